"""A ready tokenizer that loses text, or that is not that of the weights, is refused before text is packed."""

import unicodedata
from collections.abc import Iterable
from pathlib import Path

from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TOKENIZER_FILE, TextTokenizer, decode, encode, load_tokenizer

_CHECKED_TEXTS = 256
_SHOWN = 24  # characters of a text that does not come back


def refuse_lossy(tokenizer: TextTokenizer, texts: Iterable[str], key: str) -> None:
    """Raises KieloError where more than half of the first 256 texts do not come back, with an example.

    Spaces and Unicode's compatibility forms (NFKC) may differ: many tokenizers normalise them. A model of
    what is lost otherwise (letters that are unknown, capitals, accents) could never write such text. key:
    the recipe key that the tokenizer is of.
    """
    batch = [text for _, text in zip(range(_CHECKED_TEXTS), texts)]
    pairs = [
        (_bare(text), _bare(back)) for text, back in zip(batch, decode(tokenizer, encode(tokenizer, batch)))
    ]
    lost = [(text, back) for text, back in pairs if text != back]
    if 2 * len(lost) <= len(pairs):
        return
    text, back = lost[0]
    first = next((n for n, (one, other) in enumerate(zip(text, back)) if one != other), len(back))
    begin = max(0, first - _SHOWN // 2)
    raise KieloError(
        f"{key}: of {len(pairs):,} texts {len(lost):,} do not come back from this tokenizer: "
        f"{text[begin : begin + _SHOWN]!r} becomes {back[begin : begin + _SHOWN]!r} (without spaces). What "
        "would work: a byte-level tokenizer or one with byte fallback, that keeps capitals and accents; or "
        "none, and this recipe trains its own"
    )


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def refuse_other_vocabulary(tokenizer: Path, weights: Path, key: str) -> None:
    """Raises KieloError where more than a tenth of the ids are other tokens in the tokenizer of the weights.

    Both are folders; nothing is compared where one of them has no tokenizer. Some ids may differ, as those of
    control tokens that were added later. key: the recipe key that `tokenizer` is of.
    """
    if not all((folder / TOKENIZER_FILE).is_file() for folder in (tokenizer, weights)):
        return
    ours, theirs = (
        {number: token for token, number in load_tokenizer(folder).whole.get_vocab().items()}
        for folder in (tokenizer, weights)
    )
    alike = sum(theirs.get(number) == token for number, token in ours.items())
    if 10 * alike >= 9 * len(ours):
        return
    number = next(number for number in sorted(ours) if theirs.get(number) != ours[number])
    raise KieloError(
        f"{key}: is not the vocabulary of model.weights: {len(ours) - alike:,} of its {len(ours):,} ids are "
        f"other tokens there, such as {number}: {ours[number]!r} here, {theirs.get(number)!r} in {weights}. "
        f'What would work: tokenizer.path = "{weights}", or model.transplant = "mean", which makes rows for '
        "this vocabulary"
    )
