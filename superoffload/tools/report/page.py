"""Builds one self-contained HTML page: no script, no network, plots inlined, readable from disk and on paper."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape as as_markup
from pathlib import Path

from superoffload.host.untrusted import printable
from superoffload.tools.report import style

_CSS = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: #f4f6f9; color: {style.INK}; font: 15px/1.55 system-ui, Roboto, sans-serif; }}
main {{ max-width: 1000px; margin: 0 auto; padding: 32px 24px 56px; }}
h1 {{ font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; }}
h2 {{ font-size: 18px; margin: 40px 0 12px; }}
p {{ margin: 8px 0; }}
.lead {{ color: {style.MUTED}; margin: 0 0 20px; }}
.verdict {{ border-radius: 10px; padding: 14px 18px; font-weight: 600; color: white; }}
.good {{ background: {style.GREEN}; }} .bad {{ background: {style.RED}; }}
.verdict ul {{ margin: 6px 0 0; padding-left: 20px; font-weight: 400; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 18px 0; }}
.card, .panel {{ background: white; border: 1px solid {style.GRID}; border-radius: 10px; }}
.card {{ padding: 12px 16px; }}
.card b {{ display: block; font-size: 21px; white-space: nowrap; font-variant-numeric: tabular-nums; }}
.card span {{ color: {style.MUTED}; font-size: 13px; }}
.panel {{ padding: 14px 18px; overflow-x: auto; }}
.panel img {{ display: block; width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }}
th {{ text-align: left; color: {style.MUTED}; font-weight: 600; font-size: 13px; }}
th, td {{ padding: 5px 12px 5px 0; border-bottom: 1px solid {style.GRID}; vertical-align: top; }}
tr:last-child td {{ border-bottom: 0; }}
td.number, th.number {{ text-align: right; }}
code, pre {{ font: 13px/1.5 ui-monospace, "SF Mono", Consolas, monospace; }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
.ok {{ color: {style.GREEN}; font-weight: 600; }} .no {{ color: {style.RED}; font-weight: 600; }}
.event {{ color: {style.RED}; white-space: nowrap; }}
footer {{ margin-top: 40px; color: {style.MUTED}; font-size: 13px; }}
@media print {{ body {{ background: white; }} .panel, .card {{ break-inside: avoid; }} }}
"""


def escape(text: str) -> str:
    """Escapes text, including invalid characters in a name that another program gave."""
    return as_markup("\n".join(map(printable, text.split("\n"))))


@dataclass(frozen=True)
class Markup:
    """Wraps text that is HTML already; every other text is escaped."""

    html: str


Cell = str | int | float | Markup


def cell_html(cell: Cell) -> str:
    return cell.html if isinstance(cell, Markup) else escape(str(cell))


def code(text: str) -> Markup:
    return Markup(f"<code>{escape(text)}</code>")


def mark(good: bool, yes: str = "equal", no: str = "different") -> Markup:
    return Markup(f'<span class="{"ok" if good else "no"}">{escape(yes if good else no)}</span>')


@dataclass
class Page:
    """Collects sections in order; `html()` returns the page."""

    title: str
    lead: str
    _parts: list[str] = field(default_factory=list)

    def verdict(self, good: bool, text: str, problems: Iterable[str] = ()) -> None:
        items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
        details = f"<ul>{items}</ul>" if items else ""
        self._parts.append(f'<div class="verdict {"good" if good else "bad"}">{escape(text)}{details}</div>')

    def cards(self, cards: Sequence[tuple[str, str]]) -> None:
        """Adds (value, meaning) pairs in large type."""
        items = "".join(
            f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in cards
        )
        self._parts.append(f'<div class="cards">{items}</div>')

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str | Markup) -> None:
        self._parts.append(f"<p>{cell_html(text)}</p>")

    def image(self, path: Path, alternative: str) -> None:
        data = base64.b64encode(path.read_bytes()).decode()
        self._parts.append(
            f'<div class="panel"><img alt="{escape(alternative)}" src="data:image/png;base64,{data}"></div>'
        )

    def listing(self, items: Iterable[str]) -> None:
        self._parts.append(f'<div class="panel"><ul>{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul></div>')

    def pre(self, text: str) -> None:
        self._parts.append(f'<div class="panel"><pre>{escape(text)}</pre></div>')

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Cell]], numeric_from: int | None = None) -> None:
        """Adds a table; columns from `numeric_from` on are right-aligned."""

        def attribute(column: int) -> str:
            return ' class="number"' if numeric_from is not None and column >= numeric_from else ""

        head = "".join(f"<th{attribute(column)}>{escape(name)}</th>" for column, name in enumerate(header))
        body = "".join(
            "<tr>"
            + "".join(f"<td{attribute(column)}>{cell_html(cell)}</td>" for column, cell in enumerate(row))
            + "</tr>"
            for row in rows
        )
        header_row = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
        self._parts.append(f'<div class="panel"><table>{header_row}<tbody>{body}</tbody></table></div>')

    def html(self) -> str:
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_CSS}</style></head>\n<body><main>\n"
            f'<h1>{escape(self.title)}</h1>\n<p class="lead">{escape(self.lead)}</p>\n'
            + "\n".join(self._parts)
            + "\n<footer>Written by superoffload. This page is one file and loads nothing.</footer>\n"
            + "</main></body></html>\n"
        )
