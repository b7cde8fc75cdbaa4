"""DiLoCo with a group of two workers on Ray: one is killed inside a round, and nothing is lost or different."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

from tests.cluster.small_ray import small_ray
from tests.unit.outer.groups import events, group, model, train_together
from tests.unit.train.helpers import write_shards
from tests.waiting import held, kill_one_of
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.trainer import fit, fit_local
from tidewheel.train.audit import audit

pytestmark = [pytest.mark.cluster, pytest.mark.long]
STEPS, EVERY, KILLED_AT = 12, 2, 5


@pytest.mark.parametrize("outer", [
    {}, {"quantise": "int8", "fragments": 2, "overlap": 1}], ids=["whole", "streaming"])
def test_a_killed_worker_of_a_group_changes_no_bit(outer: dict[str, object], tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch):
    write_shards(tmp_path / "shards")
    common = (f"steps={STEPS}", "checkpoint.every_steps=4")
    settings = {"every": EVERY, "patience_seconds": 600, **outer}
    calm = [group(tmp_path, number, 2, *common, f"run.uri={tmp_path / 'calm'}", store=tmp_path / "calm-outer",
                  **settings) for number in range(2)]
    train_together(calm)
    with small_ray(2), ThreadPoolExecutor(1) as pool:
        monkeypatch.chdir(tmp_path)  # only now, so that Ray's workers do not inherit it
        two, one = (group(tmp_path, number, 2, *common, *extra, **settings) for number, extra in enumerate([
            ("elastic.max_workers=2", f"callbacks=[{held(tmp_path, KILLED_AT)}]"), ("elastic.max_workers=1",)]))
        training = pool.submit(fit, two)
        other = Thread(target=fit_local, args=(one,), daemon=True)
        other.start()
        victim = kill_one_of(2, tmp_path, training)
        assert training.result(300).steps == STEPS
        other.join(300)
    assert victim, f"two workers reached step {KILLED_AT}"
    assert any(event["generation"] >= 0 for event in events(two, "failure"))
    for settings_of_group, undisturbed in zip((two, one), calm, strict=True):
        rounds = [event["members"] for event in events(settings_of_group, "outer_round")]
        assert set(map(tuple, rounds)) == {(0, 1)}, "no round was decided without a group"
        assert {event["step"] for event in events(settings_of_group, "outer_round")} == {
            event["step"] for event in events(undisturbed, "outer_round")}
        assert digest(settings_of_group.run_uri).state == digest(undisturbed.run_uri).state
        assert audit(settings_of_group.run_uri).ok
    if "fragments" not in outer:
        assert model(tmp_path / "outer") == model(tmp_path / "calm-outer")
