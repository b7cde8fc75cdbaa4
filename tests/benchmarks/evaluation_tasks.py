"""Compare `evaluate --tasks` with lm-evaluation-harness' `hf` model on one exported model: speed and log-likelihoods.

    python -m tests.benchmarks.evaluation_tasks [--items 64] [--layers 8] [--dim 384]

The model has random weights. Both evaluate the same questions with four choices, three examples and texts to continue,
in fp32 with the same number of threads. Exit code 1 if two log-likelihoods differ by 1e-4 or more, or two texts differ.
It needs `pip install 'tidewheel[lm-eval]'`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.tasks import TaskManager

from tests.unit.inference.tasks.models import WORDS, write_model, write_task
from tidewheel.inference.scorer import ModelScorer, open_scorer
from tidewheel.inference.tasks.evaluation import Options, evaluate, items_of
from tidewheel.inference.tasks.requests import Answer, Likelihood

LIMIT = 1e-4
CHOICES: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_text": "{{passage}}\nQ: {{question}}\nA:",
                           "doc_to_choice": "options", "doc_to_target": "label", "num_fewshot": 3,
                           "fewshot_split": "test"}
WRITTEN: dict[str, Any] = {"output_type": "generate_until", "doc_to_text": "{{passage}}\nQ: {{question}}\nA:",
                           "doc_to_target": "answer",
                           "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 32, "do_sample": False}}


def items(count: int) -> list[dict[str, Any]]:
    """Return questions about passages of different lengths."""
    return [{"passage": ". ".join(WORDS[(number + at) % len(WORDS)] for at in range(3 + number % 9)),
             "question": f"What colour is number {number}?", "label": number % 4, "answer": "blue",
             "options": ["the deep blue of a harbour", "yellow", "red like old copper", "the white of a window"]}
            for number in range(count)]


def ours(model: Path, files: list[str], output: Path) -> tuple[dict[str, list[Answer]], dict[str, float]]:
    """Return the answers and the seconds of each task; opening the model is not counted."""
    scorer: ModelScorer = open_scorer(str(model), device="cpu")
    answers: dict[str, list[Answer]] = {}
    seconds: dict[str, float] = {}
    for task in Options(tuple(files)).open():
        asked = [request for item in items_of(task, scorer, chat=False) for request in item.requests]
        scorer.answers(asked[:4])
        begin = time.perf_counter()
        answers[task.name] = scorer.answers(asked)
        seconds[task.name] = time.perf_counter() - begin
    evaluate(scorer, Options(tuple(files)), str(output))
    return answers, seconds


def theirs(model: Path, folder: Path, names: list[str]) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return the answers and the seconds of each task; opening the model is not counted."""
    from lm_eval.models.huggingface import HFLM

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    hf = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=8)
    answers: dict[str, list[Any]] = {}
    seconds: dict[str, float] = {}
    for name in names:
        kind = "generate_until" if name == "written" else "loglikelihood"
        plain, spent = getattr(hf, kind), [0.0]

        def timed(requests: Any, plain: Any = plain, spent: list[float] = spent, **settings: Any) -> Any:
            plain(requests[:4], **settings)
            begin = time.perf_counter()
            found = plain(requests, **settings)
            spent[0] = time.perf_counter() - begin
            return found

        setattr(hf, kind, timed)
        result = lm_eval.simple_evaluate(model=hf, tasks=[name], task_manager=manager, log_samples=True,
                                         bootstrap_iters=0)
        setattr(hf, kind, plain)
        samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
        answers[name] = [response[0] for sample in samples for response in sample["resps"]]
        seconds[name] = spent[0]
    return answers, seconds


def tokens_of(model: Path, files: list[str]) -> dict[str, int]:
    """Return the tokens of all prompts and continuations of each task, as they would be without sharing."""
    scorer = open_scorer(str(model), device="cpu")
    counts: dict[str, int] = {}
    for task in Options(tuple(files)).open():
        total = 0
        for item in items_of(task, scorer, chat=False):
            for request in item.requests:
                if task.config.output_type == "generate_until":
                    total += request.tokens  # type: ignore[union-attr]
                else:
                    pair = scorer.texts.pair(request)  # type: ignore[arg-type]
                    total += len(pair.context) + len(pair.continuation) - 1
        counts[task.name] = total
    return counts


def main() -> int:
    """Print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=384)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = write_model(folder / "model", num_hidden_layers=options.layers, hidden_size=options.dim,
                            intermediate_size=3 * options.dim, max_position_embeddings=1024, initializer_range=0.05)
        files = [write_task(folder / "tasks", name, task, items(options.items))
                 for name, task in (("choices", CHOICES), ("written", WRITTEN))]
        counts = tokens_of(model, files)
        mine, my_seconds = ours(model, files, folder / "out")
        other, their_seconds = theirs(model, folder / "tasks", list(mine))
    print(f"\n{options.items} items, {options.layers} layers of {options.dim}, {torch.get_num_threads()} thread(s)")
    print("| task | requests | tokens | ours, tokens/s | hf, tokens/s | ratio | largest difference |")
    print("|---|---|---|---|---|---|---|")
    failed = False
    for name, answers in mine.items():
        if name == "written":
            differing = sum(one != two for one, two in zip(answers, other[name], strict=True))
            shown, failed = f"{differing} texts differ", failed or differing > 0
        else:
            worst = max(abs(one.log_likelihood - two[0]) for one, two in zip(answers, other[name], strict=True)
                        if isinstance(one, Likelihood))
            shown, failed = f"{worst:.1e}", failed or worst >= LIMIT
        print(f"| {name} | {len(answers)} | {counts[name]:,} | {counts[name] / my_seconds[name]:,.0f} | "
              f"{counts[name] / their_seconds[name]:,.0f} | {their_seconds[name] / my_seconds[name]:.2f} | {shown} |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
