"""The part of the pack stage that puts documents into sequences, for two values of dataset.packing.

Token shards + the run's sequence lengths → the files of `packed_sequences.py`, and their counts. Documents of
up to a sequence's length stay whole. Longer documents are cut into whole sequences, and their rest is packed
with the others (Ding et al. 2024, arXiv:2404.10830, section 3). Lengths of documents are read twice, a block
at a time: to count the pieces of each length, and to sort them by length (a counting sort).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import Manifest, hash_manifest, is_current, read_manifest, write_stage
from kielo.artifact.stage_counts import PackedLength, PackingCounts
from kielo.dataset import packed_sequences
from kielo.dataset.batches import Shard, open_shard, packed_counts
from kielo.dataset.packed_sequences import best_fit_decreasing, entries, one_a_sequence, packing_folder
from kielo.recipe.phases import full_phases
from kielo.recipe.sections import PACKED, Recipe

# Runs read their text by these files. A change of their content must be in the run's identity too, so that a
# run is not continued on other sequences.
KIND, VERSION = "packing", 1
Fit = Callable[[np.ndarray, int], tuple[np.ndarray, int]]
_FITS: dict[str, Fit] = {"best_fit": best_fit_decreasing, "one_a_sequence": one_a_sequence}


def pack_sequences(recipe: Recipe, tokens_folder: Path) -> Manifest | None:
    """Pack the sequences of all sources, beside the tokens. Return the manifest if anything was made."""
    packing = recipe.dataset.packing
    if packing not in PACKED:
        return None
    folder = packing_folder(tokens_folder)
    lengths = sorted({phase.sequence_length for phase in full_phases(recipe)})
    inputs: dict[str, str] = {"tokens": hash_manifest(tokens_folder)}
    section: JsonTable = {"sequence_lengths": lengths}
    if packing != "best_fit":  # which older folders do not name
        section[packed_sequences.PACKING] = packing
    if is_current(folder, KIND, VERSION, inputs, section):
        return None
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        made: dict[str, dict[str, PackedLength]] = {}
        for name in packed_counts(tokens_folder).sources:
            shard = open_shard(tokens_folder, name)
            packed = (pack_source(shard, length, stage.folder, name, _FITS[packing]) for length in lengths)
            made[name] = dict(zip(map(str, lengths), packed, strict=True))
        stage.counts.update(PackingCounts(sources=made).content())
    return read_manifest(folder)


def pack_source(
    shard: Shard, sequence_length: int, folder: Path, name: str, fit: Fit = best_fit_decreasing
) -> PackedLength:
    counts = np.zeros(sequence_length + 1, np.int64)  # pieces of each length
    documents = cut = cut_in_one_stream = 0
    for start, end in shard.document_blocks():
        size = end - start
        documents += int(np.count_nonzero(size))
        cut += int(np.count_nonzero(size > sequence_length))
        last = np.maximum(end - 1, start)
        cut_in_one_stream += int(np.count_nonzero(start // sequence_length != last // sequence_length))
        counts += np.bincount(size % sequence_length, minlength=len(counts))
        counts[sequence_length] += int((size // sequence_length).sum())
    counts[0] = 0  # documents without a rest
    table, sequences = fit(counts, sequence_length)
    table_name, pieces_name = packed_sequences.file_names(name, sequence_length)
    np.save(folder / table_name, table)
    pieces = np.lib.format.open_memmap(folder / pieces_name, "w+", np.int64, (int(counts.sum()),))
    _sort_by_length(shard, sequence_length, np.cumsum(counts) - counts, pieces)
    pieces.flush()
    return PackedLength(
        sequences=sequences,
        documents=documents,
        cut_documents=cut,
        cut_in_one_stream=cut_in_one_stream,
        filling=sequences * sequence_length - int((counts * np.arange(len(counts))).sum()),
    )


def _sort_by_length(shard: Shard, sequence_length: int, place: np.ndarray, pieces: np.ndarray) -> None:
    """Write all pieces into `pieces`, by length. place: the first place of each length, which moves on."""
    dtype = np.uint16 if sequence_length <= 1 << 16 else np.uint32  # sorting two bytes is a radix sort
    for start, end in shard.document_blocks():
        whole, rest = np.divmod(end - start, sequence_length)
        filled = np.flatnonzero(rest)
        order = filled[np.argsort(rest[filled].astype(dtype), kind="stable")]
        length = rest[order]
        counts = np.bincount(length, minlength=len(place))
        place_in_block = np.arange(len(length)) - (np.cumsum(counts) - counts)[length]
        first = start[order] + whole[order] * sequence_length
        pieces[place[length] + place_in_block] = entries(first, whole[order] == 0, True)
        document = np.repeat(np.arange(len(whole)), whole)
        number = np.arange(len(document)) - (np.cumsum(whole) - whole)[document]
        first = start[document] + number * sequence_length
        ends = (number == whole[document] - 1) & (rest[document] == 0)
        at = int(place[sequence_length])
        pieces[at : at + len(document)] = entries(first, number == 0, ends)
        place += counts
        place[sequence_length] += len(document)
