"""Tests of precision: fp32 operations under autocast, layers in fp8 and its refusal, the loss scale of fp16."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter
from tidewheel.train import precision
from tidewheel.train.precision import LossScale

CPU = torch.device("cpu")
MODEL = Llama(dim=32, num_layers=2, num_heads=2, ffn_dim=48)


def decoder() -> Decoder:
    model = Decoder(MODEL, 64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, MODEL, 0))
    return model


class Types(TorchDispatchMode):
    """A dispatch mode that records the floating-point types of each operation's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        dtypes = {t.dtype for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()}
        self.seen.setdefault(func.overloadpacket.__name__, set()).update(dtypes)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "low"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_are_low_and_sums_are_fp32(name: precision.Precision, low: torch.dtype):
    model, tokens = decoder(), torch.arange(32).reshape(2, 16)
    segments, positions = torch.zeros_like(tokens), torch.arange(16).expand(2, 16)
    with Types() as types:
        with precision.precision_context(CPU, name):
            loss = model(tokens, positions, segments, next_tokens(tokens, segments))
        loss.backward()
    assert loss.dtype == torch.float32
    assert low in types.seen["mm"]
    reductions = [op for op in types.seen if any(part in op for part in ("softmax", "nll_loss", "rms_norm", "rsqrt",
                                                                         "logsumexp", "exp"))
                  and op not in ("expand", "_unsafe_view")]
    assert any("softmax" in op or "exp" in op for op in reductions), sorted(types.seen)
    for op in reductions:
        assert types.seen[op] <= {torch.float32}, (op, types.seen[op])
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_fp32_is_left_alone_inside_another_autocast():
    with torch.autocast("cpu", torch.bfloat16), precision.precision_context(CPU, "fp32"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_fp8_is_refused_on_hardware_without_it():
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU with fp8 matrix products.*this is a CPU"):
        precision.check_precision(CPU, "fp8")
    for name in ("fp32", "bf16", "fp16"):
        precision.check_precision(CPU, name)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_loss_scale_equals_torchs(finite: list[bool], interval: int):
    """The reference is GradScaler with the same overflows."""
    ours = LossScale(scale=2.0**16, growth_interval=interval)
    scale, growth = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for good in finite[:20]:
        torch._amp_update_scale_(scale, growth, torch.tensor(0.0 if good else 1.0), 2.0, 0.5, interval)
        ours.update(good)
        resumed = LossScale(growth_interval=interval)
        resumed.restore(ours.state())
        assert resumed == ours
        assert (ours.scale, ours.good) == (float(scale), int(growth))


@pytest.mark.parametrize(("device", "tf32", "expected"), [
    ("cuda", True, "high"), ("cuda", False, "highest"), ("cpu", True, "medium")])
def test_fp32_products_in_tf32_only_on_gpus_and_only_inside_the_block(device: str, tf32: bool, expected: str):
    """Torch keeps one setting for the process; "medium" stands for what the user had chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with precision.fp32_products(torch.device(device), tf32):
            assert torch.get_float32_matmul_precision() == expected
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
