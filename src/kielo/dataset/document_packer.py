"""Documents → their tokens by shard: what a process does with a batch of documents.

Tokens, side of the held-out split and held-out set follow from the document alone, so batches may be packed
anywhere and in any order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import orjson

from kielo.artifact.documents import Document, parse_record
from kielo.dataset.encoded_documents import (
    DocumentEncoder,
    EncodedDocument,
    begin_of_documents,
    begins_with_cls,
    sources_with_loss_mask,
)
from kielo.dataset.heldout_sets import HELDOUT, SET_KEY, HeldoutLanguages, set_file
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import longest_sequence_length
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TextTokenizer, decode, end_of_text_id, load_tokenizer, role_id
from kielo.tokenizer.measure import WORD
from kielo.tokenizer.stage_inputs import is_heldout

ROUND_TRIP_EVERY = 64  # documents: decoding all would take as long as encoding
SOURCES, HELDOUT_SETS = "sources", "heldout_sets"
TOO_LONG = "too_long_conversations"  # in the counts of a source that has any


@dataclass(frozen=True)
class DocumentBatch:
    """Lines of a file of documents. `first` is the first line's number, from 0. The last batch `is_last`."""

    path: Path
    first: int
    lines: list[bytes]
    is_last: bool = False

    def documents(self) -> list[Document]:
        return [
            parse_record(self.path, number, line) for number, line in enumerate(self.lines, self.first + 1)
        ]


@dataclass
class ShardRows:
    """Documents of one shard, end to end with their frames."""

    group: str  # SOURCES, HELDOUT or HELDOUT_SETS, in which `name` is counted
    name: str
    file: str
    carries_loss: list[np.ndarray] | None  # None without a loss mask
    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def join(self) -> None:
        """Join all rows: few large arrays are sent to another process faster than many small ones."""
        self.tokens = [np.concatenate([np.zeros(0, np.int32), *self.tokens])]
        if self.carries_loss is not None:
            self.carries_loss = [np.concatenate([np.zeros(0, bool), *self.carries_loss])]


@dataclass
class PackedDocuments:
    """A batch's rows by shard."""

    is_last: bool = False  # of its file
    shards: dict[str, ShardRows] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)  # documents of each source, with held-out ones
    heldout: list[bytes] = field(default_factory=list)  # as JSON lines
    checked: int = 0  # documents that were decoded
    exact: int = 0  # and that came back

    @property
    def num_documents(self) -> int:
        return self.met.total()


class DocumentPacker:
    """A packer of a recipe's documents. masked: sources of ready tokens of which only a part carries loss."""

    def __init__(self, recipe: Recipe, tokenizer: TextTokenizer, masked: Sequence[str] = ()):
        self._recipe, self._tokenizer = recipe, tokenizer
        end, first = end_of_text_id(tokenizer), begin_of_documents(recipe, tokenizer.folder)
        if begins_with_cls(recipe) and (cls_id := role_id(tokenizer, "cls_token")) is not None:
            first = (cls_id,)
        # Before framed documents, and after every document.
        self._begin = np.array(first, dtype=np.int32)
        self._end = np.array([end], dtype=np.int32)
        self._encoder = DocumentEncoder(recipe, tokenizer, end)
        self._with_mask = [*sources_with_loss_mask(recipe), *masked]
        self._languages = HeldoutLanguages(recipe)
        # What to do with a conversation that is longer than a sequence.
        chats = [source for source in recipe.corpus.sources if source.kind == "instructions"]
        self._too_long = {source.name: source.too_long for source in chats}
        self._longest = longest_sequence_length(recipe)

    def __call__(self, batch: DocumentBatch) -> PackedDocuments:
        documents = batch.documents()
        encoded = self._encoder.encode(documents)
        packed = PackedDocuments(batch.is_last)
        chosen = slice(-batch.first % ROUND_TRIP_EVERY, None, ROUND_TRIP_EVERY)
        self._check_round_trip(documents[chosen], encoded[chosen], packed)
        for document, one in zip(documents, encoded, strict=True):
            packed.met[document["source"]] += 1
            if not len(one.ids):
                continue  # an empty text: an end-of-text alone teaches nothing
            if is_heldout(document["text"], self._recipe.dataset.heldout_share):
                self._hold_out(document, one, packed)
            else:
                source = document["source"]
                rows = _rows(packed, SOURCES, source, checked_name(source), source in self._with_mask)
                if source in self._too_long and len(one.ids) >= self._longest:
                    rows.counts[TOO_LONG] += 1
                    if self._too_long[source] == "drop":
                        continue
                    one = _truncated(one, self._longest - 1) if self._too_long[source] == "truncate" else one
                self._add(document, one, rows)
        for rows in packed.shards.values():
            rows.join()
        return packed

    def held_out(self, document: Document, row: Sequence[int], flags: np.ndarray | None) -> PackedDocuments:
        """Pack a document with known ids and loss mask that is held out whatever the split says."""
        packed, ids = PackedDocuments(), np.array(row, dtype=np.int32)
        num_bytes = None
        if flags is not None:
            (text,) = decode(self._tokenizer, [ids[flags[:-1]].tolist()], has_special=False)
            num_bytes = len(text.encode()) + int(flags[-1])
        encoded = EncodedDocument(
            document["text"], ids, len(WORD.findall(document["text"])), flags, num_bytes
        )
        self._hold_out(document, encoded, packed)
        return packed

    def _hold_out(self, document: Document, encoded: EncodedDocument, packed: PackedDocuments) -> None:
        self._add(document, encoded, _rows(packed, HELDOUT, HELDOUT, HELDOUT, bool(self._with_mask)))
        if self._languages.has_several_sets:
            name, source = self._languages.set_of(document), document["source"]
            file = set_file(checked_name(name))
            self._add(document, encoded, _rows(packed, HELDOUT_SETS, name, file, source in self._with_mask))
            if name != source:
                document = document | {"metadata": document["metadata"] | {SET_KEY: name}}
        packed.heldout.append(orjson.dumps(document) + b"\n")

    def _add(self, document: Document, encoded: EncodedDocument, rows: ShardRows) -> None:
        carries_loss = encoded.carries_loss
        begin = self._begin if encoded.is_framed else self._begin[:0]
        row = np.concatenate([begin, encoded.ids, self._end])
        num_bytes = len(document["text"].encode("utf-8", "surrogatepass"))
        if rows.carries_loss is not None:
            flags = np.ones(len(row), bool) if carries_loss is None else carries_loss
            rows.carries_loss.append(flags)
            with_loss = encoded.bytes_with_loss
            rows.counts["tokens_with_loss"] += int(flags.sum())
            rows.counts["bytes_with_loss"] += num_bytes + 1 if with_loss is None else with_loss
        rows.tokens.append(row)
        rows.lengths.append(len(row))
        rows.ids.append(" ".join(document["id"].splitlines()))  # one line each, whatever the id
        rows.counts["tokens"] += len(row)
        rows.counts["documents"] += 1
        rows.counts["bytes"] += num_bytes
        rows.counts["words"] += encoded.num_words

    def _check_round_trip(
        self, documents: Sequence[Document], encoded: Sequence[EncodedDocument], packed: PackedDocuments
    ) -> None:
        texts = decode(self._tokenizer, [one.ids.tolist() for one in encoded])
        for document, one, back in zip(documents, encoded, texts, strict=True):
            packed.checked += 1
            packed.exact += one.text == back
            # A ready tokenizer may normalise. Then the share of exact texts is only reported.
            if one.text != back and not self._recipe.tokenizer.ready:
                raise KieloError(
                    f"document {document['id']}: the tokenizer changes its text. Fix: train it again"
                )


def _truncated(encoded: EncodedDocument, most: int) -> EncodedDocument:
    flags = encoded.carries_loss
    if flags is not None:
        flags = np.append(flags[:most], False)
    return replace(encoded, ids=encoded.ids[:most], carries_loss=flags)


def load_packer(recipe: Recipe, tokenizer_folder: Path) -> DocumentPacker:
    return DocumentPacker(recipe, load_tokenizer(tokenizer_folder))


def empty_counts(has_loss_mask: bool) -> dict[str, int]:
    counts = {"tokens": 0, "documents": 0, "bytes": 0, "words": 0}
    return counts | ({"tokens_with_loss": 0, "bytes_with_loss": 0} if has_loss_mask else {})


def checked_name(source: str) -> str:
    """Return the name of a source or held-out set. Raises KieloError for a name that no file can have."""
    is_taken = source == HELDOUT or source.startswith(f"{HELDOUT}.")
    if not source or is_taken or source[0] == "." or "/" in source or "\\" in source:
        raise KieloError(f"corpus.sources: name = {source!r} cannot name a file here. Fix: another name")
    return source


def _rows(packed: PackedDocuments, group: str, name: str, file: str, has_loss_mask: bool) -> ShardRows:
    if file not in packed.shards:
        packed.shards[file] = ShardRows(group, name, file, [] if has_loss_mask else None)
    return packed.shards[file]
