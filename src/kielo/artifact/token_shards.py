"""Token shards: Megatron's indexed dataset, version 1, a pair of files `PREFIX.bin` and `PREFIX.idx`.

`.bin` is the tokens of all documents, end to end, little-endian uint16 (vocabularies below 65,500) or int32.
`.idx` is: magic "MMIDIDX\0\0", version u64, dtype code u8, sequences u64, document indices u64, then int32
length of each sequence in tokens, int64 offset of each sequence in bytes, int64 number of the first sequence
of each document with the total at the end. We write a sequence for each document, and read shards with more
(Megatron's sentence splitting). Format: megatron-core `datasets/indexed_dataset.py`, which reads our files as
we read its files.

`PREFIX.loss_mask`, if it exists, has a byte for each token: 1 if predicting it carries loss. In a shard
without it every token carries loss.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kielo.artifact.durable import DurableFile, WrittenAside
from kielo.artifact.token_file import FileArray
from kielo.recipe.errors import KieloError

READ_BYTES = 1 << 23
SEQUENCES_AT_ONCE = 1 << 20  # of an index that is checked
LOSS_MASK = ".loss_mask"
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_BY_CODE = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)
DTYPES: dict[int, type] = dict(enumerate(_BY_CODE, start=1))
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
# Megatron's limit: uint16 below it, int32 from it on.
UINT16_VOCAB_SIZES = 65_500
BLOCK_DOCUMENTS = 1 << 20


class TokenShardWriter(WrittenAside):
    """A writer of a shard and, with has_loss_mask, its mask: `.bin` gets its name first, `.idx` last."""

    def __init__(self, prefix: Path | str, vocab_size: int, has_loss_mask: bool = False):
        self.prefix, self.vocab_size = Path(prefix), vocab_size
        self.dtype = np.dtype(np.uint16 if vocab_size < UINT16_VOCAB_SIZES else np.int32)
        self._lengths: list[np.ndarray] = []
        self._num_documents = 0
        self._file = DurableFile(_beside(self.prefix, ".bin"))
        self._mask_file = DurableFile(_beside(self.prefix, LOSS_MASK)) if has_loss_mask else None

    def add(self, tokens: np.ndarray, carries_loss: np.ndarray | None = None) -> None:
        """Append a document, a one-dimensional array of token ids; otherwise as `add_documents`."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1:
            raise ValueError(f"a document is one row of token ids, not an array of shape {tokens.shape}")
        self.add_documents(tokens, np.array([tokens.size]), carries_loss)

    def add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, carries_loss: np.ndarray | None = None
    ) -> None:
        """Append documents of the given lengths [documents], whose tokens [sum of lengths] are end to end.

        carries_loss: bool of each token, None: all. KieloError for an id outside the vocabulary.
        """
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            number = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            row = np.split(tokens, np.cumsum(lengths)[:-1])[number]
            raise KieloError(
                f"{self.prefix}: document {self._num_documents + number} has token ids "
                f"{row.min()}..{row.max()}, outside the vocabulary of {self.vocab_size}. Was it encoded "
                "with another tokenizer?"
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
        for file in filter(None, (self._file, self._mask_file)):
            file.close()
        write_index(self.prefix, self.dtype, lambda: self._lengths)

    def abandon(self) -> None:
        for file in filter(None, (self._file, self._mask_file)):
            file.abandon()


def join_token_shards(parts: Sequence[Path], prefix: Path) -> None:
    """Join shards of one dtype, with their masks, in `prefix`. In memory is the index of a single part."""
    for suffix in (".bin", LOSS_MASK):
        files = [_beside(part, suffix) for part in parts]
        if files[0].is_file():
            join_files(files, _beside(prefix, suffix))

    def lengths() -> Iterator[np.ndarray]:
        return (np.diff(TokenShard(part).document_offsets) for part in parts)

    write_index(prefix, TokenShard(parts[0]).dtype, lengths)


def join_files(parts: Sequence[Path], path: Path) -> None:
    with DurableFile(path) as whole:
        for part in parts:
            with open(part, "rb") as file:
                while block := file.read(READ_BYTES):
                    whole.write(block)


def write_index(prefix: Path, dtype: np.dtype, lengths: Callable[[], Iterable[np.ndarray]]) -> None:
    """Write `.idx` of a shard. lengths(): the lengths of its documents, in tokens, in blocks [documents]."""
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


class MegatronHead:
    """The first 34 bytes of a `.idx`, and where its arrays are."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise KieloError(
                f"{path}: no such file; a Megatron shard is a pair PREFIX.bin and PREFIX.idx. Fix: the "
                "pair, or flat ids without an index as PREFIX.npy"
            )
        self._path = path
        with open(path, "rb") as file:
            content = file.read(HEADER.size)
        if len(content) < HEADER.size or not content.startswith(MAGIC):
            raise KieloError(
                f"{path}: not a Megatron index (it does not start with MMIDIDX, or has fewer than "
                f"{HEADER.size} bytes). Fix: copy it again"
            )
        _, version, code, self.num_sequences, self.num_boundaries = HEADER.unpack(content)
        if version != VERSION or code not in DTYPES or np.dtype(DTYPES[code]).kind not in "iu":
            raise KieloError(
                f"{path}: version {version}, dtype code {code}, but only version 1 with integers is read"
            )
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        needed, size = HEADER.size + 12 * self.num_sequences + 8 * self.num_boundaries, path.stat().st_size
        if size < needed:
            raise KieloError(
                f"{path}: {size:,} bytes, but its header promises {needed:,}; the file is cut short. Fix: "
                "copy it again, or run the pack stage again"
            )
        if self.num_boundaries < 1:
            raise self._uncovered()

    def _uncovered(self) -> KieloError:
        what = f"its documents do not cover its {self.num_sequences} sequences"
        return KieloError(f"{self._path}: damaged ({what}). Fix: copy it again, or run the pack stage again")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (first byte of each sequence, first sequence of each document and their number), mapped."""
        place = HEADER.size + 4 * self.num_sequences
        pointers = self._mapped("<i8", place, self.num_sequences)
        return pointers, self._mapped("<i8", place + 8 * self.num_sequences, self.num_boundaries)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens of each sequence, first sequence of each document and their number), in memory."""
        lengths = np.fromfile(self._path, "<i4", self.num_sequences, offset=HEADER.size)
        place = HEADER.size + 12 * self.num_sequences
        documents = np.fromfile(self._path, "<i8", self.num_boundaries, offset=place)
        if documents[0] != 0 or documents[-1] != self.num_sequences or np.any(np.diff(documents) < 0):
            raise self._uncovered()
        return lengths, documents

    def end_of_data(self) -> int:
        """Return the byte after the last sequence. Raises KieloError if documents miss sequences."""
        pointers, documents = self.arrays()
        if documents[0] != 0 or documents[-1] != self.num_sequences:
            raise KieloError(
                f"{self._path}: damaged (its documents cover sequences {documents[0]} to {documents[-1]} of "
                f"{self.num_sequences}). Fix: copy it again"
            )
        if not self.num_sequences:
            return 0
        lengths = self._mapped("<i4", HEADER.size, self.num_sequences)
        return int(pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize

    def check_sequences(self) -> None:
        """Read all arrays. Raises KieloError unless sequences and documents follow each other."""
        pointers, documents = self.arrays()
        lengths = self._mapped("<i4", HEADER.size, self.num_sequences)
        for first in range(0, self.num_sequences, SEQUENCES_AT_ONCE):
            last = min(first + SEQUENCES_AT_ONCE, self.num_sequences)
            sizes = lengths[first:last].astype(np.int64) * self.dtype.itemsize
            following = pointers[first + 1 : last + 1]
            wrong = np.flatnonzero(sizes < 0)
            if not len(wrong):
                ends = pointers[first:last][: len(following)] + sizes[: len(following)]
                wrong = np.flatnonzero(ends != following)
            if len(wrong):
                number = first + int(wrong[0])
                raise KieloError(
                    f"{self._path}: damaged (sequence {number} has {int(lengths[number]):,} tokens from byte "
                    f"{int(pointers[number]):,}, and the next does not begin after them). Fix: copy it again"
                )
        for first in range(0, self.num_boundaries - 1, SEQUENCES_AT_ONCE):
            part = documents[first : first + SEQUENCES_AT_ONCE + 1]
            wrong = np.flatnonzero((part[1:] < part[:-1]) | (part[:-1] < 0) | (part[1:] > self.num_sequences))
            if len(wrong):
                number = int(wrong[0])
                raise KieloError(
                    f"{self._path}: damaged (document {first + number} is sequences {int(part[number]):,} to "
                    f"{int(part[number + 1]):,} of {self.num_sequences:,}). Fix: copy it again"
                )

    def _mapped(self, dtype: str, place: int, count: int) -> np.ndarray:
        if not count:
            return np.zeros(0, dtype)
        return np.memmap(self._path, dtype, "r", place, (count,)).view(np.ndarray)


class TokenShard:
    """A shard. Opening it reads only the index.

    dtype: the type of the stored ids. document_offsets: int64 [num_documents + 1], in tokens. loss_mask:
    uint8 [num_tokens], 0 for tokens without loss; None if all tokens have loss.
    """

    def __init__(self, prefix: Path | str):
        self.prefix = Path(prefix)
        self._index_path = _beside(self.prefix, ".idx")
        self._data_path = _beside(self.prefix, ".bin")
        for path in (self._index_path, self._data_path):
            if not path.is_file():
                raise KieloError(f"{path}: no such file; a token shard is a pair PREFIX.bin and PREFIX.idx")
        head = MegatronHead(self._index_path)
        self.dtype, (lengths, documents) = head.dtype, head.read()
        sequence_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        self.document_offsets: np.ndarray = sequence_ends[documents]
        self.num_tokens = int(sequence_ends[-1])
        self.num_documents = len(documents) - 1
        expected = self.num_tokens * self.dtype.itemsize
        if expected != (found := self._data_path.stat().st_size):
            raise KieloError(
                f"{self._index_path} does not match {self._data_path.name}: the index describes "
                f"{expected:,} bytes ({self.num_tokens:,} tokens of {self.dtype.itemsize} bytes), but the "
                f"data has {found:,}. Fix: copy both files again, or run the pack stage again"
            )
        self._tokens = FileArray(self._data_path, self.dtype, self.num_tokens)
        self.loss_mask = self._read_loss_mask()

    def read(self, start_token: int, count: int) -> np.ndarray:
        """Return tokens start_token .. start_token+count-1, [count]. IndexError outside; OSError."""
        if start_token < 0 or count < 0 or start_token + count > self.num_tokens:
            raise IndexError(
                f"{self.prefix}: tokens {start_token}..{start_token + count} of {self.num_tokens}"
            )
        return self._tokens[start_token : start_token + count]

    def num_whole_sequences(self, length: int) -> int:
        """Return the number of sequences of `length` tokens that have a following token."""
        return max(0, self.num_tokens - 1) // length

    def sequences(self, numbers: np.ndarray, length: int) -> np.ndarray:
        """Return whole sequences with their next tokens, [numbers, length + 1]. Neighbours share a token."""
        return self._tokens.rows(numbers * length, length + 1)

    def borders(self, start_token: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (range, token), int64 [borders], of documents that begin inside ranges [n]."""
        offsets = self.document_offsets
        before = np.searchsorted(offsets, start_token, side="right")  # documents that begin earlier or there
        borders = np.searchsorted(offsets, start_token + count, side="left") - before
        which = np.repeat(np.arange(len(borders)), borders)
        number = np.arange(len(which)) + (before - np.cumsum(borders) + borders)[which]
        return which, offsets[number]

    def document_blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (first token, token after the last) of all documents, in blocks; int64 [documents] each."""
        for first in range(0, self.num_documents, BLOCK_DOCUMENTS):
            offsets = self.document_offsets[first : first + BLOCK_DOCUMENTS + 1]
            yield offsets[:-1], offsets[1:]

    def _read_loss_mask(self) -> FileArray | None:
        path = _beside(self.prefix, LOSS_MASK)
        if not path.is_file():
            return None
        if path.stat().st_size != self.num_tokens:
            raise KieloError(
                f"{path}: {path.stat().st_size:,} bytes for the {self.num_tokens:,} tokens of "
                f"{self._data_path.name}. Fix: copy both files again, or run the pack stage again"
            )
        return FileArray(path, np.uint8, self.num_tokens)


def _beside(prefix: Path, suffix: str) -> Path:
    """Return PREFIX + suffix. `with_suffix` would cut a prefix with a dot."""
    return prefix.with_name(prefix.name + suffix)
