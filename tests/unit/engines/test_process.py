"""Tests of engines in a process of their own, with a stand-in that speaks the protocol."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine_parts import StandIn
from tests.unit.post.runs import rollout_run
from tidewheel import engines
from tidewheel.engines.child import answering
from tidewheel.engines.serving import process
from tidewheel.engines.serving.base import Decoding, EngineLost, EngineUse, Prefix, Weights
from tidewheel.engines.serving.process import Limits, ProcessRunning
from tidewheel.errors import ConfigError
from tidewheel.models import families, huggingface

MODEL = families.KIND.build("llama", {"dim": 8, "num_layers": 1, "num_heads": 2, "max_sequence_length": 32})
ROWS = 32
PREFIXES = [Prefix([5, 6], 6, seed) for seed in range(8)]


def weights(name: str, value: float = 1.0) -> Weights:
    shapes = huggingface.weight_shapes(MODEL, ROWS)
    return Weights(name, {key: torch.full(shape, value) for key, shape in shapes.items()})


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[ProcessRunning]:
    """Yield a stand-in whose faults are the files in the test's folder."""
    use = EngineUse(MODEL, ROWS, Decoding(1.0, 0, 1.0, frozenset({0}), "fp32"), "cpu", 1, 0)
    engine = StandIn(python=sys.executable, faults=str(tmp_path)).open(use)
    assert isinstance(engine, ProcessRunning)
    yield engine
    engine.close()


def test_tokens_go_in_and_come_out_with_the_version_that_was_loaded(opened: ProcessRunning):
    opened.load(weights("one"))
    one = opened.complete(PREFIXES)
    assert opened.about() == "stand-in 1"
    assert all(1 <= len(completion.tokens) <= 6 for completion in one)
    opened.load(weights("two", 2.0))
    assert opened.complete(PREFIXES) != one
    opened.load(weights("one"))
    assert opened.complete(PREFIXES) == one
    opened.health()
    assert opened._folder is not None
    assert not list(opened._folder.rglob("*.safetensors")), "weights stay in shared memory only while they are loaded"


def test_a_version_whose_bytes_differ_is_not_served(opened: ProcessRunning, monkeypatch: pytest.MonkeyPatch):
    opened.load(weights("one"))
    written = opened._write

    def damaged(folder: Path, of: Weights) -> None:
        written(folder, of)
        hash_of = answering.sha256
        monkeypatch.setattr(answering, "sha256", lambda path: hash_of(path)[::-1] if path.suffix != ".json" else
                            hash_of(path))

    monkeypatch.setattr(opened, "_write", damaged)
    with pytest.raises(EngineLost, match=r"damaged: the hash of model.safetensors differs"):
        opened.load(weights("two", 2.0))


def test_requests_for_other_weights_are_refused(opened: ProcessRunning):
    opened.load(weights("one"))
    opened._weights = "two"
    with pytest.raises(EngineLost, match="one are loaded, not two"):
        opened.complete(PREFIXES)


def test_a_killed_process_is_lost_and_starts_again(opened: ProcessRunning, tmp_path: Path):
    opened.load(weights("one"))
    one = opened.complete(PREFIXES)
    (tmp_path / "kill").touch()
    with pytest.raises(EngineLost, match="SIGKILL"):
        opened.complete(PREFIXES)
    opened.load(weights("one"))
    assert opened.complete(PREFIXES) == one
    assert opened._process is not None
    os.kill(opened._process.pid, signal.SIGKILL)  # while it has no work
    with pytest.raises(EngineLost):
        opened.health()


def test_a_process_that_hangs_is_ended(opened: ProcessRunning, tmp_path: Path):
    opened.load(weights("one"))
    assert opened._process is not None
    hanging = opened._process
    (tmp_path / "stop").touch()
    opened._limits = Limits(600, 0.5)
    with pytest.raises(EngineLost, match=r"no sign of life for 0\.5 s"):
        opened.complete(PREFIXES)
    assert hanging.returncode == -signal.SIGKILL


def test_a_process_that_works_for_long_gives_signs_of_life(opened: ProcessRunning, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch):
    opened.load(weights("one"))
    (tmp_path / "slow").touch()
    lines: list[Any] = []
    ours = SimpleNamespace(dumps=json.dumps, loads=lambda line: lines.append(json.loads(line)) or lines[-1])
    monkeypatch.setattr(process, "json", ours)  # not the module's function: other threads call that
    assert len(opened.complete(PREFIXES)) == len(PREFIXES)
    assert len(lines) > 1
    assert all(line.get("beat") for line in lines[:-1])


def test_the_process_ends_with_the_one_that_started_it():
    """A generator that is killed leaves no engine behind."""
    program = """
import json, socket, subprocess, sys, time
ours, theirs = socket.socketpair()
engine = subprocess.Popen([sys.executable, sys.argv[1], str(theirs.fileno())], pass_fds=[theirs.fileno()],
                          start_new_session=True)
ours.sendall(json.dumps({"id": 1, "op": "health"}).encode() + b"\\n")
assert b"ok" in ours.recv(1000)
print(engine.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(StandIn.PROGRAM)], stdout=subprocess.PIPE,
                          text=True) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        while _runs(engine):
            time.sleep(0.02)


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("reason", "said"), [
    ("missing", "the environment of .*StandIn is not complete"), ("unsupported", "cannot serve this model")])
def test_what_the_environment_or_the_engine_lacks_is_said(opened: ProcessRunning, tmp_path: Path, reason: str,
                                                          said: str):
    (tmp_path / reason).touch()
    with pytest.raises(ConfigError, match=said):
        opened.load(weights("one"))


def test_an_environment_without_vllm_is_named_with_what_to_do():
    """The main environment has none; the program needs nothing of Tidewheel's to say so."""
    use = EngineUse(MODEL, ROWS, Decoding(1.0, 0, 1.0, frozenset({0}), "fp32"), "cpu", 1, 0)
    engine = engines.Vllm(python=sys.executable).open(use)
    with pytest.raises(ConfigError, match=r"not complete: ModuleNotFoundError.*vllm") as error:
        engine.load(weights("one"))
    assert "vllm_environment.sh" in error.value.fix


def test_a_python_that_is_not_known_or_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    use = EngineUse(MODEL, ROWS, Decoding(1.0, 0, 1.0, frozenset({0}), "fp32"), "cpu", 1, 0)
    monkeypatch.delenv("TIDEWHEEL_VLLM_PYTHON", raising=False)
    with pytest.raises(ConfigError, match="the Python of the environment of vllm is not known") as error:
        engines.Vllm().open(use)
    assert "TIDEWHEEL_VLLM_PYTHON" in error.value.fix
    monkeypatch.setenv("TIDEWHEEL_VLLM_PYTHON", "/nowhere/bin/python")
    with pytest.raises(ConfigError, match="no program /nowhere/bin/python"):
        engines.Vllm().open(use)


@pytest.mark.parametrize(("overrides", "said"), [
    (["rollouts.temperature=0.7", "objective.temperature=0.7", "rollouts.top_k=5"], "over the whole vocabulary"),
    (["rollouts.temperature=0.7", "objective.temperature=0.7", "rollouts.top_p=0.9"], "nearest legal choice"),
    (["rollouts.generators.gpus=1.5"], "vLLM uses whole GPUs"),
    (["rollouts.engine.cache_gb=2"], "did you mean 'cache_gib'"),
])
def test_settings_that_vllm_cannot_honour_are_refused(tmp_path: Path, overrides: Sequence[str], said: str):
    with pytest.raises(ConfigError, match=said):
        rollout_run(tmp_path, "run", "rollouts.engine.kind=vllm", *overrides)


def test_settings_that_it_can_honour_are_not(tmp_path: Path):
    rollout_run(tmp_path, "run", "rollouts.engine=vllm", "rollouts.top_k=5", "rollouts.generators.gpus=0.5")
    rollout_run(tmp_path, "run", "rollouts.engine=vllm", "rollouts.temperature=0.7", "objective.temperature=0.7")


def test_a_family_that_hugging_face_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch):
    decoding = Decoding(1.0, 0, 1.0, frozenset(), "fp32")
    assert engines.Vllm().problem(MODEL, decoding, 0) == ""
    model = families.KIND.build("llama", {"dim": 8, "num_layers": 1, "num_heads": 2, "max_sequence_length": 32})
    monkeypatch.setattr(type(model), "to_hugging_face", super(type(model), model).to_hugging_face.__func__)
    assert "Hugging Face's format" in engines.Vllm().problem(model, decoding, 0)


def test_the_recipe_has_the_engine_but_not_its_paths(tmp_path: Path):
    native = rollout_run(tmp_path).recipe_hash()
    assert rollout_run(tmp_path, "run", "rollouts.engine=native").recipe_hash() == native
    hashes = {rollout_run(tmp_path, "run", f"rollouts.engine={{kind: vllm, {more}}}").recipe_hash()
              for more in ("python: /a", "python: /b, silence_seconds: 9", "cache_gib: 2")}
    assert len(hashes) == 1
    assert hashes != {native}
    assert engines.Vllm(python="/a").key() == engines.Vllm(python="/b").key() != engines.Native().key()


def test_what_vllm_is_asked_for():
    """Log-probabilities are of the logits divided by the temperature; token ids go in, so it needs no tokenizer."""
    use = EngineUse(MODEL, ROWS, Decoding(1.0, 5, 1.0, frozenset({0}), "bf16"), "cpu", 2, 0)
    asked = engines.Vllm().load_settings(use)
    assert asked["decoding"] == {"temperature": 1.0, "top_k": 5, "top_p": 1.0, "stop_token_ids": [0]}
    assert asked["arguments"]["logprobs_mode"] == "raw_logprobs"
    assert asked["arguments"]["dtype"] == "bfloat16"
    assert asked["arguments"]["kv_cache_memory_bytes"] == 1 << 30
    other = EngineUse(MODEL, ROWS, Decoding(0.5, 0, 1.0, frozenset({0}), "fp32"), "cuda", 1, 4)
    arguments = engines.Vllm(memory_fraction=0.5, compiled=True).load_settings(other)["arguments"]
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert (arguments["tensor_parallel_size"], arguments["gpu_memory_utilization"]) == (4, 0.5)
    assert not arguments["enforce_eager"]


def test_no_module_of_the_main_environment_imports_vllm():
    package = Path(engines.__path__[0]).parent
    importing = {path.relative_to(package).as_posix() for path in package.rglob("*.py")
                 if any(line.strip().startswith(("import vllm", "from vllm ", "from vllm."))
                        for line in path.read_text().splitlines())}
    assert importing == {"engines/child/vllm_engine.py"}
    assert "vllm" not in (Path(__file__).parents[3] / "pyproject.toml").read_text()
