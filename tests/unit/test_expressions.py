"""Expressions give what `re` gives, and none runs without end or takes all memory."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.every import every
from tidewheel import expressions
from tidewheel.expressions import ExpressionError

PIECES = st.sampled_from(["a", "b", ".", "[ab]", "(a)", "(b)?", "|", "{1,2}", "{e}", "\\\\", r"\w", "^", "\n", "é"])


@settings(max_examples=60, deadline=None)
@given(pattern=st.lists(PIECES, max_size=5).map("".join), text=st.text("ab {}é\n\ud800", max_size=12))
def test_results_are_those_of_re(pattern: str, text: str):
    try:
        expected = re.findall(pattern, text), re.sub(pattern, "<\\g<0>>", text, count=2)
    except re.error:
        with pytest.raises(ExpressionError, match="is not valid"):
            expressions.check(pattern)
        return
    expressions.check(pattern)
    assert (expressions.findall(pattern, text), expressions.sub(pattern, "<\\g<0>>", text, 2)) == expected


def test_the_first_match_counts():
    assert expressions.first_matches(["a$", "a", "b"], ["ab", "a", "b", "c"]) == [1, 0, 2, None]
    assert expressions.first_matches([], ["a"]) == [None]


@every((("too slow", "(a|a)*b", "a" * 60, "processor time"), ("nested", "(" * 20000, "", "nested too deeply"),
        ("a lot of memory", "(a?)*?", "a" * 2_000_000, "MiB of memory")))
def test_what_takes_too_much_is_refused(case: tuple[str, str, str, str]):
    _, pattern, text, problem = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expressions, "SECONDS", 0)
        with pytest.raises(ExpressionError, match=problem):
            expressions.sub(pattern, "x" * 1000, text)
    assert expressions.findall("a", "aa") == ["a", "a"]


def test_a_fork_has_a_child_of_its_own():
    assert expressions.findall("a", "a") == ["a"]
    pid = os.fork()
    if not pid:
        os._exit(0 if expressions._child is None and expressions.findall("b", "b") == ["b"] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert expressions.findall("c", "c") == ["c"]
