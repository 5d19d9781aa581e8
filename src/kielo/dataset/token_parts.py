"""Parts of a run's token shards: RUN/tokens.parts/NUMBER has the shards of one file of the corpus.

A part is a stage folder, so it is complete or missing, several machines may share the parts, and a command
resumes after the finished parts. `pack.py` joins them in the order of the corpus: the outcome is the same
bytes for any number of workers and machines, and after any number of kills.
"""

import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kielo.artifact.documents import SUFFIX, DocumentWriter, document_files
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import (
    MANIFEST_NAME,
    finished_manifest,
    hash_manifest,
    is_current,
    read_manifest,
    refuse_foreign,
    write_stage,
)
from kielo.artifact.stage_counts import CorpusCounts, PartCounts, RoundTrip, TokenCounts
from kielo.artifact.stage_folder import StageFolder
from kielo.artifact.stage_json import counts_of, read_counts
from kielo.artifact.text_files import read_lines
from kielo.artifact.token_shards import TokenShardWriter, join_files, join_token_shards
from kielo.corpus.process_pool import results_in_order
from kielo.dataset.document_packer import (
    HELDOUT_SETS,
    SOURCES,
    DocumentBatch,
    PackedDocuments,
    ShardRows,
    empty_counts,
    load_packer,
    sources_with_loss_mask,
)
from kielo.dataset.heldout_sets import HELDOUT
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import tokenizer_facts

KIND, VERSION = "token part", 1
BATCH_BYTES = 1 << 20  # of documents' lines that a worker gets at the same time, before the last document
LEAST_BYTES_FOR_WORKERS = 8 << 20  # packing less text takes less than starting a second process
TRIES = 2  # of each batch, if its worker is killed
_PART = re.compile(r"\d{5,}")
IDS = ".ids.txt"


class TokenPartWriter:
    """A writer of a part's shards. With `has_loss_mask` the held-out documents of all sources have a mask."""

    def __init__(self, folder: Path, vocab_size: int, has_loss_mask: bool):
        self._folder, self._vocab_size, self._has_loss_mask = folder, vocab_size, has_loss_mask
        self._open_files = ExitStack()
        self._shards: dict[str, _Shard] = {}
        self._met: Counter[str] = Counter()
        self._checked = self._exact = 0

    def __enter__(self) -> "TokenPartWriter":
        self._shard(ShardRows(HELDOUT, HELDOUT, HELDOUT, [] if self._has_loss_mask else None))
        self._heldout = self._open_files.enter_context(DocumentWriter(self._folder / (HELDOUT + SUFFIX)))
        return self

    def __exit__(self, *problem: Any) -> None:
        self._open_files.__exit__(*problem)

    def add(self, packed: PackedDocuments) -> None:
        for rows in packed.shards.values():
            self._shard(rows).add(rows)
        self._heldout.add_lines(b"".join(packed.heldout))
        self._met.update(packed.met)
        self._checked += packed.checked
        self._exact += packed.exact

    def counts(self) -> PartCounts:
        groups: dict[str, dict[str, TokenCounts]] = {SOURCES: {}, HELDOUT_SETS: {}, HELDOUT: {}}
        for shard in self._shards.values():
            counted = TokenCounts.model_validate({"file": shard.file, **shard.counts})
            groups[shard.group][shard.name] = counted
        round_trip = RoundTrip(checked=self._checked, exact=self._exact)
        return PartCounts(**groups, met=dict(self._met), round_trip=round_trip)

    def _shard(self, rows: ShardRows) -> "_Shard":
        if rows.file not in self._shards:
            self._shards[rows.file] = _Shard(self._folder, rows, self._vocab_size, self._open_files)
        return self._shards[rows.file]


class _Shard:
    def __init__(self, folder: Path, first: ShardRows, vocab_size: int, open_files: ExitStack):
        self.group, self.name, self.file = first.group, first.name, first.file
        has_loss_mask = first.carries_loss is not None
        shard = TokenShardWriter(folder / self.file, vocab_size, has_loss_mask)
        ids = (folder / (self.file + IDS)).open("w", encoding="utf-8", newline="\n")
        self._tokens, self._ids = open_files.enter_context(shard), open_files.enter_context(ids)
        self.counts = Counter(empty_counts(has_loss_mask))

    def add(self, rows: ShardRows) -> None:
        flags = None if rows.carries_loss is None else np.concatenate(rows.carries_loss)
        self._tokens.add_documents(np.concatenate(rows.tokens), np.array(rows.lengths), flags)
        self._ids.writelines(f"{one}\n" for one in rows.ids)
        self.counts.update(rows.counts)


class TokenParts:
    """The parts of the shards in `tokens_folder`, one a file of the corpus. Manifests have `section`."""

    def __init__(self, recipe: Recipe, corpus: Path, tokenizer: Path, tokens: Path, section: JsonTable):
        self._recipe, self._tokenizer_folder, self._section = recipe, tokenizer, section
        self._corpus = read_counts(corpus, CorpusCounts) or CorpusCounts()
        self._inputs = {"corpus": hash_manifest(corpus), "tokenizer": hash_manifest(tokenizer)}
        self._files = document_files(corpus / "documents")
        self.number = len(self._files)
        self._folder = parts_folder(tokens)

    def make(self, share: tuple[int, int] = (1, 1)) -> list[Path]:
        """Make every n-th part from the k-th on, share = (k, n), unless finished. Return their folders."""
        vocab_size = tokenizer_facts(self._tokenizer_folder).vocabulary_size
        has_loss_mask = bool(sources_with_loss_mask(self._recipe))
        mine = dict(list(self._folders().items())[share[0] - 1 :: share[1]])
        # disable=None: a bar on a terminal, nothing in a log
        known = self._corpus.documents_kept if share[1] == 1 else None
        with tqdm(desc="packing", total=known, unit=" documents", disable=None) as bar:
            finished = {file for file, folder in mine.items() if is_current(folder, *self._identity(file))}
            bar.update(sum(sum(counts_of_part(mine[file]).met.values()) for file in finished))
            missing = [file for file in mine if file not in finished]
            try:
                with closing(self._packed(missing)) as packed:
                    for file in missing:
                        with write_stage(mine[file], *self._identity(file)) as stage:
                            with TokenPartWriter(stage.folder, vocab_size, has_loss_mask) as part:
                                for batch in packed:
                                    part.add(batch)
                                    bar.update(batch.met.total())
                                    if batch.is_last:
                                        break
                            stage.counts.update(part.counts().content())
            finally:
                with suppress(OSError):  # there are parts in it
                    self._folder.rmdir()
        return list(mine.values())

    def num_finished(self) -> int:
        return sum(is_current(folder, *self._identity(file)) for file, folder in self._folders().items())

    def _folders(self) -> dict[Path, Path]:
        return {file: self._folder / f"{number:05d}" for number, file in enumerate(self._files)}

    def _identity(self, file: Path) -> tuple[str, int, dict[str, str], JsonTable]:
        return KIND, VERSION, self._inputs, self._section | {"file": file.name}

    def _packed(self, files: Sequence[Path]) -> Generator[PackedDocuments, None, None]:
        is_small = (self._corpus.bytes_kept or 0) < LEAST_BYTES_FOR_WORKERS
        workers = 1 if is_small else self._recipe.corpus.workers
        make = partial(load_packer, self._recipe, self._tokenizer_folder)
        batches = chain.from_iterable(map(document_batches, files))
        return results_in_order(make, batches, workers, "pack", TRIES)


def parts_folder(tokens_folder: Path) -> Path:
    place = StageFolder(tokens_folder, KIND, "").place
    return place.with_name(f"{place.name}.parts")


def counts_of_part(folder: Path) -> PartCounts:
    return counts_of(folder, finished_manifest(folder), PartCounts)


def join_parts(parts: Sequence[Path], counts: Sequence[PartCounts], folder: Path) -> PartCounts:
    """Join the files of parts in `folder`. Return their counts, joined like the counts of one part."""
    totals: dict[str, dict[str, Counter[str]]] = {SOURCES: {}, HELDOUT: {}, HELDOUT_SETS: {}}
    met, round_trip = Counter[str](), Counter[str]()
    files: dict[str, list[Path]] = {}
    for part, of_part in zip(parts, counts, strict=True):
        for group, total in totals.items():
            for name, own in getattr(of_part, group).items():
                files.setdefault(own.file, []).append(part / own.file)
                total.setdefault(name, Counter()).update(own.model_dump(exclude={"file"}, exclude_unset=True))
        met.update(of_part.met)
        round_trip.update(of_part.round_trip.content())
    for file, prefixes in files.items():
        join_token_shards(prefixes, folder / file)
        join_files([path.with_name(path.name + IDS) for path in prefixes], folder / (file + IDS))
    join_files([part / (HELDOUT + SUFFIX) for part in parts], folder / (HELDOUT + SUFFIX))
    return PartCounts.model_validate({**totals, "met": met, "round_trip": round_trip})


def remove_parts(tokens_folder: Path) -> None:
    folder = parts_folder(tokens_folder)
    for part in sorted(folder.iterdir()) if folder.is_dir() else ():
        manifest = read_manifest(part) if _PART.fullmatch(part.name) else None
        if manifest is not None and manifest.kind == KIND:
            refuse_foreign(part, KIND)
            # The manifest last: without it, files that a kill leaves would not be removed.
            for name in (*manifest.files, MANIFEST_NAME):
                (part / name).unlink(missing_ok=True)
            part.rmdir()
    with suppress(OSError):
        folder.rmdir()


def document_batches(file: Path) -> Iterator[DocumentBatch]:
    first, lines, size = 0, list[bytes](), 0
    for _, line in read_lines(file):
        if size >= BATCH_BYTES:
            yield DocumentBatch(file, first, lines)
            first, lines, size = first + len(lines), [], 0
        lines.append(line)
        size += len(line)
    yield DocumentBatch(file, first, lines, is_last=True)
