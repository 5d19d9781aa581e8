"""An encoder's fillings for a hidden word, in held-out sentences or in the recipe's.

A sentence is a line of a held-out document. The hidden word is a single token, so that the truth is a
possible answer.
"""

import re
from collections.abc import Sequence

import numpy as np
import torch

from kielo.artifact.scores import FilledMask, Filling
from kielo.evaluate.encoder import Encoder
from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import decode

NUM_SENTENCES = 6
NUM_FILLINGS = 5
_CHARACTERS = (40, 160)  # of a sentence
_WORD = re.compile(r"[^\W\d_]{4,}")


def fill_heldout(encoder: Encoder, documents: Sequence[str], seed: int) -> list[FilledMask]:
    """Hide a word in a sentence of each of the first documents with a fitting sentence."""
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
