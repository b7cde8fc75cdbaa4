"""Corruption is found in every place under every layout, named, and nothing is found without it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.bit_flips import Rig, settings
from tests.ranks import on_ranks
from tests.unit.train.helpers import write_shards
from tidewheel.train.reproducible.kernels import deterministic_kernels

LAYOUTS = {"ddp": ["parallel.data=ddp"], "zero1": ["parallel.data=zero1"],
           "zero2": ["parallel.data=zero2", "parallel.reduce=step"],
           "zero3": ["parallel.data=zero3", "parallel.reduce=micro_batch"]}
PASSES = ("gradient", "activation", "data")
CASES = [*((3, layout, place) for layout in LAYOUTS for place in PASSES),
         (3, "ddp", "weights"), (3, "ddp", "optimizer"), (3, "zero1", "weights"),
         (2, "zero3", "gradient"), (2, "zero3", "data"), (2, "ddp", "weights"), (1, "ddp", "gradient")]
MESHES = {"hsdp": ["parallel.data=zero3", "parallel.replicate=2"], "tensor": ["parallel.tensor=2"],
          "context": ["parallel.context=2", "parallel.data=zero2"],
          "pipeline": ["parallel.pipeline=2", "parallel.data=zero1"],
          "experts": ["model={kind: mixtral, dim: 32, num_layers: 2, num_heads: 4, ffn_dim: 40, num_experts: 4}"],
          "noise": ["neftune_alpha=5", "precision=bf16", "parameters=bf16"]}
MESH_CASES = [*((4, mesh, "gradient") for mesh in MESHES), (4, "hsdp", "weights"), (4, "hsdp", "optimizer")]
LAST = {"weights": "weights", "optimizer": "optimizer", "gradient": "gradient", "activation": "gradient",
        "data": "data"}


def all_cases(ranks: int, cases: list[tuple[int, str, str]], folder: str) -> None:
    """Plant each fault on the last rank in the third step, and write down what each rank found."""
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    with deterministic_kernels():
        for layout in dict.fromkeys(case[1] for case in cases if case[0] == ranks):
            overrides = {**LAYOUTS, **MESHES}[layout]
            rig = Rig(settings(Path(folder), f"{layout}{ranks}", 1.0, *overrides), rank, ranks)
            for place in (case[2] for case in cases if case[:2] == (ranks, layout)):
                rig.go_back()
                clean = [rig.found() for _ in range(2)]
                error = rig.found(place if rank == ranks - 1 else "", random.Random(5))
                event = rig.control.events[-1][1] if rank == 0 and rig.control.events else None
                results[f"{layout} {place}"] = {"clean": [str(other) for other in clean if other], "event": event,
                                                "ranks": error.ranks if error else None, "text": str(error)}
            rig.close()
    Path(folder, f"{ranks}-{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("corruption")
    write_shards(folder / "shards", rows=60)
    for ranks in (1, 2, 3):
        on_ranks(ranks, all_cases, ranks, CASES, str(folder))
    return {(ranks, rank): json.loads((folder / f"{ranks}-{rank}.json").read_text())
            for ranks in (1, 2, 3) for rank in range(ranks)}


@pytest.mark.parametrize(("ranks", "layout", "place"), CASES)
def test_a_flipped_bit_is_found_and_its_rank_is_named(found: dict, ranks: int, layout: str, place: str):
    of_ranks = [found[ranks, rank][f"{layout} {place}"] for rank in range(ranks)]
    assert all(result["clean"] == [] for result in of_ranks), "nothing is found before the bit flips"
    assert len({result["text"] for result in of_ranks}) == 1, "all ranks agree"
    event = of_ranks[0]["event"]
    assert event["found"][0]["place"] == LAST[place]
    assert event["since"] == event["back_to"] + 1 == event["step"] - 1, "the check before found the state before good"
    if (ranks, place) == (2, "weights"):
        assert of_ranks[0]["ranks"] == [0, 1]
        assert event["found"][0]["certain"] is False, "of two copies nobody knows which is right"
        assert "one of the ranks 0, 1" in of_ranks[0]["text"]
    else:
        assert of_ranks[0]["ranks"] == [ranks - 1]
        assert event["nodes"] == [f"node {ranks - 1}"]
        assert event["found"][0]["certain"] is True


@pytest.mark.long
def test_every_mesh_is_checked(tmp_path: Path):
    write_shards(tmp_path / "shards", rows=60)
    on_ranks(4, all_cases, 4, MESH_CASES, str(tmp_path))
    results = json.loads((tmp_path / "4-0.json").read_text())
    for _, mesh, place in MESH_CASES:
        result = results[f"{mesh} {place}"]
        assert result["clean"] == [], mesh
        assert 3 in result["ranks"], (mesh, place, result)
        assert result["event"]["found"][0]["place"] == LAST[place]
    for mesh in ("hsdp", "context", "noise"):
        assert results[f"{mesh} gradient"]["ranks"] == [3], mesh


def a_weight_is_not_a_number(folder: str) -> None:
    """Make a weight of the last rank not a number in a run that samples no step in reach; write down what was found."""
    rank = dist.get_rank()
    with deterministic_kernels():
        rig = Rig(settings(Path(folder), "not-a-number", 1e-6, *LAYOUTS["ddp"]), rank, 3)
        before = [rig.found() for _ in range(2)]
        assert not rig.checked
        if rank == 2:
            next(iter(rig.training.state()["model"].values())).view(-1)[0] = float("nan")
        errors = [rig.found() for _ in range(2)]
        rig.close()
    result = {"before": [str(error) for error in before if error],
              "found": [error and list(error.ranks) for error in errors]}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def test_the_step_after_one_that_was_withheld_is_checked(tmp_path: Path):
    """Its norm was not finite, so the update was withheld, and no weight of the other ranks is spoilt."""
    write_shards(tmp_path / "shards", rows=60)
    on_ranks(3, a_weight_is_not_a_number, str(tmp_path))
    for rank in range(3):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {"before": [], "found": [None, [2]]}
