"""Documents → their tokens, which of them carry loss, and the shards that they belong to.

The chat template lays conversations out. Tokens, side of the held-out split and held-out set follow from the
document alone, so batches may be packed anywhere and in any order.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import orjson

from kielo.artifact.documents import TOOLS, WEIGHT, Document, carries_loss, messages_of, parse_record
from kielo.artifact.manifest import read_manifest
from kielo.dataset.heldout_sets import HELDOUT, SET_KEY, HeldoutLanguages, set_file
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import longest_sequence_length
from kielo.recipe.sections import Recipe
from kielo.tokenizer.chat_template import ChatTemplate
from kielo.tokenizer.load import TextTokenizer, decode, end_of_text_id, load_tokenizer, role_id
from kielo.tokenizer.measure import WORD
from kielo.tokenizer.piece_cache import PieceCache
from kielo.tokenizer.stage_inputs import is_heldout
from kielo.tokenizer.text_frame import ids_before_texts_of

# Key of the section of RUN/tokens: ids before documents, if any. Earlier versions put none.
BEGINS_WITH = "begins_with"
# In the metadata of a held-out document of ready tokens: its ids, without end-of-text. Its text, without
# special tokens, may have other ids.
STORED_IDS = "ids"


@dataclass(frozen=True)
class EncodedDocument:
    text: str  # of the decoded ids
    ids: np.ndarray  # int32, without end-of-text
    num_words: int
    carries_loss: np.ndarray | None = None  # bool [ids + 1], also of end-of-text; None: all do
    bytes_with_loss: int | None = None  # UTF-8, and one for each end of a text with loss; None: all
    is_framed: bool = True  # the ids that begin documents come before it; a chat template writes its own

    @property
    def loss_mask(self) -> np.ndarray:
        return np.ones(len(self.ids) + 1, bool) if self.carries_loss is None else self.carries_loss


class DocumentEncoder:
    """An encoder of a recipe's documents. takes_ids: stored ids of ready tokens are the tokenizer's."""

    def __init__(
        self, recipe: Recipe, tokenizer: TextTokenizer, end_of_text_id: int, takes_ids: bool = False
    ):
        self._takes_ids = takes_ids
        self._tokenizer, self.end_of_text_id = tokenizer, end_of_text_id
        self._pieces = PieceCache(tokenizer)
        outside = [text.name for text in recipe.evaluate.texts if text.loss == "answers"]
        self._on_answers = [*sources_with_loss_mask(recipe), *outside]
        self._frames_chats = recipe.train.objective == "masked_tokens"

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    def encode(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        encoded: dict[int, EncodedDocument] = {}
        found = {number: messages_of(document) for number, document in enumerate(documents)}
        chats = {number: messages for number, messages in found.items() if messages is not None}
        stored = [number for number, one in enumerate(documents) if self._takes_ids and stored_ids(one)]
        for number in stored:
            text, ids = documents[number]["text"], np.array(stored_ids(documents[number]), np.int32)
            encoded[number] = EncodedDocument(text, ids, len(WORD.findall(text)), is_framed=False)
        texts = sorted(found.keys() - chats.keys() - set(stored))
        rows = self._pieces.encode([documents[number]["text"] for number in texts])
        for number, row in zip(texts, rows, strict=True):
            encoded[number] = EncodedDocument(documents[number]["text"], row.ids, row.num_words)
        if chats:
            conversations = [(_place(documents[number]), messages) for number, messages in chats.items()]
            tools = [documents[one]["metadata"].get(TOOLS) for one in chats]
            for number, laid_out in zip(chats, self._template.lay_out(conversations, tools), strict=True):
                ids, is_answer = np.array(laid_out.ids, dtype=np.int32), laid_out.is_answer
                words = len(WORD.findall(documents[number]["text"]))
                if len(ids) and ids[-1] == self.end_of_text_id:  # the template has written it
                    ids, is_answer = ids[:-1], is_answer[:-1]
                one = EncodedDocument(laid_out.text, ids, words, is_framed=self._frames_chats)
                if documents[number]["source"] in self._on_answers:
                    size = _answer_bytes(documents[number])
                    one = replace(one, carries_loss=is_answer, bytes_with_loss=size, is_framed=False)
                else:
                    _refuse_weights(documents[number])
                encoded[number] = one
        return [encoded[number] for number in found]


def stored_ids(document: Document) -> list[int] | None:
    return document["metadata"].get(STORED_IDS)


def sources_with_loss_mask(recipe: Recipe) -> list[str]:
    return [source.name for source in recipe.corpus.sources if source.loss == "answers"]


def begin_of_documents(recipe: Recipe, tokenizer_folder: Path) -> tuple[int, ...]:
    """Return the ids before a decoder's documents. Encoders and ready tokens have none."""
    if recipe.train.objective == "masked_tokens" or recipe.corpus.token_sources:
        return ()
    return ids_before_texts_of(tokenizer_folder)


def packed_begin_of_documents(tokens_folder: Path, tokenizer_folder: Path) -> tuple[int, ...]:
    """Return the ids with which the documents in RUN/tokens begin, or before packing the tokenizer's."""
    if (packed := read_manifest(tokens_folder)) is None:
        return ids_before_texts_of(tokenizer_folder)
    return tuple(packed.section.get(BEGINS_WITH, ()))


def begins_with_cls(recipe: Recipe) -> bool:
    """Return True for encoders, whose documents `cls_token` begins, unless their tokens are ready."""
    return recipe.train.objective == "masked_tokens" and not recipe.corpus.token_sources


def _place(document: Document) -> str:
    facts = document["metadata"]
    return f"source {document['source']}: {facts['file']}, line or row {facts['number']}"


def _refuse_weights(document: Document) -> None:
    for number, message in enumerate(messages_of(document) or (), start=1):
        if message.get(WEIGHT, 1) == 0:
            raise KieloError(
                f"{_place(document)}, message {number}: has the weight 0, but all tokens of its source carry "
                'loss. Fix: loss = "answers" in the source'
            )


def _answer_bytes(document: Document) -> int:
    size = 0
    for message in filter(carries_loss, messages_of(document) or ()):
        more = {key: message[key] for key in message if key not in ("role", "content", WEIGHT)}
        size += len(message["content"].encode("utf-8", "surrogatepass")) + 1
        size += len(json.dumps(more, ensure_ascii=False).encode("utf-8", "surrogatepass")) if more else 0
    return size


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
        return [parse_record(self.path, at, line) for at, line in enumerate(self.lines, self.first + 1)]


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
    is_last: bool = False  # of its file
    shards: dict[str, ShardRows] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)  # documents of each source, with held-out ones
    heldout: list[bytes] = field(default_factory=list)  # as JSON lines
    checked: int = 0  # documents that were decoded
    exact: int = 0  # and that came back


class DocumentPacker:
    """A packer of a recipe's documents. masked: sources of ready tokens of which only a part carries loss."""

    def __init__(self, recipe: Recipe, tokenizer: TextTokenizer, masked: Sequence[str] = ()):
        self._recipe, self._tokenizer = recipe, tokenizer
        end, first = end_of_text_id(tokenizer), begin_of_documents(recipe, tokenizer.folder)
        if begins_with_cls(recipe) and (cls_id := role_id(tokenizer, "cls_token")) is not None:
            first = (cls_id,)
        # Before framed documents, and after every document.
        self._begin, self._end = np.array(first, dtype=np.int32), np.array([end], dtype=np.int32)
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
                    if self._too_long[source] == "truncate":
                        flags, ids = one.carries_loss, one.ids[: self._longest - 1]
                        flags = None if flags is None else np.append(flags[: self._longest - 1], False)
                        one = replace(one, ids=ids, carries_loss=flags)
                self._add(document, one, rows)
        for rows in packed.shards.values():
            rows.join()
        return packed

    def held_out(self, document: Document, row: Sequence[int], flags: np.ndarray | None) -> PackedDocuments:
        """Pack a document with known ids and loss mask that is held out whatever the split says."""
        packed, ids, num_bytes = PackedDocuments(), np.array(row, dtype=np.int32), None
        if flags is not None:
            (text,) = decode(self._tokenizer, [ids[flags[:-1]].tolist()], has_special=False)
            num_bytes = len(text.encode()) + int(flags[-1])
        words = len(WORD.findall(document["text"]))
        self._hold_out(document, EncodedDocument(document["text"], ids, words, flags, num_bytes), packed)
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
        begin = self._begin if encoded.is_framed else self._begin[:0]
        row = np.concatenate([begin, encoded.ids, self._end])
        num_bytes = len(document["text"].encode("utf-8", "surrogatepass"))
        if rows.carries_loss is not None:
            flags, with_loss = encoded.carries_loss, encoded.bytes_with_loss
            rows.carries_loss.append(flags := np.ones(len(row), bool) if flags is None else flags)
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
