"""The texts of a run that contenders are scored on and baselines learn from: run folder → documents' texts.

A corpus too large for memory is sampled evenly, with the same sample for every contender, and the scores
report it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.documents import SUFFIX, Document, messages_of, read_documents
from kielo.artifact.manifest import check_sizes
from kielo.dataset.batches import Shard, open_shard, packed_counts, packed_manifest
from kielo.dataset.heldout_sets import HELDOUT, HeldoutSet, heldout_sets
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TextTokenizer, decode, end_of_text_id, load_tokenizer
from kielo.tokenizer.stage_inputs import is_heldout

MOST_HELDOUT_BYTES = 4 << 20
MOST_SET_BYTES = 1 << 20  # of one source's
MOST_TRAINING_BYTES = 32 << 20  # the byte baselines hold it in memory: about 40 bytes for each
MOST_UNIGRAM_TOKENS = 1 << 28


def heldout_documents(tokens_folder: Path) -> tuple[list[Document], dict[str, int]]:
    """Return the held-out documents, or an even sample of about 4 MiB, and the number and bytes of all.

    Conversations are left out, because baselines know no turns. If all are conversations, their text is
    taken.
    """
    path = tokens_folder / "heldout.jsonl.zst"
    check_sizes(tokens_folder, packed_manifest(tokens_folder), [path.name])
    plain = [_num_bytes(one["text"]) for one in read_documents(path) if messages_of(one) is None]
    sizes = plain or [_num_bytes(document["text"]) for document in read_documents(path)]
    if not sizes:
        raise KieloError(f"{path}: no held-out documents. Fix: raise dataset.heldout_share or add text")
    share = MOST_HELDOUT_BYTES / max(1, sum(sizes))
    taken = (one for one in read_documents(path) if not plain or messages_of(one) is None)
    return list(evenly(taken, share)), {
        "heldout_documents_in_all": len(sizes),
        "heldout_bytes_in_all": sum(sizes),
    }


def documents_of_sets(tokens_folder: Path) -> Iterator[tuple[HeldoutSet, list[Document]]]:
    """Yield each source's held-out set and each outside text, with an even sample of about 1 MiB of it."""
    for one in heldout_sets(tokens_folder)[1:]:
        is_source = one.folder == Path(tokens_folder)
        path = one.folder / ((HELDOUT if is_source else one.file) + SUFFIX)
        check_sizes(one.folder, packed_manifest(one.folder), [path.name])
        mine = (document for document in read_documents(path) if not is_source or one.holds(document))
        yield one, list(evenly(mine, MOST_SET_BYTES / max(1, one.text_bytes or 0)))


def training_texts(recipe: Recipe, run_folder: Path) -> tuple[list[str], dict[str, int]]:
    """Return the training documents, or an even sample of 32 MiB, and the bytes of both.

    These are the corpus' documents that are not held out, and the decoded text of ready tokens, whose bytes
    are estimated.
    """

    def corpus_texts() -> Iterator[str]:
        if not recipe.corpus.of_raw_text.sources:
            return
        for document in read_documents(run_folder / "corpus" / "documents"):
            if not is_heldout(document["text"], recipe.dataset.heldout_share):
                yield document["text"]

    ready = [source.name for source in recipe.corpus.token_sources]
    counts = packed_counts(run_folder / "tokens").sources
    total = sum(map(_num_bytes, corpus_texts())) + sum(counts[name].bytes or 0 for name in ready)
    share = MOST_TRAINING_BYTES / max(1, total)
    texts = list(evenly(corpus_texts(), share))
    if ready:
        tokenizer = load_tokenizer(run_folder / "tokenizer")
        for name in ready:
            texts += _decoded(open_shard(run_folder / "tokens", name), tokenizer, min(1.0, share))
    return texts, {"training_bytes": total, "training_bytes_of_byte_baselines": sum(map(_num_bytes, texts))}


def training_token_counts(tokens_folder: Path, vocab_size: int) -> np.ndarray:
    """Count each token [vocab_size] in the training shards, or in an even sample of long shards."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    shards = [open_shard(tokens_folder, name) for name in sorted(packed_counts(tokens_folder).sources)]
    share = min(1.0, MOST_UNIGRAM_TOKENS / max(1, sum(shard.num_tokens for shard in shards)))
    for shard in shards:
        for start, count in _spread_parts(shard.num_tokens, share):
            counts += np.bincount(shard.read(start, count), minlength=vocab_size)
    return counts


def _decoded(shard: Shard, tokenizer: TextTokenizer, share: float) -> Iterator[str]:
    """Yield the documents in that share of a shard's tokens, in parts at even distances."""
    end = end_of_text_id(tokenizer)
    for start, count in _spread_parts(shard.num_tokens, share, part=1 << 20):
        row = shard.read(start, count)
        rows = [part[part != end].tolist() for part in np.split(row, np.flatnonzero(row == end) + 1)]
        yield from decode(tokenizer, [part for part in rows if part], has_special=False)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file, with their numbers from 1. Raise KieloError for a line in no UTF-8."""
    with path.open("rb") as file:
        yield from decoded_lines(file, str(path))


def decoded_lines(lines: Iterable[bytes], name: str) -> Iterator[tuple[int, str]]:
    """Do as `text_lines`, for the lines of a file that errors call `name`."""
    for number, data in enumerate(lines, 1):
        try:
            yield number, data.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise KieloError(
                f"{name}, line {number}: not UTF-8 ({error.reason}). Fix: save it as UTF-8"
            ) from None


def evenly(items: Iterable[Any], share: float) -> Iterator[Any]:
    """Yield that share of the items at even distances, the first included, or all from a share of 1 on."""
    for number, item in enumerate(items):
        if share >= 1 or number == 0 or int((number + 1) * share) > int(number * share):
            yield item


def _spread_parts(num_tokens: int, share: float, part: int = 1 << 22) -> Iterator[tuple[int, int]]:
    """Yield (start, count) of parts that cover the share of a shard, at even distances."""
    for start in range(0, num_tokens, part):
        count = round(min(part, num_tokens - start) * share)
        if count:
            yield start, count


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8"))
