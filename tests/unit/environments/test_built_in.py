"""The built-in environments, played by hand and by a model."""

from __future__ import annotations

from typing import Any

import pytest

import tidewheel as tw
from tidewheel.environments import KIND
from tidewheel.environments.episode.base import Environment, Reply, Task


def replies(environment: Environment, *turns: str, reference: str | None = None, seed: int = 47) -> list[Reply]:
    state, opening = environment.reset(Task("?", reference, seed, 0))
    assert opening == ""
    return [environment.step(state, turn) for turn in turns]


@pytest.mark.parametrize(("turn", "reply"), [
    ("So <calc>12*7</calc>", Reply("=84\n")), ("<calc>1</calc><calc>(1+2)/8</calc>", Reply("=0.375\n")),
    ("<calc>1/3</calc>", Reply("=0.333333333333\n")), ("<calc>2**9</calc>", Reply("=error\n")),
    ("<calc>1/0</calc>", Reply("=error\n")), ("<calc>os</calc>", Reply("=error\n")),
    ("<calc></calc>", Reply("=error\n")),
    ("84", Reply(done=True)), ("<calc>84", Reply(done=True)), ("84</calc>", Reply(done=True)), ("", Reply(done=True))])
def test_the_calculator_computes_the_call_that_ends_a_turn(turn: str, reply: Reply):
    assert replies(tw.environments.Calculator(), turn) == [reply]


def test_the_calculator_has_the_marks_of_its_settings():
    settings: dict[str, Any] = {"begin": "[", "end": "]", "result": " {} ", "error": "?"}
    calculator = KIND.build("calculator", settings)
    assert calculator.ends() == ("]",)
    assert [reply.text for reply in replies(calculator, "[2*3]", "[a]")] == [" 6 ", " ? "]


def test_the_number_is_between_the_last_hints():
    game = tw.environments.GuessNumber(highest=99)
    low, high, guesses = 0, 99, 0
    while True:
        guess = (low + high) // 2
        [reply] = replies(game, f" {guess}\n")
        guesses += 1
        if reply.done:
            break
        assert reply.text in ("higher\n", "lower\n")
        low, high = (guess + 1, high) if reply.text == "higher\n" else (low, guess - 1)
    assert (guess, reply.reward) == (47, 1.0)
    assert guesses <= 7


def test_the_number_is_the_references_if_there_is_one():
    game = tw.environments.GuessNumber()
    assert [(reply.reward, reply.text) for reply in replies(game, "8", "x", "7", "-1", reference="8")] == [
        (1.0, ""), (0.0, "?\n"), (0.0, "higher\n"), (0.0, "higher\n")]


def test_a_key_follows_from_the_settings():
    keys = {tw.environments.GuessNumber(highest=highest).key() for highest in (9, 9, 10)}
    assert len(keys) == 2
    assert tw.environments.GuessNumber().key() == tw.environments.GuessNumber(highest=9).key()
