"""The report's section about near-deduplication: expected and measured recall of the bands, and the clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.report.page import Html, cards, columns, count, join, percent, table, tag
from tidewheel.report.plots import Scale, Svg, grid, histogram, legend

NOTE = ("Two documents are compared when one band of their MinHash signatures is equal; a removal needs a verified "
        "edge to a better document that stays. Measured on sampled pairs with their exact Jaccard similarity.")
_CURVE_POINTS = 101
MIN_PAIRS = 5  # fewer in a bin say nothing


def section(found: Mapping[str, Any]) -> list[Html]:
    """Return the blocks of the section from `near_dedup` of summary.json; [] if the recipe has no such step."""
    if not found:
        return []
    sample = found.get("sample") or {}
    blocks = [_cards(found, sample), s_curve(found["bands"], found["rows"], found["min_jaccard"],
                                             sample.get("bins") or [])]
    similarity = found.get("estimated_jaccard")
    drawn = []
    if similarity and sum(map(bool, similarity["counts"])) > 1:
        drawn.append(tag("div", tag("h3", "Estimated similarity of candidate pairs"), histogram(
            "similarity", similarity["edges"], similarity["counts"], similarity.get("limits"))))
    if clusters := _clusters(found):
        drawn.append(clusters)
    return [*blocks, columns(*drawn)] if drawn else blocks


def _cards(found: Mapping[str, Any], sample: Mapping[str, Any]) -> Html:
    unit = {"words": "word", "characters": "character"}.get(found.get("unit", "words"), "")
    shown = [
        ("Dropped", count(found["dropped"]), f"of {count(found['documents'])} documents", ""),
        ("Candidate pairs", count(found["candidates"]), f"{count(found['edges'])} at {found['min_jaccard']:g} or above",
         ""),
        ("Signatures", f"{found['bands']} × {found['rows']}", f"bands × rows over {unit} {found['ngram']}-grams", ""),
        ("Largest cluster", count(found.get("largest_cluster")), "a kept document and its duplicates", ""),
    ]
    if sample.get("precision") is not None:
        shown.append(("Precision", percent(sample["precision"]),
                      f"of {count(sample['accepted'])} sampled removals are truly that similar", ""))
    return cards(shown)


def s_curve(bands: int, rows: int, threshold: float, bins: Sequence[Mapping[str, Any]]) -> Html:
    """Draw the probability 1 - (1 - s^rows)^bands that a pair of similarity s is compared, and the measured recall.

    Args:
        bands: bands of a signature.
        rows: hash values in a band.
        threshold: least similarity of duplicates.
        bins: measured recall by similarity, as in summary.json.
    """
    svg = Svg(270, "share of pairs found, by similarity: theory and measurement")
    left, right = 60.0, 900.0
    x, y = Scale(0, 1, left, right), Scale(0, 1, 230, 30)
    grid(svg, y, left, right, "share of pairs that are compared", count=5, form="{:.0%}")
    for tenth in range(11):
        svg.text(x(tenth / 10), 250, f"{tenth / 10:g}", "middle")
    svg.text(right + 14, 250, "Jaccard similarity")
    svg.line(x(threshold), 24, x(threshold), 234, "var(--bad)", 1.5, "4 3")
    svg.text(x(threshold) - 6, 40, f"threshold {threshold:g}", "end", "var(--bad)")
    steps = [at / (_CURVE_POINTS - 1) for at in range(_CURVE_POINTS)]
    svg.curve([(x(s), y(1 - (1 - s**rows) ** bands)) for s in steps], "var(--accent)", 2)
    measured = [one for one in bins if one.get("recall") is not None and one["pairs"] >= MIN_PAIRS]
    for one in measured:
        middle = (one["from"] + one["to"]) / 2
        svg.dot(x(middle), y(one["recall"]), "var(--second)", radius=min(3 + one["pairs"] ** 0.5 / 4, 9),
                title=f"{one['from']:g} to {one['to']:g}: {one['recall']:.1%} of about {one['pairs']:,.0f} pairs, "
                      f"{one['curve']:.1%} by the curve")
    marks = [("var(--accent)", f"1 − (1 − s^{rows})^{bands}")]
    if measured:
        marks.append(("var(--second)", "measured on sampled pairs (larger: more pairs)"))
    return join([svg.render(), legend(marks)])


def _clusters(found: Mapping[str, Any]) -> Html | None:
    rows = [(_range(one), f"{one['clusters']:,}") for one in found.get("cluster_sizes", []) if one["clusters"]]
    if not rows:
        return None
    one_in = found.get("clusters_counted_one_in", 1)
    told = "Clusters by size" if one_in == 1 else f"Clusters by size (one in {one_in:,} counted)"
    return tag("div", tag("h3", told), table(("documents", "clusters"), rows, numeric=(1,)))


def _range(one: Mapping[str, Any]) -> str:
    first, last = one["from"], one["to"]
    return f"{first:,} or more" if last is None else f"{first:,}" if last == first else f"{first:,} to {last:,}"
