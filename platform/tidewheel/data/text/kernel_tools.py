"""Tools of the compiled passes: bytes at addresses, their hashes, UTF-8, and the compilation and caching of a pass.

Small functions take addresses instead of arrays, because numba counts references to an array at each call. The caller
that takes an address must keep the array alive.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tidewheel.data.text import kernel_cache, kernel_objects, kernel_source

SEED = np.uint64(0x8F1BBCDCCA62C1D6)
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FMIX_1, FMIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_U0, _U1, _U32, _U33 = np.uint64(0), np.uint64(1), np.uint64(32), np.uint64(33)
HIGH, _LOW7 = np.uint64(0x8080808080808080), np.uint64(0x7F7F7F7F7F7F7F7F)
TO_LOWER = np.uint64(0x2020202020202020)
_FROM_0, _BEHIND_9 = np.uint64(0x5050505050505050), np.uint64(0x4646464646464646)
_FROM_A, _BEHIND_Z = np.uint64(0x1F1F1F1F1F1F1F1F), np.uint64(0x0505050505050505)


KERNELS: dict[str, Kernel] = {}
"""Every kernel of the modules imported so far, by module and name."""


class Kernel:
    """A compiled pass, callable from Python.

    Its machine code comes from the package (`kernel_objects`) if possible, else from this machine's disk
    (`kernel_cache`), else it is compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.py_func = function
        self.name = f"{function.__module__}.{function.__qualname__}"

    def __call__(self, *arguments: Any) -> Any:
        for form in self.forms if not _compiling_here else ():
            packed = form.pack(arguments)
            if packed is not None:
                return form.call(packed)
        return self.dispatcher(*arguments)

    @functools.cached_property
    def forms(self) -> tuple[kernel_objects.Form, ...]:
        """Forms from the package; () if they have another source or need another processor."""
        return kernel_objects.forms(self.name, self.digest)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the source, from `kernel_source`."""
        return kernel_source.digest(self.py_func)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """numba's dispatcher, which compiles for the argument types of a call, in nopython mode and without the GIL."""
        dispatcher = numba.njit(nogil=True)(self.py_func)
        kernel_cache.keep(dispatcher, self.digest)
        return dispatcher

    def is_ready(self) -> bool:
        """Return whether this machine has the machine code already."""
        return bool(self.forms) or kernel_cache.is_kept(self.dispatcher)


_compiling_here: list[bool] = []


@contextlib.contextmanager
def compiling_here() -> Iterator[None]:
    """Ignore the package's machine code in the block: compile kernels, or load them from this machine's cache."""
    _compiling_here.append(True)
    try:
        yield
    finally:
        _compiling_here.pop()


def compiled(function: Callable[..., Any]) -> Kernel:
    """Make a function a kernel; use it as a decorator. Kernels must not call each other, but `numba.njit` functions."""
    kernel = Kernel(function)
    KERNELS[kernel.name] = kernel
    return kernel


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _loader(kind):
    """Return an intrinsic that loads a number of this kind from an address."""
    @intrinsic
    def load(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.load(_pointer(builder, arguments[0], ir.IntType(kind.bitwidth)), align=1)
        return kind(types.int64), generate
    return load


def _storer(kind):
    """Return an intrinsic that writes a number of this kind to an address."""
    @intrinsic
    def store(typing_context, address, value):
        def generate(context, builder, signature, arguments):
            builder.store(arguments[1], _pointer(builder, arguments[0], ir.IntType(kind.bitwidth)), align=1)
            return context.get_dummy_value()
        return types.void(types.int64, kind), generate
    return store


load, load8, load16, load32 = (_loader(kind) for kind in (types.uint64, types.uint8, types.uint16, types.uint32))
load_signed, store, store8, store_signed = (
    _loader(types.int64), _storer(types.uint64), _storer(types.uint8), _storer(types.int64))


@intrinsic
def trailing_zeros(typing_context, value):
    """Return the number of zero bits below the lowest set bit; 64 for 0."""
    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))
    return types.int64(types.uint64), generate


def _vector(builder, address, shift=0):
    kind = ir.VectorType(ir.IntType(8), 64)
    place = builder.add(address, ir.Constant(ir.IntType(64), shift))
    return kind, builder.load(_pointer(builder, place, kind), align=1)


@intrinsic
def plain(typing_context, address):
    """Return whether the 64 bytes at an address are ASCII without a carriage return."""
    def generate(context, builder, signature, arguments):
        kind, block = _vector(builder, arguments[0])
        zero, turn = ir.Constant(kind, [0] * 64), ir.Constant(kind, [13] * 64)
        bad = builder.or_(builder.icmp_signed("<", block, zero), builder.icmp_signed("==", block, turn))
        return builder.icmp_signed("==", builder.bitcast(bad, ir.IntType(64)), ir.Constant(ir.IntType(64), 0))
    return types.boolean(types.int64), generate


def _any_of(*words):
    """Return an intrinsic: whether one of the ASCII words begins, in either case, in the 64 bytes at an address."""
    @intrinsic
    def begins(typing_context, address):
        def generate(context, builder, signature, arguments):
            hits, blocks = None, {}
            for word in words:
                hit = None
                for shift, letter in enumerate(word):
                    kind, block = blocks.get(shift) or _vector(builder, arguments[0], shift)
                    blocks[shift] = kind, block
                    case = ir.Constant(kind, [32] * 64)
                    same = builder.icmp_signed("==", builder.or_(block, case), ir.Constant(kind, [ord(letter)] * 64))
                    hit = same if hit is None else builder.and_(hit, same)
                hits = hit if hits is None else builder.or_(hits, hit)
            return builder.icmp_signed("!=", builder.bitcast(hits, ir.IntType(64)), ir.Constant(ir.IntType(64), 0))
        return types.boolean(types.int64), generate
    return begins


phrase_begins = _any_of("javas", "lorem", "polic", "cooki", "ms of")  # of one of the phrases of C4


@numba.njit(nogil=True, inline="always")
def letters(x):
    """Return the high bit of each byte of x that is an ASCII letter."""
    low = (x | TO_LOWER) & _LOW7
    return (low + _FROM_A) & ~(low + _BEHIND_Z) & ~x & HIGH


@numba.njit(nogil=True, inline="always")
def digits(x):
    """Return the high bit of each byte of x that is an ASCII digit."""
    low = x & _LOW7
    return (low + _FROM_0) & ~(low + _BEHIND_9) & ~x & HIGH


@numba.njit(nogil=True)
def decode(at, i, end):
    """Return (code point, bytes) of the UTF-8 character at i; a broken one is code point 0 with one byte."""
    b = np.int64(load8(at + i))
    if b < 0x80:
        return b, 1
    if b < 0xE0:
        if b >= 0xC2 and i + 1 < end:
            return (b & 0x1F) << 6 | (np.int64(load8(at + i + 1)) & 0x3F), 2
    elif b < 0xF0:
        if i + 2 < end:
            return ((b & 0x0F) << 12 | (np.int64(load8(at + i + 1)) & 0x3F) << 6
                    | (np.int64(load8(at + i + 2)) & 0x3F)), 3
    elif b < 0xF5 and i + 3 < end:
        code = ((b & 0x07) << 18 | (np.int64(load8(at + i + 1)) & 0x3F) << 12
                | (np.int64(load8(at + i + 2)) & 0x3F) << 6 | (np.int64(load8(at + i + 3)) & 0x3F))
        if code < 0x110000:
            return code, 4
    return np.int64(0), 1


@numba.njit(nogil=True)
def absorb(h, chunk):
    h = (h ^ chunk) * MULTIPLIER
    return h ^ (h >> _U32)


@numba.njit(nogil=True)
def finish(h, chunk, length):
    """Return the hash after the last partial chunk and the length, finalised by murmur's 64-bit mixer."""
    h = absorb(h, chunk) ^ np.uint64(length)
    h = (h ^ (h >> _U33)) * FMIX_1
    h = (h ^ (h >> _U33)) * FMIX_2
    return h ^ (h >> _U33)


@numba.njit(nogil=True)
def mask(length):
    """Return ones in the lowest `length` bytes, 0 to 8 of them."""
    return (_U1 << np.uint64(8 * length)) - _U1 if length < 8 else ~_U0


@numba.njit(nogil=True)
def hash_bytes(at, start, stop):
    """Return the 64-bit hash of bytes [start, stop) of the text at an address."""
    h, i = SEED, start
    while i + 8 <= stop:
        h = absorb(h, load(at + i))
        i += 8
    return finish(h, load(at + i) & mask(stop - i), stop - start)


@compiled
def hash_at(at, start, stop):
    """Return `hash_bytes`; callable from Python."""
    return hash_bytes(at, start, stop)


@numba.njit(nogil=True)
def key_of(at, start, stop):
    """Return up to 8 bytes as they are, and the hash of more."""
    if stop - start <= 8:
        return load(at + start) & mask(stop - start)
    return hash_bytes(at, start, stop)


@numba.njit(nogil=True)
def get(at, k):
    return load_signed(at + 8 * k)


@numba.njit(nogil=True)
def put(at, k, value):
    store_signed(at + 8 * k, np.int64(value))
