"""The held-out split: text -> is it held out, by a hash of the text alone.

The vocabulary is the first thing learned from the text, so the split is decided here: neither it nor the
model sees a held-out document. Equal texts are on the same side, whatever their source, order or number.
"""

import xxhash

_HASHES = 1 << 64


def place_by_hash(text: str) -> float:
    """Returns a number in [0, 1) from the text alone (xxh3-64 of its UTF-8), spread evenly over texts."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) / _HASHES


def is_heldout(text: str, share: float) -> bool:
    """Returns True if the document is kept out of training, as about `share` of all documents are."""
    return place_by_hash(text) < share
