"""The built-in rewards on plain and on hostile answers."""

from __future__ import annotations

import json
import math
import re
import sys
import unicodedata
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidewheel as tw
from tidewheel.errors import ConfigError
from tidewheel.rewards import KIND
from tidewheel.rewards.exact_match import MARKS_IN_A_ROW
from tidewheel.rewards.scoring.expressions import value_of

LONG = 500_000
HOSTILE = {
    "digits and commas": "1," * (LONG // 2), "digits": "1" * LONG, "markers": "####" * (LONG // 4),
    "signs": "-" * LONG, "currency": "$" * LONG, "numbers with many points": "1." * (LONG // 2),
    "combining marks": "a" + "\u0315\u0300" * (LONG // 2 - 1), "deep arrays": "[" * LONG,
    "deep objects": '{"a":' * (LONG // 5), "names of one object": "{" + '"a":1,' * (LONG // 6),
    "closed deep arrays": "[" * (LONG // 2) + "]" * (LONG // 2), "quotes": '"' * LONG, "backslashes": "\\" * LONG,
    "a number of many digits": '{"a":' + "9" * (LONG - 10) + "]", "letters": "a" * (LONG - 1) + "!",
    "spaces": " " * LONG, "fences": "```" * (LONG // 3),
    "null bytes": "\0" * LONG, "a word that grows": "\ufdfa" * (LONG // 50),
}
REWARDS: dict[str, tw.Reward] = {
    "gsm8k": tw.rewards.Gsm8k(), "last number": tw.rewards.Gsm8k(last_number=True),
    "exact match": tw.rewards.ExactMatch(unicode="NFKC", ignore_case=True, ignore_punctuation=True,
                                         ignore_articles=True),
    "json": tw.rewards.JsonObject(fenced=True), "regex": tw.rewards.Regex(pattern=r"^(a+)+$"),
    "json schema": tw.rewards.JsonSchema(definition={"type": "array", "items": {"pattern": "^(a+)+$"}}, fenced=True),
    "arithmetic": tw.rewards.Arithmetic(), "arithmetic behind a mark": tw.rewards.Arithmetic(after="#"),
    "regex with a group": tw.rewards.Regex(pattern=r"^(?P<answer>(?:(?:a|a,|1|1,)+)+)$"),
}
words = settings(derandomize=True, database=None, deadline=None, max_examples=60)


def score(reward: tw.Reward, answer: str, reference: str | None = None) -> float:
    scores = reward.judge([tw.Sample("", answer, reference)])
    assert not scores.failures, scores.failures
    return float(scores.values[0])


def reason(reward: tw.Reward, answer: str, reference: str | None = None) -> str:
    scores = reward.judge([tw.Sample("", answer, reference)])
    assert math.isnan(scores.values[0])
    return scores.failures[0].reason


@pytest.mark.parametrize("reward", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_is_wrong_and_takes_linear_time(reward: tw.Reward, answer: str):
    """Exponential or quadratic time would meet the limit of every test."""
    assert len(answer) <= LONG
    assert score(reward, answer, "42") == 0


def test_an_answer_of_200_mb_is_refused_by_its_length():
    answer = "1" * 200_000_000
    for reward in REWARDS.values():
        assert reason(reward, answer, "42") == "answer_too_long"
    assert reason(tw.rewards.ExactMatch(max_characters=3), "yes", "four") == "answer_too_long"


@pytest.mark.parametrize(("answer", "reference", "expected"), [
    ("So 6 x 7.\n#### 42", "6 x 7 = 42\n#### 42", 1), ("#### 42.00", "42", 1), ("#### $1,234.50.", "#### 1234.5", 1),
    ("#### -7", "-7", 1), ("#### -$7", "-7", 1), ("#### 7", "-7", 0), ("#### 42 apples", "42", 1),
    ("#### about 42", "42", 1), ("#### 41\n#### 42", "42", 1), ("#### 42\n#### 41", "42", 0), ("42", "42", 0),
    ("####\n42", "42", 0), ("", "42", 0), ("#### ", "42", 0), ("#### 41 42", "42", 0), ("#### 1,5", "15", 0),
    ("#### 1.2.3", "1.2", 0), ("#### .5", "0.5", 1), ("#### " + "9" * 65, "9", 0), ("#### ٤٢", "42", 0)])
def test_gsm8k_compares_the_number_behind_the_last_marker(answer: str, reference: str, expected: float):
    assert score(tw.rewards.Gsm8k(), answer, reference) == expected


@pytest.mark.parametrize(("answer", "expected"), [
    ("6 x 7 is 42.", 1), ("it is 42, not 41", 0), ("10-42", 1), ("10 -42", 0), ("(-42)", 0), ("none", 0),
    ("#### 41, or 42", 0), ("7 and then\n**42**", 1)])
def test_gsm8k_may_take_the_last_number_of_an_answer_without_marker(answer: str, expected: float):
    assert score(tw.rewards.Gsm8k(last_number=True), answer, "42") == expected


@words
@given(st.decimals(-10**12, 10**12, allow_nan=False, places=3), st.booleans())
def test_gsm8k_reads_each_number_as_it_is_written(number: Decimal, grouped: bool):
    shown = f"{number:,f}" if grouped else f"{number:f}"
    assert score(tw.rewards.Gsm8k(), f"so\n#### {shown}.", f"{number:f}") == 1
    assert score(tw.rewards.Gsm8k(), f"so\n#### {shown}1", f"{number:f}") == 0


@pytest.mark.parametrize(("options", "answer", "expected"), [
    ({}, "  New\n York ", 1), ({}, "new york", 0), ({"ignore_case": True}, "NEW YORK", 1),
    ({"ignore_punctuation": True}, "«New York!»", 1), ({"ignore_articles": True}, "the New York", 1),
    ({"collapse_spaces": False}, "New  York", 0), ({"after": "Answer:"}, "Answer: no. Answer: New York", 1),
    ({"after": "Answer:"}, "New York", 0), ({"unicode": "NFKC"}, "Ｎｅｗ York", 1), ({}, "Ｎｅｗ York", 0)])
def test_exact_match_compares_normal_forms(options: dict[str, bool | str], answer: str, expected: float):
    assert score(KIND.build("exact_match", options), answer, "New York") == expected


@words
@given(st.text(max_size=60))
def test_exact_match_finds_a_text_equal_to_its_normal_forms(text: str):
    reward = tw.rewards.ExactMatch()
    if not text.split():
        assert reason(reward, text, text) == "unusable_reference"
        return
    for form in ("NFC", "NFD"):
        assert score(reward, f" {unicodedata.normalize(form, text)}\n", text) == 1
    assert score(reward, f"{text}x", text) == 0


def test_exact_match_keeps_rows_of_marks_apart_as_unicode_does():
    marks = "\u0300" * MARKS_IN_A_ROW
    reward = tw.rewards.ExactMatch()
    assert score(reward, "e" + marks, unicodedata.normalize("NFC", "e" + marks)) == 1
    assert score(reward, "e" + marks + marks, "e" + marks) == 0


@pytest.mark.parametrize(("pattern", "answer", "reference", "expected"), [
    ("[0-9]{4}", "in 1984", None, 1), ("^[0-9]{4}$", "in 1984", None, 0), ("a.b", "a\nb", None, 0),
    ("(?s)a.b", "a\nb", None, 1), ("(?i)(yes)", "YES", None, 1), (r"\bø", "x ø", None, 0),
    ("(?s)<answer>(?P<answer>.*)</answer>", "<answer> 42\n</answer>", "42 ", 1),
    ("(?s)<answer>(?P<answer>.*)</answer>", "<answer>41</answer>", "42", 0), ("x(?P<answer>4)", "42", "4", 0)])
def test_regex_is_found_or_its_group_is_the_reference(pattern: str, answer: str, reference: str | None,
                                                      expected: float):
    assert score(tw.rewards.Regex(pattern=pattern), answer, reference) == expected


@pytest.mark.parametrize(("pattern", "message"), [
    ("(", "missing"), (r"(a)\1", "no backreferences"), ("a(?=b)", "no look-around"), ("", "is empty"),
    ("(?P<answer>a)(b)", "write other groups as"), ("(a{1000}){1000}", "repetition"), ("\ud800", "surrogates")])
def test_a_pattern_that_re2_cannot_run_is_refused(pattern: str, message: str):
    with pytest.raises(ConfigError, match=message):
        tw.rewards.Regex(pattern=pattern)


@pytest.mark.parametrize(("options", "answer", "expected"), [
    ({}, '{"a": 1}', 1), ({}, ' {} \n', 1), ({}, "[]", 0), ({}, '{"a": NaN}', 0), ({}, "{'a': 1}", 0), ({}, "{} {}", 0),
    ({}, "", 0), ({}, "\u00a0{}", 0), ({}, "```json\n{}\n```", 0), ({"fenced": True}, "```json\n{}\n```", 1),
    ({"fenced": True}, "{}", 1), ({"fenced": True}, "```", 0),
    ({"required": {"a": "integer"}}, '{"a": 1}', 1), ({"required": {"a": "integer"}}, '{"a": 1.0}', 0),
    ({"required": {"a": "integer"}}, '{"a": true}', 0), ({"required": {"a": "number"}}, '{"a": 1e400}', 1),
    ({"required": {"a": "number"}}, '{"a": "1"}', 0), ({"required": {"a": "null"}}, '{"a": null}', 1),
    ({"required": {"a": "any", "b": "array"}}, '{"a": {}, "b": []}', 1), ({"required": {"a": "any"}}, "{}", 0),
    ({"required": {"a": "any"}, "extra_keys": False}, '{"a": 1, "b": 2}', 0),
    ({"max_depth": 2}, '{"a": [1, 2]}', 1), ({"max_depth": 2}, '{"a": [[1]]}', 0),
    ({"max_depth": 2}, '{"a": "[[["}', 1)])
def test_json_object_has_its_keys_with_their_types(options: dict[str, object], answer: str, expected: float):
    assert score(KIND.build("json_object", options), answer) == expected


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=12)


@words
@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.booleans())
def test_json_object_takes_what_json_writes_and_not_a_part_of_it(value: dict[str, object], ascii_only: bool):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert score(tw.rewards.JsonObject(), text) == 1
    assert score(tw.rewards.JsonObject(), text[:-1]) == 0
    assert score(tw.rewards.JsonObject(), text + "]") == 0


def test_json_object_takes_a_number_of_any_length():
    assert score(tw.rewards.JsonObject(required={"a": "integer"}), '{"a":' + "9" * LONG + "}") == 1


def test_json_object_does_not_depend_on_how_deep_its_caller_is():
    answer = '{"a":' * 150 + "1" + "}" * 150
    reward = tw.rewards.JsonObject(max_depth=200)

    def below(depth: int) -> float:
        return score(reward, answer) if depth == 0 else below(depth - 1)

    used = len([*iter_frames()])
    assert below(0) == below(max(0, sys.getrecursionlimit() - used - 300)) == 1


def iter_frames() -> list[object]:
    frame, frames = sys._getframe(), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


@pytest.mark.parametrize(("reward", "reference"), [
    (tw.rewards.Gsm8k(), "none"), (tw.rewards.Gsm8k(), "#### x"), (tw.rewards.ExactMatch(), " "),
    (tw.rewards.Regex(pattern="(?P<answer>a)"), " ")])
def test_a_reference_without_use_is_a_failure(reward: tw.Reward, reference: str):
    assert reason(reward, "a", reference) == "unusable_reference"
    assert reason(reward, "a", None) == "no_reference"


@pytest.mark.parametrize("reward", REWARDS.values(), ids=REWARDS)
def test_lone_surrogates_are_a_failure(reward: tw.Reward):
    assert reason(reward, "a\ud800", "42") == "invalid_unicode"
    assert reason(reward, "a", "\udfff") == "invalid_unicode"


@words
@given(st.lists(st.tuples(st.text(max_size=20), st.none() | st.text(max_size=9)), max_size=5),
       st.sampled_from([*REWARDS]))
def test_a_score_depends_on_the_sample_alone(batch: list[tuple[str, str | None]], name: str):
    samples = [tw.Sample("", answer, reference) for answer, reference in batch]
    together = REWARDS[name].judge(samples)
    alone = [REWARDS[name].judge([sample]) for sample in samples]
    assert [str(scores.values[0]) for scores in alone] == list(map(str, together.values))
    assert {index: scores.failures[0] for index, scores in enumerate(alone) if scores.failures} == together.failures


SCHEMA = {"type": "object", "required": ["name", "tags"], "additionalProperties": False, "properties": {
    "name": {"type": "string", "pattern": "^[a-z]+$"}, "size": {"$ref": "#/$defs/size"},
    "tags": {"type": "array", "uniqueItems": True}}, "patternProperties": {"^x-": {"type": "null"}},
    "$defs": {"size": {"type": "integer", "minimum": 1}}}


@pytest.mark.parametrize(("answer", "expected"), [
    ('{"name": "ab", "tags": []}', 1), ('{"name": "ab", "tags": [1, true, "1", [1]], "size": 3}', 1),
    ('{"name": "ab"}', 0), ('{"name": "A", "tags": []}', 0), ('{"name": "ab", "tags": [1, 1.0]}', 0),
    ('{"name": "ab", "tags": [{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]}', 0), ('{"name": "ab", "tags": [NaN]}', 0),
    ('{"name": "ab", "tags": [], "size": 0}', 0), ('{"name": "ab", "tags": [], "x-a": null}', 1),
    ('{"name": "ab", "tags": [], "x-a": 1}', 0), ('{"name": "ab", "tags": [], "other": 1}', 0),
    ('{"name": "\\ud800", "tags": []}', 0), ("[]", 0), ("", 0), ("no", 0), ("```\n{}\n```", 0)])
def test_json_schema_describes_the_answer(answer: str, expected: float):
    assert score(tw.rewards.JsonSchema(definition=SCHEMA), answer) == expected


def test_json_schema_takes_linear_time():
    reward = tw.rewards.JsonSchema(definition={"uniqueItems": True, "items": {"pattern": "^(a+)+$"}})
    items = [{"a": number} for number in range(20_000)]
    assert score(reward, json.dumps(items)) == 1
    assert score(reward, json.dumps([*items, "a" * 100_000 + "!"])) == 0


@pytest.mark.parametrize(("definition", "message"), [
    ({"type": "text"}, "no JSON schema: .*text.* in type"), ({"pattern": "a(?=b)"}, "no look-around"),
    ({"patternProperties": {"a(?=b)": {}}}, "RE2"),
    ({"items": {"$ref": "https://example.org/x"}}, "nothing is fetched")])
def test_a_schema_that_cannot_be_used_is_refused(definition: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        tw.rewards.JsonSchema(definition=definition)


@pytest.mark.parametrize(("options", "answer", "reference", "expected"), [
    ({}, "42", "42", 1), ({}, "6*7", "42", 1), ({}, "(1 + 2) * -3 / 4", "-2.25", 1), ({}, "1/3", "2/6", 1),
    ({}, "0.333", "1/3", 0), ({"tolerance": 1e-3}, "0.333", "1/3", 1), ({}, "6 × 7 − 2", "40", 1), ({}, "1/0", "1", 0),
    ({}, "2**3", "8", 0), ({}, "__import__('os')", "1", 0), ({}, "", "0", 0), ({}, "1 2", "12", 0), ({}, "(1", "1", 0),
    ({}, "1)", "1", 0), ({}, "--1", "1", 1), ({}, "(" * 30 + "1" + ")" * 30, "1", 1),
    ({}, "(" * 60 + "1" + ")" * 60, "1", 0), ({}, "1+" * 300 + "1", "301", 0), ({}, "1e3", "1000", 0),
    ({"after": "="}, "so 6*7 = 42\nyes", "42", 1), ({"after": "="}, "42", "42", 0),
    ({"numbers": True}, "8/(3-8/3)", "24: 3 3 8 8", 1), ({"numbers": True}, "3*8", "24: 3 3 8 8", 0),
    ({"numbers": True}, "24", "24: 3 3 8 8", 0), ({"numbers": True}, "8*3+3-3", "24: 3 3 8", 0)])
def test_arithmetic_compares_exact_values(options: dict[str, object], answer: str, reference: str, expected: float):
    assert score(KIND.build("arithmetic", options), answer, reference) == expected


@pytest.mark.parametrize(("options", "reference"), [({}, "x"), ({}, "1/0"), ({"numbers": True}, "24"),
                                                    ({"numbers": True}, "24: 3 x"), ({"numbers": True}, "3 3")])
def test_arithmetic_needs_a_reference_with_a_value(options: dict[str, bool], reference: str):
    assert reason(KIND.build("arithmetic", options), "1", reference) == "unusable_reference"


@words
@given(st.recursive(st.integers(0, 99).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
    lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"), max_leaves=6))
def test_arithmetic_has_the_values_of_python(expression: str):
    exact = re.sub(r"([0-9]+)", r"Fraction(\1)", expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    assert value_of(expression) == expected
