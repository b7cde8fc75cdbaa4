"""The page of a preview: a slider for each threshold, and its effect on the documents."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tidewheel.data.preview import Preview
from tidewheel.printable import printable, printable_lines
from tidewheel.report.page import Html, Page, join, table, tag

_TITLES = ("setting", "", "", "limit", "documents dropped")
SCRIPT = Path(__file__).parent / "preview.js"


def render(preview: Preview, *, name: str, input: str) -> bytes:
    """Return one self-contained HTML page.

    Args:
        preview: the preview.
        name: name of the recipe.
        input: URI of the documents.
    """
    page = Page(f"Preview of {name}", subtitle=f"{len(preview.documents)} documents of {input}")
    page.section("Thresholds", tag("p", "", id="preview-kept"),
                 tag("div", tag("table", tag("thead", tag("tr", *(tag("th", title) for title in _TITLES))),
                                tag("tbody", id="preview-thresholds")), class_="table"),
                 tag("pre", "", id="preview-overrides"),
                 note="Each limit applies to all documents, with the text that earlier filters leave. The preview does "
                      "not look for duplicates. To use limits that you moved, add the lines below the table to "
                      "`tidewheel data run`.")
    only = tag("label", tag("input", type="checkbox", id="preview-only-dropped"), " only what is dropped")
    page.section("Documents", only, tag("div", id="preview-documents"))
    if preview.quarantined:
        rows = [(reason.replace("_", " "), f"{count:,}") for reason, count in preview.quarantined.items()]
        page.section("Records that cannot be used", table(("reason", "records"), rows, numeric=(1,)))
    page.section("Data", join([_data(preview), Html(f"<script>{SCRIPT.read_text(encoding='utf-8')}</script>")]),
                 note="The page holds the documents' beginnings and needs no network.")
    return page.render()


def _data(preview: Preview) -> Html:
    """Return the preview as JSON that cannot end its element."""
    documents = [{**asdict(document), "id": printable(document.id), "source": printable(document.source),
                  "text": printable_lines(document.text)} for document in preview.documents]
    value = {"documents": documents,
             "thresholds": [asdict(document) for document in preview.thresholds]}
    text = json.dumps(value, ensure_ascii=True).replace("<", "\\u003c").replace("&", "\\u0026")
    return Html(f'<script type="application/json" id="preview-data">{text}</script>')
