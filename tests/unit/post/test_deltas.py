"""Tests of versions of the policy as deltas: every bit comes back, or the whole version is read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.post.runs import inline, logged, rollout_run
from tidewheel.elastic import trainer
from tidewheel.post.fetching import Fetched, Fetcher
from tidewheel.post.policy import Version, published
from tidewheel.storage import Store, store
from tidewheel.train.config import TrainConfig
from tidewheel.train.policy import deltas, publishing
from tidewheel.train.policy.publishing import Publishing


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=0, max_size=200), st.data())
def test_a_delta_restores_every_bit(before: bytes, data: st.DataObject):
    now = data.draw(st.binary(min_size=len(before), max_size=len(before)))
    for other in (now, before, bytes([*before[:-1], 1]) if before else b""):
        delta = deltas.encode(before, other)
        assert delta is None or deltas.decode(before, delta) == other
    assert deltas.encode(before, before + b"x") is None


def test_a_small_step_is_a_small_delta_in_bf16():
    torch.manual_seed(0)
    weights = torch.randn(100_000) * 0.05
    sizes: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        before, now = ({"w": (weights + change * torch.rand(100_000)).to(dtype)} for change in (0.0, 1e-6))
        before_bytes, now_bytes = safetensors.torch.save(before), safetensors.torch.save(now)
        delta = deltas.encode(before_bytes, now_bytes)
        assert delta is not None
        sizes[dtype] = len(delta) / len(now_bytes)
    assert sizes[torch.bfloat16] < 0.03
    assert sizes[torch.float32] < 0.6


class PlainModel(torch.nn.Linear):
    """A model that publishes as one part."""

    class mesh:
        """The position of the only rank."""

        coordinate = staticmethod(lambda *_: 0)
        size = staticmethod(lambda _: 1)


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Store, list[Version]]:
    """Return a run's folder with four versions of its policy."""
    run, model = store(tmp_path / "run"), PlainModel(64, 64)
    writer = Publishing(rollout_run(tmp_path, "run", "rollouts.look_ahead=3", "rollouts.weights=bf16"), model, run)
    for version in range(4):
        model.weight.data += 1e-5
        writer.write(version, writer.gather())
    found = [published(run, version, 1) for version in range(4)]
    return run, [version for version in found if version is not None]


def test_the_next_version_is_read_as_a_delta_and_any_other_whole(versions: tuple[Store, list[Version]]):
    run, four = versions
    size, fetcher = four[0].files[0].whole.bytes, Fetcher(run)
    expected = {number: Fetcher(run).fetch(version)[0] for number, version in enumerate(four)}
    for number, kind in ((0, "whole"), (1, "delta"), (2, "delta"), (0, "whole"), (1, "delta"), (3, "whole"), (3, "")):
        files, fetched = fetcher.fetch(four[number])
        assert files == expected[number]
        assert fetched.whole == (size if kind == "whole" else 0)
        assert (0 < fetched.deltas < size / 2) == (kind == "delta")


def damages(run: Store, version: Version) -> dict[str, Any]:
    delta = version.files[0].delta
    assert delta is not None
    content = run.read(delta.key)
    return {"cut": content[:-1], "empty": b"", "a bit": bytes([*content[:-1], content[-1] ^ 1]), "text": b"delta"}


def test_a_damaged_delta_leads_to_the_whole_version(versions: tuple[Store, list[Version]],
                                                    caplog: pytest.LogCaptureFixture):
    run, four = versions
    delta, size = four[1].files[0].delta, four[1].files[0].whole.bytes
    assert delta is not None
    for name, content in damages(run, four[1]).items():
        run.write(delta.key, content)
        caplog.clear()
        fetcher = Fetcher(run)
        fetcher.fetch(four[0])
        with caplog.at_level(logging.WARNING):
            files, fetched = fetcher.fetch(four[1])
        assert files == Fetcher(run).fetch(four[1])[0]
        assert (fetched.whole, fetched.deltas, fetched.damaged) == (size, 0, 1), name
        assert "is damaged, the whole version is read" in caplog.text
    run.delete(delta.key)
    fetcher = Fetcher(run)
    fetcher.fetch(four[0])
    assert fetcher.fetch(four[1])[1].whole == size, "it is gone, which is no damage"


def test_a_delta_that_makes_other_weights_does_not_serve(versions: tuple[Store, list[Version]]):
    run, four = versions
    own, other = four[1].files[0], four[2].files[0]
    assert own.delta is not None
    assert other.delta is not None
    lying = Version(1, (type(own)(own.whole, own.before, other.delta),))
    fetcher = Fetcher(run)
    fetcher.fetch(four[0])
    files, fetched = fetcher.fetch(lying)
    assert fetched.damaged == 1
    assert files == Fetcher(run).fetch(four[1])[0]


def test_versions_that_no_step_needs_are_removed_with_their_deltas(tmp_path: Path):
    run, model = store(tmp_path / "run"), PlainModel(64, 64)
    for begin in (0, 4):  # the second writer takes over from the first
        writer = Publishing(rollout_run(tmp_path, "run", "rollouts.look_ahead=1"), model, run)
        for version in range(begin, begin + 4):
            model.weight.data += 1e-5
            writer.write(version, writer.gather())
    names = [entry.key for entry in run.list(publishing.FOLDER)]
    assert sorted(name.rpartition(".")[2] for name in names) == ["delta", "delta", "json", "json", "safetensors",
                                                                "safetensors"]
    writer = Publishing(rollout_run(tmp_path, "run", "rollouts.look_ahead=1"), model, run)
    writer.write(7, writer.gather())  # a third writer resumes at its last step
    assert run.read_json("policies/00000007.0of1.json")["delta"] is not None
    assert len(run.list(publishing.FOLDER)) == 6


def test_a_run_reads_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "_local_pool", inline)

    def run(name: str, *overrides: str) -> list[Fetched]:
        config: TrainConfig = rollout_run(tmp_path, name, *overrides)
        trainer.fit_local(config)
        return [Fetched(**record["fetched"]) for record in logged(tmp_path, name, "rollouts.jsonl")
                if record["kind"] == "step"]

    first, *others = run("run", "steps=3", "rollouts.weights=bf16", "optimizer.learning_rate=1e-4")
    assert (first.whole > 0, first.deltas) == (True, 0)
    assert all(fetched.whole == 0 < fetched.deltas < first.whole / 2 for fetched in others)
