"""Documents looked up in a run's tokens: of a step, computed from the order, and a sample with its ids.

Nothing was logged for the first. Other programs' ids are compared with the second.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kielo.artifact.documents import Document, Message, messages_of, read_documents
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import finished_manifest, hash_manifest, read_manifest
from kielo.artifact.stage_counts import CorpusCounts, PackCounts
from kielo.artifact.stage_json import counts_of
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_shards import TokenShard
from kielo.dataset.batches import NOT_COUNTED, Batch, Batches, PhaseSteps, Shard, document_numbers
from kielo.dataset.heldout_sets import HELDOUT
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
        if (reason := _unreadable(batches, sample, vocab_rows)) is not None:
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
    path = folder / f"{source}.ids.txt"
    if not path.is_file():
        raise KieloError(
            f"{path}: no such file, the list of {source}'s documents. Fix: run the pack stage again"
        )
    with open(path, encoding="utf-8", newline="\n") as lines:  # streamed, because the file may be large
        rows = enumerate(islice(lines, max(numbers) + 1))
        found = {number: line.rstrip("\n") for number, line in rows if number in numbers}
    if len(found) == len(numbers):
        return found
    raise KieloError(
        f"{path}: has {len(found)} of {len(numbers)} documents, so it is cut short. Fix: pack again"
    )


MOST_OF_SOURCE = 400
MOST_CHARACTERS = 16_000_000  # in all, with the documents that are passed over
LONGEST = 200_000  # characters

WithIds = tuple[Document, list[int] | None]  # a document as the corpus has it, and its ids


class SampleDocument(NamedTuple):
    place: str  # its source and id
    text: str
    messages: list[Message] | None = None  # of a conversation
    ids: list[int] | None = None  # with the frame


def packed_sample(run: Path) -> list[SampleDocument]:
    """Return documents in RUN/tokens, up to MOST_OF_SOURCE of each source, with ids if they have any."""
    tokens, packed = run / "tokens", read_manifest(run / "tokens")
    if packed is None:
        return []
    sources = counts_of(tokens, packed, PackCounts).sources
    of_text = {name for name, of in sources.items() if of.folder is None}
    chosen = _chosen(_held_out(tokens, of_text), of_text)
    corpus, made_of = run / "corpus", packed.inputs.get("corpus")
    is_there = read_manifest(corpus) is not None and hash_manifest(corpus) == made_of
    if is_there and len(chosen) < MOST_OF_SOURCE * len(of_text):
        chosen += _chosen(_training(tokens, corpus, of_text), of_text)
    return chosen


def corpus_sample(corpus: Path) -> list[SampleDocument]:
    counts = counts_of(corpus, finished_manifest(corpus), CorpusCounts)
    documents = ((one, None) for one in read_documents(corpus / "documents"))
    return _chosen(documents, {source.name for source in counts.sources})


def _chosen(documents: Iterator[WithIds], sources: set[str]) -> list[SampleDocument]:
    found, chosen, read = Counter[str](), [], 0
    for document, ids in documents:
        source, text = document["source"], document["text"]
        read += len(text)
        if found[source] < MOST_OF_SOURCE and len(text) <= LONGEST:
            found[source] += 1
            chosen.append(SampleDocument(f"{source}, {document['id']}", text, messages_of(document), ids))
        if read > MOST_CHARACTERS or all(found[name] >= MOST_OF_SOURCE for name in sources):
            break
    return chosen


def _held_out(tokens: Path, of_text: set[str]) -> Iterator[WithIds]:
    shard = TokenShard(tokens / HELDOUT)
    for number, document in enumerate(read_documents(tokens / f"{HELDOUT}.jsonl.zst")):
        yield document, _token_row(shard, number) if document["source"] in of_text else None


def _training(tokens: Path, corpus: Path, of_text: set[str]) -> Iterator[WithIds]:
    shards = {name: TokenShard(tokens / name) for name in of_text}
    rows = {name: _numbers(tokens / f"{name}.ids.txt") for name in of_text}
    for document in read_documents(corpus / "documents"):
        number = rows[document["source"]].get(" ".join(document["id"].splitlines()))
        if number is not None:
            yield document, _token_row(shards[document["source"]], number)


def _numbers(path: Path) -> dict[str, int]:
    with open(path, encoding="utf-8", newline="\n") as lines:
        ids = [line.rstrip("\n") for line in islice(lines, 2 * MOST_OF_SOURCE)]
    times = Counter(ids)  # several documents with one id are left out
    return {id_: number for number, id_ in enumerate(ids) if times[id_] == 1}


def _token_row(shard: TokenShard, number: int) -> list[int]:
    start, end = shard.document_offsets[number : number + 2].tolist()
    return shard.read(start, end - start).tolist()
