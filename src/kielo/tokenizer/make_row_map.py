"""The row map of a vocabulary transplant: (old tokenizer, new tokenizer) → `RowMap`; no weights are read.

A new token whose text an old token has takes that token's row; any other the mean of the rows of the old
tokens that its text is made of (NorMistral: Samuel et al. 2024, arXiv:2412.06484), or with `focus` a sum of
rows weighted by similarity (`token_vectors.py`). Tokens are compared by the
bytes that they stand for, so that conventions of leading space (Ġ of byte-level vocabularies, ▁ of
SentencePiece) and of bytes (one character, or <0x0A>) do not matter. Control tokens take the row of the old
one of their role, or else of their name, and never that of a text.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from kielo.artifact.tokenizer_files import RowMap, Transplant
from kielo.tokenizer.control_tokens import CONFIG_FILES
from kielo.tokenizer.facts import tokenizer_hash
from kielo.tokenizer.load import TextTokenizer, special_token, vocabulary_size
from kielo.tokenizer.spelling import ALPHABET, SPACE, Spelling, TokenNames
from kielo.tokenizer.token_vectors import read_token_vectors, similar_rows

# The order in which a token of several roles is looked up.
_ROLES = ("eos_token", "bos_token", "unk_token", "pad_token", "mask_token", "sep_token", "cls_token")
_HEAVIEST = 4  # old tokens of a weighted row that examples name
_REMEDY = 'model.transplant = "random", which needs no texts'
_ESCAPED = re.compile("([\udc80-\udcff])")  # a byte that is no UTF-8, after `surrogateescape`


def make_row_map(
    old: TextTokenizer, new: TextTokenizer, method: Transplant, vectors: Path | None = None
) -> RowMap:
    """Computes the map; the same tokenizers give the same map.

    vectors: the file of auxiliary vectors of `focus`, of the new tokenizer's tokens (`token_vectors.py`). A
    token without one has the mean of old tokens, as with `mean`. Raises KieloError for a tokenizer that is
    neither byte-level nor of SentencePiece's form, and for vectors that cannot be read.
    """
    rows: list[list[int]] = [[] for _ in range(vocabulary_size(new))]
    control: dict[str, str] = {}
    weights: dict[str, list[float]] = {}
    if method != "random":
        from_tokens, to_tokens = _Vocabulary(old), _Vocabulary(new)
        for number, text in to_tokens.texts.items():
            is_byte = number in to_tokens.byte_ids
            if from_tokens.texts.get(number) == text and is_byte == (number in from_tokens.byte_ids):
                rows[number] = [number]  # of an extended vocabulary, also where two tokens have one text
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
    """Returns a sentence: how many rows are copied, composed and random."""
    num_rows = max(1, len(made.rows))
    of_similar = f" ({len(made.weights):,} of them weighted by similarity)" if made.weights else ""
    return (
        f"{len(made.rows):,} rows of the new vocabulary: {made.copied:,} ({made.copied / num_rows:.1%}) are "
        f"rows of the same text or role, {made.composed:,} ({made.composed / num_rows:.1%}) are means of "
        f"{made.tokens_per_composed_row:.1f} old rows{of_similar}, {made.random:,} "
        f"({made.random / num_rows:.1%}) are random"
    )


def example_ids(made: RowMap, number: int) -> list[int]:
    """Returns `number` new ids, or fewer, evenly spread over those with composed rows."""
    composed = [new_id for new_id in range(len(made.rows)) if made.is_composed(new_id)]
    return composed[:: max(1, len(composed) // max(1, number))][:number]


def row_in_words(made: RowMap, new_id: int, old: TokenNames) -> str:
    """Returns the old tokens of a row by their names: `a + b`, or `0.62 a + 0.38 b`."""
    names = [old(one) for one in made.rows[new_id]]
    weights = made.weights.get(str(new_id))
    if weights is None:
        return " + ".join(names)
    heaviest = sorted(zip(weights, names), reverse=True)
    said = " + ".join(f"{weight:.2f} {name}" for weight, name in heaviest[:_HEAVIEST])
    return said + f" and {len(heaviest) - _HEAVIEST} more" * (len(heaviest) > _HEAVIEST)


class _Vocabulary:
    """The tokens of a tokenizer by the bytes that they stand for.

    texts: id → bytes, of all tokens but control tokens. control: control token → id. byte_ids: ids of tokens
    that are spelled as a byte (<0x0A>).
    """

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
        self._by_text: dict[bytes, int] = {}
        self._by_byte: dict[bytes, int] = {}
        for number, text in self.texts.items():
            (self._by_byte if number in self.byte_ids else self._by_text).setdefault(text, number)

    @cached_property
    def _model(self) -> Any:
        return self.tokenizer.for_text.tokenizer.model

    def compose(self, text: bytes, is_byte: bool) -> list[int]:
        """Returns the ids of the tokens that `text` is made of, ascending: one if a token is this text.

        is_byte: prefer a token that is spelled as a byte. [] where the vocabulary cannot spell the text.
        """
        first, second = (self._by_byte, self._by_text) if is_byte else (self._by_text, self._by_byte)
        exact = first.get(text, second.get(text))
        if exact is not None:
            return [exact]
        found = list(self._pieces(text))
        if b"".join(self.texts.get(number, b"") for number in found) != text:
            return []  # of a control token, or of one for unknown characters
        return sorted(found)

    def _pieces(self, text: bytes) -> Iterator[int]:
        """Yields the ids by the tokenizer's model alone: no normaliser, and no cuts before merging."""
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
        """Returns the model's ids of a text; [] where it has a letter that the model cannot write."""
        try:
            return [token.id for token in self._model.tokenize(spelled)]
        except Exception:  # the Rust library raises a bare one, where Unigram has no token for the unknown
            return []


def _control_tokens(old: _Vocabulary, new: _Vocabulary) -> dict[str, str]:
    found = {}
    new_roles, old_roles = _roles(new.tokenizer.folder), _roles(old.tokenizer.folder)
    for name in sorted(new.control):
        of_role = (old_roles.get(role) for role, token in new_roles.items() if token == name)
        old_name = next((token for token in of_role if token in old.control), name)
        if old_name in old.control:
            found[name] = old_name
    return found


def _roles(folder: Path) -> Mapping[str, str]:
    named = {role: [special_token(folder / file, role) for file in CONFIG_FILES] for role in _ROLES}
    return {role: next(filter(None, names)) for role, names in named.items() if any(names)}
