"""Layouts of documents on the host, against the definition and against the offsets found on the device."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.benchmarks.step_counters import attention_waits
from tidewheel.models.attention import document_mask, document_offsets
from tidewheel.models.documents import Documents, padded_count
from tidewheel.models.families import Llama


@given(arrays.arrays(np.int32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.integers(-1, 3)))
def test_offsets_begin_as_those_found_on_the_device_and_end_with_empty_documents(segments: np.ndarray):
    documents = Documents.of(segments)
    exact = document_offsets(torch.from_numpy(segments)).tolist()
    offsets = documents.offsets.tolist()
    assert documents.offsets.dtype == torch.int32
    assert offsets[:len(exact)] == exact
    assert set(offsets[len(exact):]) <= {segments.size}
    assert len(offsets) == padded_count(len(exact) - 1) + 1
    assert np.diff(exact).max() <= documents.longest <= segments.shape[1]


@pytest.mark.parametrize(("document", "longest"), [(100, 128), (600, 640), (1100, 1280), (4000, 4096), (4096, 4096)])
def test_the_longest_document_is_rounded_up(document: int, longest: int):
    segments = (np.arange(4096) // document)[None]
    assert Documents.of(segments).longest == longest


@pytest.mark.parametrize(("rows", "whole"), [
    ([[0, 0, 0, 0]], True), ([[0, 0, -1, -1], [5, 5, 5, 5]], True), ([[-1, -1, -1, -1]], True),
    ([[0, 0, 1, 1]], False), ([[0, 0, 0, 0], [0, 1, -1, -1]], False), ([[0]], True)])
def test_whole_rows_are_rows_of_one_document_and_padding(rows: list[list[int]], whole: bool):
    assert Documents.of(np.array(rows)).whole_rows == whole
    assert Documents.of(torch.tensor(rows)).whole_rows == whole


def test_the_number_of_offsets_takes_few_values_and_little_more_than_needed():
    counts = [padded_count(documents) for documents in range(1, 4097)]
    assert all(documents <= count < 1.25 * documents for documents, count in enumerate(counts, 1))
    assert counts == sorted(counts)
    assert len(set(counts)) == 44


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operators whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        self.waits += function.overloadpacket in (torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense)
        return function(*arguments, **(kwargs or {}))


@pytest.mark.parametrize(("known", "waits"), [(True, 0), (False, 1)])
def test_a_mask_from_a_layout_of_the_host_waits_for_nothing(known: bool, waits: int):
    segments = torch.tensor([[0, 0, 1, 1], [0, 1, 2, -1]])
    documents = Documents.of(segments) if known else None
    with Counted() as counted:
        mask = document_mask(segments, "varlen", documents=documents)
    assert counted.waits == waits
    assert mask.offsets.tolist() == [0, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("document", "known", "waits", "calls"), [
    (24, True, 0, 3), (24, False, 1, 3), (64, True, 0, 0), (64, False, 1, 3)])
def test_a_forward_and_backward_pass_on_a_gpu_waits_for_nothing(document: int, known: bool, waits: int, calls: int):
    """Rows of one document need no varlen attention, if the host knows that they are."""
    segments = (torch.arange(64) // document).expand(2, -1).contiguous()
    model = Llama(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=64)
    counts = attention_waits(model, segments, Documents.of(segments) if known else None)
    assert counts["nonzero"] == waits
    assert counts["item"] == 0
    assert counts["_varlen_attn"] == calls
