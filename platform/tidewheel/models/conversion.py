"""Weights that Hugging Face keeps in another form: transposed, joined to one tensor, or one tensor for each expert.

A family lists them in `Model.hugging_face_weights`; all others are renamed by `Model.hugging_face_names`. Nothing here
imports torch before weights are converted.

    joined(("attention.wq.weight", "attention.wk.weight", "attention.wv.weight"), "attn.c_attn.weight",
           (dim, dim, dim), transpose=True)                                   # GPT-2
    per_expert("ffn.experts.w1", "block_sparse_moe.experts.{}.w1.weight", 8)  # [E, F, D] and E times [F, D]
    joined(("ffn.experts.w1", "ffn.experts.w3"), "mlp.experts.gate_up_proj", (F, F), dim=1)   # [E, 2F, D], gate first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Conversion:
    """A few weights of a layer here, and the weights with the same values at Hugging Face.

    Args:
        ours: names in a block, "attention.wq.weight".
        theirs: names in a layer, "self_attn.q_proj.weight".
        to_theirs: from our tensors, in the order of `ours`, to theirs.
        to_ours: the inverse.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: Callable[[Tensors], Tensors]
    to_ours: Callable[[Tensors], Tensors]


def renamed(ours: str, theirs: str) -> Conversion:
    """Return the conversion of a weight that is the same under another name."""
    return Conversion((ours,), (theirs,), list, list)


def transposed(ours: str, theirs: str) -> Conversion:
    """Return the conversion of a weight whose last two dimensions are exchanged."""
    return Conversion((ours,), (theirs,), _exchanged, _exchanged)


def joined(ours: Sequence[str], theirs: str, sizes: Sequence[int], *, dim: int = 0,
           transpose: bool = False) -> Conversion:
    """Return the conversion of several weights that are one, put side by side.

    Args:
        ours: names in a block, in order.
        theirs: name in a layer.
        sizes: of our weights along `dim`.
        dim: of our weights, along which they are put side by side.
        transpose: exchange the last two dimensions of the joined tensor.
    """
    def to_theirs(tensors: Tensors) -> Tensors:
        import torch

        whole = [torch.cat(list(tensors), dim=dim)]
        return _exchanged(whole) if transpose else whole

    def to_ours(tensors: Tensors) -> Tensors:
        (whole,) = _exchanged(tensors) if transpose else tensors
        return whole.split(list(sizes), dim=dim)

    return Conversion(tuple(ours), (theirs,), to_theirs, to_ours)


def per_expert(ours: str, theirs: str, experts: int) -> Conversion:
    """Return the conversion of a weight [E, ...] that is a tensor for each expert.

    Args:
        ours: name in a block.
        theirs: name in a layer, with {} for the number of the expert.
        experts: E.
    """
    def to_ours(tensors: Tensors) -> Tensors:
        import torch

        return [torch.stack(list(tensors))]

    names = tuple(theirs.format(expert) for expert in range(experts))
    return Conversion((ours,), names, lambda tensors: tensors[0].unbind(0), to_ours)


def _exchanged(tensors: Tensors) -> Tensors:
    return [tensor.transpose(-1, -2) for tensor in tensors]


def interleaved(ours: tuple[str, str], theirs: str) -> Conversion:
    """Return the conversion of two weights [E, F, ...] to [E, ..., 2F], whose entries alternate, as GPT-OSS has it.

    Args:
        ours: names of the gate's and the other weight.
        theirs: name in a layer.
    """
    def to_theirs(tensors: Tensors) -> Tensors:
        import torch

        both = torch.stack(list(tensors), dim=2).flatten(1, 2)  # [E, 2F, ...]
        return [both if both.ndim == 2 else both.transpose(1, 2)]

    def to_ours(tensors: Tensors) -> Tensors:
        (whole,) = tensors
        both = whole if whole.ndim == 2 else whole.transpose(1, 2)
        return [both[:, 0::2], both[:, 1::2]]

    return Conversion(ours, (theirs,), to_theirs, to_ours)
