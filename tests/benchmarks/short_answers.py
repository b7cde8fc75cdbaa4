"""Tune a model to prefer short answers, and measure its answers before and after, with five seeds.

    python -m tests.benchmarks.short_answers [--output FOLDER] [--seeds 5] [--base-steps 400] [--steps 40]

A small base model trains on paragraphs of the demo's corpus: the user gives the first words, the assistant writes the
rest. Pairs come from other paragraphs: the better answer ends after the first sentence, the worse one is the whole
rest. DPO trains once for each seed, which decides the order of the pairs and the draws of the answers.

The exit code is 1 unless both 95 % intervals over the seeds are on the right side: the margin on held-out pairs is
positive, and the answers are at least a quarter shorter than those of the base model. The same command on the same
folder continues what was interrupted. FOLDER/answers has every answer.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from tidewheel import jsonlog, storage
from tidewheel.cluster.session import session
from tidewheel.config import build, load
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.demo.corpus import build_corpus
from tidewheel.elastic.trainer import fit_local
from tidewheel.inference.generate import generate
from tidewheel.inference.reference import ReferenceModel, make
from tidewheel.inference.writer import Writer
from tidewheel.shards.manifest import PARTS, read_manifest
from tidewheel.shards.preferences import read_pairs
from tidewheel.shards.references import Column
from tidewheel.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
LENGTH, LONGEST_ANSWER, PROMPTS = 160, 128, 64
OPENING = 5
"""Words of a prompt."""
SHORTER = 0.75
"""The upper end of the interval of the answers' length after, as a share of the length before, must be below this."""
TEMPLATE = ("{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


# -- the data ----------------------------------------------------------------------------------------------------------


def paragraphs(corpus: Path) -> Iterator[list[str]]:
    """Yield the distinct prose paragraphs of the corpus's docstrings and readmes, each as its sentences."""
    seen: set[str] = set()
    for file in sorted(corpus.glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the corpus has broken records on purpose
            if record.get("source") not in ("docstrings", "readmes") or not isinstance(record.get("text"), str):
                continue
            for paragraph in record["text"].split("\n\n"):
                text = " ".join(paragraph.split())
                if 60 <= len(text) <= 600 and text[0].isupper() and text[-1] == "." and text not in seen:
                    seen.add(text)
                    yield _SENTENCE_END.split(text)


def write_records(folder: Path) -> None:
    """Write the conversations, the pairs, the template and the evaluation items that pipelines read."""
    corpus = build_corpus(storage.store(str(folder / "raw")))
    chats = []
    pairs = []
    for sentences in paragraphs(folder / "raw/corpus"):
        words = sentences[0].split()
        prompt, short = " ".join(words[:OPENING]), " ".join(words[OPENING:])
        whole = " ".join([short, *sentences[1:]])
        if len(words) < OPENING + 3:
            continue
        if int(hashlib.sha256(whole.encode()).hexdigest(), 16) % 3:
            chats.append({"prompt": prompt, "completion": whole})
        elif len(sentences) > 1:
            pairs.append({"prompt": prompt, "chosen": short, "rejected": whole})
    for name, records in (("chat", chats), ("preferences", pairs)):
        (folder / "raw" / name).mkdir(exist_ok=True)
        (folder / "raw" / name / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "raw/chat_template.jinja").write_text(TEMPLATE)
    print(f"{corpus.documents:,} documents of the demo's corpus: {len(chats):,} conversations and {len(pairs):,} pairs "
          "of other paragraphs", flush=True)


def run_pipelines(folder: Path) -> None:
    """Make the shard sets of the conversations and of the pairs."""
    raw = folder / "raw"
    special = ["<|user|>", "<|assistant|>", "<|end|>"]
    chats = build(PipelineConfig, {
        "name": "chats", "read": {"paths": ["chat/*.jsonl"], "kind": "chat"}, "partitions": 1, "steps": [
            {"tokenize": {"train": {"vocabulary_size": 2048, "special_tokens": special}, "loss": "all",
                          "chat_template": "chat_template.jinja"}},
            {"pack": {"sequence_length": LENGTH, "validation_fraction": 0.03}}]})
    pairs = load(PipelineConfig, str(ROOT / "pipelines/preferences.yaml"), (
        f"steps.3.pack.sequence_length={LENGTH}", "steps.3.pack.validation_fraction=0.1", "partitions=1"))
    with session(None):
        pipeline.run(chats, input=str(raw), output=str(folder / "chats"))
        (raw / "tokenizer.json").write_bytes((folder / "chats/shards/tokenizer.json").read_bytes())
        pipeline.run(pairs, input=str(raw), output=str(folder / "pairs"))


# -- the runs ----------------------------------------------------------------------------------------------------------


def base_settings(folder: Path, steps: int) -> TrainConfig:
    """Return the settings of the base model's run: the demo's model and batch."""
    return load(TrainConfig, str(ROOT / "jobs/configs/demo.yaml"), (
        f"run.uri={folder}/runs", "run.id=base", f"data.uri={folder}/chats/shards", f"steps={steps}",
        f"data.validation={folder}/chats/validation", "batch.global_sequences=16", "evaluation.sample_tokens=0",
        f"evaluation.every_steps={steps}"))


def tuned_settings(folder: Path, seed: int, steps: int, references: str) -> TrainConfig:
    """Return the settings of a seed's DPO run."""
    return load(TrainConfig, str(ROOT / "jobs/configs/dpo.yaml"), (
        f"run.uri={folder}/runs", f"run.id=dpo-{seed}", f"model.init_from={folder}/runs/base", f"seed={seed}",
        f"data.uri={folder}/pairs/shards", f"data.validation={folder}/pairs/validation", f"data.reference={references}",
        f"data.seed={seed}", f"steps={steps}", "schedule.warmup_steps=4", f"evaluation.every_steps={steps}",
        "evaluation.sequences=0", "batch.global_sequences=8", "batch.micro_sequences=2", "batch.pad_to_multiple_of=16",
        "optimizer.learning_rate=1e-4"))


@dataclass(frozen=True)
class Answers:
    """Answers of a model to the prompts of held-out pairs."""

    tokens: list[int]
    """Of each answer, without the token that ends it."""
    ended: list[bool]
    """Whether the model ended the answer, before `LONGEST_ANSWER` tokens."""
    texts: list[tuple[str, str]]
    """Prompts and answers."""


def answer(run: str, folder: Path, seed: int, file: Path) -> Answers:
    """Return a model's answers, sampled at temperature 1, and keep them in a file that a later call reads."""
    if file.exists():
        return Answers(**json.loads(file.read_text()))
    writer = Writer.open(run)
    batch = next(iter(read_pairs(f"{folder}/pairs/validation")))
    answers = Answers([], [], [])
    for row, pair in enumerate(batch.slice(0, PROMPTS).to_pylist()):
        prompt = pair["chosen"][: pair["prompt_length"]]
        new = generate(writer.model, prompt, tokens=LONGEST_ANSWER, context=LENGTH + LONGEST_ANSWER, temperature=1.0,
                       top_k=0, seed=1000 * seed + row, stop=writer.ends)
        ended = new[-1] in writer.ends
        answers.tokens.append(len(new) - ended)
        answers.ended.append(ended)
        answers.texts.append((writer.tokenizer.decode(prompt), writer.tokenizer.decode(new)))
    storage.store(str(file.parent)).write_json(file.name, asdict(answers))
    return answers


@dataclass(frozen=True)
class Seed:
    """What one seed measured."""

    margin: float
    """Mean difference of the rewards of held-out pairs: 0.1 times nats. 0 before, by its definition."""
    accuracy: float
    """Share of the held-out pairs whose margin is positive."""
    chosen: float
    """Log-probability of the better answer of held-out pairs, in nats."""
    length_before: float
    length: float
    ended_before: float
    ended: float


def measure(folder: Path, seed: int, *, steps: int, references: str) -> Seed:
    """Tune the base model with one seed, or find that run, and measure both models."""
    torch.set_num_threads(1)
    began = time.monotonic()
    tuned = tuned_settings(folder, seed, steps, references)
    fit_local(tuned)
    figures = [line["validation"][""] for line in jsonlog.read(storage.store(tuned.run_uri), "metrics.jsonl")
               if "validation" in line][-1]
    before = answer(f"{folder}/runs/base", folder, seed, folder / f"answers/base-{seed}.json")
    after = answer(tuned.run_uri, folder, seed, folder / f"answers/dpo-{seed}.json")
    result = Seed(
        figures["margins"], figures["accuracies"], figures["logps_chosen"], float(np.mean(before.tokens)),
        float(np.mean(after.tokens)), float(np.mean(before.ended)), float(np.mean(after.ended)))
    print(f"seed {seed}: margin {result.margin:.2f}, {result.length_before:.1f} -> {result.length:.1f} tokens, "
          f"{time.monotonic() - began:.0f} s", flush=True)
    return result


# -- the table ---------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval (Student's t)."""
    width = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(width)


def report(seeds: list[Seed], chosen_before: float) -> int:
    """Print the table; return 1 if an interval is not where it should be."""
    def of(value: Callable[[Seed], float], form: str = ".2f") -> str:
        mean, width = interval([value(seed) for seed in seeds])
        return f"{mean:{form}} ± {width:{form}}"

    print("| | before | after |\n|---|---|---|")
    print(f"| margin of held-out pairs, beta x nats | 0 | {of(lambda seed: seed.margin)} |")
    print(f"| held-out pairs whose margin is positive, % | | {of(lambda seed: 100 * seed.accuracy, '.1f')} |")
    print(f"| log-probability of the better answer, nats | {chosen_before:.1f} | "
          f"{of(lambda seed: seed.chosen, '.1f')} |")
    print(f"| length of an answer, tokens | {of(lambda seed: seed.length_before, '.1f')} | "
          f"{of(lambda seed: seed.length, '.1f')} |")
    print(f"| answers that end within {LONGEST_ANSWER} tokens, % | {of(lambda seed: 100 * seed.ended_before, '.1f')} | "
          f"{of(lambda seed: 100 * seed.ended, '.1f')} |")
    margin, margin_width = interval([seed.margin for seed in seeds])
    share, share_width = interval([seed.length / seed.length_before for seed in seeds])
    print(f"\n{len(seeds)} seeds; length after as a share of the length before: {share:.2f} ± {share_width:.2f}; "
          f"goal: a margin above 0 and a share below {SHORTER}, with their whole 95 % intervals")
    return int(margin - margin_width <= 0 or share + share_width >= SHORTER)


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="short-answers-output")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--base-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=40, help="of DPO")
    parser.add_argument("--processes", type=int, default=2, help="seeds at once")
    options = parser.parse_args()
    folder = Path(options.output).resolve()
    torch.set_num_threads(1)
    if not (folder / "raw/chat_template.jinja").exists():
        write_records(folder)
    if not (folder / "pairs/summary.json").exists():
        run_pipelines(folder)
    sets = [f"{folder}/pairs/{name}" for name in ("shards", "validation")]
    began = time.monotonic()
    base = base_settings(folder, options.base_steps)
    print(f"base: {fit_local(base).validation_loss:.3f} nats a token on held-out conversations, "
          f"{time.monotonic() - began:.0f} s", flush=True)
    references = make(ReferenceModel(base.run_uri), sets, str(folder / "references")).uri
    manifest = read_manifest(storage.store(sets[1]))
    column = Column.open(references, sets[1], manifest, PARTS)
    before_tuning = [column.values(shard) for shard in range(len(manifest.shards))]
    measure_seed = functools.partial(measure, folder, steps=options.steps, references=references)
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        seeds = list(pool.map(measure_seed, range(options.seeds)))
    print(f"{read_manifest(storage.store(sets[0])).rows:,} pairs to learn, {manifest.rows:,} held out, "
          f"{PROMPTS} answers for each seed and model")
    return report(seeds, float(np.concatenate(before_tuning)[:, 0].mean()))


if __name__ == "__main__":
    sys.exit(main())
