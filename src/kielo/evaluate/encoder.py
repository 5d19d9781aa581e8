"""An encoder's view of single texts: logits at a place, states of a layer, and words for a mask.

Each text is a sequence. Texts of one length are computed together, without padding. Shape letters: n = texts,
s = tokens of a text, v = vocabulary, d = hidden size.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kielo.artifact.scores import FilledMask, Filling
from kielo.dataset.document_packer import begins_with_cls
from kielo.evaluate.contender import MOST_LOGITS_PER_FORWARD, Contender, load_checkpoint
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve import resolved as resolved_file
from kielo.tokenizer.load import decode, encode, end_of_text_id, role_id, vocabulary_size
from kielo.tokenizer.spelling import WordPieces, word_pieces

TOKENS_AT_ONCE = 8192
NUM_SENTENCES = 6
NUM_FILLINGS = 5
_CHARACTERS = (40, 160)  # of a sentence
_WORD = re.compile(r"[^\W\d_]{4,}")


@dataclass(frozen=True)
class Encoder:
    """A Kielo encoder with the tokens around its texts."""

    contender: Contender
    mask_id: int
    first: tuple[int, ...]  # ids that begin a text, `[CLS]` or none
    last: tuple[int, ...]  # ids that end it
    pieces: WordPieces  # how tokens make words

    @property
    def most_tokens(self) -> int:
        return self.contender.sequence_length - len(self.first) - len(self.last)

    def sequence(self, ids: Sequence[int]) -> np.ndarray:
        """Return a text as the model was trained to see it, int64 [s]."""
        return np.array([*self.first, *ids, *self.last], np.int64)

    def rows_at_once(self, length: int) -> int:
        """Return the sequences of `length` tokens in one forward, whose logits exist for all tokens."""
        tokens = min(TOKENS_AT_ONCE, MOST_LOGITS_PER_FORWARD // vocabulary_size(self.contender.tokenizer))
        return max(1, tokens // length)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode(self.contender.tokenizer, texts)

    def beginning(self, text: str) -> str:
        """Return the beginning of a text, at most one sequence, up to the end of a word if it has spaces."""
        text = text[: 16 * self.most_tokens].strip()
        while (num_tokens := len(self.encode([text])[0])) > self.most_tokens:
            shorter = text[: len(text) * self.most_tokens // num_tokens]
            text = shorter.rpartition(" ")[0].rstrip() or shorter
        return text

    @torch.inference_mode()
    def logits_at(self, inputs_ns: np.ndarray, places_n: np.ndarray) -> Tensor:
        """Return the logits at one place of each sequence, fp32 [n, v]."""
        inputs = torch.from_numpy(inputs_ns).to(self.contender.device)
        rows = torch.arange(len(inputs), device=inputs.device)
        places = torch.from_numpy(places_n).to(inputs.device)
        return self.contender.logits(inputs, None)[rows, places].float()

    @torch.inference_mode()
    def states(self, inputs_ns: np.ndarray, layer: int) -> Tensor:
        """Return the output of a layer, counted from 1, fp32 [n, s, d]."""
        found: list[Tensor] = []
        module = self.contender.module
        hook = module.layers[str(layer - 1)].register_forward_hook(
            lambda _layer, _inputs, output: found.append(output)
        )
        try:
            module(torch.from_numpy(inputs_ns).to(self.contender.device))
        finally:
            hook.remove()
        return found[0].float()


def open_encoder(contender: Contender, recipe: Recipe) -> Encoder:
    """Return the encoder of a recipe's run, with the control tokens that the recipe puts around texts."""
    tokenizer = contender.tokenizer
    cls_id = role_id(tokenizer, "cls_token") if begins_with_cls(recipe) else None
    mask_id = role_id(tokenizer, "mask_token")
    if mask_id is None:
        raise KieloError(f"{tokenizer.folder}: the tokenizer has no mask token, so no word can be hidden")
    first, last = () if cls_id is None else (cls_id,), (end_of_text_id(tokenizer),)
    return Encoder(contender, mask_id, first, last, word_pieces(tokenizer))


def load_encoder(recipe: Recipe, run_folder: Path, checkpoint: Path) -> Encoder:
    resolved = resolved_file.read(run_folder / "resolved.toml")
    return open_encoder(load_checkpoint(checkpoint, resolved, run_folder / "tokenizer"), recipe)


def by_length(
    num_items: int, length_of: Callable[[int], int], rows_of: Callable[[int], int] = lambda _: 1
) -> Iterator[list[int]]:
    """Yield groups of item numbers, each of one length and about `TOKENS_AT_ONCE` tokens together.

    A group has at least one item. `rows_of` returns the number of sequences of an item.
    """
    for length, numbers in groupby(sorted(range(num_items), key=length_of), key=length_of):
        together: list[int] = []
        rows = 0
        for number in numbers:
            if together and (rows + rows_of(number)) * length > TOKENS_AT_ONCE:
                yield together
                together, rows = [], 0
            together.append(number)
            rows += rows_of(number)
        yield together


def fill_heldout(encoder: Encoder, documents: Sequence[str], seed: int) -> list[FilledMask]:
    """Hide a word in a sentence of each of the first documents with a fitting sentence, which is a line.

    The word is a single token, so that the truth is a possible answer.
    """
    random, filled = np.random.default_rng(seed), []
    for document in documents:
        lines = [line.strip() for line in document.splitlines()]
        lines = [line for line in lines if _CHARACTERS[0] <= len(line) <= _CHARACTERS[1]]
        if lines and (found := _hide_a_word(encoder, lines[random.integers(len(lines))], random)):
            filled.append(found)
        if len(filled) == NUM_SENTENCES:
            break
    return filled


def fill_prompts(encoder: Encoder, prompts: Sequence[str]) -> list[FilledMask]:
    """Fill texts with one mask token each, which are encoded as transformers encodes them.

    Raise KieloError for a text without or with two mask tokens, for a text that is too long, and for a space
    before a mask token that does not take it in, because the model never saw these ids.
    """
    whole = encoder.contender.tokenizer.whole
    mask = whole.id_to_token(encoder.mask_id) or ""
    added = whole.get_added_tokens_decoder().get(encoder.mask_id)
    filled = []
    for prompt in prompts:
        if prompt.count(mask) != 1:
            raise KieloError(f"{prompt[:60]!r}: an encoder fills one hidden word. Fix: {mask} once in it")
        before, after = prompt.split(mask)
        seen_before = before.rstrip() if added and added.lstrip else before
        seen_after = after.lstrip() if added and added.rstrip else after
        ids_before, ids_after, without_space = encoder.encode([seen_before, seen_after, before.rstrip()])
        if ids_before != without_space:
            raise KieloError(
                f"{prompt[:60]!r}: the space before a word is in the word's token, and the {mask} of this "
                f"tokenizer does not take the space in (lstrip in tokenizer.json). "
                f"Fix: {before.rstrip() + mask + after!r}"
            )
        if len(ids_before) + 1 + len(ids_after) > encoder.most_tokens:
            raise KieloError(
                f"{prompt[:60]!r}: longer than a sequence of the model. "
                f"Fix: at most {encoder.most_tokens} tokens"
            )
        fillings = _likeliest(encoder, [*ids_before, encoder.mask_id, *ids_after], len(ids_before))
        filled.append(FilledMask(before=before, after=after, truth=None, fillings=fillings))
    return filled


def _hide_a_word(encoder: Encoder, sentence: str, random: np.random.Generator) -> FilledMask | None:
    tokenizer = encoder.contender.tokenizer.for_text.tokenizer
    encoding = tokenizer.encode(sentence, add_special_tokens=False)
    if len(encoding.ids) > encoder.most_tokens:
        return None
    places = {}  # (begin, end) of a token's letters → its number
    for number, (begin, end) in enumerate(encoding.offsets):
        piece = sentence[begin:end]
        places[(begin + len(piece) - len(piece.lstrip()), end)] = number
    words = [word for word in _WORD.finditer(sentence) if word.span() in places]
    if not words:
        return None
    word = words[random.integers(len(words))]
    number = places[word.span()]
    ids = list(encoding.ids)
    ids[number] = encoder.mask_id
    return FilledMask(
        before=sentence[: word.start()],
        after=sentence[word.end() :],
        truth=word.group(),
        fillings=_likeliest(encoder, ids, number),
    )


def _likeliest(encoder: Encoder, ids: Sequence[int], place: int) -> list[Filling]:
    logits = encoder.logits_at(encoder.sequence(ids)[None], np.array([place + len(encoder.first)]))[0]
    values, tokens = torch.softmax(logits, dim=-1).cpu().topk(min(NUM_FILLINGS, len(logits)))
    texts = decode(encoder.contender.tokenizer, [[token] for token in tokens.tolist()])
    return [
        Filling(text=text.strip() or repr(text), probability=probability)
        for text, probability in zip(texts, values.tolist(), strict=True)
    ]
