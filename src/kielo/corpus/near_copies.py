"""Near copies of documents by MinHash and locality-sensitive hashing (Broder 1997).

Documents with the same values in all rows of one band of their signatures are a pair. Pairs make clusters,
and one document of a cluster stays. The number of documents of its cluster is in its metadata: a weight for
mixtures. FineWeb2 (Penedo et al. 2025) compares runs of 5 words in 14 bands of 8, HPLT (de Gibert et al.
2024) single words in 17 bands of 15. If 5 % of the words of a copy were replaced here and there, HPLT finds
0.99 of such copies and FineWeb2 0.24. If 1 % were replaced, both find all. Signatures are rensa's, from
hashes of words in lower case.
"""

from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from kielo.corpus.hash_buckets import HashWriter, read_bucket
from kielo.corpus.step import DocumentFilter, SplitDocument
from kielo.recipe.errors import KieloError

NEAR = "near copy"
CLUSTER_SIZE, SCORE = "cluster_size", "document_score"  # in a document's metadata
BAND_HASHES, SIGNED, WEIGHTS = "bands", "signed.npy", "weights.npy"
PAIRS, SIZES_OF_CLUSTERS, NEAR_FLAGS = "pairs.npy", "sizes.u32", "near.u8"
WORDS_AT_ONCE, _NUM_REMEMBERED = 1 << 17, 200_000
SEED = 1
_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SIZES = (
    (2, "2"),
    (3, "3"),
    (4, "4"),
    (5, "5 to 7"),
    (8, "8 to 99"),
    (100, "100 to 999"),
    (1000, "1,000 or more"),
)


@dataclass(frozen=True)
class Bands:
    bands: int
    rows: int
    words: int  # of a shingle


PUBLISHED = {"fineweb2": Bands(14, 8, 5), "hplt": Bands(17, 15, 1)}


def refuse_missing() -> Any:
    """Return rensa's class. Raises KieloError without the package."""
    try:
        from rensa import RMinHash
    except ImportError:
        raise KieloError('corpus.near_copies needs a package. Fix: pip install "rensa>=0.5"') from None
    return RMinHash


class _WordHashes(dict[str, int]):
    """Word → hash of it in lower case. Most words recur, and are remembered."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _NUM_REMEMBERED:
            self.clear()
        found = self[word] = xxhash.xxh3_64_intdigest(word.lower().encode())
        return found


_WORD_HASHES = _WordHashes()


def shingles(words: Sequence[Sequence[str]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all runs of `size` words of each document, and where each document's begin."""
    numbers = np.fromiter(map(len, words), np.int64, len(words))
    hashes = np.fromiter(map(_WORD_HASHES.__getitem__, chain.from_iterable(words)), np.uint64)
    runs = np.zeros(max(0, len(hashes) - size + 1), np.uint64)
    for place in range(size):
        runs = runs * _FACTOR + hashes[place : place + len(runs)]
    runs = (runs ^ (runs >> np.uint64(30))) * _MIX
    owner = np.repeat(np.arange(len(numbers)), numbers)
    runs = runs[owner[: len(runs)] == owner[size - 1 : size - 1 + len(runs)]]
    return runs, np.concatenate([[0], np.cumsum(np.maximum(numbers - size + 1, 0))]).astype(np.uint64)


def signatures(words: Sequence[Sequence[str]], how: Bands) -> np.ndarray:
    """Return a row of bands × rows values for each document that has a shingle."""
    runs, begins = shingles(words, how.words)
    begins = np.unique(begins)  # without documents that have none
    if len(begins) == 1:
        return np.empty((0, how.bands * how.rows), np.uint32)
    digest = refuse_missing().digest_matrix_from_flat_token_hashes
    return np.array(digest(runs, begins, how.bands * how.rows, SEED).to_rows(), np.uint32)


def band_keys(rows: np.ndarray, how: Bands) -> np.ndarray:
    """Return a hash of each band of each document: documents × bands."""
    values = rows.reshape(-1, how.bands, how.rows).astype(np.uint64)
    keys = np.repeat((np.arange(1, how.bands + 1, dtype=np.uint64) * _FACTOR)[None], len(values), axis=0)
    for row in range(how.rows):
        keys = (keys ^ values[:, :, row]) * _MIX
        keys ^= keys >> np.uint64(29)
    return keys


class SignatureWriter:
    """A writer of the keys of bands of a part, of the signed documents, and of the documents' weights."""

    def __init__(self, folder: Path, how: Bands, keep: str, buckets: int):
        self._folder, self._how, self._keep = folder, how, keep
        self._hashes = HashWriter(folder, BAND_HASHES, buckets)
        self._files = ExitStack()
        self._signed, self._weights = array("I"), array("f")
        self._waiting: list[list[str]] = []
        self._num_words = 0

    def __enter__(self) -> Self:
        self._files.enter_context(self._hashes)
        return self

    def __exit__(self, *problem: Any) -> None:
        if problem[0] is None:
            self._write()
            np.save(self._folder / SIGNED, np.frombuffer(self._signed, np.uint32))
            np.save(self._folder / WEIGHTS, np.frombuffer(self._weights, np.float32))
        self._files.__exit__(*problem)

    def add(self, document: SplitDocument, is_compared: bool) -> None:
        score = document.metadata.get(SCORE, 0.0) if self._keep == "score" else document.num_bytes
        self._weights.append(0.0 if self._keep == "first" else score)
        words = [word for line in document.words() for word in line] if is_compared else []
        if len(words) >= self._how.words:
            self._signed.append(len(self._weights) - 1)
            self._waiting.append(words)
            self._num_words += len(words)
        if self._num_words >= WORDS_AT_ONCE:
            self._write()

    def _write(self) -> None:
        self._hashes.add(band_keys(signatures(self._waiting, self._how), self._how).ravel())
        self._waiting, self._num_words = [], 0


def write_pairs(parts: Sequence[Path], begins: Sequence[int], how: Bands, bucket: int, folder: Path) -> None:
    """Write pairs of documents with the same key, as numbers in the corpus. begins: each part's first."""
    keys, documents = list[np.ndarray](), list[np.ndarray]()
    for part, begin in zip(parts, begins, strict=False):
        hashes, positions = read_bucket(part, BAND_HASHES, bucket)
        keys.append(hashes)
        signed = np.load(part / SIGNED)
        documents.append(
            (signed[(positions // np.uint64(how.bands)).astype(np.int64)] + begin).astype(np.uint32)
        )
    order = np.argsort(found := np.concatenate(keys), kind="stable")
    same, owners = found[order][1:] == found[order][:-1], np.concatenate(documents)[order]
    np.save(folder / PAIRS, np.stack([owners[:-1][same], owners[1:][same]], axis=1))


def unite(parent: np.ndarray, pairs: np.ndarray) -> None:
    """Join the trees of pairs in a union-find. The root of a tree is its smallest number."""
    first, second = pairs[:, 0], pairs[:, 1]
    while len(first):
        first, second = root_of(parent, first), root_of(parent, second)
        low, high = np.minimum(first, second), np.maximum(first, second)
        differ = low != high
        first, second = low[differ], high[differ]
        np.minimum.at(parent, second, first)


def root_of(parent: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    root = parent[numbers]
    while not np.array_equal(above := parent[root], root):
        root = above
    parent[numbers] = root
    return root


def write_clusters(
    parts: Sequence[Path],
    begins: Sequence[int],
    pairs: Iterable[Path],
    is_copy: Iterable[np.ndarray],
    folder: Path,
) -> None:
    """Write the size of each document's cluster, and whether the document goes, for all documents in order.

    is_copy: of each part its exact copies, which never stay. Takes 10 bytes of memory a document.
    """
    number = begins[-1]
    parent = np.arange(number, dtype=np.uint32)
    for path in pairs:
        unite(parent, np.load(path / PAIRS))
    ranges = list(zip(begins, begins[1:], strict=False))
    for begin, end in ranges:
        root_of(parent, np.arange(begin, end, dtype=np.uint32))
    best, weights = np.full(number, -np.inf, np.float32), list[np.ndarray]()
    exact = list(is_copy)
    for part, (begin, end), copies in zip(parts, ranges, exact, strict=True):
        np.maximum.at(best, parent[begin:end], _weights(part, copies))
    stays = np.zeros(number, bool)
    with open(folder / NEAR_FLAGS, "wb") as file:
        for part, (begin, end), copies in zip(parts, ranges, exact, strict=True):
            roots = parent[begin:end]
            candidates = np.flatnonzero(_weights(part, copies) == best[roots])
            found, first = np.unique(roots[candidates], return_index=True)
            is_new = ~stays[found]
            stays[found] = True  # of a root: its cluster has a document that stays
            gone = np.ones(end - begin, np.uint8)
            gone[candidates[first[is_new]]] = 0
            file.write(gone.tobytes())
    del best, weights
    sizes = np.zeros(number, np.uint32)
    for begin, end in ranges:
        np.add.at(sizes, parent[begin:end], np.uint32(1))
    with open(folder / SIZES_OF_CLUSTERS, "wb") as file:
        for begin, end in ranges:
            file.write(sizes[parent[begin:end]].tobytes())


def _weights(part: Path, copies: np.ndarray) -> np.ndarray:
    return np.where(copies, np.float32(-np.inf), np.load(part / WEIGHTS))


def read_clusters(folder: Path, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes of the clusters of documents, and 1 for each document that goes."""
    sizes = np.fromfile(folder / SIZES_OF_CLUSTERS, np.uint32, end - begin, offset=4 * begin)
    return sizes, np.fromfile(folder / NEAR_FLAGS, np.uint8, end - begin, offset=begin)


@dataclass
class NearCopies(DocumentFilter):
    """A filter by the flags of a part's documents. A document that stays has the size of its cluster."""

    name = "near copies"
    flags: np.ndarray
    sizes: np.ndarray

    def judge(self, document: SplitDocument) -> str | None:
        if self.flags[document.place[1]]:
            return NEAR
        if (size := int(self.sizes[document.place[1]])) > 1:
            document.metadata[CLUSTER_SIZE] = size
            self.count(CLUSTER_SIZE, next(label for least, label in reversed(_SIZES) if size >= least))
        return None
