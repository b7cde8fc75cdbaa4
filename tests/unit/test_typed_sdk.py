"""pyright knows the SDK's signatures: correct code passes, and each mistake is reported on its line.

`test_types.py` checks the same with mypy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidewheel
from tests.docs_pages import DOCS, ROOT, blocks

CODE = """\
from collections.abc import Sequence

import tidewheel as tw

kept = tw.filters.gopher_quality(min_words=50, max_hash_ratio=0.2)
languages = tw.filters.language(allow=("en", "de"), min_score=0.5)
listed = tw.filters.words(files=("listed.txt",), max_count=2, max_share=None)
scored = tw.filters.classifier(file="model.bin", as_quality=True)
web = tw.filters.urls(domains=("bad.example",), max_soft_words=2)
others = (tw.filters.gopher_repetition(), tw.filters.c4(terminal_punctuation=False), tw.filters.fineweb(),
          tw.filters.refinedweb(max_removed_words=0.1), tw.filters.pii(emails=False))
corpus = tw.Pipeline("web").read("corpus/*.jsonl").filter(kept, languages, listed, scored, web, *others)
lion = tw.optimizers.Lion(learning_rate=1e-4, betas=(0.9, 0.95))
first = tw.Train("a.yaml", data=corpus, run={"id": "first"}, optimizer={"learning_rate": 2e-4}, steps=3,
                 model={"preset": "debug", "rope_scaling": {"factor": 8.0}}, elastic={"max_workers": 2})
second = tw.Train({"steps": 3, "data": {"seed": 1}}, "clean", optimizer=lion, schedule=tw.schedules.WSD(warmup_steps=5),
                  objective=tw.objectives.NextToken(z_loss=1e-4), init_from=first, precision="bf16")
third = tw.Train("a.yaml", callbacks=[tw.callbacks.LogProgress(every_seconds=5), "log_progress", {"kind": "my:Own"}])
sink = tw.trackers.WeightsAndBiases(project="p", mode="offline")
final = tw.rewards.Gsm8k(marker="Answer:", last_number=True).judge([tw.Sample("6 x 7?", "Answer: 42", "42")])
judges: list[tw.Reward] = [tw.rewards.ExactMatch(unicode="NFKC", max_characters=1000), tw.rewards.Regex(pattern="a"),
                           tw.rewards.JsonObject(required={"a": "integer"}, extra_keys=False)]
share: float | None = final.mean


class Own(tw.Callback):
    below: float = 3.0

    def on_step_end(self, worker: tw.Worker, step: tw.Step) -> None:
        if step.loss is not None and step.loss < self.below:
            worker.record(step.step, {"below": step.loss})


class Printed(tw.Tracker):
    def write(self, record: tw.Record) -> None:
        print(record["step"])


class Brief(tw.Reward):
    max_words: int = 50

    def score(self, batch: Sequence[tw.Sample]) -> list[float]:
        return [float(len(sample.answer.split()) <= self.max_words) for sample in batch]


class Careful(tw.Reward):
    def score(self, batch: Sequence[tw.Sample]) -> tw.Scores:
        return tw.Scores([0.0] * len(batch), {0: tw.Failure("no_unit", batch[0].answer)})


Brief(max_words=3).key()
with tw.RewardProcess(Brief(max_words=3), seconds=2) as process:
    share = process.judge([tw.Sample("6 x 7?", "42")]).mean
tw.Train("a.yaml", callbacks=[Own(below=2.0)])
tw.Train("a.yaml", callbacks=[3])  # wrong
tw.callbacks.LogProgress(every_second=5)  # wrong
tw.trackers.WeightsAndBiases()  # wrong
tw.Train("a.yaml", optimizer__learning_rate=1e-3)  # wrong
tw.Train("a.yaml", optimiser={"learning_rate": 1e-3})  # wrong
tw.Train("a.yaml", steps="many")  # wrong
tw.Train("a.yaml", optimizer=tw.schedules.WSD())  # wrong
tw.optimizers.AdamW(learning_rat=1e-3)  # wrong
tw.optimizers.Adamm()  # wrong
tw.filters.gopher_quality(min_wordz=50)  # wrong
tw.filters.gopher_quality(min_words="many")  # wrong
tw.filters.classifier()  # wrong
tw.filters.gopher_qualty()  # wrong
tw.Pipeline("web").filter(3)  # wrong
tw.rewards.Gsm8k(last_numbr=True)  # wrong
tw.rewards.Regex()  # wrong
tw.rewards.JsonObject(required={"a": "int"})  # wrong
tw.rewards.gsm8k()  # wrong
Brief().judge(["an answer"])  # wrong
tw.RewardProcess(Brief(), second=2)  # wrong
"""
WRONG = {number for number, line in enumerate(CODE.splitlines(), 1) if line.endswith("# wrong")}


def write_recipe(folder: Path) -> Path:
    """Write the recipe with its mistakes to a folder and return its path."""
    file = folder / "recipe.py"
    file.write_text(CODE)
    return file


def test_the_package_is_marked_as_typed():
    assert Path(tidewheel.__file__).with_name("py.typed").exists()


#: Diagnostics of strict mode for code that uses a package without types, such as pyarrow.
UNTYPED = {"reportMissingTypeStubs", "reportUnknownMemberType", "reportUnknownVariableType",
           "reportUnknownArgumentType", "reportAttributeAccessIssue"}


def write_examples(folder: Path) -> int:
    """Write the examples of README and docs that use the SDK, and return their number."""
    count = 0
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for block in blocks(page):
            if block.language == "python" and "import tidewheel" in block.text:
                (folder / page.stem).mkdir(exist_ok=True)
                (folder / page.stem / Path(block.file or f"line_{block.line}.py").name).write_text(block.text)
                count += 1
    return count


@pytest.fixture(scope="module")
def diagnostics(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what one run of pyright in strict mode says about the recipe and the examples."""
    folder = tmp_path_factory.mktemp("typed")
    write_recipe(folder)
    assert write_examples(folder) >= 6
    (folder / "pyrightconfig.json").write_text(json.dumps({
        "typeCheckingMode": "strict", "extraPaths": [str(ROOT / "platform")]}))
    process = subprocess.run([Path(sys.executable).parent / "basedpyright", "--outputjson", "--pythonpath",
                           sys.executable], cwd=folder, capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = json.loads(process.stdout)["generalDiagnostics"]
    return found


def of_the_recipe(diagnostic: dict[str, Any]) -> bool:
    return Path(diagnostic["file"]).name == "recipe.py" and Path(diagnostic["file"]).parent.name.startswith("typed")


def test_pyright_in_strict_mode_knows_the_sdk(diagnostics: list[dict[str, Any]]):
    recipe = [diagnostic for diagnostic in diagnostics if of_the_recipe(diagnostic)]
    assert {diagnostic["range"]["start"]["line"] + 1 for diagnostic in recipe} == WRONG, recipe


def test_pyright_in_strict_mode_finds_nothing_in_the_examples(diagnostics: list[dict[str, Any]]):
    unexpected = [diagnostic for diagnostic in diagnostics if not of_the_recipe(diagnostic)
                  and (diagnostic["rule"] not in UNTYPED
                       or "import pyarrow" not in Path(diagnostic["file"]).read_text())]
    assert not unexpected, [(diagnostic["file"], diagnostic["range"]["start"]["line"] + 1, diagnostic["message"])
                            for diagnostic in unexpected]
