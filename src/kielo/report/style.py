"""The head of a page that stands alone, and its style sheet.

The colours are those of `figures`, light or dark like the reader's system.
"""

from html import escape

CSS = """\
:root {
  color-scheme: light dark;
  --paper: #fbfbf8; --panel: #f1f3ec; --ink: #1b211d; --quiet: #5a645d; --rule: #d9ded5;
  --ours: #2f7d4f; --other: #a9b2ab; --dropped: #c9772b; --good: #22683f; --bad: #b3321f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #121614; --panel: #1b211e; --ink: #e6ebe6; --quiet: #9ba69f; --rule: #323a35;
    --ours: #63bb86; --other: #66716a; --dropped: #dd9350; --good: #7fd0a0; --bad: #f08b78;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 3rem 1.25rem 5rem; max-width: 52rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif;
}
h1 { margin: 0; font-size: 2.1rem; line-height: 1.15; letter-spacing: -0.015em; overflow-wrap: anywhere; }
h2 { margin: 0 0 0.75rem; font-size: 1.2rem; line-height: 1.3; }
header p { margin: 0.4rem 0; }
.eyebrow { color: var(--quiet); font-size: 0.875rem; }
.verdict { margin: 1.25rem 0; font-size: 1.15rem; }
.verdict > span { display: block; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.facts {
  display: flex; flex-wrap: wrap; gap: 1.25rem 2.5rem; margin: 1.75rem 0 0; padding: 1.25rem 0;
  border-block: 1px solid var(--rule);
}
.facts div { display: flex; flex-direction: column; }
.facts dd { margin: 0; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.facts dt { color: var(--quiet); font-size: 0.875rem; }
section { margin-top: 3.25rem; }
figure { margin: 1rem 0; }
figure svg { display: block; height: auto; overflow: visible; }
figure svg text { font-family: inherit !important; }
figcaption, .note { color: var(--quiet); font-size: 0.875rem; }
figcaption { margin-top: 0.4rem; max-width: 44rem; }
blockquote {
  margin: 0 0 1rem; padding: 0.9rem 1.1rem; background: var(--panel); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th { color: var(--quiet); font-weight: 500; text-align: left; vertical-align: bottom; }
th, td { padding: 0.35rem 1rem 0.35rem 0; border-bottom: 1px solid var(--rule); }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
th.number { white-space: normal; }
table.pairs { width: auto; min-width: min(100%, 26rem); }
tr.differs td { color: var(--bad); font-weight: 600; }
td:not(.number), #parity td { overflow-wrap: anywhere; }
code, pre {
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.875rem;
}
pre { padding: 0.9rem 1.1rem; background: var(--panel); border-radius: 6px; overflow-x: auto; }
code { overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--quiet); }
@media print { body { max-width: none; padding: 0; } section { break-inside: avoid; } }
"""


def page_head(title: str) -> str:
    """Returns all of a page before its body; the page loads nothing from elsewhere."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(title)}</title>
<style>
{CSS}</style>
</head>"""
