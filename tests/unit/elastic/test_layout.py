from hypothesis import given
from hypothesis import strategies as st

from tidewheel.elastic.layout import largest_fit, legal_sizes, slots


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 600))
def test_every_legal_size_gives_equal_shares(virtual, minimum, maximum):
    sizes = legal_sizes(virtual, minimum, maximum)
    assert sizes == tuple(sorted(set(sizes)))
    assert set(sizes) == {size for size in range(1, virtual + 1) if virtual % size == 0 and minimum <= size <= maximum}


@given(st.integers(1, 64), st.integers(0, 80))
def test_the_largest_size_that_fits_is_chosen(virtual, available):
    sizes = legal_sizes(virtual)
    fit = largest_fit(sizes, available)
    assert fit <= available
    assert all(size <= fit or size > available for size in sizes)


def test_sizes_without_an_upper_bound_and_without_a_fit():
    assert legal_sizes(6) == (1, 2, 3, 6)
    assert legal_sizes(4, 3, 3) == ()
    assert largest_fit((2, 4), 1) == 0


def test_a_worker_never_spans_two_nodes():
    assert slots([{"CPU": 3}, {"CPU": 3}], {"CPU": 2}) == 2
    assert slots([{"CPU": 1}], {"CPU": 0.1}) == 10
    assert slots([{"CPU": 8, "GPU": 2}, {"CPU": 8}], {"CPU": 1, "GPU": 1}) == 2
    assert slots([{"CPU": 8, "nic": 3}, {"CPU": 1, "nic": 3}], {"CPU": 2, "nic": 1}) == 3
    assert slots([], {"CPU": 1}) == 0
