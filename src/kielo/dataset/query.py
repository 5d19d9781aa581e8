"""The documents of a step: (tokens folder, step) -> rows, computed from the order; nothing was logged.

Also reads the sequences of a step with an error that names the documents that cannot be read.
"""

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
    """Return one row for each part of a document in each sequence of `step`, which is in `phase`.

    Rows, in the samples' order: {"sample", "source", "epoch", "sequence", "document" (its id; file and number
    in token files read in place), "tokens" (of it in the sequence), "with_loss" (where a source of the phase
    has a loss mask: how many of them carry loss), "text" (of these tokens, as `text_of` decodes
    them)}. Raises KieloError when the list of ids does not fit the shard.
    """
    batches = Batches(folder, seed, phase, longest_sequence_length, end_of_text_id, False)
    samples = batches.samples(step)
    located = batches.order.locate(samples)
    rows: list[JsonTable] = []
    wanted: dict[int, set[int]] = {}
    has_mask = any(shard.loss_mask is not None for shard in batches.shards)
    places = (values.tolist() for values in (samples, located.source, located.epoch, located.sequence))
    for sample, source, epoch, sequence, ranges in zip(*places, batches.ranges(located), strict=True):
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
    """Return the ids of the documents in ranges (first token, tokens) of a source's stream, in order.

    Of token files that are read in place: file and number. Raises KieloError and OSError.
    """
    found = [document for of in ranges for document, _, _ in _parts(batches.shards[source], *of)]
    numbers = {document for document in found if isinstance(document, int)}
    ids = read_ids(batches.folder, batches.names[source], numbers) if numbers else {}
    return list(dict.fromkeys(ids[one] if isinstance(one, int) else one for one in found))


def read_sequences(batches: Batches, step: int, samples: np.ndarray, vocab_rows: int) -> Batch:
    """Read samples [n] of a step; after an error, read them again one by one.

    vocab_rows: of the embedding. Raises KieloError for the first sample that cannot be read or has ids
    outside of these rows; the message names step, source, documents and file.
    """
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
    """Return True if the embedding or the head lacks a row for an id."""
    if not batch.inputs.size:
        return False
    inputs, labels = batch.inputs, batch.labels
    is_below = inputs.min() < 0 or ((labels < 0) & (labels != NOT_COUNTED)).any()
    return bool(is_below or max(inputs.max(), labels.max()) >= vocab_rows)


def _described(batches: Batches, sample: np.ndarray) -> str:
    """Return e.g. "sample 12 of books (a.txt:3, a.txt:9)", with the documents as far as they are known."""
    located = batches.order.locate(sample)
    (ranges,), source = batches.ranges(located), int(located.source[0])
    documents: list[str] = []
    with suppress(OSError, KieloError):
        documents = document_ids(batches, source, ranges)
    names = ", ".join(documents[:_MOST_NAMED])
    more = f", {len(documents) - _MOST_NAMED} more" if len(documents) > _MOST_NAMED else ""
    return f"sample {sample[0]} of {batches.names[source]}" + (f" ({names}{more})" if names else "")


def _tokens_with_loss(shard: Shard, start: int, count: int) -> int:
    return count if shard.loss_mask is None else int(shard.loss_mask[start : start + count].sum())


def _parts(shard: Shard, start: int, count: int) -> Iterator[tuple[int | str, int, int]]:
    """Yield (document, its first token, its tokens) of each document in a range of a stream.

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
    """Read the ids of the documents with these numbers; the file, which may be large, is streamed."""
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
