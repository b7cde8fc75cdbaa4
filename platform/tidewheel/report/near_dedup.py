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


def section(near_dedup: Mapping[str, Any]) -> list[Html]:
    """Return the blocks of the section from `near_dedup` of summary.json; [] if the recipe has no such step."""
    if not near_dedup:
        return []
    sample = near_dedup.get("sample") or {}
    blocks = [_cards(near_dedup, sample), s_curve(near_dedup["bands"], near_dedup["rows"], near_dedup["min_jaccard"],
                                                  sample.get("bins") or [])]
    similarity = near_dedup.get("estimated_jaccard")
    drawn = []
    if similarity and sum(map(bool, similarity["counts"])) > 1:
        drawn.append(tag("div", tag("h3", "Estimated similarity of candidate pairs"), histogram(
            "similarity", similarity["edges"], similarity["counts"], similarity.get("limits"))))
    if clusters := _clusters(near_dedup):
        drawn.append(clusters)
    return [*blocks, columns(*drawn)] if drawn else blocks


def _cards(near_dedup: Mapping[str, Any], sample: Mapping[str, Any]) -> Html:
    unit = {"words": "word", "characters": "character"}.get(near_dedup.get("unit", "words"), "")
    shown = [
        ("Dropped", count(near_dedup["dropped"]), f"of {count(near_dedup['documents'])} documents", ""),
        ("Candidate pairs", count(near_dedup["candidates"]),
         f"{count(near_dedup['edges'])} at {near_dedup['min_jaccard']:g} or above", ""),
        ("Signatures", f"{near_dedup['bands']} × {near_dedup['rows']}",
         f"bands × rows over {unit} {near_dedup['ngram']}-grams", ""),
        ("Largest cluster", count(near_dedup.get("largest_cluster")), "a kept document and its duplicates", ""),
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
    measured = [bin_ for bin_ in bins if bin_.get("recall") is not None and bin_["pairs"] >= MIN_PAIRS]
    for bin_ in measured:
        middle = (bin_["from"] + bin_["to"]) / 2
        svg.dot(x(middle), y(bin_["recall"]), "var(--second)", radius=min(3 + bin_["pairs"] ** 0.5 / 4, 9),
                title=f"{bin_['from']:g} to {bin_['to']:g}: {bin_['recall']:.1%} of about "
                      f"{bin_['pairs']:,.0f} pairs, {bin_['curve']:.1%} by the curve")
    marks = [("var(--accent)", f"1 − (1 − s^{rows})^{bands}")]
    if measured:
        marks.append(("var(--second)", "measured on sampled pairs (larger: more pairs)"))
    return join([svg.render(), legend(marks)])


def _clusters(near_dedup: Mapping[str, Any]) -> Html | None:
    rows = [(_range(size_bin), f"{size_bin['clusters']:,}")
            for size_bin in near_dedup.get("cluster_sizes", []) if size_bin["clusters"]]
    if not rows:
        return None
    one_in = near_dedup.get("clusters_counted_one_in", 1)
    title = "Clusters by size" if one_in == 1 else f"Clusters by size (one in {one_in:,} counted)"
    return tag("div", tag("h3", title), table(("documents", "clusters"), rows, numeric=(1,)))


def _range(size_bin: Mapping[str, Any]) -> str:
    first, last = size_bin["from"], size_bin["to"]
    return f"{first:,} or more" if last is None else f"{first:,}" if last == first else f"{first:,} to {last:,}"
