"""A small HTML builder. It escapes every string, and a page contains its own style and needs no other file.

    page = Page("demo run", "finished")
    page.section("Loss", figure, note="nats per token")
    store.write("report.html", page.render())
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_VOID = frozenset({"br", "hr", "meta", "rect", "line", "path", "circle", "polyline", "input"})


class Html(str):
    """Finished markup, which is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """Return an element.

    Args:
        name: name of the element.
        children: content; strings are escaped, `Html` is not, None is left out.
        attributes: attributes; class_ is "class", data_x is "data-x", None is left out.
    """
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
                    for key, value in attributes.items() if value is not None)
    if name in _VOID and not children:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Html:
    """Join elements and text. None is left out."""
    return Html("".join(child if isinstance(child, Html) else html.escape(str(child))
                        for child in children if child is not None))


def cards(items: Sequence[tuple[str, str, Any, str]]) -> Html:
    """Return headline figures: (title, value, note, tone), where tone is "", "good" or "bad"."""
    return tag("div", *(tag("div", tag("div", title, class_="card-title"), tag("div", value, class_="card-value"),
                            tag("div", note, class_="card-note"), class_=f"card {tone}".strip())
                        for title, value, note, tone in items), class_="cards")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numeric: Sequence[int] = ()) -> Html:
    """Return a table.

    Args:
        columns: titles.
        rows: cells.
        numeric: indexes of columns that are aligned right, with figures of equal width.
    """
    def cells(kind: str, row: Sequence[Any]) -> Html:
        return tag("tr", *(tag(kind, cell, class_="number" if at in numeric else None) for at, cell in enumerate(row)))

    return tag("div", tag("table", tag("thead", cells("th", columns)), tag("tbody", *(cells("td", r) for r in rows))),
               class_="table")


def details(summary: Any, *body: Any, open_: bool = False) -> Html:
    """Return a part that folds.

    Args:
        summary: the line that is always shown.
        body: the rest.
        open_: whether it is unfolded at first.
    """
    return tag("details", tag("summary", summary), *body, open="open" if open_ else None)


def columns(*blocks: Html) -> Html:
    """Place blocks beside each other where there is room."""
    return tag("div", *blocks, class_="columns")


def note(*text: Any) -> Html:
    """Return a paragraph of small print."""
    return tag("p", *text, class_="note")


def badge(text: str, tone: str = "") -> Html:
    """Return a short word in a coloured frame."""
    return tag("span", text, class_=f"badge {tone}".strip())


def swatch(colour: str) -> Html:
    """Return a small square in a figure's colour, for its legend."""
    return tag("span", class_="swatch", style=f"background:{colour}")


class Page:
    """A page made of sections.

    Args:
        title: headline of the page.
        status: element beside the headline.
        subtitle: line below the headline.
    """

    def __init__(self, title: str, status: Any = None, *, subtitle: str = "") -> None:
        self._title = title
        self._head = tag("header", tag("div", tag("h1", title), status, class_="title"),
                         tag("p", subtitle, class_="subtitle") if subtitle else None)
        self._sections: list[tuple[str, Html]] = []

    def headline(self, *blocks: Any) -> None:
        """Add blocks right below the title, without a frame."""
        self._head = join([self._head, *blocks])

    def section(self, title: str, *blocks: Any, note: str = "") -> None:
        """Add a section, unless it has no blocks.

        Args:
            title: headline of the section.
            blocks: content; None and "" are left out.
            note: small print below the headline.
        """
        if any(block is not None and block != "" for block in blocks):
            anchor = "".join(char if char.isalnum() else "-" for char in title.lower())
            self._sections.append((anchor, tag("section", tag("h2", title),
                                               tag("p", note, class_="note") if note else None, *blocks, id=anchor)))

    def render(self) -> bytes:
        """Return the whole page as UTF-8."""
        style = Html(f"<style>{(Path(__file__).parent / 'page.css').read_text(encoding='utf-8')}</style>")
        head = tag("head", tag("meta", charset="utf-8"), tag("title", self._title),
                   tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
                   tag("meta", name="color-scheme", content="light dark"), style)
        body = tag("body", tag("main", self._head, *(section for _, section in self._sections),
                               tag("footer", "Tidewheel: the result does not depend on the cluster.")))
        return ("<!doctype html>\n" + tag("html", head, body, lang="en") + "\n").encode()


def count(value: float | None) -> str:
    """Format a count: 12,345, or 1.23 M and 4.56 B where more digits would be noise."""
    if value is None:
        return "–"
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Format seconds: 0.12 s, 12.3 s, 4 min 05 s, 3 h 20 min."""
    if value is None:
        return "–"
    if value < 60:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def percent(part: float, whole: float = 1.0, digits: int = 1) -> str:
    """Format a share; "–" when the whole is zero.

    Args:
        part: part of the whole.
        whole: the whole.
        digits: digits after the point.
    """
    return f"{100 * part / whole:.{digits}f} %" if whole else "–"


def shorten(text: Any, limit: int) -> str:
    """Return at most `limit` characters, with an ellipsis in place of the rest."""
    text = str(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
