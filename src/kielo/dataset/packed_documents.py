"""Some documents of a run with the ids that the pack stage wrote, to compare other programs' ids with."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kielo.artifact.documents import Document, Message, messages_of, read_documents
from kielo.artifact.manifest import finished_manifest, hash_manifest, read_manifest
from kielo.artifact.stage_counts import CorpusCounts, PackCounts
from kielo.artifact.stage_json import counts_of
from kielo.artifact.token_shards import TokenShard
from kielo.dataset.heldout_sets import HELDOUT
from kielo.dataset.token_parts import IDS

MOST_OF_SOURCE = 400
MOST_CHARACTERS = 16_000_000  # in all, with the documents that are passed over
LONGEST = 200_000  # characters

WithIds = tuple[Document, list[int] | None]  # a document as the corpus has it, and its ids


class SampleDocument(NamedTuple):
    """A document. `place` is its source and id. `messages` are a conversation's. `ids` include the frame."""

    place: str
    text: str
    messages: list[Message] | None = None
    ids: list[int] | None = None


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
    sources = {source.name for source in counts.sources}
    documents = ((one, None) for one in read_documents(corpus / "documents"))
    return _chosen(documents, sources)


def _chosen(documents: Iterator[WithIds], sources: set[str]) -> list[SampleDocument]:
    found, chosen, read = Counter[str](), [], 0
    for document, ids in documents:
        source, text = document["source"], document["text"]
        read += len(text)
        if found[source] < MOST_OF_SOURCE and len(text) <= LONGEST:
            found[source] += 1
            place = f"{source}, {document['id']}"
            chosen.append(SampleDocument(place, text, messages_of(document), ids))
        if read > MOST_CHARACTERS or all(found[name] >= MOST_OF_SOURCE for name in sources):
            break
    return chosen


def _held_out(tokens: Path, of_text: set[str]) -> Iterator[WithIds]:
    shard = TokenShard(tokens / HELDOUT)
    for number, document in enumerate(read_documents(tokens / f"{HELDOUT}.jsonl.zst")):
        yield document, _row(shard, number) if document["source"] in of_text else None


def _training(tokens: Path, corpus: Path, of_text: set[str]) -> Iterator[WithIds]:
    shards = {name: TokenShard(tokens / name) for name in of_text}
    rows = {name: _numbers(tokens / f"{name}{IDS}") for name in of_text}
    for document in read_documents(corpus / "documents"):
        number = rows[document["source"]].get(" ".join(document["id"].splitlines()))
        if number is not None:
            yield document, _row(shards[document["source"]], number)


def _numbers(path: Path) -> dict[str, int]:
    with open(path, encoding="utf-8", newline="\n") as lines:
        ids = [line.rstrip("\n") for line in islice(lines, 2 * MOST_OF_SOURCE)]
    times = Counter(ids)  # several documents with one id are left out
    return {id_: number for number, id_ in enumerate(ids) if times[id_] == 1}


def _row(shard: TokenShard, number: int) -> list[int]:
    start, end = shard.document_offsets[number : number + 2].tolist()
    return shard.read(start, end - start).tolist()
