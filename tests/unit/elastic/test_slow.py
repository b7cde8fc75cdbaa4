"""A slow worker's node is left when the run is faster without it, and only then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.elastic.slow import judge


@pytest.mark.parametrize(("ratio", "size", "others", "leave"), [
    (1.6, 4, 4, True),  # a standby worker takes over: nothing is lost
    (1.6, 4, 3, True),  # 3 workers take 4/3 as long, the slow one makes all take 1.6 times as long
    (1.3, 4, 3, False),
    (1.6, 2, 1, False),  # one worker would take twice as long
    (2.5, 2, 1, True),
    (9.0, 2, 0, False),  # there is no other worker
])
def test_a_slow_worker_is_replaced_only_if_the_run_gains(ratio: float, size: int, others: int, leave: bool):
    assert judge("replace", ratio, size=size, others=others, sizes=(1, 2, 3, 4)).leave is leave
    assert not judge("report", ratio, size=size, others=others, sizes=(1, 2, 3, 4)).leave


def test_a_slow_worker_stays_if_the_others_are_no_legal_number():
    """Four virtual ranks: three workers cannot share them, so two would do the work of four."""
    assert not judge("replace", 1.9, size=4, others=3, sizes=(1, 2, 4)).leave
    assert judge("replace", 2.1, size=4, others=3, sizes=(1, 2, 4)).leave
    assert judge("replace", 9.0, size=4, others=3, sizes=(4,)).reason == "3 other worker(s) are not a legal number"


@given(ratio=st.floats(1.01, 10), size=st.integers(1, 8), others=st.integers(0, 9))
def test_a_step_never_takes_longer(ratio: float, size: int, others: int):
    sizes = (1, 2, 4, 8)
    if judge("replace", ratio, size=size, others=others, sizes=sizes).leave:
        rest = max(candidate for candidate in sizes if candidate <= others)
        assert size / rest < ratio or rest >= size
