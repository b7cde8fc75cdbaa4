"""Data sets of the Hugging Face hub, from a server on loopback: one commit per output, errors that say what to do."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hub_server import HubServer
from tidewheel import retry
from tidewheel.config import build
from tidewheel.data import readers
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stages import ingest, input_versions, origin
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.resolve import content, resolve
from tidewheel.errors import InputError, StorageAwayError, StorageError
from tidewheel.retry import RetryPolicy
from tidewheel.storage import store
from tidewheel.stores.hub import calls
from tidewheel.stores.hub.uri import parse

NAME = "hf://datasets/owner/words"


@pytest.fixture(autouse=True)
def short_budget(monkeypatch) -> None:
    monkeypatch.setattr(calls, "POLICY", RetryPolicy(request_seconds=5, budget_seconds=0.1, pause_seconds=0.001))


@pytest.fixture
def server(monkeypatch) -> Iterator[HubServer]:
    with HubServer() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        monkeypatch.setenv("HF_TOKEN", "")
        yield found


def parquet(*texts: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), sink)
    return sink.getvalue()


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


FIRST = {"README.md": b"# Words\n", "data/train-00000-of-00001.parquet": parquet("one", "two"),
         "data/test-00000-of-00001.parquet": parquet("three"), "more/a.jsonl": lines("four")}


def job(tmp_path, *paths: str, input: str = "", **read) -> Job:
    recipe = build(PipelineConfig, {"read": {"paths": paths or [NAME], **read}, "steps": ["dedup_exact"]})
    (tmp_path / "in").mkdir(exist_ok=True)
    return resolve(recipe, input=input or str(tmp_path / "in"), output=str(tmp_path / "out"))


def texts(found: Job) -> list[str]:
    return [record.text for file in found.files for record in readers.read_records(
        store(file.root), file.key, found.config.read, name=file.name, shape=file.shape)]


@pytest.mark.parametrize(("paths", "read", "wanted"), [
    ([NAME], {}, ["one", "two"]), ([NAME], {"split": "all"}, ["three", "one", "two"]),
    ([f"{NAME}@main"], {}, ["one", "two"]), ([f"{NAME}/more"], {}, ["four"]), ([f"{NAME}/more/"], {}, ["four"]),
    ([f"{NAME}/more/a.jsonl"], {}, ["four"]), ([f"{NAME}/**/*.parquet"], {}, ["three", "one", "two"])])
def test_data_sets_folders_files_and_patterns_are_read(tmp_path, server, paths, read, wanted):
    commit = server.commit("owner/words", FIRST)
    result = job(tmp_path, *paths, **read)
    assert texts(result) == wanted
    assert all(commit in file.root and commit not in file.name for file in result.files)
    assert all(file.name.startswith(paths[0].partition("/more")[0].partition("/**")[0]) for file in result.files)


def test_names_are_relative_to_a_hub_input(tmp_path, server):
    server.commit("owner/words", FIRST)
    result = job(tmp_path, ".", input=NAME)
    assert ([file.name for file in result.files], result.input) == (["data/train-00000-of-00001.parquet"], NAME)
    assert texts(result) == ["one", "two"]
    assert texts(job(tmp_path, "ignored/*", input=f"{NAME}/more/a.jsonl")) == ["four"]


def test_an_output_keeps_its_commit_and_a_new_one_reads_the_newest(tmp_path, server):
    old = server.commit("owner/words", FIRST)
    first = job(tmp_path)
    input_versions.record(first.store, first.commits)
    server.commit("owner/words", {**FIRST, "data/train-00000-of-00001.parquet": parquet("changed")})
    again = job(tmp_path)
    assert (texts(again), again.commits) == (["one", "two"], {NAME: old})
    assert [task.unit.key for task in ingest.tasks(again)] == [task.unit.key for task in ingest.tasks(first)]
    assert origin.write(again)["input"]["commits"] == {NAME: old}
    input_versions.record(again.store, again.commits)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    assert texts(job(tmp_path)) == ["changed"]
    assert texts(job(tmp_path, f"{NAME}@{old}")) == ["one", "two"]


def test_files_unchanged_by_a_new_commit_are_not_read_again(tmp_path, server):
    server.commit("owner/words", FIRST)
    keys = {task.unit.key for task in ingest.tasks(job(tmp_path, split="all"))}
    server.commit("owner/words", {**FIRST, "data/test-00000-of-00001.parquet": parquet("changed")})
    assert len(keys & {task.unit.key for task in ingest.tasks(job(tmp_path, split="all"))}) == 1


def test_content_of_a_workflow_step_is_the_content_of_the_files(tmp_path, server):
    server.commit("owner/words", FIRST)
    recipe = build(PipelineConfig, {"read": {"paths": [NAME]}, "steps": ["dedup_exact"]})
    (tmp_path / "in").mkdir()
    results = [content(recipe, input=str(tmp_path / "in"), output=str(tmp_path / f"out-{number}"))
               for number in range(2)]
    assert results[0] == results[1]
    assert results[0]["files"][0][0] == f"{NAME}/data/train-00000-of-00001.parquet"


@pytest.mark.parametrize(("path", "told", "fix"), [
    ("hf://datasets/owner/wrods", "no such data set", "correct the owner and name"),
    (f"{NAME}@v2", "no such revision", "after @"), ("hf://datasets/words", "not the URI of a data set", "owner/name"),
    ("hf://models/owner/words", "not the URI of a data set", "owner/name"),
    (f"{NAME}/nothing", "no file matches", "read.paths"), (f"{NAME}/*.csv", "no file matches", "read.paths")])
def test_missing_data_sets_raise(tmp_path, server, path, told, fix):
    server.commit("owner/words", FIRST)
    with pytest.raises((StorageError, InputError)) as error:
        job(tmp_path, path)
    assert told in error.value.what
    assert fix in error.value.fix
    assert error.value.where.startswith("hf://")


@pytest.mark.parametrize(("refusal", "told", "fix"), [
    ((403, "GatedRepo"), "requires you to accept its terms", "log in"), ((403, ""), "status 403", "HF_TOKEN"),
    ((500, ""), "status 500", "again later")])
def test_refusals_of_the_hub_raise(tmp_path, server, refusal, told, fix):
    server.refusal = refusal
    with pytest.raises(StorageError) as error:
        job(tmp_path)
    assert told in error.value.what
    assert fix in error.value.fix


def test_a_missing_network_raises(tmp_path, monkeypatch):
    with HubServer() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.endpoint)
    with pytest.raises(StorageAwayError, match="cannot be reached") as error:
        job(tmp_path)
    assert gone.endpoint in error.value.what
    assert "hf download" in error.value.fix


def test_offline_mode_raises(tmp_path, server, monkeypatch):
    from huggingface_hub import constants

    server.commit("owner/words", FIRST)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE"):
        job(tmp_path)


def test_a_missing_package_raises(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(StorageError, match=r"tidewheel\[hub\]"):
        job(tmp_path)


def test_the_hub_is_read_only(tmp_path):
    recipe = build(PipelineConfig, {"read": {"paths": ["*"]}, "steps": ["dedup_exact"]})
    (tmp_path / "a.jsonl").write_bytes(lines("a"))
    with pytest.raises(StorageError, match="hub is read-only"):
        resolve(recipe, input=str(tmp_path), output=NAME)
    with pytest.raises(StorageError, match="hub is read-only"):
        store(NAME).write("a", b"")


def test_a_store_reads_ranges_and_reports_missing_files(server):
    commit = server.commit("owner/words", FIRST)
    for place in (store(f"{NAME}@{commit}"), store(NAME), store(f"{NAME}/more")):
        name = "a.jsonl" if place.uri.endswith("more") else "more/a.jsonl"
        assert place.read(name) == lines("four")
        assert place.read(name, 2, 4) == lines("four")[2:6]
        assert (place.size(name), place.exists(name), place.exists("b")) == (len(lines("four")), True, False)
        assert place.fingerprint(name).startswith("hub-")
        with pytest.raises(FileNotFoundError):
            place.read("b")
    assert str(parse(f"{NAME}@{commit}/more").at("")) == f"{NAME}/more"
    assert [stamp.key for stamp in store(f"{NAME}@{commit}").list("more")] == ["more/a.jsonl"]


def test_each_kind_of_request_is_tried_again_until_the_hub_answers(server, monkeypatch):
    monkeypatch.setattr(calls, "POLICY", RetryPolicy(budget_seconds=60, pause_seconds=0.001))
    commit = server.commit("owner/words", FIRST)
    server.refusal = (503, "")
    for request in (lambda: parse(NAME).newest() == commit, lambda: len(store(NAME).list()) == len(FIRST),
                    lambda: store(f"{NAME}@{commit}").read("more/a.jsonl") == lines("four")):
        server.refusals = 3
        assert request()
        assert server.refusals == 0


def test_a_read_that_fails_midway_goes_on_where_it_was(server, monkeypatch):
    monkeypatch.setattr(calls, "POLICY", RetryPolicy(budget_seconds=60, pause_seconds=0.001))
    commit = server.commit("owner/words", FIRST)
    with store(f"{NAME}@{commit}").open("more/a.jsonl") as stream:
        stream.seek(3)
        server.refusal, server.refusals = (500, ""), 2
        assert stream.read() == lines("four")[3:]


def test_without_a_budget_each_request_is_sent_once(server, monkeypatch):
    monkeypatch.setattr(calls, "POLICY", RetryPolicy(budget_seconds=0))
    commit = server.commit("owner/words", FIRST)
    store(f"{NAME}@{commit}").list()
    server.refusal = (503, "")
    for request in (lambda: parse(NAME).newest(), lambda: store(NAME).list(),
                    lambda: store(f"{NAME}@{commit}").read("more/a.jsonl")):
        server.requests.clear()
        with pytest.raises(StorageAwayError, match="status 503"):
            request()
        assert len(server.requests) == 1, server.requests


def test_a_silent_hub_is_given_up_at_the_deadline(monkeypatch):
    monkeypatch.setattr(calls, "POLICY", RetryPolicy(request_seconds=0.2, budget_seconds=0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for request in (lambda: parse(NAME).newest(), lambda: store(NAME).list()):
            with pytest.raises(StorageAwayError, match="cannot be reached \\(ReadTimeout"):
                request()


def test_an_unreachable_hub_is_tried_again_only_if_it_has_answered_before(server, monkeypatch):
    monkeypatch.setattr(calls, "POLICY", RetryPolicy(budget_seconds=0.5, pause_seconds=0.001))
    tries: list[None] = []
    monkeypatch.setattr(retry.logger, "log", lambda *_: tries.append(None))
    with HubServer() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.endpoint)
        gone.commit("owner/words", FIRST)
    with pytest.raises(StorageAwayError, match="cannot be reached"):
        parse(NAME).newest()
    assert not tries
    calls._reached.add(gone.endpoint)
    with pytest.raises(StorageAwayError, match="cannot be reached"):
        parse(NAME).newest()
    assert tries


def test_other_users_of_the_client_see_its_answers(server):
    server.commit("owner/words", FIRST)
    store(NAME).list()
    server.refusal = (503, "")
    client = calls.package().get_session()
    assert client.send.sends_once
    assert client.get(f"{server.endpoint}/api/datasets/owner/words").status_code == 503
