"""Publish the policy after each step, for the processes that sample rollouts with it.

`policies/00000012.0of1.json` in the run's folder says that the weights after step 12 are complete: it holds the name
and the hash of a safetensors file. With a pipeline each stage writes a file. Files are named by their content, and a
version is read only if its files have the hashes that it names. If it makes a smaller file, the head also names a delta
from the version before (`train.policy.deltas`), for generators that have this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from tidewheel.shards import notices
from tidewheel.storage import Store, content_hash
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.parallel.mesh import DIMS
from tidewheel.train.parallel.offloaded import whole
from tidewheel.train.policy import deltas, resident

FOLDER = "policies"
FORMAT = 1


def head_key(version: int, stage: int = 0, stages: int = 1) -> str:
    """Return the key of a version's head in the run's folder; with a pipeline, of one stage's.

    Args:
        version: the step after which it was published.
        stage: of the pipeline.
        stages: number of stages.
    """
    return f"{FOLDER}/{version:08d}.{stage}of{stages}.json"


class Publishing:
    """Publishes versions of a run's policy. All ranks make the same calls.

    Args:
        config: the run's settings.
        model: this rank's part of the model.
        store: the run's folder.
    """

    def __init__(self, config: TrainConfig, model: ParallelModel, store: Store) -> None:
        self._rollouts, self._steps = config.rollouts, config.steps
        self._keeps_start = config.start_is_reference
        self._model, self._store = model, store
        self._rounds = config.rollouts is not None and config.rollouts.weights == "bf16"
        self._stage, self._stages = model.mesh.coordinate("pipeline"), model.mesh.size("pipeline")
        self._writes = model.mesh.coordinate(*(name for name in DIMS if name != "pipeline")) == 0
        self._heads: dict[int, dict[str, Any]] | None = None  # of the versions of this stage in the store
        self._last: tuple[str, bytes] | None = None  # hash and content of the newest file

    def is_due(self, step: int) -> bool:
        """Return whether a later step samples with the policy after `step`; 0 is before the first step."""
        rollouts = self._rollouts
        return rollouts is not None and rollouts.is_sampled_with(step, self._steps)

    def gather(self) -> dict[str, torch.Tensor]:
        """Return this stage's tensors as whole tensors in host memory; {} on the ranks that do not write."""
        tensors = {}
        for name, value in (*self._model.named_parameters(), *self._model.named_buffers()):
            gathered = whole(value.detach())  # a collective: all ranks call it
            if self._writes:
                rounded = self._rounds and gathered.dim() > 1 and gathered.is_floating_point()
                tensors[name] = (gathered.bfloat16() if rounded else gathered).cpu().contiguous()
        return tensors

    def write(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Publish the policy after `step`, and remove versions that no later step needs.

        Args:
            step: the last step done.
            tensors: from `gather`.

        Raises:
            StorageError: the store failed.
        """
        if not self._writes or self._rollouts is None:
            return
        data = safetensors.torch.save(tensors)
        digest = content_hash(data)
        file = f"{digest.removeprefix('blake3-')[:32]}.safetensors"
        if self._heads is None:
            self._heads = self._present()
        before = self._heads.get(step, {})
        held = self._rollouts.generators.colocated and not self._rounds and self._stages == 1
        if before.get("hash") == digest:
            delta = before.get("delta")
        else:
            delta = None if held else self._write_delta(data, digest)  # a generator in this process reads no file
        self._last = (digest, data)
        self._store.write(f"{FOLDER}/{file}", data)
        self._heads[step] = {"format": FORMAT, "version": step, "file": file, "bytes": len(data), "hash": digest,
                             "delta": delta}
        self._store.write_json(head_key(step, self._stage, self._stages), self._heads[step])
        self._remove(self._heads, self._rollouts.version_for(step + 1))
        if held:
            self._hold(digest)
        notices.tell(self._store.uri)

    def _hold(self, digest: str) -> None:
        """Offer the tensors that train to a generator in this process, if they are whole and in its memory."""
        own = dict((*self._model.named_parameters(), *self._model.named_buffers()))
        if all(not isinstance(value, DTensor) and value.device.type == "cpu" for value in own.values()):
            resident.hold(self._store.uri, digest, own)

    def _write_delta(self, data: bytes, digest: str) -> dict[str, Any] | None:
        """Write what leads from the last version's file to this one; return its entry in the head, None if none."""
        if self._last is None or self._last[0] == digest:
            return None
        delta = deltas.encode(self._last[1], data)
        if delta is None:
            return None
        of_delta = content_hash(delta)
        file = f"{of_delta.removeprefix('blake3-')[:32]}.delta"
        self._store.write(f"{FOLDER}/{file}", delta)
        return {"before": self._last[0], "file": file, "bytes": len(delta), "hash": of_delta}

    def _present(self) -> dict[int, dict[str, Any]]:
        """Return the heads of this stage's versions, also those that an earlier generation of workers has written."""
        ending = head_key(0, self._stage, self._stages).partition(".")[2]
        heads = [self._store.read_json(entry.key) for entry in self._store.list(FOLDER) if entry.key.endswith(ending)]
        return {int(head["version"]): head for head in heads}

    def _remove(self, heads: dict[int, dict[str, Any]], oldest: int) -> None:
        """Remove the versions before `oldest`, but not a start that is the reference model.

        Args:
            heads: of all versions in the store; those that are removed are taken out.
            oldest: first version that a step still needs.
        """
        for version in [version for version in heads if self._keeps_start <= version < oldest]:
            removed = _files(heads.pop(version))
            kept = {file for head in heads.values() for file in _files(head)}
            self._store.delete(head_key(version, self._stage, self._stages))
            for file in removed:
                if file not in kept:
                    self._store.delete(f"{FOLDER}/{file}")


def _files(head: Mapping[str, Any]) -> list[str]:
    """Return the names of the files of a version's head."""
    delta = head.get("delta")
    return [head["file"], *([delta["file"]] if delta else [])]
