"""The pack stage: documents + tokenizer -> a token shard for each source, and shards of held-out text.

SOURCE.bin .idx    tokens of the source's documents in the corpus's order, end-of-text after each
SOURCE.loss_mask   a byte a token, where only a part of them carries loss (`loss = "answers"`)
SOURCE.ids.txt     their ids, one a line, so that a token leads back to its document
heldout.*          the same for held-out documents, and heldout.jsonl.zst with their text (for bits per byte)
token_files.json   a description of sources that are ready tokens, which are read in place
heldout.SET.*      the held-out documents of one source, or of one of its languages, where there are several
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kielo.artifact.documents import SUFFIX, DocumentWriter, read_documents
from kielo.artifact.manifest import Manifest, hash_manifest, is_current, read_manifest, write_stage
from kielo.artifact.stage_json import write_json
from kielo.artifact.token_shards import TokenShardWriter
from kielo.artifact.token_sources import find_token_sources
from kielo.artifact.trained_text import refuse_to_replace
from kielo.dataset.encoded_documents import (
    DocumentEncoder,
    EncodedDocument,
    begins_with_cls,
    sources_with_loss_mask,
)
from kielo.dataset.heldout_languages import SEPARATOR, HeldoutLanguages
from kielo.dataset.heldout_sets import HELDOUT, SET_KEY, set_file
from kielo.dataset.pack_token_files import TokenFilesPacking, inputs_of, note_places
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.facts import tokenizer_facts, tokenizer_hash
from kielo.tokenizer.heldout import is_heldout as is_heldout  # re-exported: the split belongs to both rooms
from kielo.tokenizer.load import (
    TextTokenizer,
    decode,
    end_of_text_id,
    load_tokenizer,
    role_id,
    vocabulary_size,
)
from kielo.tokenizer.measure import WORD

# Folders without the held-out sets of sources, which were written before there were any, stay current.
KIND, VERSION = "tokens", 1
logger = logging.getLogger(__name__)
BATCH_DOCUMENTS = 512
ROUND_TRIP_EVERY = 64  # documents; decoding all of them would take as long as encoding


def pack(recipe: Recipe, corpus_folder: Path, tokenizer_folder: Path, folder: Path) -> Manifest:
    """Writes the token shards. A folder that is already current stays as it is, and its manifest is returned.

    counts: {"sources": {name: {"tokens", "documents", "bytes", "words"}}, "heldout": {same},
    "heldout_sets": {set: the same, and "languages"} where there are several sources or languages,
    "round_trip": {"checked", "exact"}}; tokens include end-of-text, bytes are the text's UTF-8. Where a part
    of the tokens carries loss there are also "tokens_with_loss" and "bytes_with_loss", with one for each end.
    Raises KieloError for a source without training text, for no held-out text, where our own tokenizer does
    not give a text back, and where a checkpoint was trained on shards that would be replaced.
    """
    inputs = {"tokenizer": hash_manifest(tokenizer_folder)}
    if recipe.corpus.of_raw_text.sources:
        inputs["corpus"] = hash_manifest(corpus_folder)
    section, found = _section(recipe), {}
    if recipe.corpus.token_sources:
        found = find_token_sources(recipe, tokenizer_facts(tokenizer_folder).vocabulary_size)
        inputs |= inputs_of(found)
    if is_current(folder, KIND, VERSION, inputs, section):
        return note_places(folder, read_manifest(folder), found)
    refuse_to_replace(folder, KIND, VERSION, inputs, section)
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        tokenizer = load_tokenizer(tokenizer_folder)
        packing = _Packing(stage.folder, tokenizer, recipe)
        ready = TokenFilesPacking(recipe, found, tokenizer)
        made_with = tokenizer_hash(tokenizer_folder)
        with packing:
            for document, row in ready.heldout(made_with):
                packing.hold_out(document, EncodedDocument(document["text"], row))
            if "corpus" in inputs:
                for batch in _batched(_with_progress(corpus_folder)):
                    packing.add(batch)
        if "corpus" in inputs:
            packing.check(corpus_folder)
        if found:
            write_json(stage.folder, ready.description())
        stage.counts.update(packing.counts())
        stage.counts["sources"] = dict(sorted((stage.counts["sources"] | ready.counts).items()))
        stage.counts["tokenizer_hash"] = made_with
    return read_manifest(folder)


def _section(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings that the outcome of the pack stage depends on, as its manifest has them."""
    section: dict[str, Any] = {"heldout_share": recipe.dataset.heldout_share}
    if on_answers := sources_with_loss_mask(recipe):
        section["loss_on_answers"] = sorted(on_answers)
    if begins_with_cls(recipe):
        section["begins_with_cls"] = True
    return section


class _Shard:
    """One shard in the making, with the ids of its documents and its counts."""

    def __init__(self, tokens: TokenShardWriter, begin: list[int], end: int, open_files: ExitStack):
        """begin: what stands before documents of which all tokens carry loss."""
        self._begin = begin
        self._tokens, prefix = open_files.enter_context(tokens), tokens.prefix
        ids_path = prefix.with_name(prefix.name + ".ids.txt")
        self._ids = open_files.enter_context(ids_path.open("w", encoding="utf-8", newline="\n"))
        self._end = end
        self.counts = {"tokens": 0, "documents": 0, "bytes": 0, "words": 0}
        if tokens.has_loss_mask:
            self.counts |= {"tokens_with_loss": 0, "bytes_with_loss": 0}

    def add(self, document: dict[str, Any], encoded: EncodedDocument) -> None:
        carries_loss = encoded.carries_loss
        row = [*self._begin, *encoded.ids] if carries_loss is None else encoded.ids
        self._tokens.add(np.array([*row, self._end], dtype=np.int64), carries_loss)
        num_bytes = len(document["text"].encode("utf-8", "surrogatepass"))
        if self._tokens.has_loss_mask:
            self.counts["tokens_with_loss"] += (
                len(row) + 1 if carries_loss is None else int(carries_loss.sum())
            )
            self.counts["bytes_with_loss"] += (
                num_bytes + 1 if encoded.bytes_with_loss is None else encoded.bytes_with_loss
            )
        self._ids.write(" ".join(document["id"].splitlines()) + "\n")  # one line each, whatever the id
        self.counts["tokens"] += len(row) + 1
        self.counts["documents"] += 1
        self.counts["words"] += len(WORD.findall(document["text"]))
        self.counts["bytes"] += num_bytes


class _Packing:
    """The shards of a pack stage in the making: documents are added in batches, then checked and counted."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer, recipe: Recipe):
        self._folder, self._tokenizer, self._recipe = folder, tokenizer, recipe
        self._end, self._vocab_size = end_of_text_id(tokenizer), vocabulary_size(tokenizer)
        first = role_id(tokenizer, "cls_token") if begins_with_cls(recipe) else None
        self._begin = [] if first is None else [first]
        self._encoder = DocumentEncoder(recipe, tokenizer, self._end)
        self._on_answers = sources_with_loss_mask(recipe)
        self._open_files = ExitStack()
        self._sources: dict[str, _Shard] = {}
        self._languages, self._heldout_sets = HeldoutLanguages(recipe), dict[str, _Shard]()
        self._met: dict[str, int] = {}  # source -> its documents, held-out ones included
        self._documents = self._checked = self._exact = 0

    def __enter__(self) -> None:
        self._heldout = self._shard(HELDOUT, bool(self._on_answers))
        self._heldout_texts = self._open_files.enter_context(
            DocumentWriter(self._folder / (HELDOUT + SUFFIX))
        )

    def __exit__(self, *problem: Any) -> None:
        self._open_files.__exit__(*problem)

    def add(self, documents: list[dict[str, Any]]) -> None:
        encoded = self._encoder.encode(documents)
        self._check_round_trip(documents, encoded)
        for document, one in zip(documents, encoded):
            source = document["source"]
            self._met[source] = self._met.get(source, 0) + 1
            if not one.ids:
                continue  # an empty text: an end-of-text alone teaches nothing
            if is_heldout(document["text"], self._recipe.dataset.heldout_share):
                self.hold_out(document, one)
            else:
                if source not in self._sources:
                    self._sources[source] = self._shard(_checked_name(source), source in self._on_answers)
                self._sources[source].add(document, one)

    def hold_out(self, document: dict[str, Any], encoded: EncodedDocument) -> None:
        self._heldout.add(document, encoded)
        if self._languages.has_several_sets:
            name, source = self._languages.set_of(document), document["source"]
            if name not in self._heldout_sets:
                file = set_file(_checked_name(name))
                self._heldout_sets[name] = self._shard(file, source in self._on_answers)
            self._heldout_sets[name].add(document, encoded)
            if name != source:
                document = document | {"metadata": document["metadata"] | {SET_KEY: name}}
        self._heldout_texts.add(document)

    def check(self, corpus_folder: Path) -> None:
        named = [source.name for source in self._recipe.corpus.of_raw_text.sources]
        for name in dict.fromkeys([*self._met, *named]):
            if name not in self._sources:
                met = self._met.get(name, 0)
                raise KieloError(
                    f"source {name!r} has no training text: {met} of its documents are in {corpus_folder}, "
                    "none of them on the training side of the held-out split; see the corpus stage's funnel, "
                    "give it more text, or take it out of corpus.sources"
                )
        if not self._sources:
            raise KieloError(f"{corpus_folder}: no documents to pack; see the funnel of the corpus stage")
        if not self._heldout.counts["documents"]:
            total, share = sum(self._met.values()), self._recipe.dataset.heldout_share
            raise KieloError(
                f"dataset.heldout_share = {share:g} holds out none of the {total} documents in "
                f"{corpus_folder}; raise it, to {min(0.3, max(2 * share, 5 / total)):.2g} for instance, "
                "or add documents"
            )
        shown = {name.partition(SEPARATOR)[0] for name in self._heldout_sets}
        without = sorted(self._sources.keys() - shown)
        if len(self._recipe.corpus.sources) > 1 and without:
            logger.warning(
                "%s: dataset.heldout_share = %g holds out no document of %s, whose loss will not be shown",
                corpus_folder,
                self._recipe.dataset.heldout_share,
                ", ".join(without),
            )

    def counts(self) -> dict[str, Any]:
        return {
            "sources": {name: self._sources[name].counts for name in sorted(self._sources)},
            "heldout": self._heldout.counts,
            "heldout_sets": {
                name: shard.counts | {"languages": list(self._languages.languages_of_set(name))}
                for name, shard in sorted(self._heldout_sets.items())
            },
            "round_trip": {"checked": self._checked, "exact": self._exact},
        }

    def _shard(self, name: str, has_loss_mask: bool) -> _Shard:
        tokens = TokenShardWriter(self._folder / name, self._vocab_size, has_loss_mask)
        return _Shard(tokens, self._begin, self._end, self._open_files)

    def _check_round_trip(self, documents: list[dict[str, Any]], encoded: list[EncodedDocument]) -> None:
        chosen = slice(-self._documents % ROUND_TRIP_EVERY, None, ROUND_TRIP_EVERY)
        self._documents += len(documents)
        texts = decode(self._tokenizer, [one.ids for one in encoded[chosen]])
        for document, one, back in zip(documents[chosen], encoded[chosen], texts):
            self._checked += 1
            self._exact += one.text == back
            # A ready tokenizer may normalise; then the share of exact texts is reported, and no more.
            if one.text != back and not self._recipe.tokenizer.ready:
                raise KieloError(
                    f"document {document['id']}: the tokenizer does not give its text back; train it again"
                )


def _checked_name(source: str) -> str:
    if (
        not source
        or source == HELDOUT
        or source.startswith((".", f"{HELDOUT}."))
        or "/" in source
        or "\\" in source
    ):
        raise KieloError(
            f"source name {source!r} cannot name a file here; give the source another name in corpus.sources"
        )
    return source


def _with_progress(corpus_folder: Path) -> Iterable[dict[str, Any]]:
    known = read_manifest(corpus_folder).counts.get("documents_kept")
    # disable=None: a bar on a terminal, nothing in a log
    return tqdm(
        read_documents(corpus_folder / "documents"), "packing", known, unit=" documents", disable=None
    )


def _batched(documents: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    source = iter(documents)
    while batch := list(islice(source, BATCH_DOCUMENTS)):
        yield batch
