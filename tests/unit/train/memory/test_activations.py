"""Activation checkpointing: the same bits, less memory, the same names of parameters."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter
from tidewheel.train import memory
from tidewheel.train.memory import MemoryConfig

CONFIG = Llama(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=96, init_std=0.1)
KINDS = [{"activation_checkpointing": "full"}, {"activation_checkpointing": "every_nth"},
         {"activation_checkpointing": "selective"},
         {"activation_checkpointing": "selective", "recompute_products": 0}, {"activation_checkpointing": "offload"}]


def decoder(config: MemoryConfig) -> Decoder:
    model = Decoder(CONFIG, 64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, CONFIG, 0))
    memory.apply(model, config)
    return model


def batch(length: int = 64) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(0))
    segments = (torch.arange(length) // 24).expand(2, length)
    return tokens, (torch.arange(length) % 24).expand(2, length), segments, next_tokens(tokens, segments)


def loss_and_gradients(model: Decoder) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(*batch())
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def kept_bytes(model: Decoder) -> int:
    """Bytes of activations that the graph holds after the forward pass, each storage once, in any memory."""
    found: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch())
    assert loss.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_bits_are_the_same(kind: dict, precision: torch.dtype):
    plain, checkpointed = decoder(MemoryConfig()), decoder(MemoryConfig(**kind))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        expected, found = loss_and_gradients(plain), loss_and_gradients(checkpointed)
    assert torch.equal(found[0], expected[0])
    assert list(found[1]) == list(expected[1]), "parameters keep their names"
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


def test_less_is_kept():
    """Tensors saved inside a checkpointed block are not seen by hooks outside: what is left is what stays."""
    everything, half, full = (kept_bytes(decoder(MemoryConfig(activation_checkpointing=kind)))
                              for kind in ("none", "every_nth", "full"))
    assert full < half < everything
    assert full < 0.4 * everything


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed, with weights and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return function(*arguments, **(kwargs or {}))


def test_selective_checkpointing_recomputes_only_cheap_operations():
    counts = {}
    for name, config in {"none": {}, "full": KINDS[0], "half": KINDS[2], "all": KINDS[3]}.items():
        model = decoder(MemoryConfig(**config))
        with Products() as products:
            model(*batch()).backward()
        counts[name] = products.count
    in_blocks = 7 * CONFIG.num_layers
    assert counts["all"] == counts["none"], "every product is kept"
    assert counts["half"] == counts["none"] + in_blocks // 7 * 3, "every second one is computed again"
    assert counts["half"] < counts["full"] <= counts["none"] + in_blocks


def test_a_copy_of_the_model_uses_its_own_weights():
    model = decoder(MemoryConfig(activation_checkpointing="full"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert loss_and_gradients(model)[0] == loss_and_gradients(decoder(MemoryConfig()))[0]


@torch.no_grad()
def test_evaluation_is_not_checkpointed():
    model = decoder(MemoryConfig(activation_checkpointing="offload"))
    assert torch.equal(model(*batch()), decoder(MemoryConfig())(*batch()))


@pytest.mark.parametrize(("values", "says"), [
    ({"every": 3}, "every is for activation_checkpointing: every_nth, here it is none"),
    ({"activation_checkpointing": "full", "recompute_products": 0}, "recompute_products is for"),
    ({"activation_checkpointing": "some"}, "'none', 'full', 'every_nth', 'selective' or 'offload'")])
def test_settings_without_effect_are_refused(values: dict, says: str):
    with pytest.raises(ValueError, match=says):
        MemoryConfig.model_validate(values)
