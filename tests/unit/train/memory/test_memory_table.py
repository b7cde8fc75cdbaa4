"""The memory table's arithmetic on a small model and, for what costs nothing, on the 7B one."""

import pytest

from tests.benchmarks.memory_table import MODELS, STAGES, Measured, Row, arithmetic, measure, within

SMALL = {"dim": 128, "num_layers": 3, "num_heads": 4, "ffn_dim": 384, "qk_norm": False}


@pytest.mark.parametrize(("data", "stage"), STAGES.items())
def test_memory_of_each_zero_stage(data: str, stage: int):
    measured = measure(SMALL, 1024, 8, data)
    row = Row("small", 8, data, arithmetic(measured.billions, 8, stage))
    assert within(row, measured), (measured, row)
    assert bool(measured.beside) == (stage >= 2)


@pytest.mark.parametrize(("ranks", "data", "published"), [(1, "ddp", (14.0, 14.0, 84.0)),
                                                          (8, "zero1", (14.0, 14.0, 10.5))])
def test_seven_billion_parameters(ranks: int, data: str, published: tuple[float, float, float]):
    measured = measure(*MODELS["7b"], ranks, data)
    assert measured.billions == pytest.approx(7.0, rel=1e-4)
    assert within(Row("7b", ranks, data, published), measured), measured


def test_a_wrong_figure_is_seen():
    row = Row("7b", 8, "zero3", arithmetic(7, 8, 3))
    assert row.published == (1.75, 1.75, 10.5)
    assert within(row, Measured(1.75, 0, 3.5, 10.5, 7))
    assert not within(row, Measured(1.75, 0, 1.75, 10.5, 7))
