"""The process group of a generation opens, breaks off without its other ranks, and lets the next group open."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tidewheel.elastic import reconfiguring
from tidewheel.elastic.process_group import Connections, GenerationGroup, serve_store


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    server.settimeout(60)
    return client, server


def test_only_connections_of_the_block_are_shut_down(listener: socket.socket):
    connections = Connections()
    before, before_peer = connect(listener)
    with connections.recorded():
        own, own_peer = connect(listener)
        with connections.recorded():  # a group opened while another one opens
            inner, inner_peer = connect(listener)
    after, after_peer = connect(listener)
    connections.shut_down()
    assert own_peer.recv(1) == b""
    assert inner_peer.recv(1) == b""
    for client, peer in ((before, before_peer), (after, after_peer)):
        client.sendall(b"x")
        assert peer.recv(1) == b"x"
    for end in (before, before_peer, own, own_peer, inner, inner_peer, after, after_peer):
        end.close()


def test_a_descriptor_that_another_connection_uses_now_is_spared(listener: socket.socket):
    connections = Connections()
    with connections.recorded():
        own, own_peer = connect(listener)
    descriptor = own.fileno()
    own.close()
    own_peer.close()
    other, other_peer = connect(listener)
    assert descriptor in (other.fileno(), other_peer.fileno()), "the system gives the lowest free number"
    connections.shut_down()
    other.sendall(b"x")
    assert other_peer.recv(1) == b"x"
    other.close()
    other_peer.close()


def test_a_listening_socket_is_spared_and_no_group_is_made_after_the_end():
    connections = Connections()
    with connections.recorded():
        server = socket.create_server(("127.0.0.1", 0))
    connections.shut_down()
    client, peer = connect(server)
    client.close()
    peer.close()
    server.close()
    with pytest.raises(RuntimeError, match="the generation has ended"), connections.recorded():
        pass


def test_one_rank_alone_needs_no_group():
    group = GenerationGroup()
    group.open(("127.0.0.1", 1), 0, 0, 1, "cpu")
    assert not dist.is_initialized()
    group.break_off()
    group.close()


def test_other_waits_are_broken_off_too_even_those_registered_late():
    group = GenerationGroup()
    calls: list[str] = []
    group.also_break(lambda: calls.append("before"))
    group.break_off()
    group.also_break(lambda: calls.append("after"))
    assert calls == ["before", "after"]
    assert group.broken


def member(rank: int, port: int, leave: Any, answers: Any) -> None:
    """Run one of two ranks: rank 1 skips a collective, rank 0 breaks it off, then both reduce again."""
    torch.set_num_threads(1)
    group = GenerationGroup()
    group.open(("127.0.0.1", port), 1, rank, 2, "cpu")
    total = torch.ones(4) * (rank + 1)
    dist.all_reduce(total)
    if rank == 1:
        leave.wait(60)
    else:
        broken = threading.Timer(0.2, group.break_off)
        broken.start()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(4))  # the other rank never joins
        broken.join()
        leave.set()
    group.close()
    following = GenerationGroup()
    following.open(("127.0.0.1", port), 2, rank, 2, "cpu")
    again = torch.ones(4) * (rank + 1)
    dist.all_reduce(again)
    following.close()
    lasts = dist.is_initialized()
    alone = GenerationGroup()
    alone.open(("127.0.0.1", port), 3, 0, 1, "cpu")
    answers.put((rank, total.tolist(), again.tolist(), lasts, dist.is_initialized()))


def test_a_collective_that_a_rank_skips_is_broken_off_and_the_next_generation_works():
    store = serve_store("127.0.0.1")
    context = mp.get_context("spawn")
    leave = context.Event()
    answers = context.Queue()
    ranks = [context.Process(target=member, args=(rank, store.port, leave, answers), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    results = sorted(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert results == [(rank, [3.0] * 4, [3.0] * 4, reconfiguring.is_supported("gloo"), False) for rank in range(2)]
    assert [process.exitcode for process in ranks] == [0, 0]


def survivor(rank: int, port: int, answers: Any) -> None:
    """Run rank 0, whose first group never opens because the other rank is gone, or the new rank 1 of the next one."""
    torch.set_num_threads(1)
    if rank == 0:
        group = GenerationGroup()
        broken = threading.Timer(0.5, group.break_off)
        broken.start()
        with pytest.raises(RuntimeError):
            group.open(("127.0.0.1", port), 1, 0, 2, "cpu")
        broken.join()
        group.close()
    following = GenerationGroup()
    following.open(("127.0.0.1", port), 2, rank, 2, "cpu")
    total = torch.ones(4) * (rank + 1)
    dist.all_reduce(total)
    following.close()
    answers.put((rank, total.tolist()))


def test_a_group_opens_after_one_that_did_not():
    """torch counts a group whose opening has failed, and names the next one by the count; a new process has none."""
    store = serve_store("127.0.0.1")
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=survivor, args=(rank, store.port, answers), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    assert sorted(answers.get(timeout=120) for _ in ranks) == [(0, [3.0] * 4), (1, [3.0] * 4)]
    for process in ranks:
        process.join(60)
