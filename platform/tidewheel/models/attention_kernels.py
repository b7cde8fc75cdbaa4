"""Which attention kernel runs: a pure function of the device, the number type, the head width and what is installed.

`choose` decides and has no side effect. `Machine.of` reads the device; `activate` puts a chosen implementation of flash
attention in place, once per process.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import Literal

import torch

from tidewheel.errors import ConfigError

logger = logging.getLogger(__name__)

Flash = Literal["FA2", "FA3", "FA4"]
"""An implementation of flash attention: torch's own is FlashAttention 2."""
FLASH_MODULES: dict[str, str] = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""The module that torch imports for an implementation that is not its own."""
HALVES = (torch.bfloat16, torch.float16)
LONG = 8192
"""Rows above this many tokens use blockwise attention on a CPU: a dense mask would take more than 64 MiB a row."""
LONG_SLICES = 1024
"""The same for slices of rows, as in context parallelism."""
NARROWEST_FLEX = 16
"""Width of the narrowest heads that FlexAttention's compiled kernel takes (torch 2.11; found on an H100)."""
CUDNN = 91_000
"""cuDNN attention is used from 9.10 on; torch 2.11 comes with 9.19."""


@dataclass(frozen=True)
class Machine:
    """What decides on the kernel besides the model.

    Args:
        device: type of the device, "cuda" or "cpu".
        capability: of a CUDA device, (9, 0) for an H100.
        installed: implementations beside torch's own: "FA3", "FA4", "cuDNN".
        deterministic: whether torch must use deterministic kernels, as in reproducible mode.
    """

    device: str
    capability: tuple[int, int] = (0, 0)
    installed: frozenset[str] = frozenset()
    deterministic: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Return what this process finds for a device."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        if device.type != "cuda" or not torch.cuda.is_available():
            return cls(device.type, deterministic=deterministic)
        return cls("cuda", torch.cuda.get_device_capability(device), installed(), deterministic)


@dataclass(frozen=True)
class Choice:
    """The kernel of a micro-batch.

    Args:
        kernel: "masked", "flex", "varlen", "causal", "blockwise" or "exact".
        flash: the implementation behind varlen, and behind causal where flash attention computes it.
        cudnn: whether causal attention tries cuDNN first.
    """

    kernel: str
    flash: Flash = "FA2"
    cudnn: bool = False


def choose(requested: str, machine: Machine, dtype: torch.dtype, head_width: int, *, rows_complete: bool = True,
           whole_rows: bool = False, window: bool = False, flash: str = "auto", plain: bool = True,
           length: int = 0) -> Choice:
    """Return the kernel of a micro-batch. It depends on nothing but the arguments.

    Args:
        requested: `model.attention`: a kernel's name, or "auto" for the best one here.
        machine: the device and what is installed.
        dtype: of the queries.
        head_width: of the queries.
        rows_complete: whether queries and keys are the same complete rows, not slices of rows.
        whole_rows: whether each row is one document, see `Documents`.
        window: whether a sliding window limits the keys.
        flash: `model.flash_attention`: an implementation's name, or "auto" for the best one here.
        plain: whether weights are softmax(q k). Only masked, flex and blockwise have soft-capping and sinks.
        length: tokens of a row; 0: few.

    Raises:
        ConfigError: the requested kernel or implementation cannot run here.
    """
    if requested == "exact" and not plain:
        raise ConfigError("exact attention has neither soft-capping nor sinks, which this model family needs",
                          where="model.attention", fix="set model.attention=auto")
    if requested == "varlen" and not plain:
        raise ConfigError("varlen attention has neither soft-capping nor sinks, which this model family needs",
                          where="model.attention", fix="set model.attention=auto")
    able = plain and machine.device == "cuda" and dtype in HALVES and rows_complete and _fits_flash(machine, head_width)
    if requested == "varlen" and not able:
        raise ConfigError(f"varlen attention needs CUDA, 16-bit precision, whole rows and heads of a multiple of 8 up "
                          f"to {_widest(machine)}; here are {machine.device}, {dtype}, heads of {head_width} and "
                          f"{'whole rows' if rows_complete else 'slices of rows'}", where="model.attention",
                          fix="set model.attention=auto")
    narrow = machine.device == "cuda" and head_width < NARROWEST_FLEX
    if requested == "flex" and narrow:
        raise ConfigError(f"flex attention on a GPU needs heads of at least {NARROWEST_FLEX}; here are heads of "
                          f"{head_width}", where="model.attention", fix="set model.attention=auto")
    implementation = choose_flash(machine, head_width, flash) if able else "FA2"
    if requested != "auto":
        return Choice(requested, implementation)
    if machine.device != "cuda":
        return Choice("blockwise" if length > (LONG if rows_complete else LONG_SLICES) else "masked")
    if not able:
        return Choice("masked" if narrow else "flex")
    if not whole_rows or window:  # SDPA takes no window
        return Choice("varlen", implementation)
    return Choice("causal", implementation, cudnn=implementation == "FA2" and _fits_cudnn(machine, head_width))


def choose_flash(machine: Machine, head_width: int, requested: str = "auto") -> Flash:
    """Return the implementation of flash attention.

    FlashAttention 3 is for Hopper (9.0); its deterministic backward pass is used up to heads of 128. FlashAttention 4
    is for Blackwell (10.0), heads of 64 and 128, outside reproducible mode; on Hopper torch would take it too, but the
    backward pass over packed documents is newer there than FlashAttention 3's.

    Args:
        machine: the device and what is installed.
        head_width: of the queries.
        requested: an implementation's name, or "auto".

    Raises:
        ConfigError: the requested implementation cannot run here.
    """
    fits: dict[Flash, bool] = {
        "FA4": machine.capability[0] == 10 and head_width in (64, 128) and not machine.deterministic,
        "FA3": machine.capability == (9, 0) and head_width <= (128 if machine.deterministic else 256),
        "FA2": True}
    legal = [name for name, able in fits.items() if able and (name == "FA2" or name in machine.installed)]
    if requested == "auto":
        return legal[0]
    for name in legal:
        if name == requested:
            return name
    major, minor = machine.capability
    have = ", ".join(sorted(machine.installed)) or "nothing beside FA2"
    mode = " in reproducible mode" if machine.deterministic else ""
    raise ConfigError(f"{requested} cannot run here: compute capability {major}.{minor}, heads of {head_width}{mode}, "
                      f"installed: {have}; nearest legal choice: {legal[0]}", where="model.flash_attention",
                      fix="set model.flash_attention=auto")


def _widest(machine: Machine) -> int:
    """Return the widest head whose backward pass FlashAttention 2 has: less shared memory, narrower heads."""
    return 256 if machine.capability == (8, 0) or machine.capability[0] in (9, 10) else 192


def _fits_flash(machine: Machine, head_width: int) -> bool:
    return machine.capability >= (8, 0) and head_width % 8 == 0 and head_width <= _widest(machine)


def _fits_cudnn(machine: Machine, head_width: int) -> bool:
    """Return whether cuDNN's attention is faster than FlashAttention 2: on Hopper and Blackwell, heads up to 128.

    It is not deterministic.
    """
    return ("cuDNN" in machine.installed and machine.capability[0] in (9, 10) and head_width <= 128
            and not machine.deterministic)


@functools.cache
def installed() -> frozenset[str]:
    """Return the implementations beside torch's own that this process could use."""
    import torch.nn.attention as attention

    known = attention.list_flash_attention_impls() if hasattr(attention, "list_flash_attention_impls") else []
    names = {name for name, module in FLASH_MODULES.items() if name in known and _importable(module)}
    if torch.backends.cudnn.is_available() and (torch.backends.cudnn.version() or 0) >= CUDNN:
        names.add("cuDNN")
    return frozenset(names)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, OSError):  # a package above it is broken or missing
        return False


def activate(flash: Flash) -> Flash:
    """Put an implementation behind torch's flash attention, for the whole process; return the one that runs.

    An installed package may not fit this torch. Then FlashAttention 2 runs, and a warning says so once.
    """
    import torch.nn.attention as attention

    wanted: Flash = "FA2" if flash in _BROKEN else flash
    if (attention.current_flash_attention_impl() or "FA2") == wanted:
        return wanted
    if wanted == "FA2":
        attention.restore_flash_attention_impl()
        return wanted
    try:
        attention.activate_flash_attention_impl(wanted)
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("%s is installed but cannot be used with torch %s (%s): FA2 runs instead", wanted,
                       torch.__version__, error)
        attention.restore_flash_attention_impl(_raise_warn=False)
        _BROKEN.add(wanted)
        return "FA2"
    return wanted


_BROKEN: set[str] = set()
"""Implementations that this process could not put in place."""
