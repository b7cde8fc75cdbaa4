"""What runs in each worker: generation after generation in one process, as the coordinator says."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tidewheel.elastic.channel import Client, Message
from tidewheel.elastic.membership import How
from tidewheel.elastic.nodes import NAMESPACE
from tidewheel.errors import TidewheelError, root_cause
from tidewheel.placement import is_spot

if TYPE_CHECKING:
    from tidewheel.elastic.process_group import GenerationGroup
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.record import TrainResult

BEAT_SECONDS = 0.25
EXIT_CODE = 71
"""EX_OSERR of sysexits.h: cut off by the coordinator, or left alone by it."""
#: Mistakes in the code: starting again does not mend them.
MISTAKES = (TypeError, AttributeError, NameError, ImportError, AssertionError, KeyError, IndexError, ValueError)


_members: list[Member] = []
"""This process as a worker, if it is one; for the signal handler."""


class RestartNeeded(RuntimeError):
    """Recovery in place is given up: Ray Train's own restart is next."""


class Member:
    """This process as the coordinator's worker: hears what to do, tells how it goes, gives signs of life.

    When the connection closes the process ends: whoever is cut off must not go on training.
    """

    def __init__(self, address: tuple[str, int], token: str, name: str, node: str, *, spot: bool = False) -> None:
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """Messages that the training thread waits for: join, raise, over."""
        self.stop = False
        """Make way at the next step boundary."""
        self.save = False
        """Save in storage at the next step boundary."""
        self.terminated = False
        self.generation, self.step = -1, 0
        self._group: Any = None  # of the generation that runs here
        self._aborted = -1
        self._lock = threading.Lock()
        self._closed = threading.Event()
        hello = {"name": name, "node": node, "spot": spot, "token": token}
        self._client = Client(address, hello, self._hear, _end)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def begin(self, generation: int, group: Any) -> None:
        """The generation's collectives are `group`'s; when it must end, that is broken off."""
        with self._lock:
            self.generation, self.step, self.stop, self.save = generation, 0, False, False
            self._group = group
            if self._aborted >= generation:
                group.break_off()

    def left(self, how: How, text: str = "") -> None:
        """This worker has let go of its generation."""
        with self._lock:
            self._group = None
        self.send({"say": "left", "generation": self.generation, "how": how.value, "text": text[:2000]})

    def send(self, message: Message) -> None:
        """Tell the coordinator."""
        self._client.send(message)

    def close(self) -> None:
        """The last call; the process goes on."""
        self._closed.set()
        self._client.close()

    def terminate(self) -> None:
        """This process was asked to end: it makes way at a step boundary first. From any thread."""
        self.terminated = True
        self.send({"say": "leaving"})
        with self._lock:
            busy = self._group is not None
        if not busy:
            _end()

    def _hear(self, message: Message) -> None:
        match message["do"]:
            case "abort":
                with self._lock:
                    self._aborted = max(self._aborted, message["generation"])
                    if self._group is not None and self.generation <= self._aborted:
                        self._group.break_off()
            case "stop" | "go_on" if message["generation"] == self.generation:
                self.stop, self.save = message["do"] == "stop", bool(message.get("save"))
            case "join" | "raise" | "over":
                self.orders.put(message)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self.send({"say": "beat", "generation": self.generation, "step": self.step})


def notice() -> None:
    """SIGTERM came: leave in good order."""
    if _members:
        threading.Thread(target=_members[-1].terminate, name="notice").start()
    else:
        _end()


def _end() -> None:
    print("this worker ends: it was told to, was cut off, or the coordinator is gone", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class RunControl:
    """`train.runtime.Control` over the coordinator's connection. Nothing here waits."""

    def __init__(self, member: Member, rank: int) -> None:
        self._member, self._rank = member, rank

    def poll(self) -> bool:
        return self._member.stop

    def save_wanted(self) -> bool:
        return self._member.save

    def hold(self, step: int) -> None:
        from tidewheel.train.runtime import MadeWay

        raise MadeWay(step)

    def event(self, kind: str, **detail: Any) -> None:
        self._member.send({"say": "event", "kind": kind, "detail": {"rank": self._rank, **detail},
                           "time": time.time()})

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        self._member.step = step
        self._member.send({"say": "step", "generation": self._member.generation,
                           "progress": {"step": step, "steps": steps, **metrics}})


def run_worker(settings: dict[str, Any]) -> Any:
    """`train_loop_per_worker`; returns the run's `TrainResult`.

    Args:
        settings: "config" (`TrainConfig` as JSON values) and "coordinator" (the actor's name).

    Raises:
        RestartNeeded: Ray Train shall restart its group of workers.
        TidewheelError: something a user can mend.
    """
    import ray

    from tidewheel.train.config import TrainConfig

    config = TrainConfig.model_validate(settings["config"])
    coordinator = ray.get_actor(settings["coordinator"], namespace=NAMESPACE)
    context = ray.get_runtime_context()
    answer: Any = coordinator.place.remote()
    place: dict[str, Any] = ray.get(answer)
    return take_part(config, place, name=context.get_actor_id(), node=context.get_node_id(),
                     spot=is_spot(context.get_node_labels()))


def take_part(config: TrainConfig, place: dict[str, Any], *, name: str, node: str,
              spot: bool = False) -> TrainResult | None:
    """Be one of the run's workers until it is over; its result.

    Args:
        place: what `Coordinator.place` says.
        name: of this process, unique; node: id of its machine; spot: that may be taken away at any time.
    """
    from tidewheel import storage
    from tidewheel.elastic.warm import warm_up
    from tidewheel.train.record import read_result

    warm_up(config, deeply=place["runs"])
    member = Member(tuple(place["address"]), place["token"], name, node, spot=spot)
    _members.append(member)
    error: BaseException | None = None
    try:
        while True:
            order = member.orders.get()
            if order["do"] == "over":
                return read_result(storage.store(config.run_uri))
            if order["do"] == "raise":
                if error is not None and not order["text"]:
                    raise error
                raise RestartNeeded(order["text"]) from error
            error = None
            error = _generation(config, member, order, node[:12])
            if member.terminated:
                _end()
            gc.collect()  # the old model and its groups, before the next are built
    finally:
        _members.remove(member)
        member.close()


def _generation(config: TrainConfig, member: Member, order: Message, node: str) -> BaseException | None:
    """Train in one generation, to its end; what it failed of."""
    from tidewheel.elastic.process_group import GenerationGroup
    from tidewheel.train.loop import train
    from tidewheel.train.runtime import MadeWay, Runtime

    rank, world_size, generation = order["rank"], order["world_size"], order["generation"]
    control, group = RunControl(member, rank), GenerationGroup()
    member.begin(generation, group)
    how, text, failed = How.FINISHED, "", None
    try:
        group.open(tuple(order["store"]), generation, rank, world_size, cuda=bool(config.elastic.gpus_per_worker))
        with _checkpoints(config, order, control, group) as checkpoints:
            train(config, Runtime(rank=rank, world_size=world_size, device=_device(config), generation=generation,
                                  checkpoints=checkpoints, control=control, sinks=_sinks(config, rank), node=node,
                                  evaluated_beside=True))
    except MadeWay as left:
        how, text = How.MADE_WAY, str(left)
    except Exception as error:
        how, text, failed = _judged(error, group.broken), f"{type(error).__name__}: {error}", error
        traceback.clear_frames(error.__traceback__)  # they hold the model
    try:
        group.close()
    except Exception as error:  # a process that cannot let go is no use to the next generation
        text = f"{text}; then {type(error).__name__}: {error}"
        _end_after(member, how, text)
    member.left(how, text)
    return failed


@contextlib.contextmanager
def _checkpoints(config: TrainConfig, order: Message, control: RunControl, group: GenerationGroup) -> Iterator[Any]:
    """Storage, with the memory tier above it where every rank's node has an agent."""
    from tidewheel import storage
    from tidewheel.checkpoint.manager import CheckpointManager
    from tidewheel.checkpoint.memory.protocol import Address
    from tidewheel.checkpoint.tiers import Placement, TieredCheckpoints

    def on_event(kind: str, detail: dict[str, Any]) -> None:
        control.event(kind, **detail)

    saved = CheckpointManager.of(storage.store(config.run_uri).child("checkpoints"), config.checkpoint, on_event)
    memory = order.get("memory")
    if memory is None:
        yield saved
        return
    agents, others = ([Address(*address) for address in memory[name]] for name in ("agents", "others"))
    tiers = TieredCheckpoints(
        saved, Placement(tuple(agents), tuple(others), memory["token"]), rank=order["rank"],
        world_size=order["world_size"], generation=order["generation"], on_event=on_event,
        every_steps=config.checkpoint.memory.every_steps, buddy=config.checkpoint.memory.buddy)
    group.also_break(tiers.break_off)
    try:
        yield tiers
    finally:
        tiers.close()


def _judged(error: BaseException, broken: bool) -> How:
    """What an error says: our own, and mistakes in the code, are final, unless connections were broken under them."""
    final = isinstance(root_cause(error), (TidewheelError, *MISTAKES))
    return How.FATAL if final and not broken else How.FAILED


def _end_after(member: Member, how: How, text: str) -> None:
    member.left(how if how is How.FATAL else How.FAILED, text)
    print(f"this worker ends: {text}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def _sinks(config: TrainConfig, rank: int) -> list[Any]:
    if rank or not config.metrics.prometheus:
        return []
    from tidewheel.elastic.gauges import RayGauges

    return [RayGauges(config.run.id)]


def _device(config: TrainConfig) -> Any:
    if not config.elastic.gpus_per_worker:
        return "cpu"
    import ray.train.torch
    import torch

    device = ray.train.torch.get_device()
    torch.cuda.set_device(device)
    return device
