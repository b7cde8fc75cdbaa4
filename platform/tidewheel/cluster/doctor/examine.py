"""Examine one machine."""

from __future__ import annotations

from tidewheel.cluster.doctor import gpu, machine, network, software
from tidewheel.cluster.doctor.check import Check
from tidewheel.cluster.doctor.storage import storage as examine_storage


def diagnose(storage: str | None = None, *, in_cluster: bool = False) -> list[Check]:
    """Examine this machine. A problem is a `Check` with status "failure", never an exception.

    Args:
        storage: URI at which to try writing, reading, listing and deleting; None to leave storage out.
        in_cluster: whether this is a node of a running Ray cluster, whose ports are in use and whose address is known.
    """
    probes = {name: software.start(code) for name, code in (("torch", software.TORCH), ("ray", software.RAY))}
    checks = [software.python(), *software.packages(), software.kernels(), machine.cpus(), machine.memory(),
              machine.shared_memory(), *machine.limits(), *machine.disks(), *gpu.gpus(), network.loopback(),
              *network.proxy()]
    if not in_cluster:
        checks += [*network.ports(), *network.ray_address(), network.token(), network.listening()]
    checks += [software.torch(probes["torch"]), software.ray(probes["ray"])]
    return checks + (examine_storage(storage) if storage else [])
