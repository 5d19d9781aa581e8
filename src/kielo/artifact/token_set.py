"""A source that is read in place: its files as one stream of tokens, each opened when first read.

It has the interface of a `TokenShard`. A document does not continue in the next file.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kielo.artifact.token_file import OpenTokenFile, TokenFile
from kielo.artifact.token_file_formats import open_file
from kielo.recipe.errors import KieloError

BLOCK_TOKENS = 1 << 24
MOST_OPEN_FILES = 256  # at one time; the usual limit of a process is 1,024


class TokenSet:
    """The first `num_tokens` tokens of described files in a folder. The stream ends there."""

    def __init__(self, folder: Path, files: Sequence[TokenFile], num_tokens: int, end_of_text_id: int):
        self._folder, self._files, self._end = folder, files, end_of_text_id
        self._first = np.concatenate([[0], np.cumsum([file.tokens for file in files], dtype=np.int64)])
        self.num_tokens = num_tokens
        self.dtype = np.result_type(*{np.dtype(file.dtype) for file in files})
        self._open: OrderedDict[int, OpenTokenFile] = OrderedDict()
        # As in a `TokenShard`: None if every token carries loss.
        self.loss_mask = SetMask(self) if any(file.loss_mask for file in files) else None

    def read(self, start_token: int, count: int) -> np.ndarray:
        if start_token < 0 or count < 0 or start_token + count > self.num_tokens:
            raise IndexError(
                f"{self._folder}: tokens {start_token}..{start_token + count} of {self.num_tokens}"
            )
        parts = [
            self._file(number).tokens[start:end]
            for number, start, end in self._pieces(start_token, start_token + count)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.zeros(0, self.dtype)])

    def read_mask(self, start_token: int, end_token: int) -> np.ndarray:
        """Return 1 for each token from `start_token` to before `end_token` that carries loss, uint8."""
        parts = [np.zeros(0, np.uint8)]
        for number, start, end in self._pieces(start_token, end_token):
            mask = self._file(number).loss_mask
            parts.append(np.ones(end - start, np.uint8) if mask is None else mask[start:end])
        return np.concatenate(parts)

    def num_whole_sequences(self, length: int) -> int:
        return (self.num_tokens - 1) // length

    def sequences(self, numbers: np.ndarray, length: int) -> np.ndarray:
        rows = np.empty((len(numbers), length + 1), self.dtype)
        for row, number in zip(rows, numbers.tolist(), strict=True):
            row[:] = self.read(number * length, length + 1)
        return rows

    def borders(self, start_token: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for start, size in zip(start_token.tolist(), count.tolist(), strict=True):
            starts = self._document_starts(start, start + size)
            found.append(starts[starts > start])
        which = np.repeat(np.arange(len(found)), [len(starts) for starts in found])
        return which, np.concatenate([*found, np.zeros(0, np.int64)])

    def documents(self, start_token: int, count: int) -> list[tuple[str, int]]:
        end = start_token + count
        starts = np.unique(np.append(self._document_starts(start_token, end), start_token))
        return [
            (self.document_name(int(start)), int(size))
            for start, size in zip(starts, np.diff(starts, append=end), strict=True)
        ]

    def document_name(self, token: int) -> str:
        """Return "FILE: document N" of the document that contains a token of the stream."""
        number = int(np.searchsorted(self._first, token, side="right")) - 1
        name = self._file(number).document_name(token - int(self._first[number]))
        return f"{self._files[number].name}: {name}"

    def document_ranges(self, first: int) -> Iterator[tuple[int, int]]:
        """Yield (first token, token after the last) of each document with tokens from `first` on."""
        start = self.first_document_from(first)
        while start < self.num_tokens:
            end = self.first_document_from(start + 1)
            yield start, end
            start = end

    def document_blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield as `TokenShard` does. Files without an index are read from end to end."""
        before = np.zeros(0, np.int64)  # the document that can continue in the next block
        for first in range(0, self.num_tokens, BLOCK_TOKENS):
            starts = self._document_starts(first, min(first + BLOCK_TOKENS, self.num_tokens))
            starts = np.concatenate([before, starts])
            yield starts[:-1], starts[1:]
            before = starts[-1:]
        yield before, np.full(len(before), self.num_tokens)

    def first_document_from(self, token: int) -> int:
        """Return the first token from `token` on at which a document begins; num_tokens if there is none."""
        step, start = 1 << 12, token
        while start < self.num_tokens:
            if len(starts := self._document_starts(start, min(start + step, self.num_tokens))):
                return int(starts[0])
            start, step = start + step, min(2 * step, 1 << 20)
        return self.num_tokens

    def _document_starts(self, start: int, end: int) -> np.ndarray:
        found = [np.zeros(0, np.int64)]
        for number, first, last in self._pieces(start, end):
            starts = self._file(number).document_starts(first, last)
            if len(starts) and (starts[0] < first or starts[-1] >= last or (np.diff(starts) < 0).any()):
                raise KieloError(
                    f"{self._folder / self._files[number].name}: its index has documents at tokens "
                    f"{starts.min():,} to {starts.max():,}, looked for between {first:,} and {last:,}. The "
                    "index is damaged or another file's. Fix: copy both again"
                )
            found.append(self._first[number] + starts)
        return np.concatenate(found)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, first token, token after the last) of each file in a range of the stream."""
        number = int(np.searchsorted(self._first, start, side="right")) - 1
        while start < end:
            file_start, file_end = int(self._first[number]), int(self._first[number + 1])
            last = min(end, file_end)
            if start < last:
                yield number, start - file_start, last - file_start
            start, number = last, number + 1

    def _file(self, number: int) -> OpenTokenFile:
        if number not in self._open:
            if len(self._open) == MOST_OPEN_FILES:
                self._open.popitem(last=False)
            self._open[number] = open_file(self._folder, self._files[number], self._end)
        self._open.move_to_end(number)
        return self._open[number]


class SetMask:
    """The loss mask of a set: slices of it, or the flags at places [n], uint8."""

    def __init__(self, tokens: TokenSet):
        self._tokens = tokens

    def __getitem__(self, part: slice | np.ndarray) -> np.ndarray:
        if isinstance(part, slice):
            start, stop, _ = part.indices(self._tokens.num_tokens)
            return self._tokens.read_mask(start, stop)
        flags = [self._tokens.read_mask(place, place + 1) for place in part.tolist()]
        return np.concatenate([np.zeros(0, np.uint8), *flags])
