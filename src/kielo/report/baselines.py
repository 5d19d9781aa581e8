"""Names of the baselines of bits per byte and of hidden tokens, as page, card and summary write them."""

from kielo.artifact.scores import Scores

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
