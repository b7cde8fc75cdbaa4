"""A user's own torch module on Ray: a worker is killed, the run goes on, and the weights have the same bits."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.small_ray import small_ray
from tests.unit.train import own_modules
from tests.unit.train.helpers import config, write_shards
from tests.waiting import held, kill_one_of
from tidewheel import jsonlog
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.trainer import fit, fit_local
from tidewheel.storage import store
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.mark.parametrize("data", ["ddp", "zero3"])
def test_a_killed_worker_changes_no_bit_of_an_own_module(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", rows=4, seed=1)
    module = f"own_{data}"  # in the user's folder alone
    shutil.copy(str(own_modules.__file__), tmp_path / f"{module}.py")
    with small_ray(2):
        monkeypatch.chdir(tmp_path)  # only now, so that Ray's workers do not inherit it

        def of(run: str, *overrides: str) -> TrainConfig:
            return config(tmp_path, run, f"model={{kind: '{module}:Tiny'}}", "reproducible=true",
                          "checkpoint.every_steps=2", "evaluation.sample_tokens=0", *overrides)

        killed = of("killed", f"parallel.data={data}", f"callbacks=[{held(tmp_path, 5)}]")
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(fit, killed)
            victim = kill_one_of(2, tmp_path, training)
            assert training.result(300).steps == 8
        assert victim, "two workers reached step 5"
        calm = of("calm")
        fit_local(calm)
    assert digest(killed.run_uri).state == digest(calm.run_uri).state
    events = list(jsonlog.read(store(killed.run_uri), "events.jsonl"))
    assert any(event["kind"] == "failure" and event["detail"]["generation"] >= 0 for event in events), events
    assert audit(killed.run_uri).ok
