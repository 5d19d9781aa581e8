"""The documents of a step: (tokens folder, step) → rows, computed from the order. Nothing was logged."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from kielo.artifact.json_object import JsonTable
from kielo.artifact.token_set import TokenSet
from kielo.dataset.batches import NOT_COUNTED, Batch, Batches, PhaseSteps, Shard, document_numbers
from kielo.recipe.errors import KieloError, sentence

_MOST_NAMED = 5  # documents, in a message


def documents_of_step(
    folder: Path | str,
    seed: int,
    phase: PhaseSteps,
    longest_sequence_length: int,
    end_of_text_id: int,
    step: int,
    text_of: Callable[[np.ndarray], str],
) -> list[JsonTable]:
    """Return a row for each part of a document in each sequence of `step`, which is in `phase`.

    Rows, in the samples' order: "sample", "source", "epoch", "sequence", "document" (its id, or file and
    number in token files read in place), "tokens" (its number in the sequence), "with_loss" (of them, if a
    source of the phase has a loss mask), "text" (by `text_of`). Raises KieloError if the list of ids does not
    fit the shard.
    """
    batches = Batches(folder, seed, phase, longest_sequence_length, end_of_text_id, False)
    samples = batches.samples(step)
    located = batches.order.locate(samples)
    rows: list[JsonTable] = []
    wanted: dict[str, set[int]] = defaultdict(set)
    has_mask = any(shard.loss_mask is not None for shard in batches.shards)
    places = (values.tolist() for values in (samples, located.source, located.epoch, located.sequence))
    for sample, number, epoch, sequence, ranges in zip(*places, batches.ranges(located), strict=True):
        shard, source = batches.shards[number], batches.names[number]
        for document, start, tokens in (part for of in ranges for part in _parts(shard, *of)):
            row = {"sample": sample, "source": source, "epoch": epoch, "sequence": sequence}
            row |= {"document": document, "tokens": tokens}
            if has_mask:
                mask = shard.loss_mask
                row["with_loss"] = tokens if mask is None else int(mask[start : start + tokens].sum())
            rows.append(row | {"text": text_of(shard.read(start, tokens))})
            if isinstance(document, int):
                wanted[source].add(document)
    ids = {source: read_ids(batches.folder, source, numbers) for source, numbers in wanted.items()}
    for row in rows:
        if isinstance(row["document"], int):
            row["document"] = ids[row["source"]][row["document"]]
    return rows


def document_ids(batches: Batches, source: int, ranges: Iterable[tuple[int, int]]) -> list[str]:
    """Return the ids of the documents in ranges (first token, tokens) of a source's stream, in order."""
    found = [document for of in ranges for document, _, _ in _parts(batches.shards[source], *of)]
    numbers = {document for document in found if isinstance(document, int)}
    ids = read_ids(batches.folder, batches.names[source], numbers) if numbers else {}
    return list(dict.fromkeys(ids[one] if isinstance(one, int) else one for one in found))


def read_sequences(batches: Batches, step: int, samples: np.ndarray, vocab_rows: int) -> Batch:
    """Read samples [n] of a step. Raises KieloError, which names the first unreadable sample's documents."""
    with suppress(OSError, KieloError):
        batch = batches.read(samples)
        if not _is_outside(batch, vocab_rows):
            return batch
    for sample in samples[:, None]:
        reason = _unreadable(batches, sample, vocab_rows)
        if reason is not None:
            raise KieloError(
                f"step {step}: {_described(batches, sample)}: {reason}. Fix: restore the file and start "
                "again; the run resumes from its newest checkpoint"
            )
    return batches.read(samples)


def _unreadable(batches: Batches, sample: np.ndarray, vocab_rows: int) -> str | None:
    try:
        batch = batches.read(sample)
    except (OSError, KieloError) as error:
        return sentence(error) or str(error)
    if not _is_outside(batch, vocab_rows):
        return None
    shard = batches.shards[int(batches.order.locate(sample).source[0])]
    file = "the file" if isinstance(shard, TokenSet) else f"{shard.prefix}.bin"
    largest = max(batch.inputs.max(), batch.labels.max())
    return f"{file}: has ids up to {largest:,}, but the vocabulary has {vocab_rows:,} rows"


def _is_outside(batch: Batch, vocab_rows: int) -> bool:
    if not batch.inputs.size:
        return False
    inputs, labels = batch.inputs, batch.labels
    is_below = inputs.min() < 0 or ((labels < 0) & (labels != NOT_COUNTED)).any()
    return bool(is_below or max(inputs.max(), labels.max()) >= vocab_rows)


def _described(batches: Batches, sample: np.ndarray) -> str:
    located = batches.order.locate(sample)
    (ranges,), source = batches.ranges(located), int(located.source[0])
    documents: list[str] = []
    with suppress(OSError, KieloError):
        documents = document_ids(batches, source, ranges)
    names = ", ".join(documents[:_MOST_NAMED])
    more = f", {len(documents) - _MOST_NAMED} more" if len(documents) > _MOST_NAMED else ""
    return f"sample {sample[0]} of {batches.names[source]}" + (f" ({names}{more})" if names else "")


def _parts(shard: Shard, start: int, count: int) -> Iterator[tuple[int | str, int, int]]:
    """Yield (document's number, or its name in files read in place; first token; tokens) in a range."""
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
    path, last = folder / f"{source}.ids.txt", max(numbers)  # streamed, because the file may be large
    found: dict[int, str] = {}
    if not path.is_file():
        raise KieloError(
            f"{path}: no such file, the list of {source}'s documents. Fix: run the pack stage again"
        )
    with open(path, encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines):
            if number in numbers:
                found[number] = line.rstrip("\n")
            if number == last:
                return found
    raise KieloError(
        f"{path}: has {len(found)} of {len(numbers)} documents, so it is cut short. Fix: pack again"
    )
