"""The report's section about a mixture: each domain's share of the run, how often it is read, and the phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.report.colours import PALETTE
from tidewheel.report.page import Html, count, join, percent, swatch, table
from tidewheel.report.plots import stacked

NOTE = ("What the planned run reads of each domain: whole sequences, fixed by the weights alone. An epoch is every row "
        "of a domain once; the audit recomputes the same from the digests of the batches.")


def section(mixture: Mapping[str, Any]) -> list[Html]:
    """Return the blocks of the section from `data.mixture` of run.json; [] if the run reads one shard set."""
    domains: Sequence[Mapping[str, Any]] = mixture.get("proportions") or []
    if not domains:
        return []
    names = [str(domain["domain"]) for domain in domains]
    colours = {name: PALETTE[at % len(PALETTE)] for at, name in enumerate(names)}
    parts = [(name, float(domain["sequences"]), colours[name]) for name, domain in zip(names, domains, strict=True)]
    rows = [(join([swatch(colours[name]), name]), f"{domain['sequences']:,}", percent(domain["share"], 1, 2),
             f"{domain['epochs']:.3f}", f"{domain['rows']:,}", count(domain["tokens"]))
            for name, domain in zip(names, domains, strict=True)]
    blocks = [stacked(parts, lambda amount: f"{amount:,.0f} sequences"),
              table(("domain", "sequences", "share", "epochs", "rows of the set", "its tokens"), rows,
                    numeric=(1, 2, 3, 4, 5))]
    spans = mixture.get("spans") or []
    return [*blocks, _spans(spans, names)] if len(spans) > 1 else blocks


def _spans(spans: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Html:
    """Return a table of shares by phase. A domain that reached its limit leaves its share to the others."""
    rows = [(f"{span['start']:,}", "the end" if span["end"] is None else f"{span['end']:,}",
             *(percent(span["shares"].get(name, 0), 1, 2) for name in names)) for span in spans]
    return table(("from sequence", "to", *names), rows, numeric=range(len(names) + 2))
