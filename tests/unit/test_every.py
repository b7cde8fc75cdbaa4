"""`every` fails with each value that fails, and never passes without a value."""

from __future__ import annotations

import pytest

from tests.every import every


def test_every_failing_value_is_named():
    @every([1, 2, 3])
    def check(value: int) -> None:
        assert value == 2, "odd"

    with pytest.raises(AssertionError) as raised:
        check()
    lines = str(raised.value).splitlines()
    assert [line for line in lines if line.endswith("odd")][:2] == ["1: odd", "3: odd"]
    assert not any(line.startswith("2:") for line in lines)


def test_no_value_is_a_failure():
    with pytest.raises(AssertionError, match="nothing to check"):
        every([])(lambda _: None)()
