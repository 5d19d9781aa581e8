"""The row map of a vocabulary transplant: (old tokenizer, new tokenizer) → `RowMap`. No weights are read.

A new token takes the row of the old token with its text, or else the mean of the rows of the old tokens that
its text is made of (NorMistral: Samuel et al. 2024, arXiv:2412.06484), or with `focus` a weighted sum
(`similar_rows`). Texts are compared as bytes, so the spellings of spaces (Ġ, ▁) and bytes (one character,
<0x0A>) do not matter. A control token takes the row of the old token of its role, else of its name, and never
the row of a text.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from kielo.artifact.stage_counts import RowMap, Transplant
from kielo.recipe.errors import KieloError
from kielo.tokenizer.control_tokens import CONFIG_FILES
from kielo.tokenizer.load import TextTokenizer, special_token, tokenizer_hash, vocabulary_size
from kielo.tokenizer.spelling import ALPHABET, SPACE, Spelling, TokenNames

# The order in which a token of several roles is looked up.
_ROLES = ("eos_token", "bos_token", "unk_token", "pad_token", "mask_token", "sep_token", "cls_token")
_HEAVIEST = 4  # old tokens of a weighted row that examples name
_REMEDY = 'model.transplant = "random", which needs no texts'
_ESCAPED = re.compile("([\udc80-\udcff])")  # a byte that is no UTF-8, after `surrogateescape`


def make_row_map(
    old: TextTokenizer, new: TextTokenizer, method: Transplant, vectors: Path | None = None
) -> RowMap:
    """Compute the map. The same tokenizers give the same map. vectors: the file for `focus`.

    A token without a vector has the mean of old tokens. KieloError for other forms and bad vectors.
    """
    rows: list[list[int]] = [[] for _ in range(vocabulary_size(new))]
    control: dict[str, str] = {}
    weights: dict[str, list[float]] = {}
    if method != "random":
        from_tokens, to_tokens = _Vocabulary(old), _Vocabulary(new)
        for number, text in to_tokens.texts.items():
            is_byte = number in to_tokens.byte_ids
            if from_tokens.texts.get(number) == text and is_byte == (number in from_tokens.byte_ids):
                rows[number] = [number]  # of an extended vocabulary, even if two tokens have one text
            else:
                rows[number] = from_tokens.compose(text, is_byte)
        control = _control_tokens(from_tokens, to_tokens)
        for name, old_name in control.items():
            rows[to_tokens.control[name]] = [from_tokens.control[old_name]]
        if vectors is not None:
            texts = to_tokens.texts
            anchors = {number: rows[number][0] for number in texts if len(rows[number]) == 1}
            others = [number for number in texts if len(rows[number]) != 1]
            for number, similar, weight in similar_rows(read_token_vectors(vectors, new), anchors, others):
                rows[number], weights[str(number)] = similar, weight
    return RowMap(
        method=method,
        old_tokenizer=tokenizer_hash(old.folder),
        old_vocabulary_size=vocabulary_size(old),
        rows=rows,
        control_tokens=control,
        **({"weights": weights} if weights else {}),
    )


def row_map_in_words(made: RowMap) -> str:
    of_similar = f" ({len(made.weights):,} of them weighted by similarity)" if made.weights else ""
    counts = (made.copied, made.composed, made.random)
    copied, composed, random = (f"{count:,} ({count / max(1, len(made.rows)):.1%})" for count in counts)
    return (
        f"{len(made.rows):,} rows of the new vocabulary: {copied} are rows of the same text or role, "
        f"{composed} are means of {made.tokens_per_composed_row:.1f} old rows{of_similar}, {random} are "
        "random"
    )


def example_ids(made: RowMap, number: int) -> list[int]:
    composed = [new_id for new_id in range(len(made.rows)) if made.is_composed(new_id)]
    return composed[:: max(1, len(composed) // max(1, number))][:number]


def row_in_words(made: RowMap, new_id: int, old: TokenNames) -> str:
    """Return the old tokens of a row: `a + b`, or `0.62 a + 0.38 b`."""
    names = [old(one) for one in made.rows[new_id]]
    weights = made.weights.get(str(new_id))
    if weights is None:
        return " + ".join(names)
    heaviest = sorted(zip(weights, names, strict=True), reverse=True)
    said = " + ".join(f"{weight:.2f} {name}" for weight, name in heaviest[:_HEAVIEST])
    return said + f" and {len(heaviest) - _HEAVIEST} more" * (len(heaviest) > _HEAVIEST)


class _Vocabulary:
    """A vocabulary. `texts`: id → bytes, without control tokens. `byte_ids`: ids of tokens like <0x0A>."""

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer
        content = json.loads(tokenizer.whole.to_str())
        self._spelling = spelling = Spelling(content, tokenizer.folder, _REMEDY)
        added = {token["id"]: token["content"] for token in content["added_tokens"]}
        names = tokenizer.for_text.hidden_names
        ids = {name: tokenizer.whole.token_to_id(name) for name in names}
        self.control = {name: number for name, number in ids.items() if number is not None}
        vocabulary = tokenizer.whole.get_vocab(with_added_tokens=True)
        by_id = sorted((number, token) for token, number in vocabulary.items() if token not in names)
        self.byte_ids = {number for number, token in by_id if number not in added and spelling.is_byte(token)}
        self.texts = {
            number: added[number].encode() if number in added else spelling.bytes_of(token)
            for number, token in by_id
        }
        self._model = tokenizer.for_text.tokenizer.model
        self._by_text: dict[bytes, int] = {}
        self._by_byte: dict[bytes, int] = {}
        for number, text in self.texts.items():
            (self._by_byte if number in self.byte_ids else self._by_text).setdefault(text, number)

    def compose(self, text: bytes, is_byte: bool) -> list[int]:
        """Return the ascending ids of the tokens of `text`, or []. is_byte: prefer tokens like <0x0A>."""
        first, second = (self._by_byte, self._by_text) if is_byte else (self._by_text, self._by_byte)
        if (exact := first.get(text, second.get(text))) is not None:
            return [exact]
        found = list(self._pieces(text))
        if b"".join(self.texts.get(number, b"") for number in found) != text:
            return []  # with a control token, or a token for unknown characters
        return sorted(found)

    def _pieces(self, text: bytes) -> Iterator[int]:
        """Yield ids by the tokenizer's model alone: without normaliser and pre-tokeniser."""
        if self._spelling.is_byte_level:
            yield from self._ids("".join(ALPHABET[byte] for byte in text))
            return
        for part in _ESCAPED.split(text.decode("utf-8", "surrogateescape")):
            if _ESCAPED.fullmatch(part):
                number = self._by_byte.get(part.encode("utf-8", "surrogateescape"))
                yield from [] if number is None else [number]
            elif part:
                yield from self._ids(part.replace(" ", SPACE))

    def _ids(self, spelled: str) -> list[int]:
        try:
            return [token.id for token in self._model.tokenize(spelled)]
        except Exception:  # a bare Exception, if Unigram has no token for an unknown character
            return []


def _control_tokens(old: _Vocabulary, new: _Vocabulary) -> dict[str, str]:
    found, new_roles, old_roles = {}, _roles(new.tokenizer.folder), _roles(old.tokenizer.folder)
    for name in sorted(new.control):
        of_role = (old_roles.get(role) for role, token in new_roles.items() if token == name)
        old_name = next((token for token in of_role if token in old.control), name)
        if old_name in old.control:
            found[name] = old_name
    return found


def _roles(folder: Path) -> Mapping[str, str]:
    named = {role: [special_token(folder / file, role) for file in CONFIG_FILES] for role in _ROLES}
    return {role: next(filter(None, names)) for role, names in named.items() if any(names)}


def read_token_vectors(path: Path, tokenizer: TextTokenizer) -> np.ndarray:
    """Return fp64 [tokens of the vocabulary, numbers of a vector]; rows without a vector are zero.

    `.vec` is the text format of fastText and word2vec: a line "TOKENS NUMBERS", then for each token a line of
    its spelling (`Ġmaja`) and its numbers. `.npz` has an array `vectors` with a row for each id. Raises
    KieloError for another file, and if no token is in the vocabulary.
    """
    if not path.is_file():
        raise KieloError(f"{path}: no such file. Fix: vectors of tokens as .vec or .npz")
    tokens = vocabulary_size(tokenizer)
    vectors = _of_ids(path, tokens) if path.suffix == ".npz" else _of_names(path, tokenizer, tokens)
    if not np.isfinite(vectors).all():
        raise KieloError(f"{path}: has vectors with NaN or infinities. Fix: leave their tokens out")
    if not vectors.any():
        raise KieloError(
            f"{path}: has no vector of a token of {tokenizer.folder}. Fix: learn vectors from text that this "
            "tokenizer has cut, with tokens spelled as in its vocabulary"
        )
    return vectors


def check_form(path: Path) -> None:
    if path.suffix == ".npz":
        with _arrays(path) as arrays:
            if "vectors" not in arrays.files:
                raise KieloError(f"{path}: has no array `vectors`, but: {', '.join(arrays.files) or 'none'}")
    else:
        next(_entries(path), None)


def _arrays(path: Path) -> NpzFile:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise KieloError(f"{path}: cannot be read as .npz ({error})") from None
    if not isinstance(found, NpzFile):
        raise KieloError(f"{path}: has no arrays by name. Fix: numpy.savez(FILE, vectors=…)")
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
            f"{path}: vectors is {vectors.dtype} {list(vectors.shape)}. Fix: a row of floating-point numbers "
            f"for each of the {tokens:,} ids"
        )
    return vectors.astype(np.float64)


def _of_names(path: Path, tokenizer: TextTokenizer, tokens: int) -> np.ndarray:
    vectors = np.zeros((tokens, 0))
    for name, vector in _entries(path):
        if not vectors.shape[1]:  # the first entry proves the width that the first line says
            vectors = np.zeros((tokens, len(vector)))
        if (token_id := tokenizer.whole.token_to_id(name)) is not None:
            vectors[token_id] = vector
    return vectors


def _entries(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    lines = _lines(path)
    _, head = next(lines, (0, ""))
    width = 0
    with suppress(ValueError):
        _, width = map(int, head.split())
    if width < 1:
        raise KieloError(f'{path}: line 1 is {head[:40]!r}. Fix: "TOKENS NUMBERS", as a .vec begins')
    for number, line in lines:
        name, *values = line.rstrip(" ").rsplit(" ", width)
        vector = np.zeros(0)
        with suppress(ValueError):
            vector = np.array(values, dtype=np.float64)
        if len(vector) != width:
            raise KieloError(f"{path}: line {number} is not a token and {width} numbers")
        yield name, vector


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8", newline="\n") as file:  # tokens may have other separators
            for number, line in enumerate(file, 1):
                yield number, line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise KieloError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


_BLOCK = 64  # new tokens whose similarities exist at the same time: 64 MB with 128,000 anchors


def similar_rows(
    vectors: np.ndarray, anchors: Mapping[int, int], tokens: Sequence[int]
) -> Iterator[tuple[int, list[int], list[float]]]:
    """Yield (new id, old ids ascending, their weights) of each of `tokens` that has a vector.

    This is FOCUS (Dobler and de Melo 2023, arXiv:2305.14481). The anchors are tokens of both vocabularies.
    The weights of their rows are the sparsemax (Martins and Astudillo 2016, arXiv:1602.02068) of the cosine
    similarities of their vectors with the new token's, which leaves most at zero. vectors: [new tokens,
    numbers], zero if there is none. anchors: new id → old id. Weights sum to 1, to the rounding of fp32, and
    have the fewest digits that fp32 reads back.
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
    """Return the nearest point of the simplex to each row of `scores`: weights ≥ 0 that sum to 1.

    Michelot's algorithm (1986): the scores above a threshold are the support, and the threshold makes them
    sum to 1. Both are computed in turn, from all scores on, until the support stays.
    """
    support = np.ones(scores.shape, dtype=bool)
    while True:
        threshold = (np.where(support, scores, 0).sum(axis=1) - 1) / support.sum(axis=1)
        smaller = support & (scores > threshold[:, None])
        if np.array_equal(smaller, support):
            return np.where(support, scores - threshold[:, None], 0)
        support = smaller
