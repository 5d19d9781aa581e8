"""The documents of a step: (tokens folder, step) -> rows, computed from the order; nothing was logged."""

from pathlib import Path
from typing import Any

from kielo.artifact.token_shards import TokenShard
from kielo.dataset.batches import Batches, PhaseSteps, document_numbers
from kielo.recipe.errors import KieloError


def documents_of_step(
    folder: Path | str,
    seed: int,
    phase: PhaseSteps,
    longest_sequence_length: int,
    end_of_text_id: int,
    step: int,
) -> list[dict[str, Any]]:
    """Returns one row for each part of a document in each sequence of `step`, which is in `phase`.

    Rows, in the samples' order: {"sample", "source", "epoch", "sequence", "document" (its id), "tokens" (of
    it in the sequence)}. Raises KieloError when the list of ids does not fit the shard.
    """
    batches = Batches(folder, seed, phase, longest_sequence_length, end_of_text_id, False)
    samples = batches.samples(step)
    located = batches.order.locate(samples)
    rows: list[dict[str, Any]] = []
    wanted: dict[int, set[int]] = {}
    for sample, source, epoch, sequence in zip(
        samples.tolist(), located.source.tolist(), located.epoch.tolist(), located.sequence.tolist()
    ):
        for number, tokens in _parts(batches.shards[source], sequence, phase.sequence_length):
            rows.append(
                {
                    "sample": sample,
                    "source": source,
                    "epoch": epoch,
                    "sequence": sequence,
                    "document": number,
                    "tokens": tokens,
                }
            )
            wanted.setdefault(source, set()).add(number)
    ids = {
        source: _read_ids(batches.folder, batches.names[source], numbers)
        for source, numbers in wanted.items()
    }
    for row in rows:
        row["document"] = ids[row["source"]][row["document"]]
        row["source"] = batches.names[row["source"]]
    return rows


def _parts(shard: TokenShard, sequence: int, sequence_length: int) -> list[tuple[int, int]]:
    """Returns (document's number in the shard, its tokens in the sequence's inputs) for each document."""
    start = sequence * sequence_length
    numbers = document_numbers(shard, start, min(sequence_length, shard.num_tokens - 1 - start)).tolist()
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
