"""Profile Tidewheel's step on packed documents and write the time of each kernel.

    python -m tests.benchmarks.gpu.kernels FILE

The table is torch's, over three steps after five others; divide its times by three. Without a GPU it has operators of a
tiny shape. `results` has the table of past runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.benchmarks.gpu import wheels
from tests.benchmarks.gpu.case import Case

WARM, STEPS = 5, 3
LINES = 60


def main() -> int:
    """Profile the step, and write the table to the file that the command line names."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    installed = wheels.install()
    if installed is not None:
        sys.path.append(installed)
    from tidewheel.train.cuda_environment import prepare_environment

    prepare_environment()  # before torch starts CUDA
    import torch
    from torch.profiler import ProfilerActivity, profile

    from tests.benchmarks.gpu.ours import Ours
    from tidewheel.train.precision import fp32_products

    cuda = torch.cuda.is_available()
    case = Case(document=600) if cuda else Case(document=600).tiny()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with fp32_products(torch.device(case.device), True):
        ours = Ours(case)
        for step in range(WARM):
            ours.step(step)
        with profile(activities=activities) as profiled:
            for step in range(STEPS):
                ours.step(step)
            if cuda:
                torch.cuda.synchronize()
    column = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    table = profiled.key_averages().table(sort_by=column, row_limit=LINES, max_name_column_width=110)
    Path(sys.argv[1]).write_text(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
