"""Rows of a shard set as a micro-batch: what the model needs is computed while they are loaded."""

import numpy as np
import torch

from tidewheel.models.documents import Documents
from tidewheel.shards.reader import Rows
from tidewheel.train.batches import micro_batch


def rows(segment_ids: list[list[int]]) -> Rows:
    segments = np.array(segment_ids, dtype=np.int32)
    tokens = np.arange(segments.size, dtype=np.uint16).reshape(segments.shape)
    return Rows(tokens=tokens, lengths=(segments >= 0).sum(axis=1).astype(np.int32), segment_ids=segments,
                positions=np.zeros_like(segments), ids=[f"shard:{row}" for row in range(len(segments))])


def test_a_micro_batch_has_the_layout_of_its_own_rows():
    loaded = rows([[0, 0, 0, 0], [0, 0, 1, -1], [0, 0, 0, -1]])
    packed = micro_batch(loaded, slice(0, 2), 0, torch.device("cpu"))
    whole = micro_batch(loaded, slice(2, 3), 0, torch.device("cpu"))
    assert packed.documents.offsets.tolist() == [0, 4, 6, 7, 8]
    assert (packed.documents.whole_rows, whole.documents.whole_rows) == (False, True)
    assert whole.documents.offsets.tolist() == [0, 3, 4]
    assert packed.num_targets == 3 + 1, "within documents"


def test_the_layout_is_the_same_from_arrays_and_tensors():
    segments = np.array([[0, 0, 1, 1], [0, 1, 1, -1]], dtype=np.int32)
    of_array, of_tensor = Documents.of(segments), Documents.of(torch.from_numpy(segments).long())
    assert torch.equal(of_array.offsets, of_tensor.offsets)
    assert of_array.whole_rows == of_tensor.whole_rows
