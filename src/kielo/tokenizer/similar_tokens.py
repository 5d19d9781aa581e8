"""FOCUS: which old rows a new token is made of by similarity (Dobler and de Melo 2023, arXiv:2305.14481).

Tokens that both vocabularies have are the anchors. A new token that the old vocabulary lacks is a weighted
sum of their rows; the weights are the sparsemax of the cosine similarities between its auxiliary vector and
theirs (Martins and Astudillo 2016, arXiv:1602.02068), which leaves most of them at zero.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_BLOCK = 64  # new tokens whose similarities exist at one time: 64 MB with 128,000 anchors


def similar_rows(
    vectors: np.ndarray, anchors: Mapping[int, int], tokens: Sequence[int]
) -> Iterator[tuple[int, list[int], list[float]]]:
    """Yields (new id, old ids ascending, their weights) of each of `tokens` that has a vector.

    vectors: [new tokens, numbers], zero where there is none. anchors: new id → old id of the same text.
    Weights sum to 1, to the rounding of fp32; each has the fewest digits that fp32 reads back.
    """
    lengths = np.linalg.norm(vectors, axis=1)
    known = [new for new in sorted(anchors) if lengths[new]]
    if not known:
        return
    old = np.array([anchors[new] for new in known])
    unit = vectors / np.where(lengths, lengths, 1)[:, None]
    asked = np.array([new for new in tokens if lengths[new]], dtype=np.int64)
    for begin in range(0, len(asked), _BLOCK):
        block = asked[begin : begin + _BLOCK]
        weights = sparsemax(unit[block] @ unit[known].T).astype(np.float32)
        for new, row in zip(block.tolist(), weights):
            (places,) = np.nonzero(row)
            places = places[np.argsort(old[places])]
            yield new, old[places].tolist(), [float(str(weight)) for weight in row[places]]


def sparsemax(scores: np.ndarray) -> np.ndarray:
    """Returns the nearest point of the simplex to each row of `scores`: weights ≥ 0 that sum to 1.

    Michelot's algorithm (1986): the scores above a threshold are the support, and the threshold makes them
    sum to 1; both are computed in turn, from all scores on, until the support stays.
    """
    support = np.ones(scores.shape, dtype=bool)
    while True:
        threshold = (np.where(support, scores, 0).sum(axis=1) - 1) / support.sum(axis=1)
        smaller = support & (scores > threshold[:, None])
        if np.array_equal(smaller, support):
            return np.where(support, scores - threshold[:, None], 0)
        support = smaller
