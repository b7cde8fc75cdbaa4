"""The report's section about experts."""

from __future__ import annotations

from tidewheel.report import experts


def line(step: int, counts: list[int]) -> dict:
    ratio = max(counts) * len(counts) / sum(counts)
    return {"step": step, "loss": 1.0, "expert_load_max": ratio, "expert_load_mean_max": ratio, "router_entropy": 1.25,
            "dropped_share": 0.0, "expert_load_by_layer": {"3": ratio}, "expert_tokens": {"3": counts}}


def test_a_model_without_experts_has_no_section():
    assert experts.section([{"step": 1, "loss": 2.0}]) == []


def test_loads_are_those_of_the_last_tenth():
    lines = [line(step, [40, 0] if step <= 18 else [10, 30]) for step in range(1, 21)]
    text = "".join(map(str, experts.section(lines)))
    assert "layer 3, expert 0: 0.50" in text
    assert "layer 3, expert 1: 1.50" in text
    assert "layer 3: 2.00" in text, "the largest load over time"
    assert "1.250" in text


def test_loads_of_many_experts_are_merged_and_of_too_many_left_out():
    many = "".join(map(str, experts.section([line(1, [1] * 599 + [601])])))
    assert "layer 3, expert 597 to 599: 300.50" in many
    without = line(1, [1, 1])
    del without["expert_tokens"]
    text = "".join(map(str, experts.section([without])))
    assert "Load of each expert" not in text
    assert "Largest load of each layer" in text


def test_colours_tell_more_from_less_and_grow_with_the_distance():
    assert experts.colour(1.0)[1] < experts.colour(1.3)[1] < experts.colour(2.0)[1] == experts.colour(9.0)[1] == 1.0
    assert experts.colour(0.5)[1] == 1.0
    assert experts.colour(0.0)[1] == 1.0
    assert experts.colour(1.2)[0] != experts.colour(0.8)[0]


def test_loads_are_written_in_wide_cells_and_the_key_shows_their_colours():
    few = "".join(map(str, experts.section([line(1, [10, 30])])))
    assert ">0.50</text>" in few
    assert ">1.50</text>" in few
    many = "".join(map(str, experts.section([line(1, [1, 3] * 32)])))
    assert many.count(">1.50</text>") == 1, "cells of 64 experts are too narrow, but not that of the only step"
    for load in experts.LOADS:
        assert f">{load:g}</text>" in many
