"""Tests of the pipeline schedules in contrib/ against one process that simulates the same staleness."""

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.equivalence import checkpoints, losses, prepare, settings, train_all, weights
from tests.benchmarks.pipeline_schedules import bubble, timeline
from tests.benchmarks.stale_pipelines import replay
from tests.ranks import on_ranks
from tests.unit.contrib.stale_pipeline import (
    CONTRIB,
    NEEDED,
    PIPEDREAM,
    RATE,
    SEED,
    TWO_BUFFERS,
    VOCABULARY,
    Simulated,
    batches,
    configured,
    find_contrib,
    train,
)
from tests.unit.contrib.test_optimizers import rule
from tests.unit.train.helpers import Replaced
from tidewheel import storage
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.train import loop, parallel, stage_schedules
from tidewheel.train.audit import audit
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel import legal
from tidewheel.train.runtime import NoControl, Runtime
from tidewheel.train.step import train_step

STEPS, DRAINED = 6, 3
CASES: tuple[tuple[dict[str, Any], int | None], ...] = (
    ({"kind": PIPEDREAM}, 1), ({"kind": PIPEDREAM, "update_every": 2}, 2), ({"kind": TWO_BUFFERS}, None))


def same_as_simulated() -> None:
    pipeline, rank = dist.get_world_size(), dist.get_rank()
    ahead = pipeline - 1 - rank
    for schedule, every in CASES:
        config, data = configured(schedule, pipeline), batches(STEPS)
        trained = train(config, data, drained=(DRAINED,))
        simulated = Simulated(config, every)
        simulated.period(data[:DRAINED])
        simulated.period(data[DRAINED:])
        where = f"{schedule}, stage {rank} of {pipeline}"
        for name, value in trained.model.named_parameters():
            torch.testing.assert_close(value.detach(), simulated.weights[rank][name].detach(), rtol=1e-4, atol=2e-5,
                                       msg=f"{where}: {name}")
        assert [result.loss for result in trained.results] == pytest.approx(simulated.losses, rel=1e-5), where
        assert all(result.gradient_norm > 0 and result.targets > 0 for result in trained.results)
        delays = trained.passes.figures.delays
        if every == 1:  # the formula of PipeDream, once the pipeline is full
            assert delays[4 * DRAINED - 4:4 * DRAINED] == [ahead] * 4, where
            assert delays == 2 * [min(index, ahead) for index in range(4 * DRAINED)], where
        elif every is None:
            assert delays == 2 * ([0] * 4 + [1] * 8), where
        else:
            assert max(delays) == -(-ahead // every), where
        own = sum(value.nbytes for value in trained.model.parameters())
        versions = 2 if every is None else 1 - (-ahead // every)
        assert trained.passes.versions.most_bytes == versions * own, where


def same_as_stale() -> None:
    """Double buffers are gradients of constant staleness."""
    trained = train(configured({"kind": TWO_BUFFERS}, 2), batches(STEPS))
    config = configured(None, 1)
    model = parallel.build(config, VOCABULARY, Runtime())
    parallel.init_weights(model, SEED)
    optimizer = build_optimizer(model, rule("stale", staleness=1, learning_rate=RATE))
    for micros in batches(STEPS):
        train_step(model, optimizer, micros, Collectives(Runtime()), virtual_ranks=6)
    newest = dict(zip([name for name, _ in optimizer.named], optimizer.state_tensors("version_0")))
    for name, value in trained.model.named_parameters():
        torch.testing.assert_close(value.detach(), newest[name], rtol=1e-4, atol=2e-5)


def with_recomputation() -> None:
    """Recomputed activations have the stashed weights."""
    config = configured({"kind": PIPEDREAM}, 2, memory={"activation_checkpointing": "full"})
    simulated, data = Simulated(config, 1), batches(3)
    simulated.period(data)
    for name, value in train(config, data).model.named_parameters():
        torch.testing.assert_close(value.detach(), simulated.weights[dist.get_rank()][name].detach(), rtol=1e-4,
                                   atol=2e-5)


def two_ranks() -> None:
    same_as_simulated()
    same_as_stale()
    with_recomputation()


def test_two_ranks_train_as_one_process_with_the_same_staleness():
    on_ranks(2, two_ranks)


def test_four_ranks_train_as_one_process_with_the_same_staleness():
    on_ranks(4, same_as_simulated)


def test_a_replayed_pipeline_is_that_of_the_model_of_schedules():
    """With passes of equal lengths, 1F1B is idle as long as its published bubble, and without flush nobody is idle."""
    for stages, micro_batches in ((2, 4), (4, 8), (4, 4)):
        equal = [(1.0, 2.0, 0.0)] * stages
        seconds, idle = replay(equal, micro_batches, 1, None)
        assert idle == pytest.approx(bubble(timeline("1f1b", stages, micro_batches)))
        assert seconds == pytest.approx(3 * (micro_batches + stages - 1))
        for every in (1, micro_batches):
            seconds, idle = replay(equal, micro_batches, 20, every)
            assert seconds == pytest.approx(3 * micro_batches)


@pytest.mark.parametrize(("changes", "hint"), [
    ({"parallel": {"pipeline": 1}}, "nearest legal choice: parallel.pipeline 2"),
    ({"reproducible": True, "parallel": {"pipeline": 2, "data": "zero1"}}, "nearest legal choice: no stage_schedule"),
    ({"elastic": {"max_workers": 4}}, "one rank for each stage and no copies"),
    ({"optimizer": {"clip_norm": 1.0}}, "nearest legal choice: clip_norm 0"),
    ({"guards": {"non_finite": "skip"}}, "guards.non_finite stop"),
    ({"precision": "bf16"}, "nearest legal choice: precision fp32"),
    ({"parallel": {"pipeline": 2, "pipeline_schedule": "gpipe"}}, "parallel.pipeline_schedule 1f1b"),
    ({"parallel": {"pipeline": 2, "tensor": 2}}, "parallel.tensor is 2; nearest legal choice: tensor 1"),
    ({"adapter": {"kind": "lora"}}, "has not been shown with adapter")])
def test_what_no_stage_schedule_can_do_is_refused(changes: dict[str, Any], hint: str):
    with pytest.raises(ConfigError, match=re.escape(hint)):
        configured({"kind": PIPEDREAM}, 2, **changes)


def test_each_stage_has_one_worker():
    config = configured({"kind": TWO_BUFFERS}, 2)
    assert legal.sizes(config) == (2,)
    with pytest.raises(ConfigError, match="one worker for each stage, not 4"):
        legal.check_world(config, 4)


def test_the_result_depends_on_the_schedule_and_on_the_number_of_stages():
    hashes = {configured(schedule, pipeline).recipe_hash() for schedule, _ in CASES for pipeline in (2, 4)}
    assert len(hashes) == 6
    assert configured(None, 2).recipe_hash() == configured(None, 4).recipe_hash() not in hashes


def test_a_package_offers_schedules_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tidewheel import parts

    find_contrib()
    points = re.search(r'stage_schedules"\]\n(.*?)\n\n', (CONTRIB / "pyproject.toml").read_text(), re.DOTALL)
    assert points is not None
    about = tmp_path / "tidewheel_pipelines-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tidewheel_pipelines\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tidewheel.stage_schedules]\n" + points[1].replace('"', "") + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    parts._entry_points.cache_clear()
    try:
        named = build(TrainConfig, {**configured(None, 2).canonical(), **NEEDED, "stage_schedule": "pipedream"})
        assert named.stage_schedule == stage_schedules.KIND.build(PIPEDREAM)
        with pytest.raises(ConfigError, match="did you mean 'pipedream_2bw'"):
            stage_schedules.KIND.build("pipedream_2bv")
    finally:
        parts._entry_points.cache_clear()


SETTINGS = ("parallel.pipeline=2", f"stage_schedule={TWO_BUFFERS}", "elastic.max_workers=2", "optimizer.clip_norm=0",
            "guards.non_finite=stop", "model.tie_embeddings=false", "checkpoint.every_steps=3")
LAST = 7


class Leaves(NoControl):
    """A control that asks for a planned change once a step is done."""

    def __init__(self, step: int) -> None:
        self._step, self._is_due = step, False

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        self._is_due = step >= self._step

    def poll(self) -> bool:
        return self._is_due

    def hold(self, step: int) -> None:
        raise Replaced(f"after step {step}")


def until(config: TrainConfig, step: int) -> None:
    find_contrib()
    runtime = Runtime(dist.get_rank(), dist.get_world_size(), checkpoints=checkpoints(config), control=Leaves(step))
    with contextlib.suppress(Replaced):
        loop.train(config, runtime)


def all_steps(config: TrainConfig) -> None:
    find_contrib()
    train_all([config])


@pytest.mark.long
def test_a_run_saves_when_the_pipeline_is_empty_and_goes_on_with_the_same_bits(tmp_path: Path):
    find_contrib()
    prepare(tmp_path)
    alone = settings(tmp_path, "alone", LAST, [])
    config, moved = (settings(tmp_path, name, LAST, SETTINGS) for name in ("whole", "moved"))
    on_ranks(2, all_steps, config)
    expected, expected_losses = weights(config, alone), losses(config)
    assert sorted(expected_losses) == list(range(1, LAST + 1))
    first = settings(tmp_path, "first", 1, ["model.tie_embeddings=false"])
    train_all([first])
    assert expected_losses[1] == pytest.approx(losses(first)[1], rel=1e-5), "of the initial weights"
    folder = tmp_path / "runs/whole"
    (folder / "result.json").unlink()
    for saved in (folder / "checkpoints").iterdir():
        if saved.name.startswith("step_") and saved.name > "step_00000003":
            shutil.rmtree(saved)
    on_ranks(2, all_steps, config)
    again = weights(config, alone)
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    assert losses(config) == expected_losses

    on_ranks(2, until, moved, 4)
    assert storage.store(moved.run_uri).exists("result.json") is False
    on_ranks(2, all_steps, moved)
    audited = audit(moved.run_uri)
    assert audited.ok, audited.summary()
    assert (audited.redone, audited.world_sizes) == (0, (2,))
    assert sorted(losses(moved)) == list(range(1, LAST + 1))
