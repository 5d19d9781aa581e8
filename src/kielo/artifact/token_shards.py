"""Token shards: Megatron's indexed dataset, version 1, a pair of files `PREFIX.bin` and `PREFIX.idx`.

`.bin` is the tokens of all documents, end to end, little-endian uint16 (vocabularies below 65,500) or int32.
`.idx` is: magic "MMIDIDX\0\0", version u64, dtype code u8, sequences u64, document indices u64, then int32
length of each sequence in tokens, int64 offset of each sequence in bytes, int64 number of the first sequence
of each document with the total at the end. We write one sequence a document; shards with more (Megatron's
sentence splitting) are read. Format: megatron-core `datasets/indexed_dataset.py`, whose reader reads ours
and whose writer's we read.

`PREFIX.loss_mask`, where there is one, has a byte for each token: 1 where predicting it carries loss. A shard
without it carries loss on every token.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.durable import DurableFile
from kielo.artifact.token_file import FileArray
from kielo.recipe.errors import KieloError

# Files of parts, joined one after the other: token shards with their index, and any other bytes.


READ_BYTES = 1 << 23


def join_token_shards(parts: Sequence[Path], prefix: Path) -> None:
    """Write the shard `prefix` of all documents of the shards `parts`; they have one dtype.

    A loss mask is written where the parts have one. In memory is one part's index at a time.
    """
    for suffix in (".bin", LOSS_MASK):
        files = [part.with_name(part.name + suffix) for part in parts]
        if files[0].is_file():
            join_files(files, prefix.with_name(prefix.name + suffix))

    def lengths() -> Iterator[np.ndarray]:
        for part in parts:
            yield np.diff(TokenShard(part).document_offsets)

    write_index(prefix, TokenShard(parts[0]).dtype, lengths)


def join_files(parts: Sequence[Path], path: Path) -> None:
    """Write the bytes of `parts`, one file after the other, to a file."""
    with DurableFile(path) as whole:
        for part in parts:
            with open(part, "rb") as file:
                while block := file.read(READ_BYTES):
                    whole.write(block)


LOSS_MASK = ".loss_mask"
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
# Megatron's own border: below it uint16, from it int32.
UINT16_VOCAB_SIZES = 65_500
BLOCK_DOCUMENTS = 1 << 20


class TokenShardWriter:
    """Write one shard, aside until `close`: `.bin` takes its name first, `.idx` last.

    has_loss_mask: writes `.loss_mask` too.
    """

    def __init__(self, prefix: Path | str, vocab_size: int, has_loss_mask: bool = False):
        self.prefix, self.has_loss_mask = Path(prefix), has_loss_mask
        self.dtype = np.dtype(np.uint16 if vocab_size < UINT16_VOCAB_SIZES else np.int32)
        self.vocab_size = vocab_size
        self._lengths: list[np.ndarray] = []
        self._num_documents = 0
        self._file = DurableFile(_beside(self.prefix, ".bin"))
        self._mask_file = DurableFile(_beside(self.prefix, LOSS_MASK)) if has_loss_mask else None

    def add(self, tokens: np.ndarray, carries_loss: np.ndarray | None = None) -> None:
        """Append one document, a one-dimensional array of token ids; else as `add_documents`."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1:
            raise ValueError(f"a document is one row of token ids, not an array of shape {tokens.shape}")
        self.add_documents(tokens, np.array([tokens.size]), carries_loss)

    def add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, carries_loss: np.ndarray | None = None
    ) -> None:
        """Append documents of the given lengths [documents], whose tokens [sum of lengths] are end to end.

        Ids are below vocab_size. carries_loss: bool, of each token; None: all. Left out where the shard has
        no mask. Raises KieloError for an id outside the vocabulary: an id that wraps round is another token.
        """
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            number = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            first = int(lengths[:number].sum())
            row = tokens[first : first + int(lengths[number])]
            raise KieloError(
                f"{self.prefix}: document {self._num_documents + number} has token ids "
                f"{row.min()}..{row.max()}, outside the vocabulary of {self.vocab_size}; was it encoded with "
                "another tokenizer?"
            )
        self._file.write(tokens.astype(self.dtype.newbyteorder("<")).tobytes())
        if self._mask_file is not None:
            flags = np.ones(tokens.size, bool) if carries_loss is None else np.asarray(carries_loss, bool)
            if flags.shape != tokens.shape:
                raise ValueError(f"{tokens.size} tokens and a loss mask of shape {flags.shape}")
            self._mask_file.write(flags.astype(np.uint8).tobytes())
        self._lengths.append(np.asarray(lengths, dtype="<i4"))
        self._num_documents += len(lengths)

    def close(self) -> None:
        """Finish the files, bring them to the disk and give them their names."""
        self._file.close()
        if self._mask_file is not None:
            self._mask_file.close()
        write_index(self.prefix, self.dtype, lambda: self._lengths)

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._file.abandon()
        if self._mask_file is not None:
            self._mask_file.abandon()

    def __enter__(self) -> "TokenShardWriter":
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def write_index(prefix: Path, dtype: np.dtype, lengths: Callable[[], Iterable[np.ndarray]]) -> None:
    """Write `.idx` of a shard: lengths() gives those of its documents, in tokens, in blocks [documents]."""
    number = sum(map(len, lengths()))
    with DurableFile(_beside(prefix, ".idx")) as index:
        index.write(HEADER.pack(MAGIC, VERSION, CODES[dtype.newbyteorder("=")], number, number + 1))
        for block in lengths():
            index.write(np.asarray(block, dtype="<i4").tobytes())
        start = 0
        for block in lengths():
            ends = start + np.cumsum(block, dtype=np.int64)
            index.write(((ends - block) * dtype.itemsize).astype("<i8").tobytes())
            start = int(ends[-1]) if len(ends) else start
        for first in range(0, number + 1, BLOCK_DOCUMENTS):
            block = np.arange(first, min(first + BLOCK_DOCUMENTS, number + 1), dtype="<i8")
            index.write(block.tobytes())


class TokenShard:
    """One shard: opening it reads the index only.

    num_tokens, num_documents; dtype of the stored ids; document_offsets: int64 [num_documents + 1], tokens.
    loss_mask: of uint8 [num_tokens], 0 where predicting the token carries no loss; None where all of them do.
    """

    def __init__(self, prefix: Path | str):
        self.prefix = Path(prefix)
        self._index_path = _beside(self.prefix, ".idx")
        self._data_path = _beside(self.prefix, ".bin")
        for path in (self._index_path, self._data_path):
            if not path.is_file():
                raise KieloError(f"{path}: no such file; a token shard is a pair PREFIX.bin and PREFIX.idx")
        self.dtype, lengths, documents = self._read_index()
        sequence_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        self.document_offsets: np.ndarray = sequence_ends[documents]
        self.num_tokens = int(sequence_ends[-1])
        self.num_documents = len(documents) - 1
        self._check_data_size()
        self._tokens = FileArray(self._data_path, self.dtype, self.num_tokens)
        self.loss_mask = self._read_loss_mask()

    def read(self, start_token: int, count: int) -> np.ndarray:
        """Return tokens start_token .. start_token+count-1 of the stream, [count].

        Raises IndexError outside the shard, and OSError where the file does not give them.
        """
        if start_token < 0 or count < 0 or start_token + count > self.num_tokens:
            raise IndexError(
                f"{self.prefix}: tokens {start_token}..{start_token + count} of {self.num_tokens}"
            )
        return self._tokens[start_token : start_token + count]

    def num_whole_sequences(self, length: int) -> int:
        """Return the number of sequences that have `length` tokens and a next one."""
        return max(0, self.num_tokens - 1) // length

    def sequences(self, numbers: np.ndarray, length: int) -> np.ndarray:
        """Return whole sequences with their next tokens, [numbers, length + 1].

        Sequence i is tokens i * length .. (i + 1) * length, so that neighbours share a token.
        """
        return self._tokens.rows(numbers * length, length + 1)

    def borders(self, start_token: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (range, token) of each document that begins inside of one of the ranges [n] of tokens.

        Inside: after its first token. int64 [borders] each.
        """
        offsets = self.document_offsets
        before = np.searchsorted(offsets, start_token, side="right")  # documents that begin no later
        borders = np.searchsorted(offsets, start_token + count, side="left") - before
        which = np.repeat(np.arange(len(borders)), borders)
        number = np.arange(len(which)) + (before - np.cumsum(borders) + borders)[which]
        return which, offsets[number]

    def document_blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (first token, token after the last) of all documents, in blocks; int64 [documents] each."""
        for first in range(0, self.num_documents, BLOCK_DOCUMENTS):
            offsets = self.document_offsets[first : first + BLOCK_DOCUMENTS + 1]
            yield offsets[:-1], offsets[1:]

    def _read_index(self) -> tuple[np.dtype, np.ndarray, np.ndarray]:
        content = self._index_path.read_bytes()
        if len(content) < HEADER.size or not content.startswith(MAGIC):
            raise KieloError(f"{self._index_path}: not a Megatron index (it does not start with MMIDIDX)")
        _, version, code, num_sequences, num_boundaries = HEADER.unpack_from(content)
        if version != VERSION or code not in DTYPES or np.dtype(DTYPES[code]).kind not in "iu":
            raise KieloError(
                f"{self._index_path}: version {version}, dtype code {code}; version 1 with integers is read"
            )
        needed = HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if len(content) < needed:
            raise KieloError(
                f"{self._index_path}: {len(content):,} bytes, but its header promises {needed:,}; "
                "the file is cut short: copy it again, or run the pack stage again"
            )
        lengths = np.frombuffer(content, "<i4", num_sequences, HEADER.size)
        documents = np.frombuffer(content, "<i8", num_boundaries, HEADER.size + 12 * num_sequences)
        if not _is_partition(documents, num_sequences):
            raise KieloError(
                f"{self._index_path}: damaged (its documents do not cover its {num_sequences} sequences)"
            )
        return np.dtype(DTYPES[code]).newbyteorder("<"), lengths, documents

    def _read_loss_mask(self) -> FileArray | None:
        path = _beside(self.prefix, LOSS_MASK)
        if not path.is_file():
            return None
        if path.stat().st_size != self.num_tokens:
            raise KieloError(
                f"{path}: {path.stat().st_size:,} bytes for the {self.num_tokens:,} tokens of "
                f"{self._data_path.name}; copy both files again, or run the pack stage again"
            )
        return FileArray(path, np.uint8, self.num_tokens)

    def _check_data_size(self) -> None:
        expected, found = self.num_tokens * self.dtype.itemsize, self._data_path.stat().st_size
        if expected != found:
            raise KieloError(
                f"{self._index_path} does not match {self._data_path.name}: the index describes "
                f"{expected:,} bytes ({self.num_tokens:,} tokens of {self.dtype.itemsize} bytes), the data "
                f"has {found:,}; copy both files again, or run the pack stage again"
            )


def _is_partition(documents: np.ndarray, num_sequences: int) -> bool:
    return bool(
        len(documents)
        and documents[0] == 0
        and documents[-1] == num_sequences
        and np.all(np.diff(documents) >= 0)
    )


def _beside(prefix: Path, suffix: str) -> Path:
    """PREFIX + suffix; `with_suffix` would cut a prefix that has a dot in it."""
    return prefix.with_name(prefix.name + suffix)
