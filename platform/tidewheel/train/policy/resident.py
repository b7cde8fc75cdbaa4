"""The policy that trains in this process, for a generator beside it: its own tensors, not a copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_held: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
"""By URI of the run: hash of the published file, and the tensors that it has the values of."""


def hold(run: str, digest: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Offer the tensors of a policy until the next call for the run, or `drop`.

    Args:
        run: URI of the run.
        digest: hash of the file with which the policy was published.
        tensors: the whole policy. Their values must stay as long as anybody samples with this version.
    """
    _held[run] = digest, {name: tensor.detach() for name, tensor in tensors.items()}


def held(run: str, digest: str) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a published policy; None if this process does not train it, or it has moved on."""
    known, tensors = _held.get(run, ("", {}))
    return tensors if known == digest else None


def drop(run: str) -> None:
    """Offer the tensors of a run no longer."""
    _held.pop(run, None)
