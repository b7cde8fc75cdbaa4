"""Groups in real processes, of which one is killed: it is left out, comes back, and both read what they planned to."""

from pathlib import Path

import pytest

from tests.unit.outer.groups import events, group, kill_one_on_the_way, model
from tests.unit.train.helpers import write_shards
from tidewheel.cluster.s3_server import S3Server
from tidewheel.train.audit import audit


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if request.param == "folder":
        yield tmp_path / "outer"
        return
    with S3Server() as server:
        server.create_bucket("bucket")
        yield "s3://bucket/outer"


@pytest.mark.long
def test_a_killed_group_is_left_out_and_comes_back(tmp_path: Path, store: Path | str):
    write_shards(tmp_path / "shards")
    patience = {0: 2, 1: 600}
    configs = [group(tmp_path, number, 2, "steps=240", "checkpoint.every_steps=25", "metrics.every_steps=5",
                     store=store, every=40, quantise="int8", patience_seconds=patience[number]) for number in range(2)]
    kill_one_on_the_way(configs, tmp_path, step=90)
    members = [event["members"] for event in events(configs[0], "outer_round")]
    alone = [index for index, names in enumerate(members) if names == [0]]
    assert members[0] == [0, 1]
    assert [0, 1] in members[alone[0]:], "it came back"
    assert any(event["step"] > 0 for event in events(configs[1], "resume"))
    assert model(store) in (model(configs[0].run_uri), model(configs[1].run_uri)), "of the one that ended last"
    for settings in configs:
        audited = audit(settings.run_uri)
        assert audited.ok, audited.summary()
