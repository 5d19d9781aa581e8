"""The corpus stage: raw text -> clean documents in one language, and the funnel that tells what was dropped.

Two passes of datatrove steps. The first works on each document alone, on all workers; the second knows the
whole corpus (duplicates) and runs in this process, in the order of the sources. So the outcome is the same,
byte for byte, for any number of workers.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import Manifest, is_current, read_manifest, write_json_atomically, write_stage
from kielo.artifact.trained_text import refuse_to_replace
from kielo.corpus.dedup import DocumentDuplicates, LineDuplicates
from kielo.corpus.executor import run_pipeline
from kielo.corpus.fetch import fetch_sources
from kielo.corpus.funnel import build_funnel, by_source, empty_message, threshold_table
from kielo.corpus.language import DocumentLanguage, LineLanguage
from kielo.corpus.length import DocumentLength, LineLength
from kielo.corpus.normalise import Normalise
from kielo.corpus.read import RawSource, ReadSources
from kielo.corpus.script import ScriptFilter
from kielo.corpus.shards import MergeCleaned, WriteCleaned, WriteDocuments
from kielo.corpus.steps import CorpusStep
from kielo.recipe.cards import Language, language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe

KIND, VERSION = "corpus", 1


def run_corpus(recipe: Recipe, folder: Path, raw_folder: Path, progress: bool = True) -> Manifest:
    """Fetch and clean the recipe's sources into `folder`: documents/*.jsonl.zst, funnel.json, manifest.json.

    Does nothing when `folder` already holds the outcome for this text and these settings (its manifest is
    returned as it was). Counts: bytes_in, documents_in, bytes_kept, documents_kept, words_kept, sources.
    Raises KieloError for text that cannot be fetched or read, and when nothing is left of it; `folder` is
    then as it was before.
    """
    folder = Path(folder)
    say = _speaker(progress)
    card = language(recipe.language)
    section = effective_settings(recipe.corpus, card)
    sources = fetch_sources(recipe, Path(raw_folder), say)
    inputs = {source.name: source.fingerprint for source in sources}
    if is_current(folder, KIND, VERSION, inputs, section):
        say("nothing changed, nothing to do")
        return read_manifest(folder)
    refuse_to_replace(folder, KIND, VERSION, inputs, section)
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        _clean(sources, section, recipe.corpus.workers, stage.folder, stage.counts, say)
    return read_manifest(folder)


def effective_settings(corpus: Corpus, card: Language) -> dict[str, Any]:
    """All that decides the outcome, with the language card's values where the recipe leaves them open.

    Raises KieloError when the identifier does not know the language.
    """
    identifier = corpus.language_identifier
    codes = card.identifier_codes.get(identifier)
    if not codes:
        known = [name for name, known_codes in card.identifier_codes.items() if known_codes]
        raise KieloError(
            f"corpus.language_identifier: {identifier} does not know {card.name}; "
            f"{' or '.join(known) or 'no identifier here'} does"
        )

    def threshold(chosen: float | None, defaults: dict[str, float]) -> float:
        return defaults.get(identifier, 0.5) if chosen is None else chosen

    return {
        "language": card.code,
        "scripts": list(card.unicode_scripts),
        "letters": card.letters,
        "max_foreign_character_share": corpus.max_foreign_character_share,
        "language_identifier": identifier,
        "identifier_codes": list(codes),
        "line_language_threshold": threshold(corpus.line_language_threshold, card.line_language_threshold),
        "document_language_threshold": threshold(
            corpus.document_language_threshold, card.document_language_threshold
        ),
        "min_line_characters": corpus.min_line_characters,
        "min_document_characters": corpus.min_document_characters,
        "deduplicate_lines": corpus.deduplicate_lines,
        "deduplicate_documents": corpus.deduplicate_documents,
        "text_fields": [source.text_field for source in corpus.sources],
        "max_documents": [source.max_documents for source in corpus.sources],
    }


def first_pass(sources: tuple[RawSource, ...], settings: dict[str, Any], cleaned: Path) -> list[CorpusStep]:
    """What happens to each document alone, in its order: cheap steps before the identification of the
    language."""
    identifier, codes = settings["language_identifier"], settings["identifier_codes"]
    return [
        ReadSources(sources),
        Normalise(),
        ScriptFilter(settings["scripts"], settings["letters"], settings["max_foreign_character_share"]),
        LineLength(settings["min_line_characters"]),
        LineLanguage(identifier, codes, settings["line_language_threshold"]),
        DocumentLanguage(identifier, codes, settings["document_language_threshold"]),
        WriteCleaned(cleaned),
    ]


def second_pass(settings: dict[str, Any], cleaned: Path, documents: Path) -> list[CorpusStep]:
    """What needs the whole corpus. Length comes last: a document may lose most of its lines as duplicates."""
    return [
        MergeCleaned(cleaned),
        *([DocumentDuplicates()] if settings["deduplicate_documents"] else []),
        *([LineDuplicates()] if settings["deduplicate_lines"] else []),
        DocumentLength(settings["min_document_characters"]),
        WriteDocuments(documents),
    ]


def _clean(
    sources: tuple[RawSource, ...],
    settings: dict[str, Any],
    workers: int,
    folder: Path,
    counts: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Both passes inside the stage's partial folder; fills `counts` and leaves documents/ and funnel.json."""
    cleaned, logging = folder / "cleaned", folder / "datatrove"
    say(f"cleaning {sum(len(source.files) for source in sources):,} files with {workers} workers")
    steps = first_pass(sources, settings, cleaned)
    tallies = run_pipeline(steps, workers, logging / "first")
    final_steps = second_pass(settings, cleaned, folder / "documents")
    steps, tallies = steps + final_steps, tallies + run_pipeline(final_steps, 1, logging / "second")
    shutil.rmtree(cleaned)
    shutil.rmtree(logging)
    _conclude(sources, settings, steps, tallies, folder, counts)
    say(
        f"kept {counts['documents_kept']:,} of {counts['documents_in']:,} documents, "
        f"{counts['bytes_kept'] / 1e6:.2f} of {counts['bytes_in'] / 1e6:.2f} MB"
    )


def _conclude(
    sources: tuple[RawSource, ...],
    settings: dict[str, Any],
    steps: Sequence[CorpusStep],
    tallies: Sequence[dict[str, int]],
    folder: Path,
    counts: dict[str, Any],
) -> None:
    """Write funnel.json and the counts; KieloError when a source was empty or nothing is left."""
    rows, table = build_funnel(steps, tallies), threshold_table(steps, tallies)
    read, kept = by_source(tallies[0]), by_source(tallies[-1])
    for source in sources:
        if source.name not in read:
            raise KieloError(
                f"corpus.sources, {source.name}: no document in {source.origin} ({len(source.files)} files)"
            )
    if not kept:
        told = f"{settings['language_identifier']}, line threshold {settings['line_language_threshold']}, "
        told += f"document threshold {settings['document_language_threshold']}"
        raise KieloError(empty_message(settings["language"], rows, table, told))
    none = {"documents": 0, "bytes": 0}
    described = [
        {
            "name": source.name,
            "origin": source.origin,
            "files": len(source.files),
            **{f"{what}_in": amount for what, amount in read[source.name].items()},
            **{f"{what}_kept": amount for what, amount in kept.get(source.name, none).items()},
        }
        for source in sources
    ]
    for what in ("bytes_in", "documents_in", "bytes_kept", "documents_kept"):
        counts[what] = sum(source[what] for source in described)
    counts["words_kept"] = tallies[-1].get("words/", 0)
    counts["sources"] = described
    write_json_atomically(
        folder / "funnel.json",
        {"settings": settings, "sources": described, "steps": rows, "threshold_table": table},
    )


def _speaker(progress: bool) -> Callable[[str], None]:
    """Lines of progress on standard error, the same on a terminal and in a log; or silence."""

    def say(line: str) -> None:
        if progress:
            print(f"corpus: {line}", file=sys.stderr, flush=True)

    return say
