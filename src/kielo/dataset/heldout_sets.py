"""The held-out sets of a run: the text of all sources, and sets of sources or languages if there are several.

Texts from outside the mixture have their own folder. A folder of an earlier Kielo has the first set only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.stage_counts import EvaluationTextCounts, TokenCounts
from kielo.artifact.stage_json import read_counts
from kielo.dataset.batches import Batch, open_shard, packed_counts, shard_batch
from kielo.recipe.cards import language, language_code
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe, Source
from kielo.recipe.several_languages import languages_of

SEPARATOR = "@"  # no name of a source has it
HELDOUT = "heldout"  # the files of all sources' text; a source's own are heldout.SOURCE
SET_KEY = "heldout_set"  # in a held-out document's metadata, if its set is not its source's
EVALUATION_TEXTS = "evaluation_texts"  # folder beside the tokens' (`evaluation_texts.py`)


class HeldoutLanguages:
    """The sets of a recipe's sources: a source's name, or SOURCE@LANGUAGE as the identifier decides."""

    def __init__(self, recipe: Recipe):
        self._identifier = recipe.corpus.language_identifier
        self._languages = {source.name: languages_of(recipe, source) for source in recipe.corpus.sources}
        self._codes = {source.name: self._codes_of(source) for source in recipe.corpus.sources}

    @property
    def has_several_sets(self) -> bool:
        return len(self._codes) > 1 or any(self._codes.values())

    def set_of(self, document: Mapping[str, Any]) -> str:
        source, codes = document["source"], self._codes.get(document["source"])
        if not codes:
            return source
        from kielo.corpus.language_identification import MAX_CHARACTERS, load_identifier

        found = load_identifier(self._identifier).probabilities(document["text"][:MAX_CHARACTERS])
        most = max(codes, key=lambda code: sum(found.get(known, 0.0) for known in codes[code]))
        return f"{source}{SEPARATOR}{most}"

    def languages_of_set(self, name: str) -> tuple[str, ...]:
        source, _, code = name.partition(SEPARATOR)
        return (code,) if code else tuple(map(language_code, self._languages.get(source, ())))

    def _codes_of(self, source: Source) -> dict[str, tuple[str, ...]]:
        """Return language → the identifier's codes, if it can tell a source's languages apart."""
        languages = self._languages[source.name]
        if source.kind != "text" or len(languages) < 2:
            return {}
        codes = {language_code(name): language(name).codes_of(self._identifier) for name in languages}
        return codes if all(codes.values()) else {}


@dataclass(frozen=True)
class HeldoutSet:
    name: str  # "" for all sources' text, else of a source's set or outside text
    folder: Path
    file: str  # its shard in `folder`
    languages: tuple[str, ...]  # codes; () if unknown
    tokens: int  # with end-of-text
    text_bytes: int | None  # UTF-8 bytes of its documents, and one for each document's border
    with_loss: tuple[int, int] | None = None  # (tokens, bytes) of the part with loss, if not all has loss

    @property
    def tokens_per_byte(self) -> float | None:
        """The tokens per byte of text (of the part with loss), which turn losses into bits per byte."""
        tokens, text_bytes = self.with_loss or (self.tokens, self.text_bytes)
        return tokens / text_bytes if text_bytes else None

    def holds(self, document: Mapping[str, Any]) -> bool:
        return document["metadata"].get(SET_KEY, document["source"]) == self.name

    def batch(self, sequence_length: int, max_sequences: int, mask_documents: bool = False) -> Batch:
        """Return at most `max_sequences` sequences, evenly spaced and always the same. Raises KieloError."""
        shard = open_shard(self.folder, self.file)
        if shard.num_tokens < 2:
            raise KieloError(f"{self.folder}: no held-out text. Fix: pack with more dataset.heldout_share")
        num_sequences = -(-(shard.num_tokens - 1) // sequence_length)
        chosen = min(num_sequences, max_sequences)
        sequences = np.arange(chosen, dtype=np.int64) * num_sequences // chosen
        return shard_batch(shard, sequences, sequence_length, mask_documents)


def set_file(source: str) -> str:
    return f"{HELDOUT}.{source}"


def heldout_sets(tokens_folder: Path | str) -> tuple[HeldoutSet, ...]:
    """Return the set of all sources, the sets of the sources if there are several, then outside texts."""
    folder = Path(tokens_folder)
    counts, outside = packed_counts(folder), folder.parent / EVALUATION_TEXTS
    found = [_set("", folder, HELDOUT, counts.heldout)]
    found += [_set(name, folder, set_file(name), of) for name, of in counts.heldout_sets.items()]
    if (texts := read_counts(outside, EvaluationTextCounts)) is not None:
        found += [_set(name, outside, name, of) for name, of in texts.texts.items()]
    return tuple(found)


def check_outside_texts(names: Iterable[str], tokens_folder: Path) -> None:
    folder = tokens_folder.parent / EVALUATION_TEXTS
    packed = read_counts(folder, EvaluationTextCounts)
    if missing := [name for name in names if packed is None or name not in packed.texts]:
        raise KieloError(
            f"{folder}: evaluate.texts, {', '.join(missing)}: not packed yet. Fix: `kielo run RECIPE --only "
            "pack`"
        )


def _set(name: str, folder: Path, file: str, of: TokenCounts) -> HeldoutSet:
    text_bytes = None if of.bytes is None or of.documents is None else of.bytes + of.documents
    is_partly = of.tokens_with_loss is not None and of.bytes_with_loss is not None
    with_loss = (of.tokens_with_loss or 0, of.bytes_with_loss or 0) if is_partly else None
    return HeldoutSet(name, folder, file, tuple(of.languages), of.tokens, text_bytes, with_loss)
