from queue import SimpleQueue
from threading import Event

import pytest

from tidewheel import jsonlog
from tidewheel.elastic.channel import Client
from tidewheel.elastic.coordinator import Coordinator, actor_name
from tidewheel.storage import store


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)


def test_a_new_driver_goes_on_counting(tmp_path, quiet):
    first = Coordinator(str(tmp_path))
    first.event("resume", {"generation": 0, "step": 0})
    first.event("failure", {"generation": 1})
    first.end()
    (tmp_path / "batches.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    second = Coordinator(str(tmp_path))
    second.start("127.0.0.1")
    place = second.place()
    assert not place["runs"]
    second.expect({"a": "n"}, True)
    heard = SimpleQueue()
    client = Client(tuple(place["address"]), {"name": "a", "node": "n", "token": place["token"]}, heard.put, print)
    order = heard.get(timeout=10)
    assert (order["do"], order["generation"], order["rank"], order["world_size"]) == ("join", 2, 0, 1)
    assert second.snapshot().generation == 2
    client.send({"say": "step", "generation": 2, "progress": {"step": 9, "steps": 10, "loss": 1.0}})
    client.send({"say": "left", "generation": 2, "how": "finished", "text": ""})
    assert heard.get(timeout=10)["do"] == "over"
    assert second.snapshot().progress["step"] == 9
    client.close()
    second.end()
    kinds = [event["kind"] for event in jsonlog.read(store(tmp_path), "events.jsonl")]
    assert kinds == ["driver_start", "resume", "failure", "driver_start"]


def test_a_stranger_is_not_heard(tmp_path, quiet):
    coordinator = Coordinator(str(tmp_path))
    coordinator.start("127.0.0.1")
    place, closed = coordinator.place(), Event()
    coordinator.expect({"a": "n"}, True)
    Client(tuple(place["address"]), {"name": "a", "node": "n", "token": "guessed"}, print, closed.set)
    assert closed.wait(10)
    assert coordinator.snapshot().generation == -1
    coordinator.end()


def test_ray_says_one_is_dead_that_is_still_connected(tmp_path, quiet):
    """Its raylet was killed, it was not: it is cut off, and ends itself."""
    coordinator = Coordinator(str(tmp_path))
    coordinator.start("127.0.0.1")
    place, closed, heard = coordinator.place(), Event(), SimpleQueue()
    coordinator.expect({"a": "n"}, True)
    Client(tuple(place["address"]), {"name": "a", "node": "n", "token": place["token"]}, heard.put, closed.set)
    assert heard.get(timeout=10)["do"] == "join"
    assert coordinator.dead(["a", "unknown"], "its actor died") == ["a"]
    assert closed.wait(10)
    assert coordinator.fenced() == {"a"}
    coordinator.end()


def test_each_failure_is_recorded_and_charged_once(tmp_path, quiet):
    coordinator = Coordinator(str(tmp_path))
    coordinator.start("127.0.0.1")
    assert coordinator.failed("lost", [0], True, False) == "kept"
    assert coordinator.failed("no place", [], True, True) == "kept"
    assert coordinator.failed("ours", [0], False, False) == "none"
    coordinator.end()
    found = [event["detail"] for event in jsonlog.read(store(tmp_path), "events.jsonl") if event["kind"] == "failure"]
    assert [one["error"] for one in found] == ["lost"]


def test_names_differ_by_run():
    assert actor_name("/a/runs/x") == actor_name("/a/runs/x") != actor_name("/a/runs/y")
