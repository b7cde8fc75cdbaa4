"""The report of a pipeline: what each stage kept, what it dropped and why, with examples. Reads summary.json alone."""

from __future__ import annotations

from typing import Any

from tidewheel import storage
from tidewheel.errors import StorageError
from tidewheel.printable import printable
from tidewheel.report import by_source, colours, contamination, examples, near_dedup, packed_rows, recipe
from tidewheel.report.page import (
    Html,
    Page,
    cards,
    columns,
    count,
    details,
    join,
    percent,
    seconds,
    shorten,
    swatch,
    table,
    tag,
)
from tidewheel.report.plots import funnel, histogram

MAX_SAMPLES = 8


def write_pipeline_report(output_uri: str) -> str:
    """Write report.html beside a pipeline's summary.json, and return its URI.

    Raises:
        StorageError: there is no summary.json, or it is damaged.
    """
    output = storage.store(output_uri)
    try:
        summary = output.read_json("summary.json")
    except FileNotFoundError:
        raise StorageError("no summary.json: no pipeline has finished here", where=output_uri,
                           fix="run `tidewheel data run` with this --output first, or give its output") from None
    page = Page(f"Pipeline {summary.get('name', '')}".strip(),
                subtitle=f"recipe {summary.get('recipe_hash', '–')} · input {summary.get('input', '–')}")
    page.headline(pipeline_cards(summary))
    add_sections(page, summary, output)
    output.write("report.html", page.render())
    return output.at("report.html")


def pipeline_cards(summary: dict[str, Any]) -> Html:
    """Return a pipeline's headline figures."""
    stages = summary.get("stages", [])
    num_read = max([stage.get("documents_in", 0) for stage in stages], default=0)
    num_kept = stages[-1].get("documents_out", 0) if stages else 0
    bad, per_token = sum(summary.get("quarantine", {}).values()), summary.get("bytes_per_token")
    packed = [
        ("Tokens", count(summary.get("tokens")), f"{per_token:.2f} bytes per token" if per_token else "", ""),
        ("Packed sequences", count(summary.get("rows")), f"{percent(summary.get('utilisation') or 0)} filled", ""),
    ] if summary.get("rows") is not None else []
    written = [("Data set", count(dataset["files"]), f"files: {', '.join(dataset['formats'])}", "")
               ] if (dataset := summary.get("dataset")) else []
    return cards([
        ("Documents kept", count(num_kept), f"of {count(num_read)} read ({percent(num_kept, num_read)})", "good"),
        *packed, *written,
        ("Quarantined records", count(bad), "unreadable or invalid, with file and offset" if bad else "none", ""),
        ("Time", seconds(sum(stage.get("seconds", 0) for stage in stages)), f"{len(stages)} stages", "")])


def add_sections(page: Page, summary: dict[str, Any], output: storage.Store) -> None:
    """Add the sections about a pipeline to its own page or to a run's.

    Args:
        page: the page.
        summary: the pipeline's summary.json.
        output: the pipeline's output.
    """
    stages = [stage for stage in summary.get("stages", []) if stage.get("documents_in") or stage.get("documents_out")]
    if stages:
        page.section("What each stage kept", funnel(stages), tag("h3", "Stages"), _stages(summary),
                     *_filters(stages),
                     note="Documents before and after each stage, and their text. Tokens are estimated from bytes, "
                          "with the final tokenizer. Published units are reused.")
        page.section("What was dropped, and why", _reasons(stages), *_other_verdicts(stages),
                     examples.side_by_side(summary.get("kept", []), summary.get("samples", {}),
                                           {stage["name"]: stage.get("dropped", {}) for stage in stages},
                                           colours.of_reasons(stages)),
                     _samples(stages, summary.get("samples", {})),
                     note="Every dropped document has a line in verdicts/<stage>/*.parquet with its reason, score and, "
                          "for a duplicate, the document that was kept instead.")
    page.section("By source", *by_source.section(summary.get("sources", []), stages), note=by_source.RULE)
    page.section("Tokens by source", *by_source.tokens_section(summary.get("source_tokens", {})),
                 note=by_source.TOKENS_NOTE)
    page.section("Packed rows", *packed_rows.section(output), note=packed_rows.NOTE)
    page.section("Near-duplicates", *near_dedup.section(summary.get("near_dedup", {})), note=near_dedup.NOTE)
    page.section("Contamination", *contamination.section(summary.get("contamination", {})), note=contamination.NOTE)
    page.section("Document statistics", _histograms(summary.get("histograms", {})),
                 note="All documents that the filter judged. Dashed lines are the thresholds of the quality filter.")
    page.section("Quarantine", _quarantine(summary.get("quarantine", {})),
                 examples.quarantined(output, summary.get("quarantine", {})),
                 note="Records that cannot be read or are invalid. quarantine/*.jsonl has file, offset and reason.")
    page.section("How it was made", *recipe.section(summary.get("made", {})), note=recipe.NOTE)


def _stages(summary: dict[str, Any]) -> Html:
    rows = []
    per_token = summary.get("bytes_per_token") or 0
    for stage in summary["stages"]:
        size = stage.get("bytes_out", 0)
        num_in, num_out = stage.get("documents_in", 0), stage.get("documents_out", 0)
        units, reused = stage.get("units", 0), stage.get("units_reused", 0)
        megabytes = f"{size / 1e6:,.2f}" if size else "–"
        tokens = count(size / per_token) if size and per_token else "–"
        rows.append((stage["name"], f"{num_in:,}", f"{num_out:,}", megabytes, tokens,
                     f"{sum(stage.get('dropped', {}).values()):,}",
                     f"{stage.get('edited', 0):,}", f"{stage.get('quarantined', 0):,}",
                     f"{units} ({reused} reused)" if reused else f"{units}", seconds(stage.get("seconds"))))
    names = ("stage", "in", "out", "MB out", "≈ tokens", "dropped", "edited", "quarantined", "units", "time")
    return table(names, rows, numeric=range(1, len(names)))


def _filters(stages: list[dict[str, Any]]) -> list[Html]:
    """Return a table of each filter's cost; [] if every unit was already published."""
    rows = [(cost["name"], stage["name"], f"{cost['documents']:,}",
             f"{cost['documents'] / max(cost['seconds'], 1e-9):,.0f}", seconds(cost["seconds"]))
            for stage in stages for cost in stage.get("filters", ())]
    names = ("filter", "stage", "documents", "documents a second on a core", "time")
    return [tag("h3", "What filters cost"), table(names, rows, numeric=(2, 3, 4))] if rows else []


def _reasons(stages: list[dict[str, Any]]) -> Html:
    of_reason = colours.of_reasons(stages)
    rows = [(join([swatch(of_reason[reason]), reason.replace("_", " ")]), stage["name"], f"{dropped:,}",
             percent(dropped, stage.get("documents_in", 0), 2))
            for stage in stages for reason, dropped in sorted(stage.get("dropped", {}).items(),
                                                              key=lambda item: (-item[1], item[0])) if dropped]
    return table(("reason", "stage", "documents", "of the stage's input"), rows, numeric=(2, 3)) if rows else Html("")


def _other_verdicts(stages: list[dict[str, Any]]) -> list[Html]:
    """Return tables of edits, and of documents that steps which only annotate would have dropped."""
    blocks: list[Html] = []
    for key, title in (("edits", "Edited"), ("would_drop", "Would be dropped (steps that only annotate)")):
        rows = [(reason.replace("_", " "), stage["name"], f"{num_documents:,}",
                 percent(num_documents, stage["documents_in"], 2))
                for stage in stages
                for reason, num_documents in sorted(stage.get(key, {}).items(), key=lambda item: (-item[1], item[0]))]
        if rows:
            blocks += [tag("h3", title), table(("reason", "stage", "documents", "of the stage's input"), rows,
                                               numeric=(2, 3))]
    return blocks


def _samples(stages: list[dict[str, Any]], samples: dict[str, dict[str, list[dict[str, Any]]]]) -> Html:
    """Return folded tables of examples, one per stage and reason."""
    dropped = {stage["name"]: {**stage.get("dropped", {}), **stage.get("edits", {})} for stage in stages}
    of_reason = colours.of_reasons(stages)
    blocks: list[Html] = []
    for stage in [*dropped, *(name for name in samples if name not in dropped)]:
        counted = dropped.get(stage, {})
        for reason, entries in sorted(samples.get(stage, {}).items(), key=lambda item: -counted.get(item[0], 0)):
            if entries:
                total = counted.get(reason, len(entries))
                mark = swatch(of_reason[reason]) if reason in of_reason else None
                head = tag("span", mark, reason.replace("_", " "), " ",
                           tag("span", f"· {stage}, {len(entries[:MAX_SAMPLES])} of {total:,}", class_="count"))
                shown = entries[:MAX_SAMPLES]
                blocks.append(details(head, _examples(shown), open_=any(example.get("survivor") for example in shown)))
    return join([tag("h3", "Examples of what was dropped or edited"), *blocks]) if blocks else Html("")


def _examples(entries: list[dict[str, Any]]) -> Html:
    survivors = any(entry.get("survivor") for entry in entries)
    scores = any(entry.get("score") is not None for entry in entries)
    edits = any("after" in entry for entry in entries)
    names = ["document", "text", *(["after the edit"] if edits else []),
             *(["stays instead"] if survivors else []), *(["score"] if scores else [])]
    rows = []
    for entry in entries:
        row: list[Any] = [tag("code", shorten(printable(entry.get("id", "")), 60)),
                          examples.one_line(entry.get("text", ""), 200)]
        row += [examples.one_line(entry.get("after", ""), 200)] if edits else []
        row += [tag("code", shorten(printable(entry.get("survivor") or "–"), 60))] if survivors else []
        row += [_score(entry.get("score"))] if scores else []
        rows.append(row)
    return table(names, rows, numeric=(len(names) - 1,) if scores else ())


def _score(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "–"


def _histograms(histograms: dict[str, dict[str, Any]]) -> Html:
    # a statistic with all documents in one bin has nothing to show
    drawn = [histogram(name, item["edges"], item["counts"], item.get("limits") or item.get("threshold"))
             for name, item in histograms.items() if sum(map(bool, item.get("counts", []))) > 1]
    return columns(*drawn) if drawn else Html("")


def _quarantine(reasons: dict[str, int]) -> Html:
    rows = [(reason.replace("_", " "), f"{num_records:,}") for reason, num_records in sorted(reasons.items(),
                                                                                  key=lambda item: -item[1])]
    return table(("reason", "records"), rows, numeric=(1,)) if rows else Html("")
