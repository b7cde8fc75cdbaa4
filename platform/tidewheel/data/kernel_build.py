"""Compile every kernel for each level of processors, and write the files that `kernel_objects` loads. For developers:

    python -m tidewheel.data.kernel_build              # takes minutes; run it when a kernel has changed
    python -m tidewheel.data.kernel_build --check      # list the kernels that have changed, in a second

It needs Linux on x86-64. The files depend only on the kernels' source and the versions of numba and llvmlite.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba import types

from tidewheel.data import warm_up
from tidewheel.data.text import kernel_objects, kernel_tools

KINDS = {"int64": types.int64, "uint64": types.uint64, "float64": types.float64, "bool": types.boolean}
OUTSIDE = frozenset({"memcpy", "memmove", "memset", "malloc", "free"})
"""Functions of the C library that the machine code may call."""
# Allocation of arrays inside kernels without numba's runtime: the same records from malloc, laid out as its `MemInfo`.
RUNTIME = """
%record = type { i64, ptr, ptr, ptr, i64, ptr }
declare ptr @malloc(i64)
declare void @free(ptr)
define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %wide = zext i32 %align to i64
  %room = add i64 %size, %wide
  %all = add i64 %room, 48
  %record = call ptr @malloc(i64 %all)
  %none = icmp eq ptr %record, null
  br i1 %none, label %end, label %fill
fill:
  %behind = getelementptr i8, ptr %record, i64 48
  %at = ptrtoint ptr %behind to i64
  %rest = urem i64 %at, %wide
  %gap = sub i64 %wide, %rest
  %data = getelementptr i8, ptr %behind, i64 %gap
  store i64 1, ptr %record
  %dtor = getelementptr %record, ptr %record, i32 0, i32 1
  store ptr null, ptr %dtor
  %info = getelementptr %record, ptr %record, i32 0, i32 2
  store ptr null, ptr %info
  %place = getelementptr %record, ptr %record, i32 0, i32 3
  store ptr %data, ptr %place
  %bytes = getelementptr %record, ptr %record, i32 0, i32 4
  store i64 %size, ptr %bytes
  %allocator = getelementptr %record, ptr %record, i32 0, i32 5
  store ptr null, ptr %allocator
  br label %end
end:
  ret ptr %record
}
define ptr @NRT_MemInfo_alloc_safe_aligned(i64 %size, i32 %align) {
  %record = call ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align)
  ret ptr %record
}
define void @NRT_MemInfo_call_dtor(ptr %record) {
  call void @free(ptr %record)
  ret void
}
"""


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compile nothing; exit code 1 if a kernel has changed")
    parser.add_argument("--folder", type=Path, default=kernel_objects.FOLDER, help="where to write")
    parser.add_argument("--level", choices=list(kernel_objects.LEVELS), help=argparse.SUPPRESS)
    parser.add_argument("--forms", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        return _check(options.folder)
    if options.level:
        _build(options.level, json.loads(options.forms.read_text()), options.folder)
        return 0
    recorded = record()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "forms.json")
        file.write_text(json.dumps(recorded))
        for level in kernel_objects.LEVELS:
            # numba reads these once, when it is imported
            environment = {**os.environ, "NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": ""}
            command = [sys.executable, "-m", "tidewheel.data.kernel_build", "--level", level, "--forms", str(file),
                       "--folder", str(options.folder)]
            subprocess.run(command, env=environment, check=True)
    return 0


def _check(folder: Path) -> int:
    changed = stale(folder)
    for name in changed:
        print(f"{name} has changed since it was compiled")
    print("run `python -m tidewheel.data.kernel_build`" if changed else "every kernel is as it was compiled")
    return 1 if changed else 0


def stale(folder: Path = kernel_objects.FOLDER) -> list[str]:
    """Return the kernels without machine code for their current source, at any level."""
    warm_up.import_kernels()
    digests = {name: kernel.digest for name, kernel in kernel_tools.KERNELS.items()}
    names: set[str] = set()
    for level in kernel_objects.LEVELS:
        file = folder / kernel_objects.path(level).name
        kept = kernel_objects.read(file)[0]["kernels"] if file.is_file() else {}
        names |= {name for name, digest in digests.items() if kept.get(name, {}).get("digest") != digest}
    return sorted(names)


def record() -> dict[str, list[list[Any]]]:
    """Call every kernel as pipelines call it, and return the types of the arguments of each."""
    with kernel_tools.compiling_here():
        warm_up.warm_up()
    return {name: [[_kind(argument) for argument in signature] for signature in kernel.dispatcher.overloads]
            for name, kernel in kernel_tools.KERNELS.items()}


def _build(level: str, recorded: dict[str, list[list[Any]]], folder: Path) -> None:
    """Compile all forms for one level, and write them as one object."""
    warm_up.import_kernels()
    assert os.environ["NUMBA_CPU_NAME"] == level, "numba was imported for another processor"
    whole = binding.parse_assembly(RUNTIME)
    kernels: dict[str, Any] = {}
    for name in sorted(recorded):
        kernel = kernel_tools.KERNELS[name]
        dispatcher = numba.njit(nogil=True)(kernel.py_func)  # without a cache
        forms = []
        for index, arguments in enumerate(recorded[name]):
            symbol = f"tidewheel_{name.removeprefix('tidewheel.').replace('.', '_')}_{index}"
            result = _compile(dispatcher, tuple(_type(argument) for argument in arguments), symbol, whole)
            forms.append({"symbol": symbol, "arguments": arguments, "result": result})
        kernels[name] = {"digest": kernel.digest, "forms": forms}
    symbols = {form["symbol"] for entry in kernels.values() for form in entry["forms"]}
    elf = _emit(whole, symbols, level)
    made = {"numba": numba.__version__, "llvmlite": llvmlite.__version__}
    target = kernel_objects.write(level, kernels, elf, made, folder)
    print(f"{target}: {len(symbols)} forms of {len(kernels)} kernels, {target.stat().st_size / 1e3:.0f} kB")


def _compile(dispatcher: Any, signature: tuple[Any, ...], symbol: str, whole: Any) -> str:
    """Compile one form and link it into `whole` under its symbol; return the type of its result."""
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    module = binding.parse_assembly(compiled.library.get_llvm_str())
    for value in (*module.functions, *module.global_variables):
        if value.is_declaration:
            continue
        if value.name == compiled.fndesc.llvm_func_name:
            value.name = symbol
        else:
            value.linkage = "internal"
    whole.link_in(module)
    kind = _kind(compiled.signature.return_type)
    assert kind in (*KINDS, "none"), f"{symbol} returns {kind}"
    return kind


def _emit(whole: Any, symbols: Iterable[str], level: str) -> bytes:
    """Remove unused functions, and return the ELF object."""
    kept = set(symbols)
    for function in whole.functions:
        if not function.is_declaration and function.name not in kept:
            function.linkage = "internal"
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=level, features="", opt=3, reloc="default", codemodel="jitdefault", jit=True)
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=0))
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(whole, builder)
    outside = {function.name for function in whole.functions
               if function.is_declaration and not function.name.startswith("llvm.")}
    assert outside <= OUTSIDE, f"the kernels call {sorted(outside - OUTSIDE)}, which some processes lack"
    whole.verify()
    return bytes(machine.emit_object(whole))


def _kind(given: Any) -> Any:
    """Return the name of one of numba's types, as in `kernel_objects.Form`."""
    if isinstance(given, types.Array):
        return f"{given.dtype}:{given.ndim}:{given.layout}:{'w' if given.mutable else 'r'}"
    if isinstance(given, (types.Tuple, types.UniTuple)):
        return [_kind(inner) for inner in given.types]
    return str(given)


def _type(kind: Any) -> Any:
    """Return numba's type of a name; the inverse of `_kind`."""
    if isinstance(kind, list):
        return types.Tuple([_type(inner) for inner in kind])
    if kind in KINDS:
        return KINDS[kind]
    dtype, dimensions, layout, access = kind.split(":")
    return types.Array(getattr(types, dtype), int(dimensions), layout, readonly=access == "r")


if __name__ == "__main__":
    sys.exit(main())
