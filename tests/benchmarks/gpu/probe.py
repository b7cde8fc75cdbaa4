"""What the device can do: bandwidth, matrix products, and attention kernels at the shapes of the step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.benchmarks.gpu.bare import causal, masked, varlen_kernel
from tests.benchmarks.gpu.case import SHAPES, Case, batches
from tests.benchmarks.gpu.timing import device_name
from tidewheel.config import build
from tidewheel.models.families import Llama

WARM, ROUNDS = 4, 15
TIBI = 1e12


def ceilings(case: Case) -> dict[str, Any]:
    """Measure device copies, copies from the device to page-locked memory, and large products in bf16 and fp8."""
    cuda = case.device == "cuda"
    side, elements = (8192, 2**30) if cuda else (128, 2**16)
    source = torch.randn(elements, device=case.device)
    target = torch.empty_like(source)
    host = torch.empty(elements, pin_memory=cuda)
    left, right = (torch.randn(side, side, device=case.device, dtype=torch.bfloat16) for _ in range(2))
    figures = {"copy_tb_per_second": 2 * source.nbytes / TIBI / _seconds(case, lambda: target.copy_(source)),
               "to_host_gb_per_second":
                   source.nbytes / 1e9 / _seconds(case, lambda: host.copy_(source, non_blocking=True)),
               f"bf16_{side}_tflops": 2 * side**3 / TIBI / _seconds(case, lambda: left @ right)}
    if cuda and torch.cuda.get_device_capability() >= (8, 9):
        figures |= {f"fp8_{kind}_{side}_tflops": 2 * side**3 / TIBI / _seconds(case, product)
                    for kind, product in _fp8_products(left, right).items()}
    return {**figures, "device": device_name(case.device), "torch": torch.__version__, "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "nccl": _nccl()}


def _fp8_products(left: torch.Tensor, right: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the product of two matrices with one scale each, and with a scale for each row of an operand."""
    low = left.to(torch.float8_e4m3fn)
    columns = right.to(torch.float8_e4m3fn).T.contiguous().T  # the kernel takes the second operand by columns
    one = torch.ones((), device=left.device)
    per_row, per_column = torch.ones(len(left), 1, device=left.device), torch.ones(1, len(left), device=left.device)

    def product(*scales: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch._scaled_mm(low, columns, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    return {"tensorwise": product(one, one), "rowwise": product(per_row, per_column)}


def attention(case: Case) -> dict[str, Any]:
    """Measure forward and backward passes of one layer's attention: whole rows and documents, by each kernel."""
    shape, figures = build(Llama, SHAPES[case.shape]), dict[str, Any]()
    documents = batches(case)[0]
    offsets = torch.from_numpy(documents.starts()).to(case.device)
    whole = torch.arange(0, case.tokens + 1, case.length, dtype=torch.int32, device=case.device)
    size = (case.rows, case.length)
    q, k, v = (torch.randn(*size, heads, shape.head_width, device=case.device, dtype=torch.bfloat16, requires_grad=True)
               for heads in (shape.num_heads, shape.kv_heads, shape.kv_heads))
    repeats = shape.num_heads // shape.kv_heads
    varlen = varlen_kernel(case.length) if case.device == "cuda" else masked

    def repeated(starts: torch.Tensor) -> torch.Tensor:
        return varlen(q, k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2), starts)

    kernels: dict[str, Callable[[], torch.Tensor]] = {
        "whole_sdpa_cudnn_first": lambda: causal(q, k, v),
        "whole_sdpa_flash": lambda: _flash(q, k, v),
        "whole_varlen": lambda: varlen(q, k, v, whole),
        "documents_varlen": lambda: varlen(q, k, v, offsets),
        "documents_varlen_repeated_keys": lambda: repeated(offsets)}
    upstream = torch.randn_like(q)
    for name, kernel in kernels.items():
        try:
            forward = _seconds(case, kernel)
            both = _seconds(case, lambda: torch.autograd.grad(kernel(), (q, k, v), upstream))  # noqa: B023
        except RuntimeError as error:  # one kernel may be missing here; the others count
            figures[f"{name}_error"] = " ".join(str(error).split())[:200]
            continue
        figures |= {f"{name}_forward_ms": 1000 * forward, f"{name}_ms": 1000 * both}
    return {"rows": case.rows, "length": case.length, **figures}


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    laid = [x.transpose(1, 2) for x in (q, k, v)]
    backends = [SDPBackend.FLASH_ATTENTION] if q.is_cuda else [SDPBackend.MATH]
    with sdpa_kernel(backends):
        return F.scaled_dot_product_attention(*laid, is_causal=True, enable_gqa=True).transpose(1, 2)


def _seconds(case: Case, function: Callable[[], Any]) -> float:
    """Return the median time of a call."""
    times = []
    for index in range(WARM + ROUNDS if case.device == "cuda" else 2):
        if case.device == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            function()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1000)
        else:
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        if index == WARM - 1:
            times.clear()
    return statistics.median(times)


def _nccl() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
