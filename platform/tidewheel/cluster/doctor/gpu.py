"""Check the GPUs, the links between them, and the driver's CUDA version with `nvidia-smi`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from tidewheel.cluster.doctor.check import Check

FIELDS = ("name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total",
          "temperature.gpu")
SMI_SECONDS = 30.0
BUSY_MIB = 2048
HOT_CELSIUS = 85
"""NVIDIA's data-centre GPUs slow down at 85 to 90 degrees."""


def gpus() -> Iterator[Check]:
    """Check the GPUs of this machine; yield nothing without an NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return
    rows, problem = _smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    gpu_rows = [[cell.strip() for cell in row.split(",")] for row in rows if row.count(",") == len(FIELDS) - 1]
    if not gpu_rows:
        yield Check("GPUs", "failure", problem or "nvidia-smi lists none",
                    "see `nvidia-smi` and `dmesg | grep -i nvidia`; in a container start it with --gpus all")
        return
    kinds = Counter(row[0] for row in gpu_rows)
    detail = ", ".join(f"{count} x {name}" for name, count in kinds.items()) + f", driver {gpu_rows[0][1]}"
    if len(kinds) > 1:
        yield Check("GPUs", "warning", f"{detail}: of different kinds", "the slowest one limits the speed: put them "
                    "into different node groups (labels)")
    else:
        yield Check("GPUs", "ok", f"{detail}, {gpu_rows[0][2]} MiB each")
    yield from _bad_gpus("GPU errors", gpu_rows, 4, lambda value: value > 0, "failure", "uncorrected memory errors",
                         "drain the node and reset the GPU, or have it replaced")
    yield from _bad_gpus("GPU memory", gpu_rows, 3, lambda value: value > BUSY_MIB, "warning",
                         "MiB in use by other programs", "`nvidia-smi` lists the processes")
    yield from _bad_gpus("GPU heat", gpu_rows, 5, lambda value: value >= HOT_CELSIUS, "warning", "degrees",
                         "check the cooling: GPUs this hot lower their clocks")
    if len(gpu_rows) > 1:
        yield _links(len(gpu_rows))


def _bad_gpus(name: str, gpu_rows: Sequence[Sequence[str]], column: int, is_bad: Callable[[int], bool],
              status: Literal["warning", "failure"], unit: str, fix: str) -> Iterator[Check]:
    """Yield a finding if a column is bad for any GPU. An unsupported value is not a number, and is skipped."""
    values = {index: int(row[column]) for index, row in enumerate(gpu_rows) if row[column].isdigit()}
    bad = {index: value for index, value in values.items() if is_bad(value)}
    if bad:
        yield Check(name, status, ", ".join(f"GPU {index}: {value} {unit}" for index, value in bad.items()), fix)


def _links(count: int) -> Check:
    """Check for NVLink between all pairs of `count` GPUs, with `nvidia-smi topo -m`."""
    rows, problem = _smi("topo", "-m")
    links: dict[tuple[int, int], str] = {}
    for row in rows:
        # nvidia-smi writes a terminal's colours even to a pipe
        cells = re.sub(r"\x1b\[[0-9;]*m", "", row).split()
        if cells and (match := re.fullmatch(r"GPU(\d+)", cells[0])) and len(cells) > count:
            links |= {(int(match[1]), other): cells[1 + other] for other in range(count)}
    pairs = {pair: link for pair, link in links.items() if pair[0] < pair[1]}
    if not pairs:
        return Check("NVLink", "warning", problem or "nvidia-smi does not show the links between the GPUs", "see "
                     "`nvidia-smi topo -m`")
    without = [f"{one}-{other} ({link})" for (one, other), link in pairs.items() if not link.startswith("NV")]
    if not without:
        return Check("NVLink", "ok", f"between all {count} GPUs: {', '.join(sorted(set(pairs.values())))}")
    if len(without) == len(pairs):
        return Check("NVLink", "warning", f"none between the {count} GPUs ({', '.join(sorted(set(pairs.values())))})",
                     "leave parallel.tensor at 1; if there should be NVLink, see `nvidia-smi nvlink --status` and the "
                     "fabric manager")
    return Check("NVLink", "warning", f"not between GPUs {', '.join(without)}",
                 "keep parallel.tensor inside the groups that have it; see `nvidia-smi nvlink --status`")


def driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver can run, such as "12.4"; None without a driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    rows, _ = _smi()
    match = re.search(r"CUDA Version:\s*(\d+\.\d+)", "\n".join(rows))
    return match[1] if match else None


def fits(built_for: str, driver: str) -> bool:
    """Return whether a driver runs programs built for a CUDA version.

    It runs those of its own major version (minor version compatibility, CUDA 11 and later) and of older ones.
    """
    return int(built_for.partition(".")[0]) <= int(driver.partition(".")[0])


def _smi(*arguments: str) -> tuple[list[str], str]:
    """Return the lines that `nvidia-smi` prints, and why there are none."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"[:200]
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        message = (done.stderr.strip() or done.stdout.strip() or f"code {done.returncode}").splitlines()[0]
        return [], f"nvidia-smi: {message}"[:200]
    return lines, ""
