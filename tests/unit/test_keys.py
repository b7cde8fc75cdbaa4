"""Keys that do not break: comments, new settings, unused parts and releases leave keys of finished work as they were.

A copy of the package is changed on disk, and another process computes the same keys with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tidewheel

PACKAGE = Path(tidewheel.__file__).parent
SCRIPT = '''
import json, sys
import tidewheel as tw
from tidewheel.config import build
from tidewheel.data.stages import ingest
from tidewheel.data.stages.resolve import resolve
from tidewheel.train.config import TrainConfig

tokenizer = tw.Tokenizer("bpe", "*.jsonl", vocabulary_size=512)
corpus = (tw.Pipeline("web").read("*.jsonl").filter(tw.filters.gopher_quality(min_words=7), tw.filters.pii())
          .dedup_exact().tokenize(tokenizer).pack(sequence_length=64))
run = tw.Train({"run": {"id": "run"}, "steps": 4}, data=corpus, optimizer=tw.optimizers.Lion(learning_rate=1e-4))
workflow = tw.Workflow("first", corpus, run, tw.Evaluate("score", run, {"web": corpus}), tw.Export("model", run))
recipe = tw.Pipeline("web").read("*.jsonl").filter(tw.filters.gopher_quality(min_words=7)).dedup_exact().config()
keys = {node.name: node.key for node in workflow.nodes("/out", input=sys.argv[1])}
job = resolve(recipe, input=sys.argv[1], output=sys.argv[1] + "/out")
keys["units"] = [task.unit.key for task in ingest.tasks(job)]
keys["recipe"] = recipe.recipe_hash()
keys["run of its own"] = build(TrainConfig, {"schedule": {"kind": "wsd"}}).recipe_hash()
keys["reward"] = tw.rewards.Gsm8k(last_number=True).key()
json.dump([tw.__file__, keys], sys.stdout)
'''


def add_comments(package: Path) -> None:
    """Add a comment to every module, and change a word of every docstring that begins a module."""
    for path in package.rglob("*.py"):
        text = path.read_text()
        path.write_text(text.replace('"""', '"""Reworded. ', 1) + "\n# a comment\n")


def add_settings(package: Path) -> None:
    """Add a setting with a default to a filter, a reader, an optimizer, a reward, a recipe and a run."""
    for module, name in (("data/filters/gopher_quality.py", "GopherQuality"), ("data/formats/jsonl.py", "JsonLines"),
                         ("train/optimizers/lion.py", "Lion"), ("rewards/gsm8k.py", "Gsm8k"),
                         ("data/config.py", "PipelineConfig"), ("data/read_config.py", "ReadConfig"),
                         ("train/config.py", "TrainConfig"), ("models/family.py", "Model")):
        path = package / module
        text = path.read_text()
        head = re.compile(rf'class {name}\(\w+\):\n(?:    """(?:.|\n)*?"""\n)?')
        changed = head.sub(lambda found: found[0] + "    brand_new: int = 3\n", text, count=1)
        assert changed != text, module
        path.write_text(changed)


def add_parts(package: Path) -> None:
    """Add a filter, a reader and an optimizer that no recipe uses."""
    for folder, base in (("data/filters", "Filter"), ("data/formats", "Reader"), ("train/optimizers", "Optimizer")):
        (package / folder / "brand_new.py").write_text(
            f"import tidewheel as tw\nfrom tidewheel.versions import Version\n\n\nclass BrandNew(tw.{base}):\n"
            "    VERSION = Version('brand_new')\n")


def release(package: Path) -> None:
    """Raise the version of the package."""
    path = package / "__init__.py"
    path.write_text(path.read_text().replace('__version__ = "', '__version__ = "9.'))


def raise_versions(package: Path) -> None:
    """Raise the declared versions of a filter, an optimizer and a reward."""
    for module in ("data/filters/gopher_quality.py", "train/optimizers/lion.py", "rewards/gsm8k.py"):
        path = package / module
        text = path.read_text()
        changed = re.sub(r'Version\("(\w+)"(?:, \d+)?', r'Version("\1", 99', text, count=1)
        assert changed != text, module
        path.write_text(changed)


@pytest.fixture(scope="module")
def keys_after(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, object]]:
    """Return a function that computes keys with a copy of the package after some changes."""
    folder = tmp_path_factory.mktemp("input")
    (folder / "a.jsonl").write_text('{"text": "some words"}\n')

    def compute(*changes: Callable[[Path], None]) -> dict[str, object]:
        copy = tmp_path_factory.mktemp("copy")
        shutil.copytree(PACKAGE, copy / "tidewheel", ignore=shutil.ignore_patterns("__pycache__"))
        for change in changes:
            change(copy / "tidewheel")
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], cwd=copy, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}, check=False)
        assert done.returncode == 0, done.stderr
        file, keys = json.loads(done.stdout)
        assert file.startswith(str(copy))
        return dict(keys)

    return compute


@pytest.fixture(scope="module")
def keys(keys_after: Callable[..., dict[str, object]]) -> dict[str, object]:
    return keys_after()


HARMLESS = (add_comments, add_settings, add_parts, release)


def test_changes_that_change_no_output_change_no_key(keys: dict[str, object],
                                                     keys_after: Callable[..., dict[str, object]]):
    assert keys_after(*HARMLESS) == keys


@pytest.mark.long  # which of them it was, if the test above fails
@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
def test_a_change_that_changes_no_output_changes_no_key(change: Callable[[Path], None], keys: dict[str, object],
                                                        keys_after: Callable[..., dict[str, object]]):
    assert keys_after(change) == keys


def test_a_raised_version_changes_the_keys_of_what_uses_it(keys: dict[str, object],
                                                           keys_after: Callable[..., dict[str, object]]):
    raised = keys_after(raise_versions)
    unchanged = {name for name in keys if raised[name] == keys[name]}
    assert unchanged == {"bpe", "recipe", "run of its own"}
