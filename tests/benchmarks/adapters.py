"""Adapters compared with the library peft: `python -m tests.benchmarks.adapters`.

The table has, for each kind with equal weights in fp32, the largest differences of logits, gradients and merged logits,
and whether each library reads the other's files. Then come the codes of NF4 beside bitsandbytes and torchao, and the
time of a LoRA step as a ratio to the same step with peft's layers. Options: --speed alone, --table alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tidewheel import storage
from tidewheel.console import print_table
from tidewheel.models import families, huggingface
from tidewheel.models.adapter import MARK, Adapter
from tidewheel.models.adapting import merge, nf4, peft_files
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.models.initial_values import init_parameter

VOCABULARY = 96
SHAPE = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 128, "init_std": 0.08}
EXPERTS: dict[str, Any] = {"kind": "mixtral", "num_experts": 4, "experts_per_token": 2, "balancing": "none"}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOLERANCE = 1e-6
"""Largest difference, as a share of the largest value."""
TOLERANCES = {"PiSSA": 3e-6}
"""peft rounds W - scale B A of the start to fp32; here the difference of two products is computed."""
START_TOLERANCE = 1e-4
"""Of the same: peft computes singular vectors in fp32, and neighbouring ones mix."""


@dataclass(frozen=True)
class Row:
    """Differences between one kind of adapter here and in peft.

    Args:
        kind: its name.
        trainable: number of parameters.
        logits: largest difference of logits, as a share of the largest.
        gradients: largest difference of gradients, as a share of the largest gradient.
        merged: the same as logits, of merged models; None: it cannot be merged.
        theirs_read: the same as logits, of our files read by peft.
    """

    kind: str
    trainable: int
    logits: float
    gradients: float
    merged: float | None
    theirs_read: float

    @property
    def agrees(self) -> bool:
        """Return whether the largest difference is within the tolerance of its kind."""
        worst = max(self.logits, self.gradients, self.merged or 0.0, self.theirs_read)
        return worst <= TOLERANCES.get(self.kind, TOLERANCE)


def peft_kinds() -> dict[str, Any]:
    """Return peft's configuration of each kind that it has."""
    from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig

    def lora(**more: Any) -> Any:
        return LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **{"target_modules": PROJECTIONS, **more})

    return {
        "LoRA": lora(), "rsLoRA": lora(use_rslora=True), "DoRA": lora(use_dora=True),
        "LoRA, ranks by pattern": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 4}),
        "LoRA of the embedding": lora(target_modules=["embed_tokens", "v_proj"]),
        "LoRA of experts": lora(target_modules=["q_proj"], target_parameters=[
            "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        "PiSSA": lora(init_lora_weights="pissa"),
        "IA3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
                         task_type="CAUSAL_LM"),
        "prefix tuning": PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
        "prompt tuning": PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")}


def compare(kind: str, config: Any) -> Row:
    """Compare one kind of adapter in both libraries, given peft's configuration of it."""
    from peft import PeftModel, get_peft_model

    torch.manual_seed(0)
    shape = EXPERTS if getattr(config, "target_parameters", None) else {}
    model, reference = models(**shape)
    theirs = get_peft_model(reference, config)
    if kind == "PiSSA":  # peft has changed the base; ours stays, and has the start as constants
        return _compare_pissa(theirs)
    _randomise(theirs)
    tokens, positions = _tokens()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        adapter, values = peft_files.read(storage.store(folder), model.config)
    merge.add(model, adapter, values)
    ours_logits = model(tokens, positions, torch.zeros_like(tokens))
    their_logits = theirs(input_ids=tokens).logits[:, -tokens.shape[1]:]  # a prompt has logits there
    ours_logits.square().mean().backward()
    their_logits.square().mean().backward()
    gradients = _gradients(model, theirs, adapter)
    with tempfile.TemporaryDirectory() as folder:
        peft_files.write(storage.store(folder), model.config, adapter, values)
        again = PeftModel.from_pretrained(models(**shape)[1], folder).eval()
        read = _share(again(input_ids=tokens).logits[:, -tokens.shape[1]:], ours_logits)
    merged = None
    if kind not in ("prefix tuning", "prompt tuning"):
        merged = _weights_differ(_merged(model, adapter, values), theirs.merge_and_unload())
    trainable = sum(value.numel() for value in values.values())
    return Row(kind, trainable, _share(ours_logits, their_logits), gradients, merged, read)


def _compare_pissa(theirs: Any) -> Row:
    """Compare the start, of which A and B are known up to the sign of each singular vector, and a changed adapter."""
    from tidewheel.models import adapters

    model, _ = models()
    adapter = adapters.KIND.build("lora", {"rank": 4, "alpha": 16, "start": "pissa"})
    values: dict[str, torch.Tensor] = {}
    their_parts = dict(theirs.named_parameters())
    difference = 0.0
    trainable = 0
    for ours, name in _linear_names(model.config).items():
        layer = model.get_submodule(ours)
        start = adapter.build(ours, layer).start(layer.weight.detach())  # type: ignore[operator, union-attr]
        begin = f"base_model.model.{name}"
        a, b = (their_parts[f"{begin}.lora_{key}.default.weight"].detach().clone() for key in "AB")
        difference = max(difference, _share(start["b"] @ start["a"], b @ a))
        trainable += a.numel() + b.numel()
        moved = {"a": a + 0.05 * torch.randn_like(a), "b": b + 0.05 * torch.randn_like(b), "a0": a, "b0": b}
        values |= {f"{ours}.adapter.{key}": value for key, value in moved.items()}
        with torch.no_grad():
            their_parts[f"{begin}.lora_A.default.weight"].copy_(moved["a"])
            their_parts[f"{begin}.lora_B.default.weight"].copy_(moved["b"])
    merge.add(model, adapter, values)
    tokens, positions = _tokens()
    ours_logits = model(tokens, positions, torch.zeros_like(tokens))
    their_logits = theirs(input_ids=tokens).logits
    ours_logits.square().mean().backward()
    their_logits.square().mean().backward()
    gradients = _gradients(model, theirs, adapter)
    with tempfile.TemporaryDirectory() as folder:
        from peft import PeftModel

        peft_files.write(storage.store(folder), model.config, adapter, values)
        again = PeftModel.from_pretrained(models()[1], folder).eval()
        read = _share(again(input_ids=tokens).logits, ours_logits)
    merged = _weights_differ(_merged(model, adapter, values), theirs.merge_and_unload())
    assert difference < START_TOLERANCE, f"the start differs by {difference:.1e}"
    return Row("PiSSA", trainable, _share(ours_logits, their_logits), gradients, merged, read)


def _merged(model: Decoder, adapter: Adapter, values: dict[str, torch.Tensor]) -> Decoder:
    """Return a decoder with an adapter in its matrices, given the decoder that the adapter is attached to."""
    whole = Decoder(model.config, VOCABULARY)
    weights = {name: parameter for name, parameter in model.named_parameters() if MARK not in name}
    whole.load_state_dict(merge.merged(weights, adapter, values), strict=False)  # buffers are not adapted
    return whole


def models(**shape: Any) -> tuple[Decoder, nn.Module]:
    """Return a decoder and transformers' model with the same random weights.

    Args:
        shape: settings of the model that differ from `SHAPE`.
    """
    from transformers import AutoModelForCausalLM

    settings = {"kind": "llama", "qk_norm": False, **SHAPE, **shape}
    if settings["kind"] != "llama":
        del settings["qk_norm"]
    config = families.KIND.build(str(settings.pop("kind")), settings)
    model = Decoder(config, VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, config, 1))
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        huggingface.write(storage.store(folder), config, VOCABULARY, lambda _: state)
        reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    return model, reference


def _linear_names(config: Model) -> dict[str, str]:
    from tidewheel.models.adapting.peft_names import their_modules

    return {ours: theirs for ours, theirs in their_modules(config).items() if ours != "embedding"}


def _randomise(model: nn.Module) -> None:
    """Fill the adapter's parameters in the order of their names; an untouched adapter would test nothing."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
            elif "ia3_l" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif "lora_" in name or "prompt_encoder" in name:
                parameter.copy_((0.5 if "prompt" in name else 0.05) * torch.randn_like(parameter))


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(5, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(2))
    return tokens, torch.arange(11).expand(3, -1)


def _gradients(model: Decoder, theirs: Any, adapter: Any) -> float:
    """Return the largest difference of gradients, as a share of the largest."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    constants = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()
                 if name.endswith((".a0", ".b0"))}
    whole = {name: value[:len(value)] for name, value in gradients.items()}
    _, ours = adapter.to_peft(model.config, {**whole, **constants})
    their_gradients = {name.replace(".default", ""): parameter.grad for name, parameter in theirs.named_parameters()
                       if parameter.grad is not None}
    if "prompt_embeddings" in ours:
        (their_gradients,) = [{"prompt_embeddings": gradient} for gradient in their_gradients.values()]
    largest = max(gradient.abs().max().item() for gradient in their_gradients.values())
    worst = 0.0
    for name, gradient in ours.items():
        expected = their_gradients[name if name in their_gradients else f"{name}.weight"]
        if name.endswith(".lora_A.weight") and ".experts." in name:  # the sum over the parts that share it
            gradient = gradient.unflatten(0, (EXPERTS["num_experts"], -1, 4)).sum(dim=1).flatten(0, 1)
        elif ".experts." in name:
            gradient = gradient.unflatten(1, (-1, 4, EXPERTS["num_experts"])).sum(dim=1).flatten(1)
        rows = gradient[tuple(slice(size) for size in expected.shape)] if constants else gradient
        worst = max(worst, (rows - expected).abs().max().item() / largest)
    return worst


def _weights_differ(model: Decoder, whole: nn.Module) -> float:
    theirs = dict(whole.named_parameters())
    worst = 0.0
    ours = dict(model.named_parameters())
    for one in huggingface.conversions(model.config, list(ours), theirs):
        for name, value in zip(one.theirs, one.to_theirs([ours[name] for name in one.ours])):
            worst = max(worst, _share(value, theirs[name]))
    return worst


def _share(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).abs().max() / expected.abs().max()).item()


def nf4_rows() -> list[dict[str, Any]]:
    """Return the share of equal codes and the relative error of NF4 here, in bitsandbytes and in torchao."""
    import bitsandbytes.functional as bnb
    from torchao.quantization import to_nf4

    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    codes, scales = nf4.encode(weight)
    twice = nf4.decode(codes, nf4.decode_scales(*nf4.encode_scales(scales)))
    once = nf4.decode(codes, scales)
    rows = [{"NF4 of": "Tidewheel, fp32 scales", "equal codes": 1.0, "error": _error(once, weight)},
            {"NF4 of": "Tidewheel, 8-bit scales", "equal codes": 1.0, "error": _error(twice, weight)}]
    for double in (False, True):
        packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
        equal = (packed.flatten() == codes.flatten()).float().mean().item()
        name = f"bitsandbytes, {'8-bit' if double else 'fp32'} scales"
        rows.append({"NF4 of": name, "equal codes": equal, "error": _error(bnb.dequantize_4bit(packed, state), weight)})
    other = to_nf4(weight)
    equal_codes = (other.quantized_data.flatten() == codes.flatten()).float().mean().item()
    rows.append({"NF4 of": "torchao", "equal codes": equal_codes, "error": _error(other.get_original_weight(), weight)})
    return rows


def _error(value: torch.Tensor, weight: torch.Tensor) -> float:
    return ((value - weight).norm() / weight.norm()).item()


def speed(repeats: int = 15) -> dict[str, float]:
    """Return seconds of a LoRA step here and with peft's layers in the same decoder, the fastest of several each.

    Both run the same loop: forward, cross-entropy, backward and AdamW on the same rows, in turns. Seconds are those of
    the one thread's processor time, so other work on the machine hardly counts.
    """
    shape = {"dim": 256, "ffn_dim": 704, "num_layers": 4}
    steps: dict[str, Callable[[], float]] = {"ours": _step(_ours(shape)), "peft": _step(_with_peft(shape))}
    best = dict.fromkeys(steps, float("inf"))
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.process_time()
            losses[name].append(step())
            best[name] = min(best[name], time.process_time() - began)
    difference = max(abs(a - b) for a, b in zip(losses["ours"], losses["peft"]))
    return {**best, "ratio": best["ours"] / best["peft"], "loss difference": difference}


def _ours(shape: dict[str, Any]) -> Decoder:
    from tidewheel.models import adapters

    model, _ = models(**shape)
    adapter = adapters.KIND.build("lora", {"rank": 16, "alpha": 32})
    merge.add(model, adapter, _values(model, adapter))
    return model


def _values(model: Decoder, adapter: Any) -> dict[str, torch.Tensor]:
    """Return equal values of A for both libraries, and B zero."""
    values = {}
    generator = torch.Generator().manual_seed(4)
    for name in sorted(_linear_names(model.config)):
        layer = model.get_submodule(name)
        values[f"{name}.adapter.a"] = torch.randn(adapter.rank, layer.in_features, generator=generator) * 0.05  # type: ignore
        values[f"{name}.adapter.b"] = torch.zeros(layer.out_features, adapter.rank)  # type: ignore[call-overload]
    return values


def _with_peft(shape: dict[str, Any]) -> Decoder:
    """Return our decoder whose linear layers are peft's."""
    from peft import LoraConfig, inject_adapter_in_model

    from tidewheel.models import adapters

    model, _ = models(**shape)
    values = _values(model, adapters.KIND.build("lora", {"rank": 16, "alpha": 32}))
    names = [name for name, module in model.blocks.named_modules() if isinstance(module, nn.Linear)]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=sorted({name.rpartition(".")[2] for name in names}))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(config, model.blocks)
    with torch.no_grad():
        for name, value in values.items():
            module = model.get_submodule(name.partition(".adapter")[0])
            getattr(module, "lora_A" if name.endswith(".a") else "lora_B")["default"].weight.copy_(value)
    return model


def _step(model: Decoder) -> Callable[[], float]:
    from tidewheel.models.decoder import next_tokens

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3, foreach=True)
    tokens = torch.randint(0, VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(5))
    positions, segments = torch.arange(128).expand(4, -1), torch.zeros(4, 128, dtype=torch.int64)
    targets = next_tokens(tokens, segments)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tokens, positions, segments, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main(arguments: list[str]) -> int:
    """Print the tables; return 1 if a difference is too large."""
    torch.set_num_threads(1)
    agree = True
    if "--speed" not in arguments:
        rows = [compare(kind, config) for kind, config in peft_kinds().items()]
        agree = all(row.agrees for row in rows)
        print_table([{"kind": row.kind, "parameters": row.trainable, "logits": f"{row.logits:.1e}",
                      "gradients": f"{row.gradients:.1e}",
                      "merged": "-" if row.merged is None else f"{row.merged:.1e}",
                      "read by peft": f"{row.theirs_read:.1e}"} for row in rows], title="adapters beside peft, fp32")
        print_table([{**row, "equal codes": f"{row['equal codes']:.4%}", "error": f"{row['error']:.5f}"}
                     for row in nf4_rows()], title="NF4 of a Gaussian matrix, 256 x 512")
    if "--table" not in arguments:
        times = speed()
        print(f"LoRA step: {times['ours'] * 1000:.1f} ms, with peft's layers {times['peft'] * 1000:.1f} ms, ratio "
              f"{times['ratio']:.3f}; losses differ by at most {times['loss difference']:.1e}")
    return int(not agree)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main(sys.argv[1:]))
