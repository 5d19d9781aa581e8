"""Vectors of tokens, learned elsewhere, and the rows that follow from their similarity (FOCUS)."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer, vocabulary_size

# Vectors of tokens, learned elsewhere: a file → one vector for each token of a tokenizer that has one.
#
# `.vec` is fastText's and word2vec's text format: a line "TOKENS NUMBERS", then a line for each token, as
# the vocabulary spells it (`Ġmaja`), with its numbers. `.npz` has an array `vectors` with a row for each
# token id; a row of zeros is no vector.


def read_token_vectors(path: Path, tokenizer: TextTokenizer) -> np.ndarray:
    """Returns [tokens of the vocabulary, numbers of a vector] in fp64; rows without a vector are zero.

    Raises KieloError for a file that is not there or not of these formats, and for one of which no token is
    in the vocabulary.
    """
    if not path.is_file():
        raise KieloError(f"{path}: no such file; what would work: vectors of tokens as .vec or .npz")
    tokens = vocabulary_size(tokenizer)
    vectors = _of_ids(path, tokens) if path.suffix == ".npz" else _of_names(path, tokenizer, tokens)
    if not np.isfinite(vectors).all():
        raise KieloError(f"{path}: has vectors with NaN or infinities; leave their tokens out")
    if not vectors.any():
        raise KieloError(
            f"{path}: has a vector of no token of {tokenizer.folder}; what would work: vectors learned from "
            "text that this tokenizer has cut, with tokens spelled as in its vocabulary"
        )
    return vectors


def check_form(path: Path) -> None:
    """Raises KieloError for a file that is there and of neither format, by its beginning alone."""
    if path.suffix == ".npz":
        with _arrays(path) as arrays:
            if "vectors" not in arrays.files:
                raise KieloError(
                    f"{path}: has no array `vectors`; it has: {', '.join(arrays.files) or 'none'}"
                )
    else:
        next(_entries(path), None)


def _arrays(path: Path) -> NpzFile:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise KieloError(f"{path}: is no .npz that can be read ({error})") from None
    if not isinstance(found, NpzFile):
        raise KieloError(
            f"{path}: is no .npz of arrays by name; what would work: numpy.savez(FILE, vectors=…)"
        )
    return found


def _of_ids(path: Path, tokens: int) -> np.ndarray:
    check_form(path)
    try:
        with _arrays(path) as arrays:
            vectors = arrays["vectors"]
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        raise KieloError(f"{path}: the array `vectors` cannot be read ({error})") from None
    if vectors.ndim != 2 or len(vectors) != tokens or vectors.dtype.kind != "f":
        raise KieloError(
            f"{path}: vectors is {vectors.dtype} {list(vectors.shape)}; what would work: a row of "
            f"floating-point numbers for each of the {tokens:,} ids"
        )
    return vectors.astype(np.float64)


def _of_names(path: Path, tokenizer: TextTokenizer, tokens: int) -> np.ndarray:
    entries = _entries(path)
    first = next(entries, None)  # before there is a matrix as wide as the first line says
    if first is None:
        return np.zeros((tokens, 0))
    vectors = np.zeros((tokens, len(first[1])))
    for name, vector in chain([first], entries):
        token_id = tokenizer.whole.token_to_id(name)
        if token_id is not None:
            vectors[token_id] = vector
    return vectors


def _entries(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (token, vector) of a .vec; KieloError for a line that is none."""
    lines = _lines(path)
    _, head = next(lines, (0, ""))
    try:
        _, width = map(int, head.split())
    except ValueError:
        width = 0
    if width < 1:
        raise KieloError(f'{path}: line 1 is {head[:40]!r}; a .vec begins with "TOKENS NUMBERS"')
    for number, line in lines:
        name, *values = line.rstrip(" ").rsplit(" ", width)
        try:
            vector = np.array(values, dtype=np.float64)
        except ValueError:
            vector = np.zeros(0)
        if len(vector) != width:
            raise KieloError(f"{path}: line {number} is not a token and {width} numbers")
        yield name, vector


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line). Only a line feed ends one: other separators may be in tokens."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield number, line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise KieloError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


# FOCUS: which old rows a new token is made of by similarity (Dobler and de Melo 2023, arXiv:2305.14481).
#
# Tokens that both vocabularies have are the anchors. A new token that the old vocabulary lacks is a
# weighted sum of their rows; the weights are the sparsemax of the cosine similarities between its auxiliary
# vector and theirs (Martins and Astudillo 2016, arXiv:1602.02068), which leaves most of them at zero.


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
        for new, row in zip(block.tolist(), weights, strict=True):
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
