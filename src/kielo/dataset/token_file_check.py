"""Checks ready token files against the recipe's tokenizer, before anything is trained on them.

A manifest of Kielo's beside the files tells the tokenizer's hash. Others are checked by what they hold: the
largest id, end-of-text where documents end, and documents that give the same ids when they are decoded and
encoded again. Ids are read whole in files of up to 64 Mi tokens of sets of up to 16 Gi, in samples of
others.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kielo.artifact.manifest import read_manifest
from kielo.artifact.token_file import TokenFile
from kielo.artifact.token_file_formats import check_index, open_file
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_sources import FoundFiles
from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer, decode, encode, end_of_text_id, role_id, vocabulary_size

WHOLE_FILE_TOKENS, WHOLE_SET_TOKENS = 1 << 26, 1 << 34
BLOCK_TOKENS, BLOCKS = 1 << 16, 64  # of a sample
DOCUMENTS, DOCUMENT_TOKENS = 64, 2048  # looked at, and of each
# A document that was cut for a training length has no end; nearly all have.
LEAST_ENDS = 0.9
# uint32 read as uint16 has a zero in each pair, which is end-of-text in many vocabularies.
MOST_ENDS = 0.25
# Encoding is not exactly undone for text with control tokens or with other normalisation.
LEAST_SAME = 0.9


def check_token_files(
    name: str, found: FoundFiles, stream: TokenSet, tokenizer: TextTokenizer, tokenizer_hash: str
) -> float:
    """Returns the bytes of text of a token, measured on a sample of documents.

    Raises KieloError, with file, number and what would work, for tokens that are not the tokenizer's.
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
            f"{end}, end-of-text, as in a sparse file that was never written; what would work: whole files"
        )
    _check_ends(name, found, rows, end)
    return _check_text(name, found, [row[row != end] for row in rows], tokenizer)


def _check_manifests(name: str, found: FoundFiles, tokenizer_hash: str) -> None:
    for place in sorted({(found.folder / file.name).parent for file in found.files}):
        manifest = read_manifest(place) if (place / "manifest.json").is_file() else None
        made_with = manifest.counts.get("tokenizer_hash") if manifest else None
        if made_with not in (None, tokenizer_hash):
            raise KieloError(
                f"corpus.sources, {name}: {place / 'manifest.json'}: these tokens were made with tokenizer "
                f"{made_with[:12]}, tokenizer.path is {tokenizer_hash[:12]}; what would work: tokenizer.path "
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
                f"tokenizer has ids 0 to {vocab_size - 1} ({np.dtype(file.dtype).name}); what "
                "would work: tokenizer.path = the tokenizer that made these tokens, or tokens_dtype of the "
                "source where a file does not tell"
            )


def block_starts(tokens: int, is_whole: bool) -> Iterator[int]:
    if is_whole and tokens <= WHOLE_FILE_TOKENS or tokens <= BLOCKS * BLOCK_TOKENS:
        yield from range(0, tokens, BLOCK_TOKENS)
    else:
        for number in range(BLOCKS):
            yield (tokens - BLOCK_TOKENS) * number // (BLOCKS - 1)


def _check_end_occurs(name: str, found: FoundFiles, stream: TokenSet, end: int, begin: int | None) -> None:
    """Files without an index have documents only where end-of-text is: looked for first, in a sample."""
    if all(file.documents is not None for file in found.files):
        return
    starts = block_starts(stream.num_tokens, is_whole=False)
    blocks = [stream.read(start, min(BLOCK_TOKENS, stream.num_tokens - start)) for start in starts]
    ends, looked_at = sum(int((block == end).sum()) for block in blocks), sum(map(len, blocks))
    if ends > looked_at * MOST_ENDS:
        raise KieloError(
            f"corpus.sources, {name}: {found.folder}: {ends:,} of {looked_at:,} tokens looked at are {end}, "
            "the tokenizer's end-of-text, as if every few words were a document; are the ids as wide as "
            f"{found.files[0].dtype}? What would work: tokens_dtype of the source; or tokenizer.path = the "
            "tokenizer that made these tokens"
        )
    if not ends:
        raise KieloError(
            f"corpus.sources, {name}: {found.folder}: none of {looked_at:,} tokens looked at in "
            f"{len(found.files)} files is {end}, the tokenizer's end-of-text, which ends a document; what "
            "would work: tokenizer.path = the tokenizer that made these tokens"
        )
    _check_begins(name, found, blocks, end, begin)


def _check_begins(
    name: str, found: FoundFiles, blocks: list[np.ndarray], end: int, begin: int | None
) -> None:
    """Without an index, a document that has no end would be one with the next, which its beginning shows."""
    if begin is None or begin == end:
        return
    begins = sum(int((block[1:] == begin).sum()) for block in blocks)
    joined = sum(int(((block[1:] == begin) & (block[:-1] != end)).sum()) for block in blocks)
    if joined:
        raise KieloError(
            f"corpus.sources, {name}: {found.folder}: {joined:,} of {begins:,} documents looked at begin "
            f"with {begin} (bos_token) where the one before has no {end} (eos_token) at its end, and files "
            "without an index have no other border; what would work: end-of-text after each, or a format "
            "with an index (PREFIX.bin and PREFIX.idx)"
        )


def sampled_documents(stream: TokenSet) -> list[np.ndarray]:
    """Returns the beginnings and ends of documents at even distances, each a row of ids."""
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
            f"with {end}, the tokenizer's end-of-text, and {times} with {other}; what would work: "
            "tokenizer.path = the tokenizer that made these tokens, its eos_token being what ends them; or "
            "shards written with Megatron's --append-eod"
        )


def _check_text(name: str, found: FoundFiles, rows: list[np.ndarray], tokenizer: TextTokenizer) -> float:
    """Returns bytes of text a token. A tokenizer that made the ids gives them for their text again."""
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
            f"looked at are those that the tokenizer writes for their text, {LEAST_SAME:.0%} are expected, "
            f"and {unknown:.0%} of the characters are broken; the text would begin {texts[0][:40]!r}. What "
            "would work: tokenizer.path = the tokenizer that made these tokens"
        )
    return sum(len(text.encode()) for text in texts) / max(1, tokens + len(rows))
