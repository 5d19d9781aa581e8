"""Documents → their tokens, and which of them carry loss. The chat template lays conversations out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from kielo.artifact.documents import TOOLS, WEIGHT, Document, carries_loss, messages_of
from kielo.artifact.manifest import read_manifest
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.chat_template import ChatTemplate
from kielo.tokenizer.load import TextTokenizer
from kielo.tokenizer.measure import WORD
from kielo.tokenizer.piece_cache import PieceCache
from kielo.tokenizer.text_frame import ids_before_texts_of

# Key of the section of RUN/tokens: ids before documents, if any. Earlier versions put none.
BEGINS_WITH = "begins_with"
# In the metadata of a held-out document of ready tokens: its ids, without end-of-text. Its text, without
# special tokens, may have other ids.
STORED_IDS = "ids"


@dataclass(frozen=True)
class EncodedDocument:
    """A document's tokens."""

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
        """Encode documents. Raises KieloError, naming file and line, for a refused conversation."""
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
    packed = read_manifest(tokens_folder)
    if packed is None:
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
    for message in messages_of(document) or ():
        if not carries_loss(message):
            continue
        more = {key: message[key] for key in message if key not in ("role", "content", WEIGHT)}
        size += len(message["content"].encode("utf-8", "surrogatepass")) + 1
        size += len(json.dumps(more, ensure_ascii=False).encode("utf-8", "surrogatepass")) if more else 0
    return size
