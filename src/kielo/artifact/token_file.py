"""One file of tokens that another program wrote: its description, and the file opened by it, lazily.

A description tells all that reading needs, so that thousands of files are opened without a look at any. The
file is opened, and its index mapped, when the first of their tokens is asked for.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from pathlib import Path

import numpy as np

from kielo.artifact.file_array import FileArray
from kielo.artifact.stage_json import JsonObject


class TokenFile(JsonObject):
    """The description of one file of tokens, and of its index of documents where it has one."""

    name: str
    """The data's path, relative to the folder of its set."""
    format: str
    """megatron, npy or ds."""
    dtype: str
    """Type of the stored ids, as numpy names it."""
    first_byte: int
    """Offset of the first id in the data."""
    tokens: int
    """Ids in the file."""
    documents: int | None
    """Documents in the file; null where no index tells."""
    bytes: int
    """Size of the data."""
    index_bytes: int
    """Size of the index, 0 without one."""
    fingerprint: str
    """xxh3-128 of the sizes and both ends of data, index and mask."""
    loss_mask: str | None = None
    """Name of the file beside it with a byte for each token, 0 where predicting it carries no loss."""


class DocumentIndex(ABC):
    """The documents of one file, by their first tokens; nothing of the index is held in memory."""

    num_documents: int

    @abstractmethod
    def starts(self, first: int, last: int) -> np.ndarray:
        """Returns the first tokens of documents first .. last-1, int64 [last - first]."""

    def number_at(self, token: int) -> int:
        """Returns the number of the first document that begins at `token` or after it."""
        return bisect_left(range(self.num_documents), token, key=lambda number: self._start(number))

    def _start(self, number: int) -> int:
        return int(self.starts(number, number + 1)[0])


class MegatronIndex(DocumentIndex):
    """The arrays of a `.idx`. pointers: first byte of each sequence; documents: first sequence of each."""

    def __init__(self, pointers: np.ndarray, documents: np.ndarray, num_tokens: int, token_bytes: int):
        self._pointers, self._documents = pointers, documents
        self._num_tokens, self._token_bytes = num_tokens, token_bytes
        self.num_documents = len(documents) - 1

    def starts(self, first: int, last: int) -> np.ndarray:
        sequences = np.asarray(self._documents[first:last], np.int64)
        # Empty documents at the end begin at no sequence; a damaged index may have negative ones.
        is_inside = (sequences >= 0) & (sequences < len(self._pointers))
        starts = np.where(sequences < 0, np.int64(-1), np.int64(self._num_tokens))
        starts[is_inside] = self._pointers[sequences[is_inside]] // self._token_bytes
        return starts


class EndsIndex(DocumentIndex):
    """datatrove's `.ds.index`: the token after each document, uint64."""

    def __init__(self, ends: np.ndarray):
        self._ends, self.num_documents = ends, len(ends)

    def starts(self, first: int, last: int) -> np.ndarray:
        if first == 0:
            return np.concatenate([np.zeros(1, np.int64), self._ends[: last - 1].astype(np.int64)])[:last]
        return self._ends[first - 1 : last - 1].astype(np.int64)


class OpenTokenFile:
    """An opened file. tokens: its ids, [tokens]; index: None where documents only end with end-of-text."""

    def __init__(self, path: Path, file: TokenFile, index: DocumentIndex | None, end_of_text_id: int):
        self._file, self._end, self.index = file, end_of_text_id, index
        self.tokens = FileArray(path, file.dtype, file.tokens, file.first_byte)
        mask = path.with_name(file.loss_mask) if file.loss_mask else None
        self.loss_mask = FileArray(mask, np.uint8, file.tokens) if mask else None

    def document_starts(self, start: int, end: int) -> np.ndarray:
        """Returns the tokens in start .. end-1 at which documents begin, int64; empty ones repeat a token."""
        if self.index is not None:
            return self.index.starts(self.index.number_at(start), self.index.number_at(end))
        before = max(start - 1, 0)
        found = np.flatnonzero(self.tokens[before : max(end - 1, before)] == self._end) + before + 1
        return np.concatenate([np.zeros(1, np.int64), found]) if start == 0 < end else found

    def document_name(self, token: int) -> str:
        """Returns "document N" of the token, or "token N", where it begins, in a file without an index."""
        if self.index is not None:
            return f"document {self.index.number_at(token + 1) - 1}"
        end, step = token, 1 << 16
        while end > 0:
            start = max(0, end - step)
            ends = np.flatnonzero(self.tokens[start:end] == self._end)
            if len(ends):
                return f"token {start + int(ends[-1]) + 1}"
            end = start
        return "token 0"
