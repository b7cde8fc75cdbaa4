"""Tests of fp8 by torchao's emulation: which layers compute in fp8, how far off they are, and the gather in fp8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tests.unit.train.parallel import layouts
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.staging import local
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder
from tidewheel.models.families import Llama
from tidewheel.storage import store
from tidewheel.train import fp8
from tidewheel.train.config import TrainConfig
from tidewheel.train.fp8_config import Fp8Config
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import check_precision

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
WORTHWHILE = {
    # torchao's rowwise filter leaves out wk and wv [1024, 4096]: at most 2,048 rows gain nothing
    "rowwise": {"attention.wq", "attention.wo", "ffn.w1", "ffn.w2", "ffn.w3"},
    "tensorwise": {"attention.wq", "attention.wo", "ffn.w1", "ffn.w2", "ffn.w3"}}
EMULATED = {"layers": "all", "emulate": True}
LOSS, NORM = 5e-3, 5e-2
"""Relative tolerances. e4m3 has 3 bits of mantissa, so each operand is off by at most 2**-4; sums average that out."""


def swapped(model: Llama, tensor: int = 1, **settings: object) -> set[str]:
    """Return the names, without the block, of the linear layers that compute in fp8."""
    with torch.device("meta"):
        part = Decoder(model, 64)
    names = [name for name, _ in part.named_parameters()]
    fp8.convert_linears(part, Fp8Config(**settings), sharded=False, tensor=tensor)
    assert [name for name, _ in part.named_parameters()] == names
    results = {name for name, module in part.named_modules() if type(module).__name__ == "Float8Linear"}
    assert all(name.startswith("blocks.0.") for name in results), "the output projection stays bf16"
    return {name.removeprefix("blocks.0.") for name in results}


@pytest.mark.parametrize("recipe", WORTHWHILE)
def test_layers_that_torchao_finds_worthwhile(recipe: str):
    eight = Llama(preset="8b", num_layers=1)
    assert swapped(eight, recipe=recipe) == WORTHWHILE[recipe]
    assert swapped(Llama(dim=256, num_layers=1, num_heads=2), recipe=recipe) == set(), "too small"


def test_all_layers_whose_dimensions_the_kernels_take():
    small = Llama(dim=32, num_layers=1, num_heads=2, ffn_dim=40)
    assert swapped(small, layers="all") == {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}
    assert swapped(small, tensor=4, layers="all") == set(), "8 rows on a rank"


def test_wrong_settings():
    with pytest.raises(ConfigError, match="nearest legal choice: recipe tensorwise"):
        build(Fp8Config, {"all_gather": True})
    for layout, changes in (({"data": "ddp"}, {}), ({"data": "zero3", "offload": True}, {}),
                            ({"data": "zero3"}, {"parameters": "bf16"})):
        with pytest.raises(ConfigError, match=r"fp8\.all_gather"):
            layouts.config(layout, precision="fp8", fp8={"recipe": "tensorwise", "all_gather": True}, **changes)
    check_precision(torch.device("cpu"), "fp8", emulated=True)


def test_keys_do_not_change():
    assert TrainConfig().recipe_hash() == TrainConfig(fp8=Fp8Config()).recipe_hash()
    assert TrainConfig(precision="fp8").recipe_hash() != build(
        TrainConfig, {"precision": "fp8", "fp8": {"recipe": "tensorwise"}}).recipe_hash()


def close(ours: list, theirs: list) -> None:
    """Check losses and norms against fp32, and that fp8 was used at all."""
    for each, exact in zip(ours, theirs):
        assert each.loss != exact.loss
        assert abs(each.loss / exact.loss - 1) < LOSS, (each.loss, exact.loss)
        assert abs(each.gradient_norm / exact.gradient_norm - 1) < NORM, (each.gradient_norm, exact.gradient_norm)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_step_is_near_fp32(recipe: str):
    exact = layouts.train(layouts.config({}), 1, 3)[1]
    close(layouts.train(layouts.config({}, precision="fp8", fp8={**EMULATED, "recipe": recipe}), 1, 3)[1], exact)


def restore(folder: Path, model: ParallelModel) -> None:
    """Save the weights, clear them, and load them again."""
    state = {"model": {name: parameter.detach() for name, parameter in model.named_parameters()}}
    before = layouts.whole_values(model)
    saved = CheckpointManager(store(folder))
    saved.save(1, state, {})
    saved.settle()
    with torch.no_grad():
        for weight in state["model"].values():
            weight.zero_()
    saved.wait()
    assert saved.load_latest(state) == {}
    assert all(torch.equal(value, before[name]) for name, value in layouts.whole_values(model).items())


def gather_in_fp8(folder: Path) -> None:
    """Compare two ranks that gather in fp8 with one process: the same scales, so nearly the same values."""
    recipe = {**EMULATED, "recipe": "tensorwise"}
    exact = layouts.train(layouts.config({}), 1, 3)[1]
    for data in ("zero2", "zero3"):
        model, results = layouts.train(
            layouts.config({"data": data}, precision="fp8", fp8={**recipe, "all_gather": True}), 2, 3)
        close(results, exact)
        weights = {name: parameter for name, parameter in model.named_parameters()
                   if name.startswith("blocks.") and parameter.ndim == 2}
        assert weights
        for name, weight in weights.items():
            assert isinstance(weight, DTensor)
            wrapped = weight._local_tensor
            whole = weight.full_tensor()
            assert wrapped._precomputed_scale.item() == pytest.approx(448 / whole.abs().max().item()), name
            part = local(weight)
            assert type(part) is torch.Tensor, "a checkpoint holds plain tensors"
            assert part.data_ptr() == wrapped._tensor.data_ptr()
        if data == "zero3":
            restore(folder, model)
    assert dist.get_world_size() == 2


def share_matrices() -> None:
    exact = layouts.train(layouts.config({}), 1, 2)[1]
    for recipe in ("rowwise", "tensorwise"):
        model, results = layouts.train(
            layouts.config({"tensor": 2}, precision="fp8", fp8={**EMULATED, "recipe": recipe}), 2, 2)
        close(results, exact)
        kinds = {name: type(module).__name__ for name, module in model.parts[0].named_modules()}
        assert kinds["blocks.0.ffn.w1"] == kinds["blocks.0.ffn.w2"] == "Float8Linear"


def test_tensor_parallel_ranks_share_fp8_matrices():
    on_ranks(2, share_matrices)


def test_weights_are_gathered_in_fp8_with_the_scale_of_the_whole_weight(tmp_path):
    on_ranks(2, gather_in_fp8, tmp_path)
