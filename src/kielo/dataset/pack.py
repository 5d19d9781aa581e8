"""The pack stage: documents + tokenizer → a token shard for each source, and shards of held-out text.

SOURCE.bin .idx    tokens of the source's documents in the corpus's order, end-of-text after each, and before
                   each what the tokenizer's post-processor puts before a text
SOURCE.loss_mask   a byte a token, if only a part of them carries loss (`loss = "answers"`)
SOURCE.ids.txt     the documents' ids, one a line, so that a token leads back to its document
heldout.*          the same for held-out documents, and heldout.jsonl.zst with their text (for bits per byte)
token_files.json   a description of sources that are ready tokens, which are read in place
heldout.SET.*      the held-out documents of one source or one of its languages, if there are several

As many processes as clean text (`document_packer.py`) pack each file of the corpus as a part
(`token_parts.py`). This stage joins the parts.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import (
    Manifest,
    finished_manifest,
    hash_manifest,
    is_current,
    refuse_foreign,
    write_stage,
)
from kielo.artifact.stage_counts import PackCounts, PartCounts, TokenCounts
from kielo.artifact.stage_json import write_json
from kielo.artifact.token_sources import FoundFiles, find_token_sources
from kielo.artifact.trained_text import has_trained, refuse_to_replace, refuse_while_trained_on
from kielo.dataset.document_packer import (
    BEGINS_WITH,
    DocumentPacker,
    begin_of_documents,
    begins_with_cls,
    sources_with_loss_mask,
)
from kielo.dataset.heldout_sets import HELDOUT, SEPARATOR, HeldoutLanguages
from kielo.dataset.pack_token_files import TokenFilesPacking, inputs_of, note_places
from kielo.dataset.token_parts import TokenParts, TokenPartWriter, counts_of_part, join_parts, remove_parts
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import longest_sequence_length
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import load_tokenizer, tokenizer_facts, tokenizer_hash

# Older folders without held-out sets of sources stay current, and folders without BEGINS_WITH if the
# tokenizer puts nothing before a text.
KIND, VERSION = "tokens", 1
logger = logging.getLogger(__name__)
MOST_NAMED = 3  # files in one message
_READY = "of_token_files"  # folder, while the stage works, of held-out documents of ready tokens


def pack(recipe: Recipe, corpus_folder: Path, tokenizer_folder: Path, folder: Path) -> Manifest:
    """Write the token shards. Keep a folder that is current, and finished parts of an earlier attempt.

    KieloError without training or held-out text, if our tokenizer changes a text, and for trained shards.
    """
    has_corpus = bool(recipe.corpus.of_raw_text.sources)
    inputs, section, found = _identity(recipe, corpus_folder, tokenizer_folder, Path(folder))
    if is_current(folder, KIND, VERSION, inputs, section):
        kept, changed = note_places(folder, finished_manifest(folder), found)
        if not changed:
            remove_parts(folder)
            return kept
        named = ", ".join(map(str, changed[:MOST_NAMED])) + ", …" * (len(changed) > MOST_NAMED)
        refuse_while_trained_on(folder, f"other content in {named}", "the files as they were; ")
    _refuse(folder, inputs, section)
    parts: list[Path] = []
    if has_corpus:
        parts = _parts(recipe, corpus_folder, tokenizer_folder, folder).make()
    counts = [counts_of_part(part) for part in parts]
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        described: dict[str, TokenCounts] = {}
        if found or not parts:
            ready, own = _heldout_of_token_files(recipe, found, tokenizer_folder, stage.folder / _READY)
            parts, counts = [stage.folder / _READY, *parts], [own, *counts]
            described = ready.counts
            if found:
                write_json(stage.folder, ready.description())
        joined = join_parts(parts, counts, stage.folder)
        if (stage.folder / _READY).exists():
            shutil.rmtree(stage.folder / _READY)
        if has_corpus:
            try:
                check_joined(recipe, joined, corpus_folder)
            except KieloError:
                remove_parts(folder)  # another recipe has other parts
                raise
        made = _counts(recipe, joined, described, tokenizer_hash(tokenizer_folder))
        _tell_too_long(recipe, made.sources)
        stage.counts.update(made.content())
    remove_parts(folder)
    return finished_manifest(folder)


def pack_share(
    recipe: Recipe, corpus_folder: Path, tokenizer_folder: Path, folder: Path, share: tuple[int, int]
) -> int:
    """Make the share (k, n), for machine k of n, of the missing parts. Return the number of its parts."""
    inputs, section, _ = _identity(recipe, corpus_folder, tokenizer_folder, Path(folder))
    if is_current(folder, KIND, VERSION, inputs, section):
        return 0
    _refuse(folder, inputs, section)
    return len(_parts(recipe, corpus_folder, tokenizer_folder, folder).make(share))


class PackProgress(NamedTuple):
    finished: int  # parts
    parts: int  # one for each file of the corpus
    is_joined: bool  # the shards are current


def pack_progress(recipe: Recipe, corpus_folder: Path, tokenizer_folder: Path, folder: Path) -> PackProgress:
    inputs, section, _ = _identity(recipe, corpus_folder, tokenizer_folder, Path(folder))
    parts = _parts(recipe, corpus_folder, tokenizer_folder, folder)
    if is_current(folder, KIND, VERSION, inputs, section):
        return PackProgress(parts.number, parts.number, is_joined=True)
    _refuse(folder, inputs, section)
    return PackProgress(parts.num_finished(), parts.number, is_joined=False)


def _identity(
    recipe: Recipe, corpus_folder: Path, tokenizer_folder: Path, folder: Path
) -> tuple[dict[str, str], JsonTable, dict[str, FoundFiles]]:
    inputs, found = {"tokenizer": hash_manifest(tokenizer_folder)}, {}
    if recipe.corpus.of_raw_text.sources:
        inputs["corpus"] = hash_manifest(corpus_folder)
    if recipe.corpus.token_sources:
        found = find_token_sources(recipe, tokenizer_facts(tokenizer_folder).vocabulary_size)
        inputs |= inputs_of(found)
    section = _section(recipe, tokenizer_folder)
    if BEGINS_WITH in section and has_trained(folder.parent):
        # A run that has trained keeps its tokens: earlier versions put nothing before documents.
        before = {key: value for key, value in section.items() if key != BEGINS_WITH}
        if is_current(folder, KIND, VERSION, inputs, before):
            section = before
    return inputs, section, found


def _refuse(folder: Path, inputs: Mapping[str, str], section: Mapping[str, Any]) -> None:
    refuse_to_replace(folder, KIND, VERSION, inputs, section)
    refuse_foreign(folder, KIND)


def _parts(recipe: Recipe, corpus_folder: Path, tokenizer_folder: Path, folder: Path) -> TokenParts:
    return TokenParts(recipe, corpus_folder, tokenizer_folder, folder, _section(recipe, tokenizer_folder))


def _section(recipe: Recipe, tokenizer_folder: Path) -> JsonTable:
    section: JsonTable = {"heldout_share": recipe.dataset.heldout_share}
    if on_answers := sources_with_loss_mask(recipe):
        section["loss_on_answers"] = sorted(on_answers)
    if too_long := {one.name: one.too_long for one in recipe.corpus.sources if one.too_long != "split"}:
        section["too_long"] = too_long | {"sequence_length": longest_sequence_length(recipe)}
    if begins_with_cls(recipe):
        section["begins_with_cls"] = True
    if begin := begin_of_documents(recipe, tokenizer_folder):
        section[BEGINS_WITH] = list(begin)
    return section


def _heldout_of_token_files(
    recipe: Recipe, found: Mapping[str, FoundFiles], tokenizer_folder: Path, folder: Path
) -> tuple[TokenFilesPacking, PartCounts]:
    tokenizer = load_tokenizer(tokenizer_folder)
    masked = [name for name, of in found.items() if any(file.loss_mask for file in of.files)]
    has_mask = bool(sources_with_loss_mask(recipe) or masked)
    ready, packer = TokenFilesPacking(recipe, found, tokenizer), DocumentPacker(recipe, tokenizer, masked)
    vocab_size = tokenizer_facts(tokenizer_folder).vocabulary_size
    folder.mkdir()
    with TokenPartWriter(folder, vocab_size, has_mask) as part:
        for document, row, flags in ready.heldout(tokenizer_hash(tokenizer_folder)):
            part.add(packer.held_out(document, row, flags))
    return ready, part.counts()


def _tell_too_long(recipe: Recipe, counts: Mapping[str, TokenCounts]) -> None:
    done = {
        "split": "their rest is trained without its beginning. The source's too_long has other ways",
        "truncate": "their rest was left out",
        "drop": "they were left out",
    }
    for source in recipe.corpus.sources:
        of_source = counts.get(source.name)
        if of_source and (number := of_source.too_long_conversations):
            total = (of_source.documents or 0) + (number if source.too_long == "drop" else 0)
            logger.warning(
                f"{source.name}: {number:,} of {total:,} conversations ({100 * number / total:.0f} %) are "
                f"longer than {longest_sequence_length(recipe)} tokens: {done[source.too_long]}"
            )


def check_joined(recipe: Recipe, joined: PartCounts, corpus_folder: Path) -> None:
    met, sources = joined.met, joined.sources
    for name in dict.fromkeys([*met, *(source.name for source in recipe.corpus.of_raw_text.sources)]):
        if name not in sources:
            raise KieloError(
                f"source {name!r} has no training text: {corpus_folder} has "
                f"{met.get(name, 0)} of its documents, and the held-out split leaves none to train on. Fix: "
                "give it more text (funnel.json has what was dropped), or take it out of corpus.sources"
            )
    if not sources:
        raise KieloError(f"{corpus_folder}: no documents to pack. Fix: more text (see its funnel.json)")
    share = recipe.dataset.heldout_share
    if not joined.heldout[HELDOUT].documents:
        total = sum(met.values())
        raise KieloError(
            f"dataset.heldout_share = {share:g} holds out none of the {total} documents in {corpus_folder}. "
            f"Fix: dataset.heldout_share = {min(0.3, max(2 * share, 5 / total)):.2g}, or more documents"
        )
    shown = {name.partition(SEPARATOR)[0] for name in joined.heldout_sets}
    without = sorted(sources.keys() - shown)
    if len(recipe.corpus.sources) > 1 and without:
        what = f"holds out no document of {', '.join(without)}, whose loss will not be shown"
        logger.warning(f"{corpus_folder}: dataset.heldout_share = {share:g} {what}")


def _counts(
    recipe: Recipe, joined: PartCounts, ready: Mapping[str, TokenCounts], tokenizer_hash: str
) -> PackCounts:
    languages = HeldoutLanguages(recipe)
    sets = {
        name: of.model_copy(update={"languages": list(languages.languages_of_set(name))})
        for name, of in sorted(joined.heldout_sets.items())
    }
    return PackCounts(
        sources=dict(sorted({**joined.sources, **ready}.items())),
        heldout=joined.heldout[HELDOUT],
        heldout_sets=sets,
        round_trip=joined.round_trip,
        tokenizer_hash=tokenizer_hash,
    )
