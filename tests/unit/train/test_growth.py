"""Tests of training on a growing set: the run equals one on the finished set, whenever the waves are published."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.helpers import FileCheckpoints, Replaced, Script, config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError, ShardError
from tidewheel.shards import growing
from tidewheel.shards.growing import Growing
from tidewheel.shards.manifest import read_manifest
from tidewheel.train import growth
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.plan import plan
from tidewheel.train.runtime import Runtime
from tidewheel.train.trace import trace_step

WAVES = (1, 1, 0, 1)  # of 20 rows each: the third batch of 8 lies in two of them, the eighth in two epochs


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(growth, "POLL_SECONDS", 0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished set in waves and the run "whole" of one process on it."""
    folder = tmp_path_factory.mktemp("growth")
    write_shards(folder / "shards", waves=WAVES)
    write_shards(folder / "validation", shards=1, rows=11, seed=1)
    run(config(folder, "whole"))
    return folder


class Pipeline(Script):
    """A control that publishes a wave of the set whenever training reports that it waits for one."""

    def __init__(self, folder: Path, max_waves: int = len(WAVES), **script: int) -> None:
        super().__init__(**script)
        self.store = storage.store(folder / "shards")
        self.max_waves = max_waves
        self.manifest = read_manifest(storage.store(folder / "finished"))
        self.seen: list[int] = []

    def event(self, kind: str, **detail: Any) -> None:
        super().event(kind, **detail)
        if kind == "data_wait":
            self.seen.append(detail["step"])
            known = growing.take_in(self.store, Growing.of(self.manifest).head())
            while known.manifest.to_come and len(known.manifest.waves) < self.max_waves:
                shards = growing._waves(self.manifest)[len(known.manifest.waves)]
                known = growing.publish(self.store, known, shards)
                if shards:
                    break


def growing_folder(whole: Path, folder: Path, waves: int = 0) -> Path:
    """Fill `folder` with the same set, of which the first `waves` waves are published, and return it."""
    for name in ("shards", "validation"):
        shutil.copytree(whole / name, folder / name)
    (folder / "finished").mkdir()
    shutil.move(folder / "shards" / "manifest.json", folder / "finished" / "manifest.json")
    shard_store, manifest = storage.store(folder / "shards"), read_manifest(storage.store(folder / "finished"))
    known = growing.begin(shard_store, Growing.of(manifest).head().manifest)
    for shards in growing._waves(manifest)[:waves]:
        known = growing.publish(shard_store, known, shards)
    return folder


def growing_config(folder: Path, *overrides: str) -> TrainConfig:
    return config(folder, "grown", "data.wait_seconds=60", *overrides)


def run(settings: TrainConfig, control: Script | None = None, generation: int = 0) -> Any:
    folder = Path(settings.run.uri)
    folder.mkdir(exist_ok=True)
    return train(settings, Runtime(generation=generation, control=control or Script(),
                                   checkpoints=FileCheckpoints(folder / f"{settings.run.id}.npz")))


def assert_same(whole: Path, folder: Path, tolerance: float = 0.0) -> None:
    def lines(base: Path, run: str, name: str) -> list[dict]:
        return jsonlog.read(storage.store(base / "runs" / run), name)

    def figures(base: Path, run: str) -> dict[tuple[int, str], float]:
        return {(line["step"], name): line[name] for line in lines(base, run, "metrics.jsonl")
                for name in ("loss", "gradient_norm", "validation_loss") if name in line}

    assert figures(folder, "grown") == pytest.approx(figures(whole, "whole"), abs=tolerance, rel=0)
    digests = [{line["step"]: line["digest"] for line in lines(base, name, "batches.jsonl")}
               for base, name in ((whole, "whole"), (folder, "grown"))]
    assert digests[0] == digests[1]
    with np.load(whole / "runs/whole.npz") as ours, np.load(folder / "runs/grown.npz") as theirs:
        for name in set(ours.files) - {"extra"}:
            np.testing.assert_allclose(theirs[name], ours[name], atol=10 * tolerance, rtol=0, err_msg=name)
    waves = [{line["wave"]: line["hash"] for line in lines(base, name, "waves.jsonl")}
             for base, name in ((whole, "whole"), (folder, "grown"))]
    assert waves[0] == waves[1]
    audited = audit(str(folder / "runs/grown"))
    assert audited.ok, audited.summary()


@pytest.mark.parametrize("ahead", ["false", "true"])
def test_the_same_run_while_the_set_grows(whole: Path, tmp_path: Path, ahead: str):
    """A run whose host runs ahead records the step before it waits for data."""
    folder = growing_folder(whole, tmp_path)
    pipeline = Pipeline(folder)
    run(growing_config(folder, f"run_ahead={ahead}"), pipeline)
    assert pipeline.seen == [1, 3, 6]  # waves of 20, 20, 0 and 20 rows, batches of 8
    assert [kind for kind, _ in pipeline.events].count("data_came") == 3
    assert_same(whole, folder)  # the audit covers the published part, since there is no manifest yet
    assert trace_step(str(folder / "runs/grown"), 5)["as_recorded"]
    spent = {line["category"] for line in jsonlog.read(storage.store(folder / "runs/grown"), "ledger.jsonl")}
    assert "data_wait" in spent
    shutil.copy(folder / "finished/manifest.json", folder / "shards")
    assert_same(whole, folder)


def test_two_processes_read_the_same_waves(whole: Path, tmp_path: Path):
    folder = growing_folder(whole, tmp_path, waves=1)
    (folder / "runs").mkdir()
    settings = growing_config(folder)
    on_ranks(2, _worker, [settings, growing_config(folder, f"data.uri={whole}/shards")], folder)
    assert_same(whole, folder, tolerance=1e-5)


def _worker(settings: list[TrainConfig], folder: Path) -> None:
    """Show rank 1 the finished set, as if it had opened it later; both ranks read what rank 0 sees."""
    growth.POLL_SECONDS = 0.02
    rank = dist.get_rank()
    train(settings[rank], Runtime(rank, 2, control=Pipeline(folder),
                                  checkpoints=FileCheckpoints(folder / "runs/grown.npz")))


def test_a_save_and_a_planned_stop_do_not_wait_for_data(whole: Path, tmp_path: Path):
    folder, settings = growing_folder(whole, tmp_path, waves=2), growing_config(tmp_path)
    pipeline = Pipeline(folder, max_waves=2, leave=7)  # polled before and after steps 1 to 5, then while it waits
    with pytest.raises(Replaced, match="after step 5"):
        run(settings, pipeline)
    assert pipeline.seen == [6]
    assert [detail["step"] for kind, detail in pipeline.events if kind == "save"][-1] == 5
    again = Pipeline(folder)
    run(settings, again, generation=1)
    assert next(detail["step"] for kind, detail in again.events if kind == "resume") == 5
    assert_same(whole, folder)


def test_a_run_ends_without_a_new_wave_and_resumes_with_the_pipeline(whole: Path, tmp_path: Path):
    folder = growing_folder(whole, tmp_path, waves=1)
    with pytest.raises(ShardError, match=r"wave 2 of 4 has not come for 0\.05 s") as raised:
        run(growing_config(folder, "data.wait_seconds=0.05"))
    assert "run it again" in raised.value.fix
    run(growing_config(folder), Pipeline(folder), generation=1)
    assert_same(whole, folder)


def test_a_set_with_other_content_is_refused(whole: Path, tmp_path: Path):
    folder, settings = growing_folder(whole, tmp_path, waves=1), growing_config(tmp_path, "data.wait_seconds=0.05")
    with pytest.raises(ShardError, match="has not come"):
        run(settings)
    before = read_manifest(storage.store(folder / "finished"))
    made_anew = write_shards(folder / "shards", waves=WAVES, seed=9)  # the same recipe gives the same head
    assert growing.identity(made_anew) == growing.identity(before)
    for refused in (lambda: run(settings, generation=1), lambda: audit(settings.run_uri)):
        with pytest.raises(ShardError, match="wave 0 of the shard set is not the one that the run read"):
            refused()


def test_a_set_rewritten_during_the_wait_is_refused(whole: Path, tmp_path: Path):
    folder = growing_folder(whole, tmp_path, waves=1)

    class Other(Pipeline):
        def event(self, kind: str, **detail: Any) -> None:
            if kind == "data_wait":
                made_anew = write_shards(folder / "shards", waves=WAVES, seed=9)
                known = growing.begin(self.store, Growing.of(made_anew).head().manifest)
                for shards in growing._waves(made_anew):
                    known = growing.publish(self.store, known, shards)

    with pytest.raises(ShardError, match="rewritten with other content"):
        run(growing_config(folder), Other(folder))


def test_only_a_run_with_wait_seconds_reads_an_unfinished_set(whole: Path, tmp_path: Path):
    folder = growing_folder(whole, tmp_path, waves=1)
    with pytest.raises(ShardError, match="a pipeline is still writing this set") as raised:
        fit_local(config(folder, "other"))
    assert "data.wait_seconds" in raised.value.fix
    told_of = {row["what"]: row["value"] for row in plan(growing_config(folder))}
    assert told_of["tokens"] == "1,024, of a set that is still being written"
    with pytest.raises(ConfigError, match="must be finished"):
        config(folder, "mixed", "data.uri=''", "data.wait_seconds=5", "data.mixture.domains.a.shards=x")


def test_fit_local_on_published_waves_equals_the_finished_set(whole: Path, tmp_path: Path):
    """All waves are published and there is no manifest yet."""
    folder = growing_folder(whole, tmp_path, waves=4)
    results = [fit_local(config(base, "local", *more)) for base, more in (
        (whole, ()), (folder, ("data.wait_seconds=1",)))]
    assert (results[0].loss, results[0].validation_loss) == (results[1].loss, results[1].validation_loss)
