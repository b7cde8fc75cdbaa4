"""One page about fine-tuning and preferences: the answers of three models to the same prompts, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel import jsonlog
from tidewheel.report import validation
from tidewheel.report.answers import by_prompt, comparison
from tidewheel.report.page import Page, cards, count
from tidewheel.report.training_plots import loss_figure
from tidewheel.storage import Store

BEFORE, AFTER_SFT, AFTER_DPO = "base model", "after SFT", "after DPO"


def page_of(sft: Store, dpo: Store) -> Page:
    """Return the page of an SFT run and of a DPO run that started from it.

    Args:
        sft: the folder of the SFT run.
        dpo: the folder of the DPO run.
    """
    answers = compared(sft, dpo)
    fine_tuning, preferences = (sorted(jsonlog.read(run, "metrics.jsonl"), key=lambda line: line.get("time", 0))
                                for run in (sft, dpo))
    page = Page("Fine-tuning and preferences", subtitle=f"runs {sft.uri} and {dpo.uri}")
    page.headline(_cards(answers, fine_tuning, preferences))
    page.section("Answers, before and after", comparison(answers, {name: name for name in (BEFORE, AFTER_SFT,
                 AFTER_DPO)}), note="The same prompts, answered with the most likely tokens by the base model, after "
                 "supervised fine-tuning on conversations, and after direct preference optimisation on pairs that "
                 "prefer the short answer. No conversation has these questions.")
    page.section("Fine-tuning", loss_figure(fine_tuning, [], {}),
                 note="Loss on the tokens of answers, in nats per token.")
    page.section("Preferences", *validation.section(preferences),
                 note="Held-out pairs. The margin is the difference of the two answers' rewards, and the accuracy is "
                      "how often it is positive.")
    return page


def compared(sft: Store, dpo: Store) -> dict[str, tuple[Mapping[str, Any], dict[str, str]]]:
    """Return {id of a prompt: (a line with the prompt, {model: answer})} of all prompts that both runs answered.

    Args:
        sft: the folder of the SFT run. Its answers of step 0 are the base model's.
        dpo: the folder of the DPO run.
    """
    first, second = (by_prompt(jsonlog.read(run, "answers.jsonl")) for run in (sft, dpo))
    answers: dict[str, tuple[Mapping[str, Any], dict[str, str]]] = {}
    for name, (line, given) in first.items():
        if name in second:
            tuned = second[name][1]
            answers[name] = line, {BEFORE: given[min(given)], AFTER_SFT: given[max(given)],
                                   AFTER_DPO: tuned[max(tuned)]}
    return answers


def _cards(answers: Mapping[str, tuple[Mapping[str, Any], dict[str, str]]], fine_tuning: Sequence[Mapping[str, Any]],
           preferences: Sequence[Mapping[str, Any]]) -> Any:
    items: list[tuple[str, str, Any, str]] = []
    losses = [line["loss"] for line in fine_tuning if line.get("loss") is not None]
    if losses:
        items.append(("Loss of answers", f"{losses[0]:.2f} → {losses[-1]:.2f}",
                      "nats per token, first and last step of SFT", ""))
    evaluated = [line["validation"][""] for line in preferences if "" in (line.get("validation") or {})]
    if evaluated and "accuracies" in evaluated[-1]:
        items.append(("Prefers the better answer", f"{100 * evaluated[-1]['accuracies']:.0f} %",
                      f"of {count(evaluated[-1]['tokens'])} held-out pairs; margin {evaluated[-1]['margins']:.2f}", ""))
    for name in (AFTER_SFT, AFTER_DPO):
        words = [len(given[name].split()) for _, given in answers.values()]
        if words:
            items.append((f"Words {name}", f"{sum(words) / len(words):.1f}", f"mean of {len(words)} answers", ""))
    return cards(items)
