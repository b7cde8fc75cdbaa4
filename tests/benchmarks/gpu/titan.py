"""torchtitan's side: its own Trainer on one device, with its model, compilation, loss, clipping and optimizer.

torchtitan 0.2.2 is the newest release that torch 2.11 can import. On one device it keeps fp32 weights under bf16
autocast. It masks documents by their last token: through variable-length flash attention here, as Tidewheel does.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from tests.benchmarks.gpu.bare import masked
from tests.benchmarks.gpu.case import END_OF_DOCUMENT, SHAPES, Case, Documents, batches
from tests.benchmarks.gpu.timing import measure
from tidewheel.config import build
from tidewheel.models.families import Llama

FOREVER = 10**6
NAME = "tidewheel_benchmark"


def train(case: Case) -> dict[str, Any]:
    """Measure torchtitan's step."""
    _as_the_only_rank()
    if case.device == "cpu":
        _on_cpu()
    from torchtitan.train import Trainer

    trainer: Any = Trainer(_job(case))
    batches_on_demand = trainer.batch_generator(trainer.dataloader)
    losses: list[torch.Tensor] = []
    forward_backward = trainer.forward_backward_step

    def kept(**named: Any) -> torch.Tensor:  # the trainer keeps the loss to itself
        losses.append(forward_backward(**named))
        return losses[-1]

    trainer.forward_backward_step = kept

    def step(index: int) -> torch.Tensor:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches_on_demand)
        return losses.pop().detach()

    figures = measure(step, case)
    trainer.close()
    torch.distributed.destroy_process_group()
    return {**figures, "note": f"torchtitan {importlib.metadata.version('torchtitan')}"}


def _job(case: Case) -> Any:
    """Register the model and the data with torchtitan; return the job's configuration."""
    import torchtitan.protocols.train_spec as specs
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec

    shape = build(Llama, SHAPES[case.shape])
    multiplier = 1.5 if shape.ffn_width == 4 * shape.dim else None  # of 8/3 of the width, rounded up to 256
    spec = get_train_spec()
    spec.model_args = {NAME: TransformerModelArgs(
        dim=shape.dim, n_layers=shape.num_layers, n_heads=shape.num_heads, n_kv_heads=shape.kv_heads,
        vocab_size=case.vocabulary, multiple_of=256, ffn_dim_multiplier=multiplier, norm_eps=shape.norm_epsilon,
        rope_theta=shape.rope_theta, attn_type="varlen" if case.document else "sdpa",
        attn_mask_type="block_causal" if case.document else "causal", eos_id=END_OF_DOCUMENT)}
    spec.build_dataloader_fn = lambda **_: _loader(case)
    spec.build_tokenizer_fn = lambda *_, **__: _tokenizer(case)
    spec.build_validator_fn = None
    specs.register_train_spec(NAME, spec)
    job = JobConfig()
    job.model.name = job.model.flavor = NAME
    job.training.local_batch_size, job.training.seq_len, job.training.steps = case.rows, case.length, FOREVER
    job.optimizer.lr, job.lr_scheduler.warmup_steps, job.metrics.log_freq = case.learning_rate, 1, FOREVER
    job.activation_checkpoint.mode = "none"
    job.debug.seed, job.job.dump_folder = 0, tempfile.mkdtemp(prefix="torchtitan-")
    job.compile.enable = case.compiled
    return job


def _loader(case: Case) -> Any:
    from torchtitan.components.dataloader import BaseDataLoader

    class Loader(BaseDataLoader):
        """The same batches as every side's."""

        def __iter__(self) -> Iterator[Any]:
            prepared = [_pair(documents) for documents in batches(case)]
            while True:
                for tokens, targets in prepared:
                    yield {"input": tokens}, targets

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            return

    return Loader()


def _pair(documents: Documents) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(documents.tokens.copy()), torch.from_numpy(documents.following.copy())


def _tokenizer(case: Case) -> Any:
    """Return what torchtitan asks a tokenizer for: its size, and the token that ends a document."""
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokenizer(BaseTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.eos_id = END_OF_DOCUMENT

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError("the batches hold tokens")

        def decode(self, *_: Any, **__: Any) -> str:
            raise NotImplementedError("the batches hold tokens")

        def get_vocab_size(self) -> int:
            return case.vocabulary

    return Tokenizer()


def _as_the_only_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _on_cpu() -> None:
    """Let torchtitan, which looks for accelerators only, run a tiny shape on a CPU."""
    from unittest.mock import MagicMock

    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.parallel_dims as dimensions
    import torchtitan.distributed.utils as distributed
    import torchtitan.models.attention as attention
    import torchtitan.tools.utils as utils

    for module in (utils, dimensions, distributed):
        module.device_type, module.device_module = "cpu", torch.cpu
    nothing = metrics.DeviceMemStats(*[0.0] * len(metrics.DeviceMemStats._fields))
    metrics.build_device_memory_monitor = lambda: MagicMock(device_name="H100", get_peak_stats=lambda: nothing)

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, *_: Any, **__: Any) -> Any:
        return masked(q[None], k[None], v[None], offsets)[0]  # the flash kernel needs a GPU

    attention.VarlenAttentionWrapper._compiled_varlen_attn = varlen
