"""Words of pages, card and terminal: bytes with their unit, and names of baselines."""

from kielo.artifact.scores import Scores


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
