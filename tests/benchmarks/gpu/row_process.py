"""The process of one row: call its function and write its figures, or why there are none, to a file.

    python -m tests.benchmarks.gpu.row_process MODULE:FUNCTION CASE_JSON RESULT_FILE
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.case import Case

MEMORY_SIGNS = ("out of memory", "OutOfMemoryError", "CUBLAS_STATUS_ALLOC_FAILED")
"""What messages say when the device's memory does not suffice. Libraries of CUDA raise their own errors."""
TEXT = 400
"""Characters of a reason."""


def out_of_memory(text: str) -> bool:
    """Return whether a message says that memory did not suffice."""
    return any(sign in text for sign in MEMORY_SIGNS)


def outcome(function: str, case: Case) -> dict[str, Any]:
    """Call the function of a row and return its record: "status" and "reason", and the figures if it is "ok".

    Args:
        function: "module:function" of this package.
        case: its argument.
    """
    module, _, name = function.partition(":")
    try:
        from tidewheel.train.cuda_environment import prepare_environment

        prepare_environment()  # before torch starts CUDA
        measure = getattr(importlib.import_module(f"tests.benchmarks.gpu.{module}"), name)
        return {"status": "ok", **measure(case)}
    except ModuleNotFoundError as error:
        traceback.print_exc()
        return {"status": "not available", "reason": str(error)}
    except Exception as error:  # a row's failure is its result
        traceback.print_exc()
        text = " ".join(str(error).split())
        status = "out of memory" if out_of_memory(f"{type(error).__name__}: {text}") else "failed"
        status = "not possible" if type(error).__name__ == "NotPossibleError" else status
        return {"status": status, "reason": f"{type(error).__name__}: {text}"[:TEXT]}


def main() -> int:
    """Measure the row that the command line names."""
    function, case, file = sys.argv[1:]
    record = outcome(function, Case(**json.loads(case)))
    partial = Path(f"{file}.part")
    partial.write_text(json.dumps(record))
    partial.rename(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and processes of libraries must not keep a row alive


if __name__ == "__main__":
    sys.exit(main())
