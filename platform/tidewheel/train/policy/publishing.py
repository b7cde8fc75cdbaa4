"""Publish the policy after each step, for the processes that sample rollouts with it.

`policies/00000012.0of1.json` in the run's folder says that the weights after step 12 are complete: it holds the name
and the hash of a safetensors file. With a pipeline each stage writes a file. Files are named by their content, and a
version is read only if its files have the hashes that it names.
"""

from __future__ import annotations

import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from tidewheel.storage import Store, content_hash
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.parallel.mesh import DIMS

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
        self._model, self._store = model, store
        self._stage, self._stages = model.mesh.coordinate("pipeline"), model.mesh.size("pipeline")
        self._writes = model.mesh.coordinate(*(name for name in DIMS if name != "pipeline")) == 0
        self._files: dict[int, str] | None = None  # of the versions of this stage in the store

    def is_due(self, step: int) -> bool:
        """Return whether a later step samples with the policy after `step`; 0 is before the first step."""
        rollouts = self._rollouts
        return rollouts is not None and rollouts.is_sampled_with(step, self._steps)

    def gather(self) -> dict[str, torch.Tensor]:
        """Return this stage's tensors as whole tensors in host memory; {} on the ranks that do not write."""
        tensors = {}
        for name, value in (*self._model.named_parameters(), *self._model.named_buffers()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value  # a collective: all ranks call it
            if self._writes:
                tensors[name] = whole.detach().cpu().contiguous()
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
        self._store.write(f"{FOLDER}/{file}", data)
        self._store.write_json(head_key(step, self._stage, self._stages), {
            "format": FORMAT, "version": step, "file": file, "bytes": len(data), "hash": digest})
        if self._files is None:
            self._files = self._present()
        self._files[step] = file
        self._remove(self._files, self._rollouts.version_for(step + 1))

    def _present(self) -> dict[int, str]:
        """Return the files of this stage's versions, also those that an earlier generation of workers has written."""
        ending = head_key(0, self._stage, self._stages).partition(".")[2]
        heads = [self._store.read_json(entry.key) for entry in self._store.list(FOLDER) if entry.key.endswith(ending)]
        return {int(head["version"]): str(head["file"]) for head in heads}

    def _remove(self, files: dict[int, str], oldest: int) -> None:
        """Remove the versions before `oldest`.

        Args:
            files: of all versions in the store; those that are removed are taken out.
            oldest: first version that a step still needs.
        """
        for version in [version for version in files if version < oldest]:
            file = files.pop(version)
            self._store.delete(head_key(version, self._stage, self._stages))
            if file not in files.values():
                self._store.delete(f"{FOLDER}/{file}")
