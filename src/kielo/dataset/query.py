"""The documents of a step: (tokens folder, step) -> rows, computed from the order; nothing was logged."""

from collections.abc import Callable, Iterable, Iterator
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
    in token files read in place), "tokens" (of it in the sequence), "with_loss" (where a source of the phase
    has a loss mask: how many of them carry loss), "text" (of these tokens, as `text_of` decodes
    them)}. Raises KieloError when the list of ids does not fit the shard.
    """
    batches = Batches(folder, seed, phase, longest_sequence_length, end_of_text_id, False)
    samples = batches.samples(step)
    located = batches.order.locate(samples)
    rows: list[dict[str, Any]] = []
    wanted: dict[int, set[int]] = {}
    has_mask = any(shard.loss_mask is not None for shard in batches.shards)
    places = (values.tolist() for values in (samples, located.source, located.epoch, located.sequence))
    for sample, source, epoch, sequence, ranges in zip(*places, batches.ranges(located)):
        shard = batches.shards[source]
        for document, start, tokens in (part for of in ranges for part in _parts(shard, *of)):
            rows.append(
                {
                    "sample": sample,
                    "source": source,
                    "epoch": epoch,
                    "sequence": sequence,
                    "document": document,
                    "tokens": tokens,
                    **({"with_loss": _tokens_with_loss(shard, start, tokens)} if has_mask else {}),
                    "text": text_of(shard.read(start, tokens)),
                }
            )
            if isinstance(document, int):
                wanted.setdefault(source, set()).add(document)
    ids = {
        source: read_ids(batches.folder, batches.names[source], numbers) for source, numbers in wanted.items()
    }
    for row in rows:
        if isinstance(row["document"], int):
            row["document"] = ids[row["source"]][row["document"]]
        row["source"] = batches.names[row["source"]]
    return rows


def document_ids(batches: Batches, source: int, ranges: Iterable[tuple[int, int]]) -> list[str]:
    """Returns the ids of the documents in ranges (first token, tokens) of a source's stream, in order.

    Of token files that are read in place: file and number. Raises KieloError and OSError.
    """
    found = [document for of in ranges for document, _, _ in _parts(batches.shards[source], *of)]
    numbers = {document for document in found if isinstance(document, int)}
    ids = read_ids(batches.folder, batches.names[source], numbers) if numbers else {}
    return list(dict.fromkeys(ids[one] if isinstance(one, int) else one for one in found))


def _tokens_with_loss(shard: Shard, start: int, count: int) -> int:
    """Returns how many of the tokens start .. start + count - 1 carry loss."""
    return count if shard.loss_mask is None else int(shard.loss_mask[start : start + count].sum())


def _parts(shard: Shard, start: int, count: int) -> Iterator[tuple[int | str, int, int]]:
    """Yields (document, its first token, its tokens) of each document in a range of a stream.

    A document is its number in a packed shard, and its name in files that are read in place.
    """
    found: list[tuple[str, int]] | list[tuple[int, int]]
    if isinstance(shard, TokenSet):
        found = shard.documents(start, count)
    else:
        numbers = document_numbers(shard, start, count).tolist()
        found = [(number, numbers.count(number)) for number in dict.fromkeys(numbers)]
    for document, tokens in found:
        yield document, start, tokens
        start += tokens


def read_ids(folder: Path, source: str, numbers: set[int]) -> dict[int, str]:
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
