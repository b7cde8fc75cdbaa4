"""Validation loss, the same for every number of ranks, and a text sample."""

from __future__ import annotations

import math

import numpy as np
import torch

from tidewheel import storage
from tidewheel.models.generate import generate
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.source import Domain
from tidewheel.train.batches import micro_batch
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import precision_context


@torch.no_grad()
def validation_loss(model: ParallelModel, shard_set: ShardSet, config: TrainConfig, collectives: Collectives) -> float:
    """Cross-entropy in nats per target token over the validation set (or its first `evaluation.sequences` rows).

    Micro-batch i is computed by data rank i mod N; sums come back as one entry per micro-batch, so the total is added
    in one fixed order. All ranks must call it together; a rank that has run out repeats its last rows, uncounted,
    because FSDP gathers weights in every forward pass.
    """
    counts = [shard.rows for shard in shard_set.manifest.shards]
    shards = np.repeat(np.arange(len(counts)), counts)
    rows = np.concatenate([np.arange(count) for count in counts])
    total = min(len(rows), config.evaluation.sequences or len(rows))
    size = min(config.batch.micro_sequences, total)
    number, mesh = math.ceil(total / size), model.mesh
    sums = torch.zeros(2, number, dtype=torch.float64)
    for first in range(0, number, mesh.data_size):
        index = first + mesh.data_rank
        begin = min(index, number - 1) * size
        part = slice(begin, min(begin + size, total))
        micro = micro_batch(shard_set.rows(shards[part], rows[part]), slice(None), 0, collectives.device)
        loss = model.evaluate(micro, precision_context(collectives.device, config.precision))
        if index < number:
            sums[0, index] = loss.double().cpu()
            sums[1, index] = micro.num_targets * mesh.leads
    model.reshard()
    sums = collectives.sum(sums)
    return float(sums[0].sum()) / max(1.0, float(sums[1].sum()))


def text_sample(model: ParallelModel, domain: Domain, config: TrainConfig, collectives: Collectives) -> str:
    """A continuation of `evaluation.prompt`, prompt included; "" when none is asked for. All ranks call it together."""
    wanted = config.evaluation
    if not wanted.sample_tokens:
        return ""
    from tidewheel.shards.tokenizer import of_manifest

    tokenizer = of_manifest(storage.store(domain.uri), domain.manifest.tokenizer)
    prompt = tokenizer.encode_plain([wanted.prompt])[0].tolist() or [tokenizer.eos]
    with precision_context(collectives.device, config.precision):
        new = generate(model, prompt, tokens=wanted.sample_tokens, context=domain.manifest.sequence_length,
                       temperature=wanted.temperature, top_k=wanted.top_k, seed=config.seed, stop=tokenizer.eos)
    model.reshard()
    return tokenizer.decode(prompt + new)
