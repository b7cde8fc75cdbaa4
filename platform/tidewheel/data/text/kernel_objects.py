"""Machine code that comes with the package: loaded in milliseconds, so that no machine has to compile the kernels.

`kernels_*.bin` hold one ELF object each, for a level of x86-64 processors. An object is compressed and begins with a
JSON header: for each kernel a digest of its source, and for each form (the types of its arguments) a symbol. Nothing in
it depends on the versions of Python or numba. A kernel whose source has another digest is not taken from here.
`kernel_build` writes these files.

A form is called as numba calls native code: a place for the result, one for the exception, then the arguments, an
array as seven or more words.
"""

from __future__ import annotations

import ctypes
import functools
import json
import lzma
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding

FOLDER = Path(__file__).parent
FORMAT = 1
SETTING = "TIDEWHEEL_KERNELS"
LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v4": frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
    "x86-64-v3": frozenset(["avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"]),
    "x86-64-v2": frozenset(["cx16", "sahf", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"]),
}
"""LLVM's names of the levels, the best first, and the processor features that each adds to the ones below it."""
_SCALARS: dict[str, Any] = {"int64": ctypes.c_int64, "uint64": ctypes.c_uint64, "float64": ctypes.c_double,
                            "bool": ctypes.c_bool}
_RETURNED, _RETURNED_NONE = 0, -2  # numba's status codes; others are exceptions
_START, _STRIDES = 4, 5  # words before the shape of an array: owner, parent, items, bytes of an item, then its data


@dataclass(frozen=True)
class Form:
    """One kernel compiled for arguments of certain types.

    arguments: "int64", "uint64", "float64", "bool", a list of these for a tuple, or an array as
    "dtype:dimensions:layout:r", layout "C" or "A" (any), "r" for an array that is only read and "w" for others.
    """

    symbol: str
    arguments: tuple[Any, ...]
    result: str
    address: int

    @functools.cached_property
    def _function(self) -> Any:
        kinds = [ctypes.c_void_p, ctypes.c_void_p]
        for argument in self.arguments:
            kinds += _words(argument)
        return ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(self.address)

    def pack(self, values: Sequence[Any]) -> list[Any] | None:
        """Return the words to call with; None if the values are of other types."""
        if len(values) != len(self.arguments):
            return None
        packed: list[Any] = []
        fits = all(_pack(kind, value, packed) for kind, value in zip(self.arguments, values))
        return packed if fits else None

    def call(self, packed: list[Any]) -> Any:
        """Run it, without the GIL.

        Raises:
            RuntimeError: the kernel raised, which none does on arrays of the right sizes.
        """
        result = _SCALARS.get(self.result, ctypes.c_void_p)()
        exception = ctypes.c_void_p()
        status = self._function(ctypes.addressof(result), ctypes.addressof(exception), *packed)
        if status not in (_RETURNED, _RETURNED_NONE):
            raise RuntimeError(f"the compiled pass {self.symbol} failed (status {status})")
        return result.value if self.result in _SCALARS else None


def _words(argument: Any) -> list[Any]:
    """The ctypes that an argument is passed as."""
    if isinstance(argument, list):
        return [word for inner in argument for word in _words(inner)]
    if argument in _SCALARS:
        return [_SCALARS[argument]]
    return [ctypes.c_int64] * (_STRIDES + 2 * int(argument.split(":")[1]))


def _pack(argument: Any, value: Any, packed: list[Any]) -> bool:
    """Append the words of a value; False if it is not of the argument's type."""
    if isinstance(argument, list):
        return (isinstance(value, tuple) and len(value) == len(argument)
                and all(_pack(kind, inner, packed) for kind, inner in zip(argument, value)))
    if argument in _SCALARS:
        if not isinstance(value, (int, float, np.generic)):
            return False
        if isinstance(value, (float, np.floating)) and argument != "float64":
            return False
        packed.append(value.item() if isinstance(value, np.generic) else value)
        return True
    dtype, dimensions, layout, access = _array_kind(argument)
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != dimensions:
        return False
    if (layout == "C" and not value.flags.c_contiguous) or (access == "w" and not value.flags.writeable):
        return False
    packed += (0, 0, value.size, value.itemsize, value.__array_interface__["data"][0], *value.shape, *value.strides)
    return True


@functools.cache
def _array_kind(argument: str) -> tuple[np.dtype, int, str, str]:
    dtype, dimensions, layout, access = argument.split(":")
    return np.dtype(dtype), int(dimensions), layout, access


def forms(name: str, digest: str) -> tuple[Form, ...]:
    """Return the forms of a kernel whose source has this digest; () if they did not come with the package."""
    shipped = _loaded()
    found = shipped.kernels.get(name) if shipped else None
    if shipped is None or found is None or found["digest"] != digest:
        return ()
    return tuple(Form(each["symbol"], tuple(each["arguments"]), each["result"],
                      shipped.engine.get_function_address(each["symbol"])) for each in found["forms"])


@dataclass(frozen=True)
class _Shipped:
    """An object file in memory."""

    kernels: dict[str, Any]
    engine: Any


@functools.cache
def level() -> str | None:
    """Return the best level that this processor has and the package has an object for; None if there is none.

    `TIDEWHEEL_KERNELS` changes it, for measurements: one of the levels, or "compile" for none.
    """
    wanted = os.environ.get(SETTING)
    if wanted == "compile" or sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    features = {name for name, has in binding.get_host_cpu_features().items() if has}
    for name in LEVELS:
        if required(name) <= features and path(name).is_file() and wanted in (None, "", name):
            return name
    return None


def required(name: str) -> frozenset[str]:
    """Return the features that a processor of this level has."""
    names = list(LEVELS)
    return frozenset().union(*(LEVELS[each] for each in names[names.index(name):]))


def path(name: str) -> Path:
    """Return where the object of a level is."""
    return FOLDER / f"kernels_{name.replace('-', '_')}.bin"


def write(name: str, kernels: dict[str, Any], elf: bytes, made: dict[str, str], folder: Path = FOLDER) -> Path:
    """Write the object of a level; made: the versions of what compiled it, for people."""
    header = json.dumps({"format": FORMAT, "level": name, "made": made, "kernels": kernels}, sort_keys=True).encode()
    target = folder / path(name).name
    target.write_bytes(lzma.compress(len(header).to_bytes(8, "little") + header + elf, preset=9 | lzma.PRESET_EXTREME))
    return target


def read(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the ELF object of a file that `write` made."""
    data = lzma.decompress(file.read_bytes())
    size = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:size]), data[size:]


@functools.cache
def _loaded() -> _Shipped | None:
    chosen = level()
    if chosen is None:
        return None
    header, elf = read(path(chosen))
    if header["format"] != FORMAT:
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(elf))
    engine.finalize_object()
    return _Shipped(header["kernels"], engine)
