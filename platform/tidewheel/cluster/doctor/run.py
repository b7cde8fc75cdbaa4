"""Examine a run's folder: what its steps wait for."""

from __future__ import annotations

from tidewheel import jsonlog
from tidewheel import storage as stores
from tidewheel.cluster.doctor.check import Check
from tidewheel.errors import ConfigError
from tidewheel.train.metrics.hidden import examine
from tidewheel.train.time_ledger import summarise


def run(uri: str) -> list[Check]:
    """Return the checks of a run, finished or not.

    Args:
        uri: folder of the run.

    Raises:
        ConfigError: it is not the folder of a run.
        StorageError: the store does not answer.
    """
    store = stores.store(uri)
    if not store.exists("run.json"):
        raise ConfigError("no run.json: this is not the folder of a run", where=uri,
                          fix="give runs/<id>, the folder that `tidewheel train` names")
    config = store.read_json("run.json").get("config", {})
    summary = summarise(jsonlog.read(store, "ledger.jsonl"), jsonlog.read(store, "events.jsonl"))
    finding = examine(summary.parts, config, jsonlog.read(store, "metrics.jsonl"))
    if finding is None:
        return [Check("communication", "warning", "the run has not done a step", "let it do some, and ask again")]
    return [Check("communication", "warning" if finding.fix else "ok", finding.detail, finding.fix)]
