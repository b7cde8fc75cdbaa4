"""What runs in each worker: generation after generation in one process, as the coordinator says."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.elastic.channel import Client, Message
from tidewheel.elastic.faults import Report, report
from tidewheel.elastic.generation import ExitReason
from tidewheel.elastic.nodes import NAMESPACE
from tidewheel.errors import clear_frames
from tidewheel.placement import is_spot
from tidewheel.time_limit import TimeLimit

if TYPE_CHECKING:
    from tidewheel.elastic.process_group import GenerationGroup
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.record import TrainResult

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
EXIT_CODE = 71
"""EX_OSERR of sysexits.h: cut off by the coordinator, or left alone by it."""

_members: list[Member] = []
"""This process as a worker, if it is one; for the signal handler."""


class RestartNeeded(RuntimeError):
    """Recovery in place is given up: Ray Train's own restart is next."""


class Member:
    """This process as the coordinator's worker: hears what to do, tells how it goes, gives signs of life.

    A connection that breaks is made again (`channel`). Until then rank 0 waits at its next step boundary: whoever is
    cut off must not go on training. The process ends when the coordinator is gone, cannot be reached for
    `channel.RECONNECT_SECONDS`, or goes on without this worker.
    """

    def __init__(self, address: tuple[str, int], token: str, name: str, node: str, *, spot: bool = False,
                 device: str = "") -> None:
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """Messages that the training thread waits for: join, probe, raise, over."""
        self.stop = False
        """Make way at the next step boundary."""
        self.save = False
        """Save in storage at the next step boundary."""
        self.terminated = False
        self.generation, self.step = -1, 0
        self._group: Any = None  # of the generation that runs here
        self._aborted = -1
        clocks = hasattr(time, "pthread_getcpuclockid")  # not on every system
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if clocks else None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        hello = {"name": name, "node": node, "spot": spot, "device": device, "token": token}
        self._client = Client(address, hello, self._hear, _end)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def begin(self, generation: int, group: Any) -> None:
        """The generation's collectives are `group`'s; when it must end, that is broken off."""
        with self._lock:
            self.generation, self.step, self.stop, self.save = generation, 0, False, False
            self._group = group
            if self._aborted >= generation:
                group.break_off()

    def left(self, said: Report) -> None:
        """This worker has let go of its generation."""
        with self._lock:
            self._group = None
        self.send({"say": "left", "generation": self.generation, "how": said.how.value, "text": said.text[:2000],
                   "kind": said.kind, "accused": said.accused})

    def in_touch(self) -> None:
        """Return once the coordinator can be reached; if it cannot, the process ends."""
        self._client.connected.wait()

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
            case "join" | "probe" | "raise" | "over":
                self.orders.put(message)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self.send({"say": "beat", "generation": self.generation, "step": self.step, "work": self._work(),
                       "aborts": self._aborted})

    def _work(self) -> float:
        """CPU seconds that the thread which made this object, the training's, has used."""
        if self._clock is None:
            return 0.0
        with contextlib.suppress(OSError):  # the thread has ended
            return round(time.clock_gettime(self._clock), 2)
        return 0.0


def notice() -> None:
    """SIGTERM came: leave in good order."""
    if _members:
        threading.Thread(target=_members[-1].terminate, name="notice").start()
    else:
        _end()


def _end() -> None:
    _exit("it was told to, was cut off, or the coordinator is gone")


def _exit(why: str) -> None:
    """End the process at once, whatever its threads do."""
    from tidewheel.train.logs import worker_log

    logger.warning("this worker ends: %s", why)
    worker_log.last_words()
    os._exit(EXIT_CODE)


def ray_log_folder() -> Path | None:
    """Return the folder in which Ray keeps the output of this process; None where it is not a file."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return Path(os.readlink("/proc/self/fd/2")).parent
    return None


class RunControl:
    """`train.runtime.Control` over the coordinator's connection. Only `poll` waits, and only while that is broken."""

    def __init__(self, member: Member, rank: int) -> None:
        self._member, self._rank = member, rank

    @property
    def stepped(self) -> bool:
        """This generation has done a step, as far as this rank knows."""
        return self._member.step > 0

    def poll(self) -> bool:
        self._member.in_touch()
        return self._member.stop

    def save_wanted(self) -> bool:
        return self._member.save

    def hold(self, step: int) -> None:
        from tidewheel.train.runtime import Preempted

        raise Preempted(step)

    def event(self, kind: str, **detail: Any) -> None:
        logger.info("event %s %s", kind, json.dumps(detail, default=str))
        self._member.send({"say": "event", "kind": kind, "detail": {"rank": self._rank, **detail},
                           "time": time.time()})

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        self._member.step = step
        self._member.send({"say": "step", "generation": self._member.generation,
                           "progress": {"step": step, "steps": steps, **metrics}})


def run_worker(settings: dict[str, Any]) -> Any:
    """`train_loop_per_worker`; returns the run's `TrainResult`.

    Args:
        settings: "config" (`TrainConfig` as JSON values), "code" (of its parts outside the package, `parts.Code`)
            and "coordinator" (the actor's name).

    Raises:
        RestartNeeded: Ray Train shall restart its group of workers.
        TidewheelError: something a user can mend.
    """
    import ray

    from tidewheel.parts import Code
    from tidewheel.train.config import TrainConfig

    for code in settings.get("code", ()):
        Code(**code).arrive()
    config = TrainConfig.model_validate(settings["config"])
    coordinator = ray.get_actor(settings["coordinator"], namespace=NAMESPACE)
    context = ray.get_runtime_context()
    answer: Any = coordinator.place.remote()
    place: dict[str, Any] = ray.get(answer)
    gpus = context.get_accelerator_ids().get("GPU", [])
    return take_part(config, place, name=context.get_actor_id(), node=context.get_node_id(),
                     spot=is_spot(context.get_node_labels()), device=",".join(map(str, gpus)), beside=ray_log_folder())


def take_part(config: TrainConfig, place: dict[str, Any], *, name: str, node: str,
              spot: bool = False, device: str = "", beside: Path | None = None) -> TrainResult | None:
    """Be one of the run's workers until it is over; its result.

    Args:
        place: what `Coordinator.place` says.
        name: of this process, unique; node: id of its machine; spot: that may be taken away at any time.
        device: its GPUs, as the node numbers them; "" on CPU.
        beside: Ray's log folder, for a copy of what is logged.
    """
    from tidewheel import storage
    from tidewheel.train.logs.worker_log import logging_worker

    with logging_worker(config.logs, storage.store(config.run_uri), run=config.run.id, node=node[:12], capture=True,
                        beside=beside):
        return _take_part(config, place, name=name, node=node, spot=spot, device=device)


def _take_part(config: TrainConfig, place: dict[str, Any], *, name: str, node: str, spot: bool,
               device: str) -> TrainResult | None:
    from tidewheel import storage
    from tidewheel.elastic.warm import warm_up
    from tidewheel.train.record import read_result

    warm_up(config, deeply=place["runs"])
    member = Member(tuple(place["address"]), place["token"], name, node, spot=spot, device=device)
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
            if order["do"] == "probe":
                member.send({"say": "probed", "problem": _problem(config)})
                continue
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
    from tidewheel.train.parallel.caches import StaleProcessError

    control, group = RunControl(member, order["rank"]), GenerationGroup()
    member.begin(order["generation"], group)
    said, failed = _train(config, order, node, control, group)
    if failed is not None:
        clear_frames(failed)  # they hold the model, and so do those of its causes
    try:
        group.close()
    except Exception as error:  # a process that cannot let go is no use to the next generation
        _end_after(member, replace(said, text=f"{said.text}; then {type(error).__name__}: {error}"))
    if isinstance(failed, StaleProcessError):  # nor is one that computes for another rank: a new one is started
        _end_after(member, replace(said, kind=""))  # its node is not to blame
    member.left(said)
    return failed


def _train(config: TrainConfig, order: Message, node: str, control: RunControl,
           group: GenerationGroup) -> tuple[Report, BaseException | None]:
    """Open the process group and train: how that ended, and the error if it is one.

    All that holds the model is in frames below `_generation`, so that they can be cleared.
    """
    from tidewheel.inference.sample import text_sample
    from tidewheel.train.loop import train
    from tidewheel.train.past import Past
    from tidewheel.train.runtime import Preempted, Runtime

    rank, world_size, generation = order["rank"], order["world_size"], order["generation"]
    logger.info("joins generation %d as rank %d of %d", generation, rank, world_size)
    limit = TimeLimit(what="the generation's work")
    group.also_break(lambda: limit.end("its ranks have parted"))
    try:
        group.open(tuple(order["store"]), generation, rank, world_size, cuda=bool(config.elastic.gpus_per_worker))
        with limit.applied(), _checkpoints(config, order, control, group) as checkpoints:
            train(config, Runtime(rank=rank, world_size=world_size, device=_device(config), generation=generation,
                                  checkpoints=checkpoints, control=control, gauges=_gauges(config.run.id), node=node,
                                  past=Past(**order["past"]) if "past" in order else None, limit=limit,
                                  sampler=text_sample, evaluated_beside=True))
    except Preempted as left:
        return Report(ExitReason.PREEMPTED, str(left)), None
    except Exception as error:
        logger.info("generation %d ends here", generation, exc_info=error)
        return report(error, broken=group.broken, stepped=generation > 0 or control.stepped), error
    return Report(ExitReason.FINISHED), None


@contextlib.contextmanager
def _checkpoints(config: TrainConfig, order: Message, control: RunControl, group: GenerationGroup) -> Iterator[Any]:
    """Storage, with the memory tier above it where every rank's node has an agent."""
    from tidewheel import storage
    from tidewheel.checkpoint.manager import CheckpointManager
    from tidewheel.checkpoint.tiers import Placement, TieredCheckpoints

    def on_event(kind: str, detail: dict[str, Any]) -> None:
        control.event(kind, **detail)

    saved = CheckpointManager.of(storage.store(config.run_uri).child("checkpoints"), config.checkpoint, on_event,
                                 generation=order["generation"])
    group.also_break(saved.break_off)
    memory = order.get("memory")
    try:
        if memory is None:
            yield saved
            return
        tiers = TieredCheckpoints(
            saved, Placement.of(memory), rank=order["rank"], world_size=order["world_size"],
            generation=order["generation"], on_event=on_event, every_steps=config.checkpoint.memory.every_steps,
            buddy=config.checkpoint.memory.buddy)
        group.also_break(tiers.break_off)
        try:
            yield tiers
        finally:
            tiers.close()
    finally:
        saved.break_off()  # an upload that the generation did not wait for can never be committed


def _problem(config: TrainConfig) -> str:
    """What a self-test of this process finds; "": nothing."""
    from tidewheel.elastic.probe import probe

    try:
        probe(config, _device(config))
    except Exception as error:  # whatever a sick device or a full disk raises is the answer
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _end_after(member: Member, said: Report) -> None:
    member.left(replace(said, how=said.how if said.how is ExitReason.FATAL else ExitReason.FAILED))
    _exit(said.text)


def _gauges(run: str) -> Callable[[], Any]:
    def gauges() -> Any:
        from tidewheel.elastic.gauges import RayGauges

        return RayGauges(run)

    return gauges


def _device(config: TrainConfig) -> Any:
    if not config.elastic.gpus_per_worker:
        return "cpu"
    import ray.train.torch
    import torch

    device = ray.train.torch.get_device()
    torch.cuda.set_device(device)
    return device
