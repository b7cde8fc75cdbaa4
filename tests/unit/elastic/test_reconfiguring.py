"""The default group that lasts: made once, connected for each generation; torch's functions as 2.14 documents them.

With torch 2.14 or later `test_process_group.py` and `tests/cluster/test_in_place.py` use torch's own.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tidewheel.elastic import reconfiguring
from tidewheel.elastic.process_group import GenerationGroup, serve_store


class Torch:
    """Records the calls. A group of one rank needs no peers, so it is whole without being connected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.refuses = False
        make = dist.init_process_group

        def init_process_group(*arguments: Any, enable_reconfigure: bool = False, **named: Any) -> None:
            self.calls.append(("init", enable_reconfigure))
            make(*arguments, **named)

        def _reconfigure(uuid: int, handles: list[str], group: Any = None, timeout: timedelta | None = None,
                         hints: dict[str, str] | None = None) -> Any:
            if self.refuses:
                raise RuntimeError("no peer")
            self.calls.append((uuid, handles))
            return SimpleNamespace(wait=lambda: True)

        monkeypatch.setattr(dist, "init_process_group", init_process_group)
        monkeypatch.setattr(dist, "_reconfigure", _reconfigure, raising=False)
        monkeypatch.setattr(dist, "_get_reconfigure_handle", lambda group=None: "gloo:0:here", raising=False)


@pytest.fixture
def of_torch(monkeypatch: pytest.MonkeyPatch):
    yield Torch(monkeypatch)
    reconfiguring.discard()


def connect(port: int, generation: int) -> None:
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    reconfiguring.connect("gloo", ("127.0.0.1", port), dist.PrefixStore(f"generation/{generation}", client), generation,
                          0, 1, seconds=20, recorded=contextlib.nullcontext)


def test_the_default_group_is_made_once_and_connected_for_each_generation(of_torch: Torch):
    store = serve_store("127.0.0.1")
    defaults, names = set(), []
    for generation in (3, 1_000_007):
        connect(store.port, generation)
        defaults.add(distributed_c10d._get_default_group())
        made = dist.new_group([0])
        names.append(distributed_c10d._world.pg_names[made])
        dist.all_reduce(torch.ones(1), group=made)
        reconfiguring.release()
        assert list(distributed_c10d._world.pg_map) == list(defaults), "groups made from it end with the generation"
    assert len(defaults) == 1
    assert names[0] == names[1], "a process that joins later counts from the beginning"
    assert of_torch.calls == [("init", True), (3, ["gloo:0:here"]), (1_000_007, ["gloo:0:here"])]
    reconfiguring.discard()
    assert not dist.is_initialized()


def test_another_store_or_a_single_rank_ends_the_group(of_torch: Torch):
    first, second = serve_store("127.0.0.1"), serve_store("127.0.0.1")
    connect(first.port, 1)
    connect(second.port, 2)
    assert [call for call in of_torch.calls if call[0] == "init"] == [("init", True)] * 2
    GenerationGroup().open(("127.0.0.1", second.port), 3, 0, 1, "cpu")
    assert not dist.is_initialized(), "checkpoints of a single rank must not ask a group"


def test_a_group_that_could_not_be_connected_is_not_used_again(of_torch: Torch, monkeypatch: pytest.MonkeyPatch):
    store = serve_store("127.0.0.1")
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    dist.PrefixStore("generation/5", client).set("handle/1", "gloo:1:there")
    of_torch.refuses = True
    group = GenerationGroup()
    monkeypatch.setattr(dist, "init_process_group", lambda *_, enable_reconfigure=False, **named: alone(named))

    def alone(named: dict[str, Any]) -> None:
        distributed_c10d.init_process_group("gloo", store=named["store"], rank=0, world_size=1)

    with pytest.raises(RuntimeError, match="no peer"):
        group.open(("127.0.0.1", store.port), 5, 0, 2, "cpu")
    assert dist.is_initialized()
    group.close()
    assert not dist.is_initialized()


def test_backends_and_versions_that_cannot():
    assert not reconfiguring.is_supported("nccl")
    assert reconfiguring.is_supported("gloo") == hasattr(dist, "_reconfigure")
