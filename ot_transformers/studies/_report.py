"""The self-contained HTML page of a study: inline style, embedded figures, nothing fetched from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from ._result import Finding, Table, format_number

if TYPE_CHECKING:
    from ._result import StudyResult

__all__ = ["render"]

MARKS = {True: ("pass", "within tolerance"), False: ("fail", "outside tolerance"), None: ("info", "reported")}

CSS = """
:root { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --wash: #f6f8fa;
  --pass: #117733; --fail: #aa2244; --info: #0b5394; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .8rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
.lead { font-size: 1.05rem; color: var(--soft); max-width: 48rem; }
.verdict { display: inline-block; margin: .4rem 0 0; font-weight: 600; }
.verdict.pass { color: var(--pass); } .verdict.fail { color: var(--fail); }
.finding { display: grid; grid-template-columns: 9.5rem 1fr; gap: .2rem 1.2rem; padding: .9rem 0;
  border-bottom: 1px solid var(--line); }
.finding:last-child { border-bottom: 0; }
.finding h3 { margin: 0; font-size: 1rem; }
.finding p { margin: .25rem 0 0; max-width: 44rem; }
.mark { font-size: .8rem; font-weight: 600; padding-top: .18rem; }
.mark.pass { color: var(--pass); } .mark.fail { color: var(--fail); } .mark.info { color: var(--info); }
.mark small { display: block; font-weight: 400; color: var(--soft); }
figure { margin: 1.6rem 0; }
figure img { width: 100%; height: auto; display: block; border: 1px solid var(--line); border-radius: 6px; }
figcaption { color: var(--soft); font-size: .92rem; margin-top: .5rem; max-width: 52rem; }
.scroll { overflow-x: auto; margin: .6rem 0 1.4rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .34rem .9rem .34rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--line); vertical-align: bottom; }
th.word, td.word { text-align: left; }
.note { color: var(--soft); font-size: .9rem; max-width: 52rem; margin: -.9rem 0 1.4rem; }
pre { background: var(--wash); border: 1px solid var(--line); border-radius: 6px; padding: .9rem 1rem;
  overflow-x: auto; font-size: .85rem; line-height: 1.45; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
@media (max-width: 40rem) { .finding { grid-template-columns: 1fr; } }
@media print { main { max-width: none; padding: 0; } figure, .finding, table { break-inside: avoid; } }
"""


def render(result: StudyResult, images: Mapping[str, str]) -> str:
    """Return the page; `images` maps figure names to SVG text."""
    from .._version import __version__

    failed = [f for f in result.findings if f.passed is False]
    tested = [f for f in result.findings if f.passed is not None]
    if not tested:
        verdict = ""
    elif failed:
        verdict = f'<p class="verdict fail">{len(failed)} of {len(tested)} checks outside tolerance</p>'
    else:
        verdict = f'<p class="verdict pass">All {len(tested)} checks within tolerance</p>'
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(result.title)}</title><style>{CSS}</style></head><body><main>",
        f"<header><h1>{escape(result.title)}</h1>",
        f'<p class="lead">{escape(result.summary)}</p>{verdict}</header>',
    ]
    if result.findings:
        parts.append("<h2>Findings</h2><section>" + "".join(map(_finding, result.findings)) + "</section>")
    if result.figures:
        parts.append("<h2>Figures</h2>")
        for item in result.figures:
            data = base64.b64encode(images[item.name].encode("utf-8")).decode("ascii")
            caption = escape(item.caption)
            parts.append(
                f'<figure id="{escape(item.name)}"><img alt="{caption}" '
                f'src="data:image/svg+xml;base64,{data}"><figcaption>{caption}</figcaption></figure>'
            )
    for name, content in result.files.items():
        if name.endswith(".gif") and isinstance(content, bytes):
            data = base64.b64encode(content).decode("ascii")
            caption = f"Animation ({escape(name)}): the view follows the size of the picture; read the axes."
            parts.append(
                f'<figure id="{escape(name)}"><img alt="{caption}" style="max-width: 36rem" '
                f'src="data:image/gif;base64,{data}"><figcaption>{caption}</figcaption></figure>'
            )
    if result.tables:
        parts.append("<h2>Tables</h2>" + "".join(map(_table, result.tables)))
    if result.notes:
        parts.append("<h2>Notes</h2><ul>")
        parts += [f"<li>{escape(note)}</li>" for note in result.notes]
        parts.append("</ul>")
    options = json.dumps(dict(result.config), indent=2)
    parts += [
        "<h2>How to run it again</h2>",
        f"<pre><code>ot-transformers {escape(result.study)} --config config.json</code></pre>",
        f"<pre><code>{escape(options)}</code></pre>",
        f"<footer>ot_transformers {escape(__version__)}. The numbers behind this page are in the CSV files "
        "and in results.npz of the same folder.</footer></main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _finding(f: Finding) -> str:
    kind, word = MARKS[f.passed]
    small = ""
    if f.value is not None:
        small = f"<small>{escape(format_number(f.value))}"
        if f.tolerance is not None:
            small += f" (bound {escape(format_number(f.tolerance))})"
        small += "</small>"
    return (
        f'<div class="finding"><div class="mark {kind}">{word}{small}</div>'
        f"<div><h3>{escape(f.title)}</h3><p>{escape(f.text)}</p></div></div>"
    )


def _table(table: Table) -> str:
    word = [any(isinstance(row[k], str) for row in table.rows) for k in range(len(table.columns))]
    css = [' class="word"' if w else "" for w in word]
    head = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(css, table.columns, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{c}>{escape(format_number(v))}</td>" for c, v in zip(css, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)} '
        f"({escape(table.name)}.csv)</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
    )
