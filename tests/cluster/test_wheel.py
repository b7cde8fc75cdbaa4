"""A user's own parts with the installed wheel: a separate folder, no checkout on the path, a cluster of two nodes.

A filter, a plain function that filters, an optimizer, a schedule, a model family, an objective, a callback and a
tracker are used from YAML, from the SDK and through `tidewheel submit`. Each run is killed once, continues, and
ends with the parameters of an undisturbed run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.own_parts import OWN_FILTERS, OWN_PARTS, overrides
from tidewheel.checkpoint.digest import digest
from tidewheel.config import build, load
from tidewheel.elastic.trainer import fit_local
from tidewheel.jsonlog import read
from tidewheel.storage import store
from tidewheel.train.config import TrainConfig

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
PACKED = ("pyproject.toml", "README.md", "LICENSE", "platform/tidewheel",
          *(f"pipelines/{name}.yaml" for name in ("demo", "sft_chat", "preferences")),
          *(f"jobs/configs/{name}.yaml" for name in ("demo", "sft", "dpo")))
MODULE = "my_parts"
STEPS = 8
RECIPE = {"name": "own", "partitions": 2, "read": {"paths": ["*.jsonl"]}, "steps": [
    {"filter": {f"{MODULE}:Opens": {"letter": "t"}, "python": f"{MODULE}:odd_words"}}, "dedup_exact",
    {"tokenize": {"train": {"vocabulary_size": 300, "sample_bytes": 50_000}}}, {"pack": {"sequence_length": 16}}]}
TRAINING = {
    "run": {"id": "run", "uri": "runs"}, "steps": STEPS, "seed": 1, "precision": "fp32",
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2}, "checkpoint": {"every_steps": 2},
    "batch": {"global_sequences": 4, "micro_sequences": 2, "virtual_ranks": 2},
    "evaluation": {"every_steps": 0, "sample_tokens": 0},
    "elastic": {"min_workers": 2, "max_workers": 2, "cpus_per_worker": 1}}
SDK = f'''
import sys

import tidewheel as tw
import yaml

import {MODULE} as mine

corpus = (
    tw.Pipeline("own").set(partitions=2)
    .read("*.jsonl")
    .filter(mine.Opens(letter="t"), mine.odd_words)
    .dedup_exact()
    .tokenize(tw.Tokenizer("bpe", "*.jsonl", vocabulary_size=300, sample_bytes=50_000))
    .pack(sequence_length=16)
)
settings = yaml.safe_load(open("sdk.yaml"))
run = tw.Train(settings, model=mine.Gelu(dim=16, num_layers=1, num_heads=2),
               optimizer=mine.Momentum(learning_rate=0.05), schedule=mine.Stairs(warmup_steps=0),
               objective=mine.Smooth(smoothing=0.2), callbacks=["{MODULE}:Diary"],
               metrics={{"trackers": [{{"kind": "{MODULE}:Table", "path": sys.argv[1]}}]}}, data=corpus)
tw.Workflow("own", corpus, run).run("sdk", input="raw")
'''


@dataclass(frozen=True)
class User:
    """A user's folder, environment and cluster."""

    folder: Path
    python: Path
    environment: dict[str, str]

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `tidewheel WORDS` in the user's folder."""
        return self.run_with(str(self.python.parent / "tidewheel"), *words)

    def run_with(self, *command: str) -> subprocess.Popen[str]:
        """Start a command in the user's folder."""
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, start_new_session=True)

    def finish(self, process: subprocess.Popen[str], seconds: float = 600.0) -> str:
        """Wait for a command to succeed, and return its output."""
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, output
        return output

    def waiting(self, process: subprocess.Popen[str]) -> list[int]:
        """Return the process ids of the two workers once both wait in the schedule at step 6."""
        until = time.monotonic() + 600
        while len(waits := list(self.folder.glob("waits-*"))) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, "the workers did not come to step 6"
            time.sleep(0.05)
        return [int(path.name.partition("-")[2]) for path in waits]

    def let_go(self) -> None:
        """Let the waiting workers continue, in this run and the next."""
        (self.folder / "hold").unlink()
        for path in self.folder.glob("waits-*"):
            path.unlink()


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return the Python of an environment with the wheel; all other packages come from the tests' environment."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKED:  # so that the build leaves no files in the checkout
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", *isolation, "-w", folder / "dist", folder / "source"], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env/bin/python"
    (wheel,) = (folder / "dist").glob("tidewheel-*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    own = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], check=True,
                         text=True, capture_output=True).stdout.strip()
    Path(own, "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # .pth files there are not read
    return python


@pytest.fixture(scope="module")
def user(installed: Path, tmp_path_factory):
    """Return a user with a folder of parts and documents, and a background cluster started from there."""
    folder = tmp_path_factory.mktemp("mine")
    parts = (OWN_PARTS + OWN_FILTERS).replace("HERE = Path(__file__).parent", f"HERE = Path({str(folder)!r})")
    seen = "\nwith open(HERE / 'imported', 'a') as file:\n    file.write(tw.__file__ + '\\n')\n"
    (folder / f"{MODULE}.py").write_text(parts + seen)
    (folder / "raw").mkdir()
    documents = [{"id": str(number), "text": f"{'the' if number % 5 == 0 else 'a'} document {number} " + "of words " * (
        number % 9)} for number in range(200)]
    (folder / "raw/corpus.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("RAY_", "PYTEST")) and name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for name, folder_of in (("TIDEWHEEL_STATE", "state"), ("HOME", "home")):
        environment[name] = str(tmp_path_factory.mktemp(folder_of))
    user = User(folder, installed, environment)
    code = "import json, sys, tidewheel; print(json.dumps([tidewheel.__file__, *sys.path]))"
    package, *path = json.loads(user.finish(user.run_with(str(installed), "-c", code)))
    assert package.startswith(str(installed.parents[1]))
    assert not {str(ROOT), str(ROOT / "platform")} & set(path)
    user.finish(user.start("cluster", "up", "--nodes", "2"))
    try:
        for line in user.finish(user.start("cluster", "env")).splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            environment[name] = value
        user.finish(user.start("data", "run", "recipe.yaml", "--input", "raw", "--output", "data"))
        yield user
        imported = set((folder / "imported").read_text().split())
        assert imported, "the parts were imported"
        assert all(path.startswith(str(installed.parents[1])) for path in imported - {reference_package()})
    finally:
        user.finish(user.start("cluster", "down"))


def reference_package() -> str:
    """Return the file of the tests' own package, which trains the undisturbed run."""
    import tidewheel

    return str(tidewheel.__file__)


def write_training(user: User, name: str, **changes: Any) -> Path:
    """Write a training configuration that uses the user's parts, and return the file."""
    values = {**TRAINING, "run": {"id": name, "uri": str(user.folder / "runs")},
              "data": {"uri": str(user.folder / "data/shards"), "validation": ""}, **changes}
    path = user.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    table = f"metrics.trackers=[{{kind: '{MODULE}:Table', path: {user.folder}/table-{name}}}]"
    config = load(TrainConfig, path, [*overrides(MODULE), f"callbacks=['{MODULE}:Diary']", table])
    path.write_text(yaml.safe_dump(config.canonical()))
    return path


@pytest.fixture(scope="module")
def calm(user: User) -> str:
    """Return the state of the undisturbed run of the YAML files."""
    return undisturbed(user, lambda: load(TrainConfig, write_training(user, "calm")))


def undisturbed(user: User, configure: Callable[[], TrainConfig]) -> str:
    """Train in this process without interruption, and return the state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(user.folder)
        patch.syspath_prepend(str(user.folder))
        config = configure()
        fit_local(config)
    return str(digest(config.run_uri).state)


def check(user: User, run: Path, table: Path, expected: str) -> None:
    """Compare a run with the undisturbed one, and check the output of its parts."""
    assert digest(str(run)).state == expected
    starts = [event["detail"] for event in read(store(run), "events.jsonl") if event["kind"] in ("start", "resume")]
    assert {start["world_size"] for start in starts} == {2}, "a worker on each of the two nodes"
    assert len(starts) >= 2, "it went on after the kill"
    assert {int(line.split()[0]) for line in table.read_text().splitlines()} == set(range(1, STEPS + 1))
    assert set(store(run).read_json("run.json")["code"]) >= {"model", "optimizer", "schedule", "objective"}
    assert "told of step" in "".join(path.read_text() for path in (run / "logs").rglob("*") if path.is_file())


def dropped(output: Path) -> dict[str, int]:
    """Return the reasons for which a pipeline's filter stage dropped documents."""
    stages = json.loads((output / "summary.json").read_text())["stages"]
    (stage,) = (stage for stage in stages if stage["name"] == "filter")
    return {reason: count for reason, count in stage["dropped"].items() if count}


def test_own_filters_of_the_wheels_user_judge_from_yaml(user: User):
    assert dropped(user.folder / "data").keys() == {"opens", "sevens"}


@pytest.mark.long  # a minute; `test_jobs.py` submits a training, and `test_elastic.py` kills workers
def test_a_submitted_training_loses_a_worker_and_ends_with_the_same_parameters(user: User, calm: str):
    config = write_training(user, "submitted")
    (user.folder / "hold").touch()
    training = user.start("submit", "--", "train", "--config", config.name)
    os.kill(user.waiting(training)[0], signal.SIGKILL)
    user.let_go()
    user.finish(training)
    check(user, user.folder / "runs/submitted", user.folder / "table-submitted", calm)


@pytest.mark.long
def test_a_training_of_a_yaml_file_is_killed_and_goes_on_by_the_same_command(user: User, calm: str):
    config = write_training(user, "killed")
    (user.folder / "hold").touch()
    training = user.start("train", config.name)
    user.waiting(training)
    training.kill()
    training.communicate()
    user.let_go()
    user.finish(user.start("train", config.name))
    check(user, user.folder / "runs/killed", user.folder / "table-killed", calm)


@pytest.mark.long
def test_a_script_of_the_sdk_is_killed_and_goes_on_when_it_is_run_again(user: User):
    (user.folder / "script.py").write_text(SDK)
    settings = {**TRAINING, "reproducible": True, "run": {"id": "run"}}
    settings.pop("model")
    (user.folder / "sdk.yaml").write_text(yaml.safe_dump(settings))
    (user.folder / "hold").touch()
    command = [str(user.python), "script.py", str(user.folder / "table-sdk")]
    script = user.run_with(*command)
    user.waiting(script)
    script.kill()
    script.communicate()
    user.let_go()
    user.finish(user.run_with(*command))
    (run,) = (path.parent for path in (user.folder / "sdk").rglob("run.json"))
    values = {**store(run).read_json("run.json")["config"], "run": {"id": "sdk-calm", "uri": str(user.folder / "runs")}}
    check(user, run, user.folder / "table-sdk", undisturbed(user, lambda: build(TrainConfig, values)))
    corpora = [path.parent for path in (user.folder / "sdk/data").glob("*/summary.json")]
    assert [set(dropped(corpus)) for corpus in corpora] == [{"opens", "sevens"}]
