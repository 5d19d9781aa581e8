"""Sequences of packed documents: (sequence, epoch) -> the pieces of documents in it.

The pack stage writes these for each source and each sequence length of the run (`pack_sequences.py`):

SOURCE.LENGTH.table.npy    which lengths of pieces are in which sequence (`best_fit.py`)
SOURCE.LENGTH.pieces.npy   the pieces by length, in the stream's order: 4 · first token + 2 · begins + ends

Pieces of equal length change places from epoch to epoch, and the pieces of a sequence are in a random order:
a document meets other documents in each epoch, and short ones are not always last. Both are keyed by seed,
source, length and epoch, so nothing is stored of them, and any rank reads any sequence.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kielo.artifact.manifest import Manifest, check_sizes, hash_manifest, read_manifest
from kielo.dataset.best_fit import FIRST_PIECE, FIRST_SEQUENCE, LENGTH, TIMES
from kielo.dataset.permutation import key_from, keys_of_epochs, permute, scramble
from kielo.recipe.errors import KieloError

FOLDER = "packing"  # beside that of the tokens
PACKING = "packing"  # of the section in its manifest; best_fit where it is not there
BEGINS, ENDS, FLAG_BITS = 2, 1, 2  # of an entry of pieces: the piece has its document's first, its last token


@dataclass(frozen=True)
class Pieces:
    """The pieces of documents in sequences, by row and column; [p] each.

    row: number of the sequence among those asked for. column: place of the piece's first token. start, count:
    its tokens in the source's stream. begins, ends: whether its document's first, last token is in it.
    """

    row: np.ndarray
    column: np.ndarray
    start: np.ndarray
    count: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class PackedSequences:
    """The packed sequences of one source at one length.

    Memory does not grow with the documents: the pieces are mapped. num_sequences: of an epoch.
    """

    def __init__(self, tokens_folder: Path | str, source: str, sequence_length: int, seed: int):
        folder, manifest = packing_folder(tokens_folder), packing_manifest(tokens_folder)
        counts = manifest.counts["sources"].get(source, {}).get(str(sequence_length))
        if counts is None:
            raise _not_packed(folder, f"has no sequences of {sequence_length:,} tokens of {source}")
        table_path, pieces_path = (folder / name for name in file_names(source, sequence_length))
        check_sizes(folder, manifest, [table_path.name, pieces_path.name])
        self._table = table = np.load(table_path, allow_pickle=False)
        self._pieces = np.load(pieces_path, mmap_mode="r", allow_pickle=False)
        self.num_sequences = int(counts["sequences"])
        self._first_sequence, self._first_part = np.unique(table[:, FIRST_SEQUENCE], return_index=True)
        self._num_parts = np.diff(self._first_part, append=len(table))
        sizes = np.diff(self._first_sequence, append=self.num_sequences)
        self._of_length = np.zeros(sequence_length + 2, np.int64)
        np.add.at(self._of_length, table[:, LENGTH], table[:, TIMES] * np.repeat(sizes, self._num_parts))
        self._before_length = np.cumsum(self._of_length) - self._of_length
        self._piece_key = np.uint64(key_from("pieces", seed, source, sequence_length))
        self._place_key = np.uint64(key_from("places", seed, source, sequence_length))

    def pieces(self, sequence: np.ndarray, epoch: np.ndarray) -> Pieces:
        """Returns the pieces of sequences, int64 [n], in their epochs, int64 [n]."""
        row, length, number = self._slots(sequence)
        key = np.full(len(row), self._piece_key, np.uint64)
        key = keys_of_epochs(keys_of_epochs(key, length), epoch[row])  # one shuffle a length and epoch
        chosen = self._before_length[length] + permute(number, self._of_length[length], key)
        entry = np.asarray(self._pieces[chosen])
        key = np.full(len(row), self._place_key, np.uint64)
        key = keys_of_epochs(keys_of_epochs(key, sequence[row]), epoch[row])
        place = np.arange(len(row)) - np.searchsorted(row, row)
        order = np.lexsort((scramble(key + place.astype(np.uint64)), row))
        length, entry = length[order], entry[order]  # rows stay as they are: they are sorted by
        end = np.cumsum(length)
        first = np.searchsorted(row, row)
        column = end - length - (end - length)[first]
        begins, ends = (entry & BEGINS) > 0, (entry & ENDS) > 0
        return Pieces(row, column, entry >> FLAG_BITS, length, begins, ends)

    def _slots(self, sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (row, length, number among the pieces of its length) of each piece, int64 [p], by row."""
        group = np.searchsorted(self._first_sequence, sequence, side="right") - 1
        row, part = _expanded(self._first_part[group], self._num_parts[group])
        times = self._table[part, TIMES]
        inside = (sequence - self._first_sequence[group])[row]
        first = self._table[part, FIRST_PIECE] + inside * times
        which, number = _expanded(first, times)
        return row[which], self._table[part, LENGTH][which], number


def _expanded(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (i, first[i] + k) for each i and each k below count[i]; int64 [sum of count] each."""
    which = np.repeat(np.arange(len(first)), count)
    return which, np.arange(len(which)) + (first - np.cumsum(count) + count)[which]


@dataclass(frozen=True)
class PackingRow:
    """The effect of packing on a source at a length, for people.

    cut, cut_in_one_stream: shares of its documents that are cut, and would be if they were trained on end to
    end. filling: share of the positions without a token.
    """

    source: str
    sequence_length: int
    sequences: int
    cut: float
    cut_in_one_stream: float
    filling: float

    def sentence(self) -> str:
        return (
            f"{self.source}: {self.sequences:,} sequences of {self.sequence_length:,} tokens, "
            f"{self.cut:.2%} of the documents cut ({self.cut_in_one_stream:.2%} in one stream), "
            f"{self.filling:.3%} filling"
        )


def packing_rows(manifest: Manifest) -> list[PackingRow]:
    """Returns a row for each source and length that was packed."""
    return [
        PackingRow(
            source,
            int(length),
            of["sequences"],
            of["cut_documents"] / max(1, of["documents"]),
            of["cut_in_one_stream"] / max(1, of["documents"]),
            of["filling"] / max(1, of["sequences"] * int(length)),
        )
        for source, lengths in manifest.counts["sources"].items()
        for length, of in lengths.items()
    ]


def file_names(source: str, sequence_length: int) -> tuple[str, str]:
    """Returns the names of the table and of the pieces."""
    return f"{source}.{sequence_length}.table.npy", f"{source}.{sequence_length}.pieces.npy"


def packing_folder(tokens_folder: Path | str) -> Path:
    return Path(tokens_folder).parent / FOLDER


def packing_manifest(tokens_folder: Path | str) -> Manifest:
    """Returns the manifest of the sequences of a tokens folder.

    Raises KieloError where there are none, and where they were packed from other tokens.
    """
    folder = packing_folder(tokens_folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise _not_packed(folder, "has no packed sequences")
    if manifest.inputs["tokens"] != hash_manifest(tokens_folder):
        raise _not_packed(folder, f"was packed from other tokens than {tokens_folder}")
    return manifest


def _not_packed(folder: Path, what: str) -> KieloError:
    return KieloError(
        f"{folder}: {what}, which dataset.packing needs; `kielo run RECIPE --to pack` makes them"
    )
