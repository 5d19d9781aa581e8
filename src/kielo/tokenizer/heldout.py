"""Which documents are held out: text -> yes or no, by a hash of the text alone.

The vocabulary is the first thing learned from the text, so the split is decided here: neither it nor the
model sees a held-out document. Equal texts fall on one side, whatever their source, order or number.
"""

import xxhash

_HASHES = 1 << 64


def place_by_hash(text: str) -> float:
    """A number in [0, 1) that depends on the text only (xxh3-64 of its UTF-8), spread evenly over texts."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) / _HASHES


def is_heldout(text: str, share: float) -> bool:
    """Whether the document is kept out of training, as about `share` of all documents are."""
    return place_by_hash(text) < share
