"""The causes of failures and changes: how to recognise each one, and what a person should do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One cause of lost time."""

    key: str
    """Stable name, for JSON."""
    title: str
    """Name for people."""
    advice: str
    """What to do."""
    planned: bool = False
    """Somebody or something asked for it, so nothing has failed."""
    blames_node: bool = False
    """A node on which it repeats is suspect."""


_ALL = (
    Cause("corruption", "silent corruption",
          "Take the named nodes out of service and test their processors and memory. The run went back to the last "
          "state known good; the evidence is in the event `corruption`.", blames_node=True),
    Cause("gpu", "GPU fault",
          "Run `tidewheel doctor --address auto`; look for Xid and ECC errors in `nvidia-smi -q` and `dmesg` on the "
          "named nodes. Reset or replace a GPU that repeats it.", blames_node=True),
    Cause("out_of_memory", "out of memory",
          "Check with `tidewheel plan`; then lower batch.micro_sequences, shard more (parallel), or recompute "
          "activations. On the host: fewer workers for each node, or less cache.", blames_node=True),
    Cause("disk_full", "disk full", "Free space on the named disk; the run retries by itself.", blames_node=True),
    Cause("bad_data", "damaged data",
          "Run `tidewheel shards verify` on the shard set, and the pipeline again with --verify."),
    Cause("non_finite", "loss or gradient not finite",
          "See the guarded steps in the report. If it repeats: a lower optimizer.learning_rate, a longer warm-up, or "
          "precision bf16 in place of fp16."),
    Cause("loss_spike", "loss spike",
          "`tidewheel shards trace` shows the documents of the step. If spikes repeat: a lower "
          "optimizer.learning_rate, or guards.rollback_rate."),
    Cause("damaged_checkpoint", "damaged checkpoint",
          "Nothing for now: an older checkpoint is used. If it repeats, check the storage with `tidewheel doctor "
          "--storage`, and each checkpoint with `tidewheel checkpoint verify`."),
    Cause("hang", "hang",
          "Read the log of the named rank (`tidewheel logs RUN --rank N`), which has its stack. The same node again: "
          "test it. Always the same place: a bug in code that not all ranks reach.", blames_node=True),
    Cause("storage", "storage",
          "Test it with `tidewheel doctor --storage URI`: credentials, limits on requests, network. Training goes on "
          "meanwhile, but a failure would cost all steps since the last checkpoint."),
    Cause("configuration", "configuration or code",
          "Fix what the message names, and give the same command again. A restart alone does not help."),
    Cause("probe_failed", "node failed its test",
          "Repair or replace the named node; `tidewheel doctor --address auto` tests it again.", blames_node=True),
    Cause("node_lost", "node lost",
          "Nothing if nodes may go away, as on spot capacity. Otherwise look at the machine's console and its raylet's "
          "log.", blames_node=True),
    Cause("frozen", "worker frozen",
          "Look for swapping, a stopped process or a stuck disk or network file system on the named node (`dmesg`, "
          "`vmstat`). If the node was only busy: a higher elastic.heartbeat_seconds.", blames_node=True),
    Cause("worker_killed", "worker process ended",
          "See its last lines with `tidewheel logs RUN --rank N`. Without a Python error there, look for the kernel's "
          "out-of-memory killer (`dmesg | grep -i oom`) on the named node.", blames_node=True),
    Cause("network", "connections between workers broke",
          "No worker raised an error of its own. Check the network of the nodes with `tidewheel doctor --address "
          "auto`: links, ports, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME.", blames_node=True),
    Cause("driver_lost", "driver ended without a stop",
          "See the log of the job or terminal that ran the command. On a cluster, submit it with `tidewheel submit`, "
          "so that it does not depend on your machine."),
    Cause("coordinator_lost", "coordinator or Ray Train's controller died",
          "Nothing: the driver started another one. If it repeats, look for the out-of-memory killer on the driver's "
          "machine (`dmesg`), and at Ray's logs there."),
    Cause("taken_over", "taken over by another driver",
          "Make sure that only one command trains this run: somebody used --take-over."),
    Cause("failed_for_good", "error that ended the run", "Fix what the message names; give the same command again."),
    Cause("error", "error of a worker",
          "Read the error below and the worker's log (`tidewheel logs RUN --rank N`). On one node only: test the node. "
          "On several: a bug, or a setting.", blames_node=True),
    Cause("slow_worker", "slow worker",
          "See the report's \"By the clock\" and the GPU's state in the event. elastic.slow_worker: replace leaves "
          "such a node by itself.", blames_node=True),
    Cause("memory_tier", "copy in memory lost",
          "Nothing: the copy is made again. Until then a failure would go back to the last checkpoint in storage."),
    Cause("local_disk", "copy on a local disk failed",
          "Training goes on. By the reason: free space on the disk, raise checkpoint.local_disk.limit_bytes, or, for a "
          "slow disk, raise checkpoint.local_disk.every_steps. Until then the end of all processes costs the steps "
          "since the last checkpoint in storage."),
    Cause("generator", "rollout generator lost",
          "Nothing: its groups are sampled again. If it repeats, read `tidewheel logs`."),
    Cause("side_task", "side task failed",
          "Training does not depend on it. The message names the tracker, callback, evaluation or log."),
    Cause("data_wait", "waited for data", "The pipeline is slower than training: give it more CPUs.", planned=True),
    Cause("drain", "planned drain", "Nothing: the cluster asked for the node.", planned=True),
    Cause("join", "node joined", "Nothing: the run grew.", planned=True),
    Cause("user_stop", "stopped on request", "The same command goes on.", planned=True),
    Cause("excluded", "node left out",
          "Repair the node, or ask for another one. Settings: elastic.node_checks.", planned=True),
    Cause("start", "start", "Nothing.", planned=True),
    Cause("resize", "planned change of size", "Nothing.", planned=True),
)
CAUSES = {cause.key: cause for cause in _ALL}
"""All causes by key, the gravest first."""

#: Texts of errors, the most specific first: the first match decides.
_ERRORS = tuple((key, re.compile(pattern, re.IGNORECASE)) for key, pattern in (
    ("corruption", r"^SilentCorruptionError"),
    ("hang", r"^HangError"),
    ("out_of_memory", r"out ?of ?memory|running low on memory|^MemoryError|cannot allocate memory|can't allocate memory"
                      r"|oom[- ]?kill"),
    ("disk_full", r"no space left|disk quota exceeded"),
    ("probe_failed", r"its (probe|test at the start) (failed|did not end)"),
    ("node_lost", r"node \S+ is gone|node (has )?died"),
    ("frozen", r"no sign of life|did not leave within|frozen"),
    ("gpu", r"cuda error|cublas|cudnn|uncorrectable ecc|\bxid\b|device-side assert|nvlink|fallen off the bus"
            r"|illegal memory access"),
    ("worker_killed", r"process has ended|is cut off|sigkill|exit code -9|\bdied\b|killed"),
    ("damaged_checkpoint", r"^CheckpointError"),
    ("bad_data", r"^(ShardError|RolloutError)|hash differs"),
    ("storage", r"^Storage(Away)?Error|object store|bucket|read-only file system"),
    ("non_finite", r"^ConfigError.*(not finite|non-finite|nan|infinite)"),
    ("loss_spike", r"^ConfigError.*spike"),
    ("taken_over", r"^OwnershipError|another driver"),
    ("configuration", r"^(ConfigError|ClusterError|InputError|TypeError|ValueError|AttributeError|NameError"
                      r"|ImportError|ModuleNotFoundError|AssertionError|KeyError|IndexError)\b"),
    ("network", r"gloo|nccl|connection (closed|reset|refused)|broken pipe|process group|communicator|Dist\w+Error"
                r"|wait timeout|the generation has ended|too few workers"),
))
ECHOES = frozenset({"worker_killed", "frozen", "network", "error"})
"""Causes that the loss of the worker's node explains."""


def of_error(text: str) -> str:
    """Return the key of the cause that an error's text names; "error" if none is known."""
    return next((key for key, pattern in _ERRORS if pattern.search(text)), "error")


def of_guard(reason: str) -> str:
    """Return the key of the cause that a guard's verdict names."""
    return "loss_spike" if "spike" in reason else "non_finite"


#: Events that stand for themselves, with the fields of their detail that say what happened.
ALONE = {
    "storage_away": ("storage", ("reason",)), "save_failed": ("storage", ("reason",)),
    "save_abandoned": ("storage", ("reason",)), "upload_failed": ("storage", ("reason",)),
    "checkpoint_refused": ("damaged_checkpoint", ("checkpoint", "reason")),
    "memory_refused": ("damaged_checkpoint", ("reason",)),
    "shard_read_again": ("bad_data", ("shard", "problem")),
    "local_disk_refused": ("local_disk", ("reason",)), "local_disk_failed": ("local_disk", ("reason",)),
    "memory_tier_lost": ("memory_tier", ("reason",)), "replica_lost": ("memory_tier", ("reason",)),
    "generator_lost": ("generator", ("why",)), "slow_worker": ("slow_worker", ("gpu",)),
    "straggler": ("slow_worker", ("gpu",)), "slow_link": ("slow_worker", ("hosts", "figures")),
    "taken_over": ("taken_over", ("error",)),
    "data_wait": ("data_wait", ()), "sink_failed": ("side_task", ("sink", "reason")),
    "callback_failed": ("side_task", ("callback", "hook", "reason")),
    "evaluation_failed": ("side_task", ("reason",)), "cleanup_failed": ("side_task", ("reason",)),
    "control_error": ("side_task", ("where", "error")), "log_dropped": ("side_task", ("log", "lines")),
    "hang": ("hang", ("found",)), "stopped": ("user_stop", ()), "node_excluded": ("excluded", ("reason",)),
    "node_used_again": ("excluded", ("reason",)),
}
