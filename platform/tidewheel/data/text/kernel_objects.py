"""Load the machine code in the package within milliseconds, so that machines need not compile the kernels.

Each `kernels_*.bin` is a compressed ELF object for one level of x86-64 processors, after a JSON header. The header has
a digest of the source of each kernel, and a symbol for each form (the types of its arguments). The code does not depend
on the versions of Python or numba. A kernel whose source has another digest is not loaded. `kernel_build` writes these
files.

Calls follow numba's convention for native code: a pointer for the result, one for the exception, then the arguments;
an array takes seven or more words.
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
"""LLVM's names of the levels, best first, and the processor features that each adds to the levels below it."""
_SCALARS: dict[str, Any] = {"int64": ctypes.c_int64, "uint64": ctypes.c_uint64, "float64": ctypes.c_double,
                            "bool": ctypes.c_bool}
_RETURNED, _RETURNED_NONE = 0, -2  # numba's status codes; others are exceptions
_START, _STRIDES = 4, 5  # words before the shape of an array: owner, parent, items, bytes of an item, then its data


@dataclass(frozen=True)
class Form:
    """A kernel compiled for certain argument types.

    Args:
        symbol: name of its function in the object.
        arguments: types of the arguments: "int64", "uint64", "float64", "bool", a list of these for a tuple, or
            "dtype:dimensions:layout:access" for an array, with layout "C" or "A" (any) and access "r" or "w".
        result: type of the result.
        address: address of the function.
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
        """Return the words to pass; None if the values have other types."""
        if len(values) != len(self.arguments):
            return None
        packed: list[Any] = []
        fits = all(_pack(kind, value, packed) for kind, value in zip(self.arguments, values))
        return packed if fits else None

    def call(self, packed: list[Any]) -> Any:
        """Call the function, without the GIL.

        Raises:
            RuntimeError: the kernel raised an error; none does for arrays of the right sizes.
        """
        result = _SCALARS.get(self.result, ctypes.c_void_p)()
        exception = ctypes.c_void_p()
        status = self._function(ctypes.addressof(result), ctypes.addressof(exception), *packed)
        if status not in (_RETURNED, _RETURNED_NONE):
            raise RuntimeError(f"the compiled pass {self.symbol} failed (status {status})")
        return result.value if self.result in _SCALARS else None


def _words(argument: Any) -> list[Any]:
    """Return the ctypes of the words of an argument."""
    if isinstance(argument, list):
        return [word for inner in argument for word in _words(inner)]
    if argument in _SCALARS:
        return [_SCALARS[argument]]
    return [ctypes.c_int64] * (_STRIDES + 2 * int(argument.split(":")[1]))


def _pack(argument: Any, value: Any, packed: list[Any]) -> bool:
    """Append the words of a value; return False if it does not have the argument's type."""
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
    """Return the forms of a kernel whose source has this digest; () if the package does not have them."""
    loaded = _loaded()
    entry = loaded.kernels.get(name) if loaded else None
    if loaded is None or entry is None or entry["digest"] != digest:
        return ()
    return tuple(Form(form["symbol"], tuple(form["arguments"]), form["result"],
                      loaded.engine.get_function_address(form["symbol"])) for form in entry["forms"])


@dataclass(frozen=True)
class _Loaded:
    """An object file in memory."""

    kernels: dict[str, Any]
    engine: Any


@functools.cache
def level() -> str | None:
    """Return the best level that this processor supports and the package has an object for; None if there is none.

    The environment variable `TIDEWHEEL_KERNELS` overrides it for measurements: a level, or "compile" for none.
    """
    requested = os.environ.get(SETTING)
    if requested == "compile" or sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    features = {name for name, has in binding.get_host_cpu_features().items() if has}
    for name in LEVELS:
        if required(name) <= features and path(name).is_file() and requested in (None, "", name):
            return name
    return None


def required(name: str) -> frozenset[str]:
    """Return the processor features that a level needs."""
    names = list(LEVELS)
    return frozenset().union(*(LEVELS[lower] for lower in names[names.index(name):]))


def path(name: str) -> Path:
    """Return the file of a level's object."""
    return FOLDER / f"kernels_{name.replace('-', '_')}.bin"


def write(name: str, kernels: dict[str, Any], elf: bytes, made: dict[str, str], folder: Path = FOLDER) -> Path:
    """Write the object of a level.

    Args:
        name: the level.
        kernels: digest and forms of each kernel.
        elf: the ELF object.
        made: versions of the compilers, for people.
        folder: folder to write to.

    Returns:
        The file.
    """
    header = json.dumps({"format": FORMAT, "level": name, "made": made, "kernels": kernels}, sort_keys=True).encode()
    target = folder / path(name).name
    target.write_bytes(lzma.compress(len(header).to_bytes(8, "little") + header + elf, preset=9 | lzma.PRESET_EXTREME))
    return target


def read(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the ELF object of a file that `write` wrote."""
    data = lzma.decompress(file.read_bytes())
    size = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:size]), data[size:]


@functools.cache
def _loaded() -> _Loaded | None:
    level_name = level()
    if level_name is None:
        return None
    header, elf = read(path(level_name))
    if header["format"] != FORMAT:
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(elf))
    engine.finalize_object()
    return _Loaded(header["kernels"], engine)
