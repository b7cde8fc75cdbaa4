"""What ranks of tests import before and in their first steps. The fork server of `tests.ranks` imports this module.

The modules stay. So the server imports them without garbage collection, and its processes never look through them.
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor.debug", "torch.utils.flop_counter",
    "pandas",  # PyArrow imports it wherever it is installed
    "pytest", "tokenizers", "tidewheel.checkpoint.manager", "tidewheel.train.loop",
    "tidewheel.train.optimizers.rules.host_adam", "tidewheel.train.trackers.clients.event_files",
    "tests.benchmarks.equivalence")

gc.disable()
try:
    for name in MODULES:
        importlib.import_module(name)
finally:
    gc.enable()
    gc.freeze()
