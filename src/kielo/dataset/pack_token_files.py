"""The pack stage of ready token files, which stay in place: recipe + tokenizer → `token_files.json`, counts.

The last documents of a source are held out. Only they are copied, with their decoded text.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kielo.artifact.documents import Document
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import Manifest, read_manifest, rewrite_counts
from kielo.artifact.stage_counts import PackCounts, TokenCounts
from kielo.artifact.stage_json import counts_of
from kielo.artifact.token_file import TokenFile
from kielo.artifact.token_file_formats import check_index, open_file
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_sources import FoundFiles, TokenFiles, TokenFileSet, checksum
from kielo.dataset.document_packer import STORED_IDS
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TextTokenizer, decode, encode, end_of_text_id, role_id, vocabulary_size

# Files and sets of up to these tokens are read whole, others in samples.
WHOLE_FILE_TOKENS, WHOLE_SET_TOKENS = 1 << 26, 1 << 34
BLOCK_TOKENS, BLOCKS = 1 << 16, 64  # of a sample
DOCUMENTS, DOCUMENT_TOKENS = 64, 2048  # of a sample, and of each document
# A document that was cut for a training length has no end. Nearly all have.
LEAST_ENDS = 0.9
# uint32 read as uint16 has a zero in each pair, which is end-of-text in many vocabularies.
MOST_ENDS = 0.25
# Decoding does not exactly undo encoding for text with control tokens or with other normalisation.
LEAST_SAME = 0.9
READERS = 8
_OTHER_TOKENIZER = "tokenizer.path = the tokenizer that made these tokens"
MOST_HELDOUT_TOKENS = 1 << 20  # of a source; as much text as the evaluation uses


def check_token_files(
    name: str, found: FoundFiles, stream: TokenSet, tokenizer: TextTokenizer, tokenizer_hash: str
) -> float:
    """Return the bytes of text of a token in a sample. Raises KieloError for tokens of another tokenizer.

    A manifest of Kielo's beside the files has the tokenizer's hash. Others are checked by ids, end-of-text at
    the ends of documents, and documents that give the same ids when they are decoded and encoded again.
    """
    _check_manifests(name, found, tokenizer_hash)
    size, end = vocabulary_size(tokenizer), end_of_text_id(tokenizer)
    is_whole = stream.num_tokens <= WHOLE_SET_TOKENS
    # disable=None: a bar on a terminal, nothing in a log
    for file in tqdm(found.files, f"checking {name}", unit=" files", disable=None):
        check_index(found.folder / file.name, file)
        _check_ids(found.folder, file, size, is_whole)
    _check_end_occurs(name, found, stream, end, role_id(tokenizer, "bos_token"))
    rows = sampled_documents(stream)
    if not any((row != end).any() for row in rows):
        raise KieloError(
            f"corpus.sources, {name}: {found.folder}: {len(rows)} documents looked at have no token but "
            f"{end}, end-of-text, as in a sparse file that was never written. Fix: complete files"
        )
    _check_ends(name, found, rows, end)
    return _check_text(name, found, [row[row != end] for row in rows], tokenizer)


def _check_manifests(name: str, found: FoundFiles, tokenizer_hash: str) -> None:
    for place in sorted({(found.folder / file.name).parent for file in found.files}):
        manifest = read_manifest(place) if (place / "manifest.json").is_file() else None
        made_with = manifest.counts.get("tokenizer_hash") if manifest else None  # of any stage
        if made_with not in (None, tokenizer_hash):
            raise KieloError(
                f"corpus.sources, {name}: {place / 'manifest.json'}: these tokens were made with tokenizer "
                f"{made_with[:12]}, tokenizer.path is {tokenizer_hash[:12]}. Fix: tokenizer.path "
                f"= the tokenizer that made them (often {place.parent / 'tokenizer'})"
            )


def _check_ids(folder: Path, file: TokenFile, vocab_size: int, is_whole: bool) -> None:
    ids = open_file(folder, file, 0).tokens
    for start in block_starts(file.tokens, is_whole):
        block = ids[start : start + BLOCK_TOKENS]
        wrong = np.flatnonzero((block < 0) | (block >= vocab_size))
        if len(wrong):
            raise KieloError(
                f"{folder / file.name}: token {start + int(wrong[0]):,} is {int(block[wrong[0]])}, and the "
                f"tokenizer has ids 0 to {vocab_size - 1} ({np.dtype(file.dtype).name}). "
                "Fix: set tokenizer.path to the tokenizer that made these tokens, or set tokens_dtype of the "
                "source if the file has no type"
            )


def block_starts(tokens: int, is_whole: bool) -> Iterator[int]:
    if is_whole and tokens <= WHOLE_FILE_TOKENS or tokens <= BLOCKS * BLOCK_TOKENS:
        yield from range(0, tokens, BLOCK_TOKENS)
    else:
        for number in range(BLOCKS):
            yield (tokens - BLOCK_TOKENS) * number // (BLOCKS - 1)


def _check_end_occurs(name: str, found: FoundFiles, stream: TokenSet, end: int, begin: int | None) -> None:
    if all(file.documents is not None for file in found.files):
        return
    starts = block_starts(stream.num_tokens, is_whole=False)
    blocks = [stream.read(start, min(BLOCK_TOKENS, stream.num_tokens - start)) for start in starts]
    ends, looked_at = sum(int((block == end).sum()) for block in blocks), sum(map(len, blocks))
    # Without an index, a document must not begin after a document without an end.
    begins = sum(int((block[1:] == begin).sum()) for block in blocks)
    joined = sum(int(((block[1:] == begin) & (block[:-1] != end)).sum()) for block in blocks)
    if ends > looked_at * MOST_ENDS:
        what = (
            f"{ends:,} of {looked_at:,} tokens looked at are {end}, the tokenizer's end-of-text, as if every "
            f"few words were a document. Are the ids as wide as {found.files[0].dtype}? Fix: the source's "
            f"tokens_dtype, or {_OTHER_TOKENIZER}"
        )
    elif not ends:
        what = (
            f"none of {looked_at:,} tokens looked at in {len(found.files)} files is {end}, the tokenizer's "
            f"end-of-text, which ends a document. Fix: {_OTHER_TOKENIZER}"
        )
    elif begin not in (None, end) and joined:
        what = (
            f"{joined:,} of {begins:,} documents looked at begin with {begin} (bos_token) after a document "
            f"without {end} (eos_token) at its end. Files without an index have no other border. Fix: "
            "end-of-text after each, or a format with an index (PREFIX.bin and PREFIX.idx)"
        )
    else:
        return
    raise KieloError(f"corpus.sources, {name}: {found.folder}: {what}")


def sampled_documents(stream: TokenSet) -> list[np.ndarray]:
    """Return the beginnings and ends of documents at even distances, each a row of ids."""
    rows, before = [], -1
    for number in range(DOCUMENTS):
        start = stream.first_document_from(stream.num_tokens * number // DOCUMENTS)
        if start == before or start >= stream.num_tokens:
            continue
        before = start
        end = stream.first_document_from(start + 1)
        row = stream.read(start, min(end - start, DOCUMENT_TOKENS))
        rows.append(np.append(row[:-1], stream.read(end - 1, 1)))
    return rows


def _check_ends(name: str, found: FoundFiles, rows: list[np.ndarray], end: int) -> None:
    last = Counter(int(row[-1]) for row in rows)
    if last[end] < LEAST_ENDS * len(rows):
        ((other, times),) = (last - Counter({end: last[end]})).most_common(1)
        raise KieloError(
            f"corpus.sources, {name}: {found.folder}: {last[end]} of {len(rows)} documents looked at end "
            f"with {end}, the tokenizer's end-of-text, and {times} with {other}. Fix: tokenizer.path = the "
            "tokenizer that made these tokens and ends documents with its eos_token, or shards written with "
            "Megatron's --append-eod"
        )


def _check_text(name: str, found: FoundFiles, rows: list[np.ndarray], tokenizer: TextTokenizer) -> float:
    rows = [row for row in rows if len(row)]
    texts = decode(tokenizer, [row.tolist() for row in rows])
    tokens = sum(map(len, rows))
    same = sum(
        (Counter(row.tolist()) & Counter(again)).total()
        for row, again in zip(rows, encode(tokenizer, texts), strict=True)
    )
    if same < LEAST_SAME * tokens:
        unknown = sum(text.count("�") for text in texts) / max(1, sum(map(len, texts)))
        raise KieloError(
            f"corpus.sources, {name}: {found.folder}: {same / max(1, tokens):.0%} of {tokens:,} tokens "
            f"looked at are what the tokenizer writes for their text, {LEAST_SAME:.0%} are expected, "
            f"and {unknown:.0%} of the characters are broken. The text would begin {texts[0][:40]!r}. "
            f"Fix: {_OTHER_TOKENIZER}"
        )
    return sum(len(text.encode()) for text in texts) / max(1, tokens + len(rows))


def training_tokens(tokens: int, heldout_share: float) -> int:
    """Return the number of a source's tokens before the first held-out document, or slightly fewer."""
    return math.ceil(tokens - min(heldout_share * tokens, MOST_HELDOUT_TOKENS))


def inputs_of(found: Mapping[str, FoundFiles]) -> dict[str, str]:
    return {f"tokens of {name}": files.identity for name, files in found.items()}


def checksums_of(name: str, found: FoundFiles, known: Mapping[str, str]) -> list[str]:
    """Read the files of source `name` and return their checksums. known: file → checksum, not read again."""
    unread = [file for file in found.files if file.name not in known]
    total = sum(file.bytes for file in unread)
    # disable=None: a bar on a terminal, nothing in a log
    is_hidden = None if unread else True
    bar = tqdm(desc=f"reading {name}", total=total, unit="B", unit_scale=True, disable=is_hidden)

    def read(file: TokenFile) -> str:
        digest = checksum(found.folder, file)
        bar.update(file.bytes)
        return digest

    with bar, ThreadPoolExecutor(READERS) as pool:
        read_now = dict(zip((file.name for file in unread), pool.map(read, unread), strict=True))
    return [known.get(file.name) or read_now[file.name] for file in found.files]


def note_places(
    folder: Path, manifest: Manifest, found: Mapping[str, FoundFiles]
) -> tuple[Manifest, list[Path]]:
    """Write into the manifest of a finished stage where the same files are now. Return it.

    Changed files are read. Files of other content are returned, and then nothing is written. Files without a
    checksum, described by an earlier version, are accepted.
    """
    counts = counts_of(folder, manifest, PackCounts)
    sources, changed = dict(counts.sources), list[Path]()
    for name, of in found.items():
        files, known = [file.name for file in of.files], sources[name]
        before = dict(zip(files, known.xxh3_128, strict=False))  # none of earlier versions
        times = dict(zip(files, known.times_ns or (), strict=False))
        since = dict(zip(files, map(list, of.times_ns), strict=True))
        same = {file: before[file] for file in files if file in before and times.get(file) == since[file]}
        now = checksums_of(name, of, same)
        digests = dict(zip(files, now, strict=True))
        changed += [of.folder / file for file in files if before.get(file, digests[file]) != digests[file]]
        place = {"folder": str(of.folder), "times_ns": list(map(list, of.times_ns)), "xxh3_128": now}
        sources[name] = known.model_copy(update=place)
    if changed or sources == counts.sources:
        return manifest, changed
    rewrite_counts(folder, counts.model_copy(update={"sources": sources}).content())
    return read_manifest(folder) or manifest, []


class TokenFilesPacking:
    def __init__(self, recipe: Recipe, found: Mapping[str, FoundFiles], tokenizer: TextTokenizer):
        self._share, self._found, self._tokenizer = recipe.dataset.heldout_share, found, tokenizer
        self._end = end_of_text_id(tokenizer)
        self.counts: dict[str, TokenCounts] = {}
        self._sets: dict[str, TokenFileSet] = {}

    def heldout(self, tokenizer_hash: str) -> Iterator[tuple[Document, list[int], np.ndarray | None]]:
        """Check each source and yield its held-out (document, ids without end-of-text, loss mask or None)."""
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
                    place, facts = f"{name}/{stream.document_name(start)}", JsonTable({STORED_IDS: row})
                    (text,) = decode(self._tokenizer, [row], False)
                    if flags is not None and not has_end:
                        flags = np.append(flags, False)
                    yield Document(id=place, source=name, metadata=facts, text=text), row, flags
            documents = [file.documents for file in found.files]
            is_indexed = None not in documents
            self.counts[name] = TokenCounts(
                tokens=first,
                documents=sum(filter(None, documents)) - heldout if is_indexed else None,
                bytes=round(first * bytes_per_token),  # an estimate, from the documents that were decoded
                words=None,
                folder=str(found.folder),
                times_ns=list(map(list, found.times_ns)),
                xxh3_128=checksums_of(name, found, {}),
            )

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
                f"its last {wanted:,} of {stream.num_tokens:,} tokens, after others. Fix: raise it, or give "
                "the source more documents"
            )
        return first
