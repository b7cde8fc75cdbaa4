"""Requests to the Hugging Face hub under the retry policy of all stores, and its errors as StorageErrors.

huggingface_hub sends the requests with its own settings: HF_ENDPOINT, HF_TOKEN or `hf auth login`, HF_HUB_OFFLINE. It
also retries them, each up to six times, without a budget for a call of several requests. During our calls its client
sends each request once, with our deadline; a failure passes through its retries, and `retry.call` tries again.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

from tidewheel import retry
from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.retry import RetryPolicy

T = TypeVar("T")
POLICY = retry.POLICY
TRANSIENT = (408, 429, 500, 502, 503, 504)
_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar("deadline of a hub request", default=None)
_reached: set[str] = set()
"""Endpoints that have answered this process."""


class RequestFailed(Exception):
    """A request failed in a way that may pass. huggingface_hub does not know this class, so it does not retry."""


class ConnectionFailed(RequestFailed):
    """There was no connection to the endpoint."""


class PassingError(StorageAwayError):
    """The hub did not answer, or answered with a status that may pass."""


class UnreachableError(PassingError):
    """There was no connection to the hub."""


def package() -> Any:
    """Import huggingface_hub.

    Raises:
        StorageError: it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise StorageError("the package that reads from the Hugging Face hub is missing", where="hf://",
                           fix="pip install 'tidewheel[hub]'") from None
    return huggingface_hub


def endpoint() -> str | None:
    """Return the URL of the hub that the environment names; None for the public one."""
    return os.environ.get("HF_ENDPOINT") or None


def server() -> str:
    """Return the URL of the hub."""
    return endpoint() or "https://huggingface.co"


def tried(request: Callable[[], T], where: str, policy: RetryPolicy | None = None) -> T:
    """Return `request()`, tried again while the hub does not answer and the budget lasts.

    Args:
        request: calls huggingface_hub.
        where: URI for messages.
        policy: deadlines and budget; None for those of all stores.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the hub does not answer, or refuses.
    """
    policy = policy or POLICY
    outlasts = retry.is_nested()

    def attempt() -> T:
        with _explained(where), _sent_once(policy.request_seconds):
            return request()

    def may_help(error: Exception) -> bool:
        if isinstance(error, UnreachableError):  # without an answer before, it is more likely a wrong address
            return outlasts or server() in _reached
        return isinstance(error, PassingError)

    return retry.call(attempt, policy, may_help=may_help)


@contextlib.contextmanager
def _sent_once(seconds: float) -> Iterator[None]:
    """Make huggingface_hub's client send each request of this thread once, with a deadline, during the block."""
    client = package().get_session()
    if not getattr(client.send, "sends_once", False):
        client.send = _once(client.send)
    token = _deadline.set(seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def _once(send: Callable[..., Any]) -> Callable[..., Any]:
    """Return the client's method `send` which, during our calls, raises RequestFailed for what may pass."""
    @wraps(send)
    def sending(request: Any, **options: Any) -> Any:
        seconds = _deadline.get()
        if seconds is None:  # a call of somebody else in this process
            return send(request, **options)
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
        errors = _client_package()
        try:
            response = send(request, **options)
        except errors.TransportError as error:
            no_connection = isinstance(error, errors.ConnectError | errors.ConnectTimeout | errors.ProxyError)
            failed = ConnectionFailed if no_connection else RequestFailed
            raise failed(f"{server()} cannot be reached ({type(error).__name__})") from error
        _reached.add(server())
        if response.status_code in TRANSIENT:
            response.close()
            raise RequestFailed(f"the Hugging Face hub answers with status {response.status_code}")
        return response

    sending.sends_once = True  # type: ignore[attr-defined]
    return sending


def _client_package() -> Any:
    """Return the package of the HTTP client that this release of huggingface_hub uses: httpx, or its successor."""
    client = next(kind for kind in type(package().get_session()).__mro__ if kind.__name__ == "Client")
    return sys.modules[client.__module__.partition(".")[0]]


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn the hub's errors into StorageErrors with a fix; the FileNotFoundError of a file stays as it is."""
    errors = package().errors
    _, instead = _noun(where)
    fix = f"check the network, the proxy and HF_ENDPOINT, or try again later; or {instead}"
    try:
        yield
    except ConnectionFailed as error:
        raise UnreachableError(str(error), where=where, fix=fix) from None
    except RequestFailed as error:
        raise PassingError(str(error), where=where, fix=fix) from None
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError,
            errors.HFValidationError) as error:
        raise _refused(error, where) from None
    except errors.EntryNotFoundError:
        raise FileNotFoundError(where) from None
    except FileNotFoundError as error:
        if isinstance(cause := error.__cause__, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
            raise _refused(cause, where) from None
        raise
    except errors.OfflineModeIsEnabled:
        raise StorageError("HF_HUB_OFFLINE is set, so nothing is read from the Hugging Face hub", where=where,
                           fix=f"unset it, or {instead}") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "?")
        raise StorageAwayError(f"the Hugging Face hub answers with status {status}", where=where,
                               fix="try again later, or log in with HF_TOKEN or `hf auth login`") from None
    except (_client_package().TransportError, OSError) as error:  # a body that breaks off, the token's file
        raise PassingError(f"reading from the hub failed ({type(error).__name__}: {error})", where=where,
                           fix=fix) from None


def _noun(where: str) -> tuple[str, str]:
    """Return what a URI of the hub names, and how to do without the hub."""
    if where.startswith("hf://datasets/"):
        return "data set", ("download the data set elsewhere (`hf download --repo-type dataset`) and give its folder "
                            "as --input")
    return "model", "download the model elsewhere (`hf download`) and give its folder"


def _refused(error: Exception, where: str) -> StorageError:
    errors = package().errors
    noun, _ = _noun(where)
    if isinstance(error, errors.GatedRepoError):
        return StorageError(f"the {noun} requires you to accept its terms", where=where,
                            fix="accept them on its page on the hub, and log in with `hf auth login` or HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return StorageError(f"the {noun} has no such revision", where=where,
                            fix="correct the branch, tag or commit after @, or omit it for main")
    return StorageError(f"there is no such {noun} on the hub, or it is private", where=where,
                        fix="correct the owner and name; for a private one, log in with `hf auth login` or HF_TOKEN")
