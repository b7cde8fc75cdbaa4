"""Activation checkpointing: the same bits, less memory, the same names of parameters."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter
from tidewheel.plan.activations import product_names as planned_names
from tidewheel.train import memory
from tidewheel.train.compile import compile_blocks
from tidewheel.train.memory import MemoryConfig
from tidewheel.train.memory.activations import product_names

CONFIG = Llama(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=96, init_std=0.1)
KINDS = [{"activation_checkpointing": "full"}, {"activation_checkpointing": "every_nth"},
         {"activation_checkpointing": "selective"},
         {"activation_checkpointing": "selective", "recompute_products": 0}, {"activation_checkpointing": "offload"},
         {"activation_checkpointing": "every_nth", "every": "sqrt"}, {"activation_checkpointing": "attention"},
         {"activation_checkpointing": "feed_forward"},
         {"activation_checkpointing": "selective", "keep_products": ["wo", "ffn.w2"]}]


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
    results: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            results[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch())
    assert loss.requires_grad
    return sum(results.values())


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


@pytest.mark.parametrize(("every", "layers", "kept"), [
    (1, 3, [0, 1, 2]), (2, 5, [1, 3]), (3, 7, [2, 5]), ("sqrt", 16, [3, 7, 11, 15]), ("sqrt", 32, [5, 11, 17, 23, 29]),
    ("sqrt", 1, [0])])
def test_every_nth_block_is_kept(every: int | str, layers: int, kept: list[int]):
    config = MemoryConfig(activation_checkpointing="every_nth", every=every)
    assert [index for index in range(layers) if config.keeps_block(index, layers)] == kept


def test_every_nth_keeps_what_its_blocks_keep():
    """Saved bytes rise by the same amount for each block that is kept."""
    saved = {every: kept_bytes(decoder(MemoryConfig(activation_checkpointing="every_nth", every=every)))
             for every in (1, 2, 3)}
    full = kept_bytes(decoder(MemoryConfig(activation_checkpointing="full")))
    assert saved[1] == kept_bytes(decoder(MemoryConfig())), "all three blocks are kept"
    assert saved[2] == saved[3], "block 1 of three, or block 2"
    assert full < saved[2] < saved[1]


def test_attention_or_the_feed_forward_alone():
    """Each part's saved tensors go, except its input; together they are most of what a block saves."""
    everything, without_attention, without_ffn, full = (
        kept_bytes(decoder(MemoryConfig(activation_checkpointing=kind)))
        for kind in ("none", "attention", "feed_forward", "full"))
    assert full < without_attention < everything
    assert full < without_ffn < everything
    counts = {}
    for kind in ("none", "attention", "feed_forward"):
        model = decoder(MemoryConfig(activation_checkpointing=kind))
        with Products() as products:
            model(*batch()).backward()
        counts[kind] = products.count
    blocks = CONFIG.num_layers
    assert counts["attention"] == counts["none"] + 3 * blocks, "wq, wk and wv; nothing needs the result of wo"
    assert counts["feed_forward"] == counts["none"] + 2 * blocks, "w1 and w3"


def test_selective_by_name_recomputes_the_other_products():
    counts = {}
    for names in (["wq", "wk", "wv", "wo", "w1", "w3", "w2"], ["wo", "w2"], ["attention.wq"]):
        model = decoder(MemoryConfig(activation_checkpointing="selective", keep_products=names))
        with Products() as products:
            model(*batch()).backward()
        counts[len(names)] = products.count
    model = decoder(MemoryConfig())
    with Products() as products:
        model(*batch()).backward()
    blocks = CONFIG.num_layers
    assert counts[7] == products.count
    assert counts[2] == products.count + 5 * blocks, "wq, wk, wv, w1, w3"
    assert counts[1] == products.count + 5 * blocks, "wk, wv, wo, w1, w3; nothing needs the result of w2"


def test_products_have_the_names_of_the_plan():
    assert product_names(CONFIG) == tuple(planned_names(CONFIG))


def test_a_name_that_no_layer_has_is_refused():
    with pytest.raises(ConfigError, match=r"no linear layer 'w9'; it has attention\.wq, attention\.wk"):
        decoder(MemoryConfig(activation_checkpointing="selective", keep_products=["wo", "w9"]))


@pytest.mark.parametrize("kind", [
    {"activation_checkpointing": "attention"}, {"activation_checkpointing": "feed_forward"},
    {"activation_checkpointing": "selective", "keep_products": ["wo"]}], ids=str)
def test_compiled_blocks_take_each_kind_in_one_graph(kind: dict):
    torch._dynamo.reset()
    compilations = CompileCounterWithBackend("aot_eager_decomp_partition")
    model, plain = decoder(MemoryConfig(**kind)), decoder(MemoryConfig())
    compile_blocks(model.blocks, backend=compilations)
    found, expected = loss_and_gradients(model), loss_and_gradients(plain)
    torch.testing.assert_close(found[0], expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5)
    assert compilations.frame_count == 1, "three blocks share it"


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
    ({"activation_checkpointing": "some"}, "'none', 'full', 'every_nth', 'attention', 'feed_forward', 'selective' or"),
    ({"keep_products": ["wo"]}, "keep_products is for activation_checkpointing: selective, here it is none"),
    ({"activation_checkpointing": "selective", "keep_products": ["wo"], "recompute_products": 3}, "give one of them"),
    ({"activation_checkpointing": "every_nth", "every": 0}, "every")])
def test_settings_without_effect_are_refused(values: dict, says: str):
    with pytest.raises(ValueError, match=says):
        MemoryConfig.model_validate(values)
