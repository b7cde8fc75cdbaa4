"""Mixtures: exact shares, own orders, phases and limits at their positions, everything a function of the position."""

from __future__ import annotations

import dataclasses
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.shards.helpers import LENGTH, write_set
from tidewheel.config import build
from tidewheel.errors import ConfigError, ShardError
from tidewheel.shards.config import MixtureConfig
from tidewheel.shards.loader import Loader
from tidewheel.shards.mixture import BLOCK, MAX_BLOCK, Mixture, Phase, integer_weights, temperature_weights
from tidewheel.shards.source import Source, SourceReader, open_source

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any)


def largest_remainder(places: int, weights: list[int]) -> list[int]:
    """Hamilton's method by its definition."""
    shares = [Fraction(places * weight, sum(weights)) for weight in weights]
    counts = [int(share) for share in shares]
    order = sorted(range(len(weights)), key=lambda d: (counts[d] - shares[d], d))
    for domain in order[:places - sum(counts)]:
        counts[domain] += 1
    return counts


@given(WEIGHTS, st.integers(0, 1 << 64), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_blocks_end_with_exact_shares_and_no_prefix_is_far_off(weights: list[int], seed: int, block: int):
    mixture = Mixture([Phase(None, tuple(weights))], [None] * len(weights), seed)
    assert mixture.spans[0].block == BLOCK
    start = block * BLOCK
    domains, _ = mixture.visits(np.arange(start, start + 2 * BLOCK))
    for ends in (start + BLOCK, start + 2 * BLOCK):
        assert mixture.counts(ends) == largest_remainder(ends, weights)
    seen = np.array(mixture.counts(start))
    shares = np.array(weights) / sum(weights)
    for count, domain in enumerate(domains.tolist(), 1):
        seen[domain] += 1
        assert np.all(np.abs(seen - shares * (start + count)) <= 2 + len(weights) * (shares + 1 / BLOCK))
        if count % 97 == 0:
            assert mixture.counts(start + count) == seen.tolist()


@given(WEIGHTS, st.integers(0, 99), st.lists(st.integers(1, 5000), min_size=6, max_size=6), st.integers(0, 3000),
       st.integers(0, 3000))
@settings(max_examples=60, deadline=None)
def test_walking_the_positions_is_the_oracle(weights, seed, limits, first, second):
    """Phases, limits and visits against counting position after position."""
    other = tuple(reversed(weights))
    limits = [limit if limit % 3 else None for limit in limits[:len(weights)]]
    phases = [Phase(first + 1, tuple(weights)), Phase(first + second + 2, other), Phase(None, tuple(weights))]
    mixture = Mixture(phases, limits, seed)
    count = min(9000, mixture.end if mixture.end is not None else 9000)
    domains, visits = mixture.visits(np.arange(count))
    seen: Counter[int] = Counter()
    for position, (domain, visit) in enumerate(zip(domains.tolist(), visits.tolist())):
        phase = next(phase for phase in phases if phase.end is None or position < phase.end)
        assert phase.weights[domain] > 0
        assert visit == seen[domain]  # so the k-th visit is the k-th row of the domain's order
        seen[domain] += 1
        assert limits[domain] is None or seen[domain] <= limits[domain]
    assert mixture.counts(count) == [seen[domain] for domain in range(len(weights))]
    for span in mixture.spans:  # shares hold inside each span as well, at the ends of its blocks
        end = min(count, span.end or count)
        whole = (end - span.start) // span.block
        if whole > 0:
            block_end = span.start + whole * span.block
            got = [after - before for after, before in zip(mixture.counts(block_end), span.before)]
            assert got == largest_remainder(whole * span.block, list(span.weights))
    if mixture.end is not None and mixture.end <= 9000:
        phase = next(phase for phase in phases if phase.end is None or mixture.end < phase.end)
        assert all(limits[domain] is not None and seen[domain] >= limits[domain]
                   for domain, weight in enumerate(phase.weights) if weight)
        with pytest.raises(ValueError, match="ends after"):
            mixture.visits(np.array([mixture.end]))


@given(WEIGHTS, st.integers(0, 99), st.lists(st.integers(0, 1 << 45), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_a_position_does_not_depend_on_its_company(weights, seed, positions):
    def mixture() -> Mixture:
        return Mixture([Phase(7000, (1,) * len(weights)), Phase(None, tuple(weights))], [None] * len(weights), seed)

    together = np.stack(mixture().visits(np.array(positions)))
    alone = np.concatenate([np.stack(mixture().visits(np.array([position]))) for position in positions], axis=1)
    assert np.array_equal(together, alone)


def test_rare_domains_get_longer_blocks_and_are_never_starved():
    weights = (5000, 4999, 1)
    mixture = Mixture([Phase(None, weights)], [None] * 3, 0)
    block = mixture.spans[0].block
    assert block == 16384
    domains, _ = mixture.visits(np.arange(40 * block))
    assert all(np.count_nonzero(part == 2) in (1, 2) for part in domains.reshape(40, block))
    with pytest.raises(ValueError, match="smallest weight"):
        Mixture([Phase(None, (MAX_BLOCK, 1))], [None] * 2, 0)


def test_far_positions_are_exact():
    """Beyond what 64-bit products and floats hold."""
    far = (1 << 61) - (1 << 61) % BLOCK
    weights = [10**12 + 1, 10**12, 10**12 - 1]
    mixture = Mixture([Phase(None, tuple(weights))], [None] * 3, 4)
    assert mixture.counts(far) == largest_remainder(far, weights)
    _, visits = mixture.visits(np.arange(far, far + 5))
    assert visits.min() > 0


def test_known_values():
    """A change would make old runs unrepeatable: this must never change."""
    mixture = Mixture([Phase(5, (1, 1, 0)), Phase(None, (5, 3, 2))], [None, 40, None], 7)
    domains, visits = mixture.visits(np.array([0, 1, 2, 3, 4, 5, 6, 7, 2000, 10**12]))
    assert domains.tolist() == KNOWN[0]
    assert visits.tolist() == KNOWN[1]


KNOWN = ([0, 1, 0, 1, 1, 1, 0, 2, 0, 0],
         [0, 0, 1, 1, 2, 3, 2, 0, 1400, 714285714258])


def test_weights():
    assert integer_weights([0.1, 0.2, 3]) == (1, 2, 30)
    assert integer_weights([1e-3, 0]) == (1, 0)
    assert [float(weight) for weight in temperature_weights([100, 10_000], 2.0)] == [10, 100]
    assert [float(weight) for weight in temperature_weights([7, 9], 1.0)] == [7, 9]
    low, high = temperature_weights([10, 10**12], 1000.0)
    assert float(high / low) < 1.03


@pytest.mark.parametrize(("values", "told"), [
    ({"domains": {}}, "at least 1"), ({"domains": {"a/b": {"shards": "x"}}}, "not a valid name"),
    ({"domains": {"a": {"shards": "x", "weight": 1}, "b": {"shards": "y"}}}, "without a weight: b"),
    ({"domains": {"a": {"shards": "x", "weight": 0}}}, "all weights are 0"),
    ({"domains": {"a": {"shards": "x", "weight": 1}}, "temperature": 2}, "temperature has no effect"),
    ({"domains": {"a": {"shards": "x"}}, "phases": [{"until_tokens": 9, "weights": {"b": 1}}]}, "no domain b"),
    ({"domains": {"a": {"shards": "x"}}, "phases": [{"until_tokens": 9, "weights": {"a": 0}}]}, "at least one"),
    ({"domains": {"a": {"shards": "x"}}, "phases": [{"until_tokens": 9, "weights": {"a": 1}}] * 2}, "must grow"),
    ({"domains": {"a": {"shard": "x"}}}, "shards")])
def test_wrong_settings_are_told(values, told):
    with pytest.raises(ConfigError, match=told):
        build(MixtureConfig, values)


def mixture_of(folder, **settings) -> MixtureConfig:
    write_set(folder / "web", rows=(30, 12))
    write_set(folder / "code", rows=(9,), documents=3)
    domains = {name: {"shards": str(folder / name)} for name in ("web", "code")}
    for name, weight in settings.pop("weights", {}).items():
        domains[name]["weight"] = weight
    return build(MixtureConfig, {"domains": domains, **settings})


def test_each_row_once_in_each_epoch_of_its_domain(tmp_path):
    source = open_source("", mixture_of(tmp_path, weights={"web": 3, "code": 1}, max_repetitions=0), 5)
    domains, shards, rows = source.locate(np.arange(900))
    _, visits = source.visits(np.arange(900))
    for number, domain in enumerate(source.domains):
        in_domain = domains == number
        total = domain.manifest.rows
        for epoch in range(int(visits[in_domain].max()) // total):
            inside = in_domain & (visits // total == epoch)
            assert len(set(zip(shards[inside].tolist(), rows[inside].tolist()))) == total == np.count_nonzero(inside)
        expected = source.orders[number].locate(np.arange(np.count_nonzero(in_domain)))
        assert [shards[in_domain].tolist(), rows[in_domain].tolist()] == [part.tolist() for part in expected]


def test_phases_switch_at_their_token(tmp_path):
    config = mixture_of(tmp_path, weights={"web": 1, "code": 0}, max_repetitions=0,
                        phases=[{"until_tokens": 20 * LENGTH, "weights": {"code": 1}},
                                {"until_tokens": 50 * LENGTH - 1, "weights": {"code": 1, "web": 1}}])
    domains, _ = open_source("", config, 5).visits(np.arange(200))
    names = np.array(["code", "web"])[domains]
    assert set(names[:20]) == {"code"}
    assert set(names[20:50]) == {"code", "web"}
    assert set(names[50:]) == {"web"}


def test_repetitions_are_capped_and_the_share_falls_to_the_others(tmp_path):
    source = open_source("", mixture_of(tmp_path, weights={"web": 1, "code": 1}, max_repetitions=2.5), 5)
    assert source.end == int(2.5 * 42) + int(2.5 * 9)
    counts = source.proportions(100)
    assert [(row["domain"], row["sequences"], row["epochs"]) for row in counts] == [
        ("code", 22, 22 / 9), ("web", 78, 78 / 42)]
    first, second = source.spans()
    assert first["shares"] == {"code": 0.5, "web": 0.5}
    assert second["shares"] == {"code": 0.0, "web": 1.0}
    domains, visits = source.visits(np.arange(first["end"]))
    assert (domains[-1], visits[-1]) == (0, 21)
    with pytest.raises(ValueError, match="ends after 127"):
        source.locate(np.array([127]))


def test_an_added_domain_keeps_the_others_orders(tmp_path):
    config = mixture_of(tmp_path)
    alone = build(MixtureConfig, {"domains": {"web": {"shards": str(tmp_path / "web")}}})
    both, one = open_source("", config, 5), open_source("", alone, 5)
    assert np.array_equal(both.orders[1].locate(np.arange(42)), one.orders[0].locate(np.arange(42)))
    assert both.hash != one.hash


def test_rows_come_from_their_domain(tmp_path):
    source = open_source("", mixture_of(tmp_path), 5)
    reader = SourceReader(source)
    rows = reader.read(np.arange(40, 70))
    assert rows.ids == source.ids(40, 30)
    domains, shards, inside = source.locate(np.arange(40, 70))
    for place, (domain, shard, row) in enumerate(zip(domains.tolist(), shards.tolist(), inside.tolist())):
        name = source.domains[domain]
        assert rows.ids[place] == f"{name.name}/{name.manifest.shards[shard].name}:{row}"
        alone = reader._sets[domain].rows(np.array([shard]), np.array([row]))
        assert np.array_equal(rows.tokens[place], alone.tokens[0])
        assert np.array_equal(rows.segment_ids[place], alone.segment_ids[0])
    parts = [reader.read(np.arange(40 + part, 70, 2)).ids for part in range(2)]  # two ranks read what one would
    assert sorted(parts[0] + parts[1]) == sorted(rows.ids)
    ahead = Loader(reader)
    assert [ahead.batch(np.arange(start, start + 8)).ids for start in (0, 8, 16)] == [
        source.ids(start, 8) for start in (0, 8, 16)]
    ahead.close()


def test_reading_ahead_stops_at_the_end(tmp_path):
    source = open_source("", mixture_of(tmp_path, max_repetitions=2), 5)
    assert source.end is not None
    reader, last = SourceReader(source), source.end // 4 * 4
    for start in range(0, last, 4):
        assert reader.read(np.arange(start, start + 4)).ids == source.ids(start, 4)
    with pytest.raises(ValueError, match="end"):
        reader.read(np.arange(last, last + 4))


@pytest.mark.parametrize(("change", "told"), [
    ({"sequence_length": 13}, "sequence_length"), ({"vocabulary_size": 256}, "vocabulary_size"),
    ({"token_dtype": "uint32"}, "token_dtype"), ({"loss_mask": True}, "loss_mask"),
    ({"tokenizer": {"file": "t", "hash": "blake3-" + "0" * 64, "eos": 0, "pad": 1}}, "another tokenizer"),
    ({"shards": ()}, "empty")])
def test_domains_must_agree(tmp_path, change, told):
    config = mixture_of(tmp_path)
    manifests = {domain.name: domain.manifest for domain in open_source("", config, 0).domains}
    manifests["web"] = dataclasses.replace(manifests["web"], **change)
    with pytest.raises(ShardError, match=told) as error:
        Source.mixed(config, manifests, 0)
    assert error.value.fix
