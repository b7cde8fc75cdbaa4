"""Text samples of the model in training."""

from __future__ import annotations

from tidewheel import storage
from tidewheel.inference.generate import generate
from tidewheel.shards.source import Domain
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import precision_context


def text_sample(model: ParallelModel, domain: Domain, config: TrainConfig, collectives: Collectives) -> str:
    """Return `evaluation.prompt` and its continuation; "" if `evaluation.sample_tokens` is 0.

    All ranks must call it together.

    Args:
        model: this rank's part of the model.
        domain: shard set whose tokenizer and sequence length are used.
        config: of the run; its seed is that of the draws.
        collectives: of the run's ranks.
    """
    settings = config.evaluation
    if not settings.sample_tokens:
        return ""
    tokenizer = of_manifest(storage.store(domain.uri), domain.manifest.tokenizer)
    prompt = tokenizer.encode_plain([settings.prompt])[0].tolist() or [tokenizer.eos]
    with precision_context(collectives.device, config.precision):
        new = generate(model.parts[0] if sees_whole_rows(model) else model, prompt, tokens=settings.sample_tokens,
                       context=domain.manifest.sequence_length, device=collectives.device,
                       temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=config.seed,
                       stop={tokenizer.eos})
    model.reshard()
    return tokenizer.decode(prompt + new)


def sees_whole_rows(model: ParallelModel) -> bool:
    """Return whether this rank has whole sequences in its own part of the model, and so can cache keys."""
    return model.mesh.size("pipeline", "context", "tensor") == 1
