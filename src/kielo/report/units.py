"""Words of pages, card and terminal: numbers with their units, and names of baselines."""

from kielo.artifact.scores import Scores

# Numbers with their units as text, for the page, the card and the terminal.


def format_bytes(num_bytes: float) -> str:
    """Returns 2.31 MB, 340 kB or 12 B: three figures, decimal units."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            value = num_bytes / size
            decimals = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{decimals}f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Returns 0.4 s, 38 s, 4 min 12 s or 3 h 05 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


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
    """Returns a baseline's full name; `scores` has the order of the n-gram."""
    return _NAMES[name].format(order=scores.ngram_order)
