"""Names of the baselines of bits per byte, as the page and the model card write them."""

from kielo.artifact.scores import Scores

_NAMES = {
    "unigram": "Token unigram",
    "xz": "xz -9 after the training text",
    "ngram": "Interpolated byte {order}-gram",
}


def baseline_name(name: str, scores: Scores) -> str:
    """Returns a baseline's full name; `scores` has the order of the n-gram."""
    return _NAMES[name].format(order=scores.ngram_order)
