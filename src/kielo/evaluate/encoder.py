"""An encoder's view of single texts: each text is a sequence, with logits at a place and states of a layer.

Texts of one length are computed together, without padding. Shape letters: n = texts, s = tokens of a text, v
= vocabulary, d = hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kielo.dataset.document_packer import begins_with_cls
from kielo.evaluate.contender import MOST_LOGITS_PER_FORWARD, Contender, load_checkpoint
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve import resolved as resolved_file
from kielo.tokenizer.load import encode, end_of_text_id, role_id, vocabulary_size
from kielo.tokenizer.spelling import WordPieces, word_pieces

TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Encoder:
    """A Kielo encoder with the tokens around its texts.

    first: ids that begin a text, `[CLS]` or none. last: ids that end it. pieces: how tokens make words.
    """

    contender: Contender
    mask_id: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    pieces: WordPieces

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
    return Encoder(
        contender=contender,
        mask_id=mask_id,
        first=() if cls_id is None else (cls_id,),
        last=(end_of_text_id(tokenizer),),
        pieces=word_pieces(tokenizer),
    )


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
