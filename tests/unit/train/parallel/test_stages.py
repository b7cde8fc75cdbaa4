from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import get_schedule_class

from tests.benchmarks.pipeline_schedules import bubble, timeline
from tidewheel.train.parallel.pipeline import TORCH_NAMES
from tidewheel.train.parallel.stages import SCHEDULES, default_per_rank, nearest_micro_batches, stages, takes


@given(layers=st.integers(1, 100), pipeline=st.integers(1, 16), schedule=st.sampled_from(SCHEDULES),
       per_rank=st.integers(1, 4))
def test_stages_hold_all_blocks_once_in_order_and_evenly(layers, pipeline, schedule, per_rank):
    if layers + 2 < pipeline * per_rank:
        return
    cut = stages(layers, pipeline, schedule, per_rank)
    assert [block for stage in cut for block in stage.blocks] == list(range(layers))
    units = [len(stage.blocks) + stage.first + stage.last for stage in cut]
    assert min(units) >= 1
    assert max(units) - min(units) <= 1
    assert sorted(stage.rank for stage in cut) == sorted(list(range(pipeline)) * per_rank)
    assert cut[0].rank == 0
    assert cut[-1].last


def test_zbv_has_the_last_stage_on_the_first_rank():
    assert [stage.rank for stage in stages(6, 4, "zbv_zero_bubble", 2)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [stage.rank for stage in stages(6, 4, "interleaved_1f1b", 2)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_legal_numbers_of_micro_batches_are_those_that_torch_accepts(schedule):
    for pipeline in (2, 3, 4):
        for number in range(1, 14):
            assert takes(schedule, pipeline, number) == _torch_takes(schedule, pipeline, number), (pipeline, number)
            nearest = nearest_micro_batches(schedule, pipeline, number)
            assert takes(schedule, pipeline, nearest)
            closer = range(number - abs(nearest - number) + 1, number + abs(nearest - number))
            assert not any(takes(schedule, pipeline, other) for other in closer if other >= 1)


def _torch_takes(schedule, pipeline, number):
    count = pipeline * default_per_rank(schedule)
    held = [SimpleNamespace(stage_index=index, num_stages=count, group_size=pipeline, group_rank=0, submod=None,
                            is_first=index == 0, is_last=index == count - 1)
            for index in range(0, count, pipeline)]
    try:
        kind = get_schedule_class(TORCH_NAMES[schedule])
        kind(held[0] if len(held) == 1 else held, number, loss_fn=lambda output, target: output)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("pipeline", "number"), [(2, 4), (4, 8), (4, 16), (3, 9)])
def test_the_bubble_of_each_schedule_equals_the_published_formula(pipeline, number):
    """(p - 1) / (v m + p - 1) with v stages on a rank: section 2.2 of https://arxiv.org/abs/2104.04473."""
    waiting = {schedule: bubble(timeline(schedule, pipeline, number)) for schedule in SCHEDULES}
    assert waiting["gpipe"] == pytest.approx((pipeline - 1) / (number + pipeline - 1))
    assert waiting["1f1b"] == pytest.approx((pipeline - 1) / (number + pipeline - 1))
    assert waiting["interleaved_1f1b"] == pytest.approx((pipeline - 1) / (2 * number + pipeline - 1))
    assert waiting["interleaved_zero_bubble"] < waiting["interleaved_1f1b"]
    assert waiting["zbv_zero_bubble"] < waiting["interleaved_1f1b"]
