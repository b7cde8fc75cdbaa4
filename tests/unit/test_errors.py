from __future__ import annotations

import pickle

import pytest

from tidewheel.errors import ConfigError, ShardError, StorageError, TidewheelError, root_cause


def test_message_has_what_where_and_fix() -> None:
    error = StorageError("no such bucket", where="s3://x", fix="create it")
    assert str(error) == "s3://x: no such bucket\n  fix: create it"
    assert str(TidewheelError("alone")) == "alone"
    assert error.exit_code == 2


@pytest.mark.parametrize("kind", [TidewheelError, *TidewheelError.__subclasses__()])
def test_errors_travel_between_processes(kind: type[TidewheelError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", where="where", fix="fix")))
    assert type(error) is kind
    assert (error.what, error.where, error.fix) == ("what", "where", "fix")


def test_root_cause_looks_through_wrappers() -> None:
    inner = ShardError("damaged")

    class RayTaskError(Exception):
        def __init__(self, cause: object) -> None:
            self.cause = cause

    assert root_cause(RayTaskError(RayTaskError(inner))) is inner
    text_cause = RayTaskError("not an exception")
    assert root_cause(text_cause) is text_cause
    looped = RayTaskError(None)
    looped.cause = looped
    assert root_cause(looped) is looped
    plain = ValueError("bug")
    assert root_cause(plain) is plain


def test_root_cause_follows_from_and_during_but_not_from_none() -> None:
    def chain(link: str) -> BaseException:
        try:
            try:
                raise ShardError("inner")
            except ShardError as error:
                if link == "from":
                    raise RuntimeError("outer") from error
                if link == "during":
                    raise RuntimeError("outer")  # noqa: B904
                raise ConfigError("outer") from None
        except Exception as error:
            return error

    assert isinstance(root_cause(chain("from")), ShardError)
    assert isinstance(root_cause(chain("during")), ShardError)
    assert isinstance(root_cause(chain("none")), ConfigError)  # `from None` hides the original on purpose
