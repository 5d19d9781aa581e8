"""The documents of a step: (tokens folder, step) -> rows, computed from the order; nothing was logged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.token_set import TokenSet
from kielo.dataset.batches import Batches, PhaseSteps, Shard, document_numbers
from kielo.recipe.errors import KieloError


def documents_of_step(
    folder: Path | str,
    seed: int,
    phase: PhaseSteps,
    longest_sequence_length: int,
    end_of_text_id: int,
    step: int,
    text_of: Callable[[np.ndarray], str],
) -> list[dict[str, Any]]:
    """Returns one row for each part of a document in each sequence of `step`, which is in `phase`.

    Rows, in the samples' order: {"sample", "source", "epoch", "sequence", "document" (its id; file and number
    in token files read in place), "tokens" (of it in the sequence), "text" (of these tokens, as `text_of`
    decodes them)}. Raises KieloError when the list of ids does not fit the shard.
    """
    batches = Batches(folder, seed, phase, longest_sequence_length, end_of_text_id, False)
    samples = batches.samples(step)
    located = batches.order.locate(samples)
    rows: list[dict[str, Any]] = []
    wanted: dict[int, set[int]] = {}
    length = phase.sequence_length
    for sample, source, epoch, sequence in zip(
        samples.tolist(), located.source.tolist(), located.epoch.tolist(), located.sequence.tolist()
    ):
        shard, start = batches.shards[source], sequence * length
        for document, tokens in _parts(shard, start, length):
            rows.append(
                {
                    "sample": sample,
                    "source": source,
                    "epoch": epoch,
                    "sequence": sequence,
                    "document": document,
                    "tokens": tokens,
                    "text": text_of(shard.read(start, tokens)),
                }
            )
            start += tokens
            if isinstance(document, int):
                wanted.setdefault(source, set()).add(document)
    ids = {
        source: _read_ids(batches.folder, batches.names[source], numbers)
        for source, numbers in wanted.items()
    }
    for row in rows:
        if isinstance(row["document"], int):
            row["document"] = ids[row["source"]][row["document"]]
        row["source"] = batches.names[row["source"]]
    return rows


def _parts(shard: Shard, start: int, length: int) -> list[tuple[int, int]] | list[tuple[str, int]]:
    """Returns (document, its tokens in a sequence's inputs) for each document from the token `start` on.

    A document is its number in a packed shard, and its name in files that are read in place.
    """
    count = min(length, shard.num_tokens - 1 - start)
    if isinstance(shard, TokenSet):
        return shard.documents(start, count)
    numbers = document_numbers(shard, start, count).tolist()
    return [(number, numbers.count(number)) for number in dict.fromkeys(numbers)]


def _read_ids(folder: Path, source: str, numbers: set[int]) -> dict[int, str]:
    """Reads the ids of the documents with these numbers; the file, which may be large, is streamed."""
    path, last = folder / f"{source}.ids.txt", max(numbers)
    found: dict[int, str] = {}
    if not path.is_file():
        raise KieloError(
            f"{path}: no such file; it lists the documents of {source}: run the pack stage again"
        )
    with open(path, encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines):
            if number in numbers:
                found[number] = line.rstrip("\n")
            if number == last:
                return found
    raise KieloError(
        f"{path}: {len(found)} of the {len(numbers)} documents asked for; it is cut short: pack again"
    )
