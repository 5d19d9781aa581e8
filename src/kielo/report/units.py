"""Words of pages, card and terminal: their templates, values with units, and names of baselines."""

import json
from collections import Counter
from typing import Any

from kielo.artifact.scores import Scores
from kielo.recipe.amounts import format_seconds
from kielo.resolve.overview import amount


def fill_template(name: str, **values: Any) -> str:
    """Return the text that a template of this folder makes of the values, which it escapes for HTML.

    Raise LookupError if a value is missing.
    """
    import jinja2  # takes 0.1 s

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kielo", "report"),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"zip": zip, "baseline_name": baseline_name, "HIDDEN_TOKENS": HIDDEN_TOKENS}
    of_own = (label, oneline, percent, plain, setting, share, three)
    environment.filters |= {of.__name__: of for of in (amount, format, repr, *of_own)}
    environment.filters |= {"bytes": format_bytes, "json": json.dumps, "seconds": format_seconds}
    try:
        return environment.get_template(name).render(values)
    except jinja2.UndefinedError as problem:
        raise LookupError(str(problem)) from problem


def format_bytes(num_bytes: float) -> str:
    """Return 2.31 MB, 340 kB or 12 B: three figures, decimal units."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            value = num_bytes / size
            decimals = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{decimals}f} {unit}"
    return f"{num_bytes:.0f} B"


# Names of the baselines of bits per byte and of hidden tokens, as page, card and summary write them.
_NAMES = {
    "unigram": "Token unigram",
    "xz": "xz -9 after the training text",
    "ngram": "Interpolated byte {order}-gram",
}

HIDDEN_TOKENS = {
    "unigram": "token unigram",
    "bigram": "token bigram",
    "neighbours": "token bigrams of both neighbours",
}


def baseline_name(name: str, scores: Scores) -> str:
    """Return a baseline's full name. `scores` has the order of the n-gram."""
    return _NAMES[name].format(order=scores.ngram_order)


def oneline(text: str) -> str:
    return " ".join(text.split()) + "\n"


def plain(text: str) -> str:
    """Escape characters that would begin a tag, a link or a code span in Markdown or HTML."""
    return "".join("\\" + char if char in "\\`*_[]<>|" else char for char in text)


def label(key: str) -> str:
    return key[:1].upper() + key[1:].replace("_", " ")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def share(share: float) -> str:
    """Return a percentage, without decimals for 100 %."""
    return percent(share) if share < 1 else "100 %"


def three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def setting(value: Any) -> str:
    """Return a setting as text: the ends of long lists, and counts of equal values of many tensors."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        shown = [setting(entry) for entry in value] or ["none"]
        return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "…", *shown[-2:]])
    if (
        isinstance(value, dict)
        and len(value) > 4
        and all(isinstance(entry, int | float) for entry in value.values())
    ):
        return "; ".join(
            f"{setting(entry)} for {count} tensors" for entry, count in Counter(value.values()).items()
        )
    if isinstance(value, dict):
        return "; ".join(
            f"{label(key)}: {setting(entry)}" for key, entry in value.items() if entry not in (None, [], "")
        )
    return "–" if value is None else str(value)
