"""Fluency of a decoder: minimal pairs, and repetition and languages of its own continuations.

The model continues the beginning of each document. The document's own continuation, of as many words, is
measured in the same way: it shows what text of this kind repeats, and how often the identifier errs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kielo.artifact.documents import Document
from kielo.artifact.scores import FluencyScores
from kielo.corpus.language_identification import load_identifier
from kielo.evaluate.contender import Contender
from kielo.evaluate.generate import continuations
from kielo.evaluate.made_pairs import make_pairs
from kielo.evaluate.minimal_pairs import score_made_pairs, score_pairs
from kielo.evaluate.pair_files import Pair
from kielo.recipe.cards import language, languages
from kielo.recipe.sections import Recipe
from kielo.recipe.several_languages import languages_of
from kielo.tokenizer.load import TextTokenizer, vocabulary_size

PROMPT_WORDS = 20
LEAST_WORDS = 2 * PROMPT_WORDS  # of a document that is continued
REPEATED_WORDS = 4
# Shorter text is often taken for another language; in longer text a change of language is not seen.
CHARACTERS_OF_A_PART = 100
MOST_LOGITS = 1 << 28  # of a forward, 1 GiB in fp32


def score_sentences(
    contender: Contender,
    recipe: Recipe,
    pairs: Sequence[Pair],
    tokenizer: TextTokenizer,
    heldout: Sequence[Document],
    training: Sequence[str],
    folder: Path | None,
) -> dict[str, Any]:
    """Return the scores of minimal pairs and continuations that the recipe asks for, by the key of `Scores`.

    pairs: of `evaluate.minimal_pairs`. tokenizer: the run's. folder: gets the made pairs, if it is given.
    """
    evaluate, found = recipe.evaluate, dict[str, Any]()
    if pairs:
        found["minimal_pairs"] = score_pairs(contender, pairs, Path(evaluate.minimal_pairs).name)
    if not evaluate.made_pairs and not evaluate.fluency_texts:
        return found
    sources = sources_of_language(recipe)
    own = [document["text"] for document in heldout if document["source"] in sources]
    if evaluate.made_pairs:
        made = make_pairs(own, training, tokenizer, evaluate.made_pairs, recipe.seed)
        if made.pairs:
            found["made_pairs"] = score_made_pairs(contender, made, evaluate.made_pairs, folder)
    if evaluate.fluency_texts and (fluency := score_continuations(contender, recipe, own)):
        found["fluency"] = fluency
    return found


def sources_of_language(recipe: Recipe) -> set[str]:
    """Return the names of sources in the recipe's language alone."""
    only = (recipe.language,)
    return {source.name for source in recipe.corpus.sources if languages_of(recipe, source) == only}


def score_continuations(contender: Contender, recipe: Recipe, texts: Sequence[str]) -> FluencyScores | None:
    """Score continuations of held-out documents, or return None if all documents are too short.

    Without spaces between words, a character counts as a word.
    """
    has_spaces = language(recipe.language).has_spaces
    joint = " " if has_spaces else ""
    documents = [words for text in texts if len(words := words_of(text, has_spaces)) >= LEAST_WORDS]
    if not documents:
        return None
    num_texts = min(recipe.evaluate.fluency_texts, len(documents))
    documents = [documents[(2 * n + 1) * len(documents) // (2 * num_texts)] for n in range(num_texts)]
    beginnings = [words[:PROMPT_WORDS] for words in documents]
    written = _continued(contender, recipe, [joint.join(words) for words in beginnings])
    new = [words_of(text, has_spaces) for text in written]
    own = [words[PROMPT_WORDS : PROMPT_WORDS + len(ours)] for words, ours in zip(documents, new, strict=True)]
    identify = identifier_of(recipe)
    return FluencyScores(
        texts=num_texts,
        repeated=repeated_share(beginnings, new),
        repeated_in_heldout=repeated_share(beginnings, own),
        languages=language_shares((joint.join(words) for words in new), identify),
        languages_in_heldout=language_shares((joint.join(words) for words in own), identify),
    )


def _continued(contender: Contender, recipe: Recipe, prompts: Sequence[str]) -> list[str]:
    settings = recipe.evaluate
    length = min(contender.sequence_length, settings.sample_tokens + 8 * PROMPT_WORDS)
    at_once = max(1, MOST_LOGITS // vocabulary_size(contender.tokenizer) // length)
    written: list[str] = []
    for start in range(0, len(prompts), at_once):
        together = prompts[start : start + at_once]
        seeds = [recipe.seed + start + number for number in range(len(together))]
        how = settings.sample_tokens, settings.temperature, settings.top_k
        written += continuations(contender, together, *how, seeds)
    return written


def words_of(text: str, has_spaces: bool) -> list[str]:
    return text.split() if has_spaces else list("".join(text.split()))


def repeated_share(beginnings: Sequence[Sequence[str]], continued: Sequence[Sequence[str]]) -> float:
    """Return the share of words after beginnings in a 4-gram that occurred before in the same text."""
    repeated = total = 0
    for first, words in zip(beginnings, continued, strict=True):
        whole, seen = [*first, *words], set()
        is_repeated = [False] * len(whole)
        for place in range(len(whole) - REPEATED_WORDS + 1):
            gram = tuple(whole[place : place + REPEATED_WORDS])
            if gram in seen:
                is_repeated[place : place + REPEATED_WORDS] = [True] * REPEATED_WORDS
            seen.add(gram)
        repeated += sum(is_repeated[len(first) :])
        total += len(words)
    return repeated / max(1, total)


def identifier_of(recipe: Recipe) -> Callable[[str], str]:
    """Return text → code of the likeliest language's card, or of the identifier if no card has it."""
    name = recipe.corpus.language_identifier
    model = load_identifier(name)
    codes: dict[str, str] = {}
    # Cards can share a code of the identifier, as Norwegian's two: then the recipe's language is meant.
    for card in (language(recipe.language), *map(language, languages())):
        for code in card.codes_of(name):
            codes.setdefault(code, card.code)

    def identify(text: str) -> str:
        found: defaultdict[str, float] = defaultdict(float)
        for code, probability in model.probabilities(text).items():
            found[codes.get(code, code)] += probability
        return max(found, key=found.__getitem__, default="?")

    return identify


def language_shares(texts: Iterator[str], identify: Callable[[str], str]) -> dict[str, float]:
    """Return language → share of the characters, largest first. A text is identified in parts."""
    characters: Counter[str] = Counter()
    for text in texts:
        for part in parts_of(text):
            characters[identify(part)] += len(part)
    total = sum(characters.values())
    return {code: count / total for code, count in characters.most_common()}


def parts_of(text: str) -> list[str]:
    """Return parts of about 100 characters, which end before a space if the text has spaces."""
    parts = []
    while len(text) > 2 * CHARACTERS_OF_A_PART:
        end = text.rfind(" ", CHARACTERS_OF_A_PART // 2, CHARACTERS_OF_A_PART + 1)
        end = CHARACTERS_OF_A_PART if end < 0 else end
        parts.append(text[:end])
        text = text[end:].lstrip(" ")
    return [*parts, text] if text else parts
