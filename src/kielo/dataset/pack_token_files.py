"""The pack stage of ready token files: they stay where they are, and only a description is written.

The last documents of a source are held out. They alone are copied, with their decoded text, into the shard of
held-out text. Recipe + tokenizer → `token_files.json`, and the counts of each source.
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kielo.artifact.manifest import Manifest, read_manifest, rewrite_counts
from kielo.artifact.token_file import TokenFile
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_sources import FoundFiles, TokenFiles, TokenFileSet, checksum
from kielo.dataset.encoded_documents import STORED_IDS
from kielo.dataset.token_file_check import check_token_files
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TextTokenizer, decode, end_of_text_id

TIMES, CHECKSUMS = "times_ns", "xxh3_128"  # counts of a source that is read in place, one for each file
READERS = 8
MOST_HELDOUT_TOKENS = 1 << 20  # of a source; as much text as the evaluation looks at


def training_tokens(tokens: int, heldout_share: float) -> int:
    """Returns how many of a source's tokens come before the first held-out document, or a few less."""
    return math.ceil(tokens - min(heldout_share * tokens, MOST_HELDOUT_TOKENS))


def inputs_of(found: Mapping[str, FoundFiles]) -> dict[str, str]:
    """Returns what the pack stage depends on: source → hash of its files, wherever they are."""
    return {f"tokens of {name}": files.identity for name, files in found.items()}


def places_of(found: FoundFiles) -> dict[str, Any]:
    """Returns the counts that say where a source's files are on this machine, and since when."""
    return {"folder": str(found.folder), TIMES: [list(times) for times in found.times_ns]}


def checksums_of(name: str, found: FoundFiles, known: Mapping[str, str]) -> list[str]:
    """Reads the files of source `name` and returns the checksum of each.

    known: file → its checksum, which is not read again.
    """
    unread = [file for file in found.files if file.name not in known]
    # disable=None: a bar on a terminal, nothing in a log
    bar = tqdm(
        desc=f"reading {name}",
        total=sum(file.bytes for file in unread),
        unit="B",
        unit_scale=True,
        disable=None if unread else True,
    )

    def read(file: TokenFile) -> str:
        digest = checksum(found.folder, file)
        bar.update(file.bytes)
        return digest

    with bar, ThreadPoolExecutor(READERS) as pool:
        read_now = dict(zip((file.name for file in unread), pool.map(read, unread)))
    return [known.get(file.name) or read_now[file.name] for file in found.files]


def note_places(
    folder: Path, manifest: Manifest, found: Mapping[str, FoundFiles]
) -> tuple[Manifest, list[Path]]:
    """Writes where the same files lie now into the manifest of a finished stage; returns it.

    Files that were written again are read whole; with one of other content, which is returned too, nothing
    is written. Files without a checksum, described by an earlier version, are taken as they are.
    """
    sources, changed = dict(manifest.counts["sources"]), []
    for name, of in found.items():
        files = [file.name for file in of.files]
        before = dict(zip(files, sources[name].get(CHECKSUMS, ())))
        times = dict(zip(files, sources[name].get(TIMES, ())))
        same = {file for file, since in zip(files, of.times_ns) if times.get(file) == list(since)}
        now = checksums_of(name, of, {file: before[file] for file in same if file in before})
        changed += [
            of.folder / file for file, digest in zip(files, now) if before.get(file, digest) != digest
        ]
        sources[name] = sources[name] | places_of(of) | {CHECKSUMS: now}
    if changed or sources == manifest.counts["sources"]:
        return manifest, changed
    rewrite_counts(folder, manifest.counts | {"sources": sources})
    return read_manifest(folder) or manifest, []


class TokenFilesPacking:
    """Describes sources that are read in place, checks them, and holds out their last documents."""

    def __init__(self, recipe: Recipe, found: Mapping[str, FoundFiles], tokenizer: TextTokenizer):
        self._share, self._found, self._tokenizer = recipe.dataset.heldout_share, found, tokenizer
        self._end = end_of_text_id(tokenizer)
        self.counts: dict[str, dict[str, Any]] = {}
        self._sets: dict[str, TokenFileSet] = {}

    def heldout(self, tokenizer_hash: str) -> Iterator[tuple[dict[str, Any], list[int], np.ndarray | None]]:
        """Checks each source and yields its held-out documents: (document, ids without end-of-text, mask).

        mask: which of the ids, and of an end-of-text after them, carry loss; None where all do.
        Raises KieloError for files that do not fit the tokenizer (`token_file_check.py`), and where no
        document can be held out.
        """
        for name, found in self._found.items():
            stream = self._whole(found)
            bytes_per_token = check_token_files(name, found, stream, self._tokenizer, tokenizer_hash)
            first = self._first_heldout(name, stream)
            self._sets[name] = TokenFileSet(files=found.files, training_tokens=first)
            heldout = 0
            for start, end in stream.document_ranges(first):
                row = stream.read(start, end - start).tolist()
                flags = None if stream.loss_mask is None else stream.loss_mask[start:end].astype(bool)
                has_end = row[-1] == self._end
                row = row[:-1] if has_end else row
                heldout += 1
                if row:
                    document = {"id": f"{name}/{stream.document_name(start)}", "source": name}
                    document |= {"metadata": {STORED_IDS: row}}
                    if flags is not None and not has_end:
                        flags = np.append(flags, False)
                    yield document | {"text": decode(self._tokenizer, [row], False)[0]}, row, flags
            documents = [file.documents for file in found.files]
            is_indexed = None not in documents
            self.counts[name] = {
                "tokens": first,
                "documents": sum(filter(None, documents)) - heldout if is_indexed else None,
                "bytes": round(first * bytes_per_token),  # an estimate, from the documents that were decoded
                "words": None,
                **places_of(found),
                CHECKSUMS: checksums_of(name, found, {}),
            }

    def description(self) -> TokenFiles:
        return TokenFiles(end_of_text_id=self._end, sources=self._sets)

    def _whole(self, found: FoundFiles) -> TokenSet:
        return TokenSet(found.folder, found.files, sum(file.tokens for file in found.files), self._end)

    def _first_heldout(self, name: str, stream: TokenSet) -> int:
        at_most = training_tokens(stream.num_tokens, self._share)
        first, wanted = stream.first_document_from(at_most), stream.num_tokens - at_most
        if not 2 <= first < stream.num_tokens:
            raise KieloError(
                f"dataset.heldout_share = {self._share:g}: the source {name} has no document that begins in "
                f"its last {wanted:,} of {stream.num_tokens:,} tokens, after others; raise it, or give the "
                "source more documents"
            )
        return first
