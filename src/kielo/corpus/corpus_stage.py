"""The corpus stage: raw text → clean documents, and the funnel of what was dropped.

The work is tasks over parts of the sources (`corpus_tasks.py`), on the workers of this machine or of several.
The outcome is the same, byte for byte, for any number of parts, workers and machines. Finished tasks are kept
until the stage is finished.
"""

import math
import os
import shutil
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path

from kielo.artifact.documents import SUFFIX
from kielo.artifact.durable import disk_problems_reported
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import Manifest, finished_manifest, is_current, refuse_foreign, write_stage
from kielo.artifact.prefetched import prefetched_folder
from kielo.artifact.stage_counts import CorpusCounts, Funnel, FunnelRow, FunnelSource
from kielo.artifact.stage_json import counts_of, write_json
from kielo.artifact.text_files import read_lines
from kielo.artifact.trained_text import refuse_to_replace
from kielo.corpus import damage, mojibake, near_copies, personal_data, ray_pool, web_document_score
from kielo.corpus.corpus_tasks import (
    PACKAGES,
    PLAN,
    CorpusTasks,
    corpus_worker,
    plan_tasks,
    remove_tasks,
    work_folder,
)
from kielo.corpus.decontamination import described
from kielo.corpus.evaluation_items import evaluation_items, lacks_tasks
from kielo.corpus.fetch import fetch_sources
from kielo.corpus.filters import FOREIGN_DROPPED, FOREIGN_KEPT, NUM_EXAMPLES
from kielo.corpus.funnel_details import border_examples, cluster_sizes, identified_languages
from kielo.corpus.input_files import hashes_beside, refuse_changed, refuse_changed_beside
from kielo.corpus.known_corpora import NOT_FINITE
from kielo.corpus.language_identification import THRESHOLDS, load_identifier
from kielo.corpus.own_step import load_own_step
from kielo.corpus.pipeline import BAD, MAX_EXAMPLES
from kielo.corpus.process_pool import WorkerPool
from kielo.corpus.raw_formats import RawSource, file_format, first_names
from kielo.corpus.ray_pool import RayPool
from kielo.corpus.step import Tally, cards_of_text, doubtful_thresholds, effective_settings, languages_of_text
from kielo.corpus.word_segmenter import cutter_of_words
from kielo.recipe.cards import language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import LEARNED_SUFFIX, Recipe

KIND, VERSION = "corpus", 3
# Bytes of files: less text is cleaned before a second process has started.
LEAST_BYTES_FOR_WORKERS = 4 << 20
# A source of at least this many records may have one bad record, unless max_bad_share is 0.
RECORDS_FOR_ONE_BAD = 10
# The least share of a source's bytes that is usually kept. Below, the text is perhaps wrapped.
MUCH_IS_LEFT = 0.5
# Lines of a file that `wrapping_advice` reads, and widths at which text is wrapped.
LINES, WIDTHS, MAX_LINE_BYTES = 2000, range(40, 121), 1 << 20
# The funnel shows the largest reasons of a step, and the sum of the others.
MAX_REASONS, OTHERS = 6, "other reasons"
NOT_SHOWN = ("write cleaned", "merge cleaned", "write", "lay out pairs")


def wrapping_advice(source: RawSource) -> str | None:
    """Return what to set for a source of .txt files whose lines look wrapped at a width, or None."""
    files = [Path(source.root) / file for file in source.files]
    path = next((path for path in files if file_format(path, source.kind) == "txt"), None)
    if path is None or source.documents != "lines":
        return None
    lengths, empty = [], 0
    for number, line in read_lines(path, MAX_LINE_BYTES, source.encoding):
        if number > LINES or line is None:
            break
        text = line.decode("utf-8", "replace").rstrip()
        lengths.append(len(text))
        empty += not text
    filled = sorted(a for a, b in pairwise(lengths) if a and b)
    if len(filled) < 20:
        return None
    # Nine of ten lines with a line after them are longer than half of a width that hardly any line exceeds.
    width = filled[len(filled) * 98 // 100]
    full = sum(length > width / 2 for length in filled)
    if width not in WIDTHS or max(filled) > 2 * width or full < 0.9 * len(filled) or not empty:
        return None
    return (
        f"{path} looks wrapped at {width} characters, so each of its lines is taken for a document. "
        f'Fix: documents = "paragraphs" or "files" in the source: '
        f"""--set 'corpus.sources=[{{path="{path}", documents="paragraphs"}}]'"""
    )


def run_corpus(recipe: Recipe, folder: Path, raw_folder: Path, progress: bool = True) -> Manifest:
    """Fetch and clean the recipe's sources into `folder`: documents/*.jsonl.zst, funnel.json, manifest.json.

    Keep a folder that is current. Raises KieloError for text that cannot be fetched or read, or of which too
    much is bad (corpus.max_bad_share), and if nothing is left of a source. Then `folder` is unchanged.
    """
    folder, say = Path(folder), _speaker(progress)
    planned = plan_corpus(recipe, folder, raw_folder, progress)
    if planned is None:
        manifest = finished_manifest(folder)
        refuse_bad_sources(counts_of(folder, manifest, CorpusCounts).sources, recipe.corpus.max_bad_share)
        return manifest
    tasks, inputs, section = planned
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        stage.counts.update(_clean(tasks, section, stage.folder, say).content())
    remove_tasks(folder, tasks.work, has_others=True)
    return finished_manifest(folder)


def plan_corpus(
    recipe: Recipe, folder: Path, raw_folder: Path, progress: bool = True
) -> tuple[CorpusTasks, dict[str, str], JsonTable] | None:
    """Fetch the sources and plan the tasks. Return them, the stage's inputs and its section; None if current.

    Any machine can do the tasks of the work folder (`CorpusTasks.work`) before `run_corpus` puts the stage
    together.
    """
    refuse_foreign(folder, KIND)  # before hours of fetching
    card, recipe = language(recipe.language), recipe.model_copy(update={"corpus": recipe.corpus.of_raw_text})
    _refuse_missing(recipe)
    beside = hashes_beside(recipe)  # before the identity hashes the same files
    section = effective_settings(recipe.corpus, card, recipe.language)
    sources = fetch_sources(recipe, Path(raw_folder), _speaker(progress), prefetched_folder())
    inputs = {source.name: source.fingerprint for source in sources}
    # Files of several folders can have the same name.
    items = enumerate(evaluation_items(recipe), 1)
    inputs |= {f"evaluation {number} {one.name}": one.fingerprint() for number, one in items}
    identity = [KIND, VERSION, inputs, section]
    if is_current(folder, KIND, VERSION, inputs, section):
        remove_tasks(folder, work_folder(folder, identity), has_others=False)  # if that was killed before
        return None
    refuse_to_replace(folder, KIND, VERSION, inputs, section)
    refuse_changed_beside(recipe, beside)
    with disk_problems_reported(f"{folder}: the {KIND} stage"):
        work = plan_tasks(folder, identity, sources, beside)
    return CorpusTasks(recipe, work), inputs, section


def _refuse_missing(recipe: Recipe) -> None:
    """Refuse a missing package, or a damaged file of an identifier, before hours of fetching."""
    corpus = recipe.corpus
    cutter_of_words(corpus.words)
    if corpus.engine == "ray":
        ray_pool.refuse_missing()
    if corpus.mask_personal_data:
        personal_data.refuse_missing()
    if corpus.repair_encoding:
        mojibake.refuse_missing()
    if corpus.quality == "hplt":
        web_document_score.scorer()
    if corpus.near_copies != "none":
        near_copies.refuse_missing()
    if corpus.language_identifier.endswith(LEARNED_SUFFIX):
        load_identifier(corpus.language_identifier)
    for path in corpus.own_steps:
        load_own_step(path)
    evaluation_items(recipe)


def _clean(tasks: CorpusTasks, settings: JsonTable, folder: Path, say: Callable[[str], None]) -> CorpusCounts:
    recipe, sources = tasks.recipe, tasks.sources
    corpus = recipe.corpus
    on = "Ray" if corpus.engine == "ray" else f"{corpus.workers} workers"
    say(f"cleaning {sum(len(source.files) for source in sources):,} files with {on}")
    for sentence in doubtful_thresholds(corpus, recipe.language):
        say(sentence)
    if unmasked := personal_data.not_masked(
        corpus.mask_personal_data, languages_of_text(corpus, recipe.language)
    ):
        say(f"corpus.mask_personal_data does not know {unmasked}: they stay")
    if unjudged := damage.not_judged(corpus.damage, cards_of_text(corpus, recipe.language)):
        say(f"corpus.damage does not look for {unjudged}")
    if items := evaluation_items(recipe):
        missing = ". Questions of evaluate.tasks are not there: KIELO_PREFETCHED is not set"
        say(f"corpus.decontaminate looks for {described(items)}" + missing * lacks_tasks(recipe))
    if corpus.language_identifier.endswith(LEARNED_SUFFIX):
        shutil.copyfile(corpus.language_identifier, folder / f"identifier{LEARNED_SUFFIX}")
    read = _do(tasks, say)
    tallies = tasks.all_tallies()
    counts = _conclude(sources, read, settings, tallies, folder)
    documents = folder / "documents"
    documents.mkdir()
    for number, file in enumerate(tasks.files()):
        _link_or_copy(file, documents / f"{number:05d}{SUFFIX}")
    for raw, source in zip(sources, counts.sources, strict=True):
        if source.bytes_kept < MUCH_IS_LEFT * source.bytes_in and (advice := wrapping_advice(raw)):
            say(f"{raw.name}: {source.bytes_kept / source.bytes_in:.0%} of the text is kept. {advice}")
        if source.bad_records:
            say(f"passed over {bad_records_in_words(source)}; the first: {source.bad_examples[0]}")
        for line in source_report(raw, source, tallies):
            say(line)
    say(
        f"kept {counts.documents_kept:,} of {counts.documents_in:,} documents, "
        f"{(counts.bytes_kept or 0) / 1e6:.2f} of {(counts.bytes_in or 0) / 1e6:.2f} MB"
    )
    return counts


def _do(tasks: CorpusTasks, say: Callable[[str], None]) -> list[FunnelSource]:
    """Do all tasks that are not done. Return the description of what was read."""
    corpus, kept = tasks.recipe.corpus, tasks.num_done()
    if kept:
        say(f"{kept:,} tasks of an earlier attempt are kept")
    workers = corpus.workers if tasks.num_bytes >= LEAST_BYTES_FOR_WORKERS else 1
    read: list[FunnelSource] = []
    work = partial(corpus_worker, tasks.recipe, tasks.work.absolute())
    on_ray, plan = corpus.engine == "ray", tasks.work / PLAN
    with RayPool(work, PACKAGES, plan) if on_ray else WorkerPool(work, workers, "corpus") as pool:
        for round in tasks.rounds:
            tasks.run_round(round, pool)
            if round == "clean":
                read = describe_read(tasks.sources, tasks.tallies(round)[0])
                refuse_bad_sources(read, corpus.max_bad_share)
    return read


def _link_or_copy(file: Path, path: Path) -> None:
    try:
        os.link(file, path)
    except OSError:  # a file system without links, or an error that the copy names
        shutil.copyfile(file, path)


def describe_read(sources: Sequence[RawSource], reader: Tally) -> list[FunnelSource]:
    """Describe the text that was read. Raises KieloError for a source that was empty or changed."""
    described = []
    for source in sources:
        refuse_changed(source, source.files)
        if source.name not in reader.counts:
            raise KieloError(
                f"corpus.sources, {source.name}: no document in {source.origin} ({len(source.files)} files)"
            )
        counted = reader.counts[source.name]
        described.append(
            FunnelSource(
                name=source.name,
                origin=source.origin,
                files=len(source.files),
                files_not_read=len(source.unread),
                file_bytes=sum(size for size, _ in source.stamps),
                documents_in=counted["documents_left", ""] + counted[BAD, ""],
                bytes_in=counted["bytes_left", ""],
                bad_records=counted[BAD, ""],
                damaged_file_bytes=counted["damaged_bytes", ""],
                bad_examples=reader.first_examples(source.name, BAD, MAX_EXAMPLES),
                documents_kept=0,
                bytes_kept=0,
            )
        )
    return described


def refuse_bad_sources(described: Sequence[FunnelSource], max_bad_share: float) -> None:
    """Raise KieloError for a source with too many bad records or too large a share of damaged files."""
    # The decimal number that a person typed: in binary 0.29 · 100 is less than 29.
    share = Fraction(repr(max_bad_share))
    for source in described:
        records, bad = source.documents_in, source.bad_records
        one = 1 if share and records >= RECORDS_FOR_ONE_BAD else 0
        allowed = min(max(math.floor(share * records), one), records - 1)
        if bad > allowed or source.damaged_file_bytes > share * (source.file_bytes or 0):
            raise KieloError(
                f"corpus.sources, {bad_records_in_words(source)}. corpus.max_bad_share = {max_bad_share:g} "
                f"allows {allowed}, and damaged files of that share of the bytes. Fix: correct the text, or "
                "raise the share. The first:\n  " + "\n  ".join(source.bad_examples)
            )


def bad_records_in_words(source: FunnelSource) -> str:
    bad, records = source.bad_records, source.documents_in
    text = f"{source.name}: {bad:,} of {records:,} records that cannot be read ({bad / records:.2%})"
    if size := source.damaged_file_bytes:
        text += f", with damaged files of {size:,} of {source.file_bytes:,} bytes"
    return text


def _conclude(
    sources: Sequence[RawSource],
    read: list[FunnelSource],
    settings: JsonTable,
    tallies: Sequence[Tally],
    folder: Path,
) -> CorpusCounts:
    rows, table = build_funnel(tallies), threshold_table(tallies)
    kept = tallies[-1].counts
    if empty := [source for source in sources if source.name not in kept]:
        messages = [[_empty_source(raw.name, settings, tallies), wrapping_advice(raw)] for raw in empty]
        raise KieloError("\n".join(part for message in messages for part in message if part))
    described = []
    for source in read:
        left = {f"{what}_kept": kept[source.name][f"{what}_left", ""] for what in ("documents", "bytes")}
        described.append(source.model_copy(update=left | _changes(source.name, tallies)))
    funnel = Funnel(
        settings=settings,
        sources=described,
        steps=rows,
        threshold_table=table,
        examples=border_examples(tallies, settings),
        identified=identified_languages(tallies),
        cluster_sizes=cluster_sizes(tallies),
    )
    write_json(folder, funnel)
    return CorpusCounts(
        bytes_in=sum(source.bytes_in for source in described),
        documents_in=sum(source.documents_in for source in described),
        bytes_kept=sum(source.bytes_kept for source in described),
        documents_kept=sum(source.documents_kept for source in described),
        words_kept=tallies[-1].total()["words", ""],
        sources=described,
    )


def _changes(name: str, tallies: Sequence[Tally]) -> dict[str, object]:
    """Return the counts of text of a source that steps changed."""
    total = Counter[tuple[str, str]]()
    for tally in tallies:
        total.update(tally.of(name).total())
    masked = {kind: number for (what, kind), number in sorted(total.items()) if what == "masked"}
    mended = {kind: number for (what, kind), number in sorted(total.items()) if what == damage.MENDED}
    return {"repaired_lines": total["repaired_lines", ""], "masked": masked, "mended": mended}


def build_funnel(tallies: Sequence[Tally]) -> list[FunnelRow]:
    """Return rows in the order of the steps, the largest reason of a step first, at least one row a step."""
    rows: list[FunnelRow] = []
    for tally in tallies:
        if tally.name in NOT_SHOWN:
            continue
        counts = tally.total()
        left = {what: counts[what, ""] for what in ("documents_left", "bytes_left")}
        left["words_left"] = counts["spaced_words_left", ""]
        for reason, dropped in _largest_reasons(counts).items():
            name = f"{tally.name} ({tally.detail})" if tally.detail else tally.name
            rows.append(FunnelRow(name=name, reason=reason, **dropped, **left))
    return rows


def threshold_table(tallies: Sequence[Tally]) -> JsonTable:
    """Return the share of bytes of the lines, and of the documents, that reached each threshold."""
    sums: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for tally in tallies:
        if tally.name in ("line language", "document language"):
            sums[tally.name.split()[0] + "s"].update(tally.total())
    table = {}
    for kind, counts in sums.items():
        total = counts["bytes_identified", ""]
        reached = {str(threshold): counts["bytes_at", str(threshold)] for threshold in THRESHOLDS}
        table[kind] = {name: round(size / total, 4) if total else 0.0 for name, size in reached.items()}
    return table


def source_report(raw: RawSource, source: FunnelSource, tallies: Sequence[Tally]) -> Iterator[str]:
    """Yield lines on the fate of a source, for the last screen: its files, and its documents by reason."""
    own = [tally.of(raw.name) for tally in tallies]
    total, dropped = Counter[tuple[str, str]](), Counter[str]()
    for tally in own:
        total.update(tally.total())
        # Sorted, because the order in which reasons were counted depends on the workers.
        for (what, reason), amount in sorted(tally.total().items()):
            if amount and what == "documents":
                dropped[f"{tally.name}, {reason}".replace("read, ", "")] += amount
    reasons = "; ".join(f"{amount:,} {reason}" for reason, amount in dropped.most_common())
    files = f"{len(raw.files):,} files read"
    if raw.unread:
        files += f", {len(raw.unread):,} not read ({first_names(raw.unread)})"
    yield (
        f"{raw.name}: {files}. {source.documents_in:,} documents in, {source.documents_kept:,} kept"
        + f". Dropped: {reasons}" * bool(reasons)
    )
    for what, became in (
        ("c1", "became the letters and signs of windows-1252, or were dropped: the text was taken"),
        ("c1_kept", "stay, because nothing is cleaned there: the text was probably taken"),
    ):
        if total[f"{what}_characters", ""]:
            yield (
                f"{raw.name}: {total[f'{what}_characters', '']:,} controls U+0080 to U+009F in "
                f"{total[f'{what}_documents', '']:,} documents {became} for Latin-1 before"
            )
    for (what, fact), number in sorted(total.items()):
        if what == NOT_FINITE:
            yield f"{raw.name}: {number:,} documents whose {fact} is no finite number: they have none"
    if source.repaired_lines:
        yield f"{raw.name}: {source.repaired_lines:,} lines in another encoding were repaired"
    if source.mended:
        classes = ", ".join(f"{number:,} {kind}" for kind, number in source.mended.items())
        yield f"{raw.name}: lines mended: {classes}"
    if source.masked:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in source.masked.items())
        yield f"{raw.name}: personal data masked before duplicates were dropped: {kinds}"
    for kind, became in ((FOREIGN_DROPPED, "dropped"), (FOREIGN_KEPT, "kept")):
        if number := total[kind, ""]:
            lines = [line for tally in own for line in tally.first_examples(raw.name, kind, NUM_EXAMPLES)]
            said = f"{number:,} lines with letters of another script {became}"
            yield f"{raw.name}: {said}, e.g. {' | '.join(lines)}"


def empty_message(what: str, rows: Sequence[FunnelRow], table: JsonTable, advice: str) -> str:
    lines = [f"corpus: nothing is left of {what}. What each step dropped:"]
    lines += [
        f"  {row.name:<28} {row.reason:<36} {row.documents:>9,} documents {row.bytes:>14,} bytes"
        for row in rows
        if row.bytes or row.documents
    ]
    for kind, shares in table.items():
        shown = "  ".join(f"{threshold}: {share:.1%}" for threshold, share in shares.items())
        lines.append(f"  share of {kind} at each language threshold: {shown}")
    lines.append(advice)
    return "\n".join(lines)


def _largest_reasons(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    dropped: dict[str, Counter[str]] = defaultdict(Counter)
    for (what, reason), amount in counts.items():
        if what in ("documents", "lines", "bytes", "spaced_words"):
            dropped[reason][what.removeprefix("spaced_")] += amount
    order = sorted(dropped, key=lambda of: (-dropped[of]["bytes"], -dropped[of]["documents"], of))
    shown = {reason: dropped[reason] for reason in order[:MAX_REASONS]}
    if rest := order[MAX_REASONS:]:
        shown[OTHERS] = sum((dropped[reason] for reason in rest), Counter())
    shown = shown or {"": Counter()}
    kinds = ("documents", "lines", "bytes", "words")
    return {reason: {kind: count[kind] for kind in kinds} for reason, count in shown.items()}


_ADVICE = {
    "code": "Is it code by hand? [corpus.code] has the limits. clean = false takes code as it is",
    "parallel": "Are the sides in the languages of `language`, in this order? pair_fields names the fields. "
    "clean = false takes pairs as they are",
    "instructions": "Do user and assistant take turns, and is every answer there? clean = false accepts any "
    "order of turns that the chat template allows",
}
_SAME_TEXT = "An earlier source has the same text. Fix: leave this source out"
# Step → advice if it dropped the most of a source that became empty.
_ADVICE_ON_STEP = {
    "document duplicates": _SAME_TEXT,
    "line duplicates": _SAME_TEXT,
    "near copies": _SAME_TEXT,
    "line length": "Its lines are short. Fix: a lower corpus.min_line_characters",
    "document length": "Its documents are short. Fix: a lower corpus.min_document_characters",
}


def _empty_source(name: str, settings: JsonTable, tallies: Sequence[Tally]) -> str:
    own = [tally.of(name) for tally in tallies]
    rows = build_funnel(own)
    worst = max(rows, key=lambda row: (row.bytes, row.documents)).name.partition(" (")[0]
    rule, kind = settings["language_rules"].get(name), settings["kinds"][settings["sources"].index(name)]
    what = f"corpus.sources, {name} (kind = {kind!r}"
    if rule:
        what += f", language = {' or '.join(rule['languages'])} by {settings['language_identifier']}, line "
        what += f"threshold {rule['line_threshold']:g}, document threshold {rule['document_threshold']:g}"
        advice = (
            "Is the text in this language? If not, set the source's `language`, or `kind` for code. If so, "
            "lower corpus.line_language_threshold or corpus.document_language_threshold, or the length that "
            "dropped it (corpus.min_line_characters, corpus.min_document_characters, corpus.quality). "
            "clean = false takes text as it is"
        )
    else:
        advice = _ADVICE.get(kind, "All of it is empty, or an earlier source has the same documents")
    return empty_message(f"{what})", rows, threshold_table(own), _ADVICE_ON_STEP.get(worst, advice))


def _speaker(progress: bool) -> Callable[[str], None]:
    def say(line: str) -> None:
        if progress:
            text = f"corpus: {line}"
            width = shutil.get_terminal_size().columns - 1 if sys.stderr.isatty() else len(text)
            print(textwrap.fill(text, width, break_long_words=False), file=sys.stderr)

    return say
