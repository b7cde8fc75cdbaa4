"""Tests of training on a mixture: the planned sequences of each domain, after kills and resizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.train.helpers import FileCheckpoints, Replaced, Script, config, two_processes, write_shards
from tidewheel import jsonlog, storage
from tidewheel.config import load
from tidewheel.errors import ConfigError, ShardError
from tidewheel.train import trace
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.plan import plan
from tidewheel.train.record import recorded_source
from tidewheel.train.runtime import Runtime

LENGTH = 16


def mixed(folder: Path, run: str, *overrides: str) -> TrainConfig:
    """Return 8 steps of 8 over two small sets: only code for two steps, then three parts of web to one of code."""
    mixture = {"domains": {"web": {"shards": str(folder / "web"), "weight": 3},
                           "code": {"shards": str(folder / "code"), "weight": 1}},
               "max_repetitions": 3, "phases": [{"until_tokens": 16 * LENGTH, "weights": {"code": 1}}]}
    return config(folder, run, "data.uri=''", f"data.mixture={json.dumps(mixture)}", *overrides)


def alone(settings: TrainConfig, generation: int = 0, **script: int):
    runtime = Runtime(generation=generation, control=Script(**script),
                      checkpoints=FileCheckpoints(Path(settings.run.uri) / f"{settings.run.id}.npz"))
    return train(settings, runtime)


def log(folder: Path, run: str) -> dict[int, str]:
    return {line["step"]: line["digest"] for line in jsonlog.read(storage.store(folder / "runs" / run),
                                                                  "batches.jsonl")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two sets, a validation set and the undisturbed run "whole"."""
    folder = tmp_path_factory.mktemp("mixture")
    write_shards(folder / "web", shards=2, rows=20)
    write_shards(folder / "code", shards=1, rows=11, seed=3)
    write_shards(folder / "validation", shards=1, rows=5, seed=1)
    (folder / "runs").mkdir()
    alone(mixed(folder, "whole"))
    return folder


def test_run_json_records_the_mixture(reference: Path):
    run = json.loads((reference / "runs/whole/run.json").read_text())
    recorded = run["data"]["mixture"]
    assert [(part["domain"], part["sequences"]) for part in recorded["proportions"]] == [("code", 28), ("web", 36)]
    assert recorded["proportions"][0]["epochs"] == pytest.approx(28 / 11)
    assert [(span["start"], span["shares"]["code"]) for span in recorded["spans"]][:2] == [(0, 1.0), (16, 0.25)]
    audited = audit(str(reference / "runs/whole"))
    assert audited.ok, audited.summary()
    assert "code: 28 sequences, 43.75%, 2.55 epochs" in audited.summary()
    lines = {row["what"]: row["value"] for row in plan(mixed(reference, "planned"))}
    assert "2.55 epochs" in lines["domain code"]
    assert lines["mixture"] == "ends after 153 sequences, 2,448 tokens"


def test_a_killed_and_resized_run_reads_the_same_sequences(reference: Path):
    killed = mixed(reference, "killed")
    with pytest.raises(Replaced):
        alone(killed, die=5)
    alone(killed, generation=1)
    resized = mixed(reference, "resized")
    two_processes(resized, reference / "runs" / "resized.npz", leave=4)
    alone(resized, generation=1)
    for settings in (killed, resized):
        assert log(reference, settings.run.id) == log(reference, "whole")
        assert audit(settings.run_uri).ok


def by_source(settings: TrainConfig) -> dict[int, dict[str, dict[str, float]]]:
    lines = jsonlog.read(storage.store(settings.run_uri), "metrics.jsonl")
    return {line["step"]: line["sources"] for line in lines if "sources" in line}


def test_losses_by_source_are_those_of_the_domains_whatever_the_history(reference: Path):
    def settings(run: str, every: int = 3) -> TrainConfig:
        return mixed(reference, run, "metrics.loss_by_source=true", f"metrics.every_steps={every}", "reproducible=true")

    each, whole, resized = settings("each", 1), settings("by_source"), settings("resized_by_source")
    alone(each)
    alone(whole)
    two_processes(resized, reference / "runs" / "resized_by_source.npz", leave=4)  # between two lines
    alone(resized, generation=1)
    assert by_source(resized) == by_source(whole)
    losses = {line["step"]: line["loss"] for line in jsonlog.read(storage.store(each.run_uri), "metrics.jsonl")
              if "loss" in line}
    steps = by_source(each)
    assert steps[1].keys() == {"code"}
    assert steps[3].keys() == {"code", "web"}
    for step, sources in steps.items():
        targets = sum(figures["tokens"] for figures in sources.values())
        nats = sum(figures["loss"] * figures["tokens"] for figures in sources.values())
        assert nats / targets == pytest.approx(losses[step], rel=1e-6)
    for name in ("code", "web"):
        expected = sum(steps[step][name]["loss"] * steps[step][name]["tokens"] for step in (4, 5, 6))
        figures = by_source(whole)[6][name]
        assert figures["loss"] * figures["tokens"] == pytest.approx(expected)
    assert by_source(whole).keys() == {3, 6, 8}


def test_the_audit_sees_a_sequence_of_another_domain(reference: Path):
    source, target = reference / "runs" / "whole", reference / "runs" / "tampered"
    target.mkdir()
    (target / "run.json").write_bytes((source / "run.json").read_bytes())
    lines = (source / "batches.jsonl").read_text().splitlines()
    swapped = json.loads(lines[3])
    swapped["digest"] = json.loads(lines[4])["digest"]
    (target / "batches.jsonl").write_text("\n".join([*lines[:3], json.dumps(swapped), *lines[4:]]) + "\n")
    assert "step 4" in audit(str(target)).mismatches[0]


def test_steps_to_documents_and_back(reference: Path):
    run = str(reference / "runs/whole")
    traced = trace.trace_step(run, 4)
    assert traced["as_recorded"]
    assert {sequence["domain"] for sequence in traced["sequences"]} == {"code", "web"}
    for sequence in traced["sequences"]:
        document = sequence["segments"][0]["document"]
        back = trace.trace_document_steps(run, document)
        if back["domain"] == sequence["domain"]:  # both sets have documents of these names
            assert (4, sequence["batch_row"]) in {(use["step"], use["batch_row"]) for use in back["steps"]}
    traced_token = trace.trace_step(run, 1, batch_row=2, token=3)
    assert traced_token["sequences"][0]["domain"] == "code"
    assert traced_token["token"]["segment"] == traced_token["sequences"][0]["segments"][0]
    with pytest.raises(ShardError, match="a mixture"):
        trace.trace_step(run, 1, uri=str(reference / "web"))


def test_other_data_or_other_shares_are_refused(reference: Path):
    settings = mixed(reference, "changed")
    with pytest.raises(Replaced):
        alone(settings, die=5)
    with pytest.raises(ConfigError, match="shards"):
        alone(mixed(reference, "changed", "data.mixture.domains.web.weight=2"), generation=1)
    run = json.loads((reference / "runs/whole/run.json").read_text())
    run["data"]["mixture"]["domains"]["web"]["uri"] = str(reference / "validation")
    with pytest.raises(ShardError, match="not the data"):
        recorded_source(run)


@pytest.mark.parametrize(("override", "message"), [
    ("steps=20", "ends after 153 sequences"), ("data.uri=/somewhere", "both given"),
    ("data.mixture.domains.web.weight=1000000000", "smallest weight"),
 ("data.mixture.weights=1", "unknown")])
def test_illegal_mixtures_are_refused_before_the_first_step(reference: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        alone(mixed(reference, "wrong", override))
    assert not (reference / "runs" / "wrong").exists()


def test_the_recipe_depends_on_the_shares_and_not_on_the_uris(reference: Path):
    plain = mixed(reference, "whole").recipe_hash()
    assert mixed(reference, "x", "data.mixture.domains.web.shards=/elsewhere").recipe_hash() == plain
    assert mixed(reference, "x", "data.mixture.domains.web.weight=2").recipe_hash() != plain


def test_the_example_loads():
    settings = load(TrainConfig, str(Path(__file__).parents[3] / "jobs/configs/mixture.yaml"))
    assert settings.data.mixture is not None
    assert sorted(settings.data.mixture.domains) == ["books", "code", "web"]
