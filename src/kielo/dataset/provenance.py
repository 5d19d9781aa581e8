"""The provenance of a run's tokens, compared with the run folder and the recipe as they are now.

The manifest of RUN/tokens has the hashes of its corpus and tokenizer, whose manifests have the recipe's
settings of that time. A checkpoint names its tokens and its tokenizer.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kielo.artifact.checkpoint_index import PlainState
from kielo.artifact.manifest import Manifest, as_json, hash_manifest, read_manifest
from kielo.artifact.stage_counts import PackCounts, TokenizerCounts
from kielo.artifact.stage_json import counts_of
from kielo.artifact.trained_text import has_trained
from kielo.corpus.step import LATER, effective_settings
from kielo.dataset.batches import packed_counts, packed_manifest
from kielo.dataset.document_packer import (
    BEGINS_WITH,
    begin_of_documents,
    begins_with_cls,
    sources_with_loss_mask,
)
from kielo.recipe.cards import language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TOKENIZER_FILE, TokenizerFacts, tokenizer_facts, tokenizer_hash

SHOWN_DIGITS = 12  # of a hash, in messages


def check_tokenizer(run_folder: Path | str) -> None:
    if packed_manifest(Path(run_folder) / "tokens").inputs.get("tokenizer") is not None:
        tokenizer_of_tokens(run_folder)


def tokenizer_of_tokens(run_folder: Path | str) -> TokenizerFacts:
    """Return the facts of RUN/tokenizer. Raises KieloError unless RUN/tokens was packed with it."""
    tokens_folder, folder = Path(run_folder) / "tokens", Path(run_folder) / "tokenizer"
    made_with = packed_manifest(tokens_folder).inputs.get("tokenizer")
    if made_with is None:  # packed by another program: nothing to compare with
        return tokenizer_facts(folder)
    if (manifest := read_manifest(folder)) is None:
        found = "a tokenizer without manifest.json"
    elif hash_manifest(folder) != made_with:
        found = hash_manifest(folder)[:SHOWN_DIGITS]
    else:
        facts, end = tokenizer_facts(folder), counts_of(folder, manifest, TokenizerCounts).end_of_text_id
        is_as_written = facts.file_hash == manifest.files[TOKENIZER_FILE].xxh3_128
        if is_as_written and end in (None, facts.end_of_text_id):
            return facts
        found = "a tokenizer that was changed later"
    raise _another_tokenizer(folder, tokens_folder, made_with, found)


def check_recipe(recipe: Recipe, run_folder: Path | str) -> None:
    """Raise KieloError, naming the keys, if the recipe asks for other text than the run's."""
    run_folder = Path(run_folder)
    tokens = packed_manifest(run_folder / "tokens")
    corpus, tokenizer = read_manifest(run_folder / "corpus"), read_manifest(run_folder / "tokenizer")
    packed_corpus = tokens.inputs.get("corpus")
    if corpus and packed_corpus and hash_manifest(run_folder / "corpus") != packed_corpus:
        raise KieloError(
            f"{run_folder / 'corpus'}: was made again after {run_folder / 'tokens'} was packed from it. "
            f"Fix: `kielo run RECIPE --to pack` packs it. To keep the present tokens, move "
            f"{run_folder / 'corpus'} away"
        )
    changed = [
        *_changes_of_tokens(recipe, tokens, packed_counts(run_folder / "tokens")),
        *_changes_of_begin(recipe, tokens, run_folder),
        *_changes("tokenizer.", tokenizer.section if tokenizer else {}, recipe.tokenizer.model_dump()),
        *_changes_of_corpus(recipe, corpus),
    ]
    if changed:
        lines = "\n".join(f"  - {change}" for change in dict.fromkeys(changed))
        raise KieloError(
            f"{run_folder / 'tokens'}: was packed by a recipe with other values:\n{lines}\nFix: the old "
            "values, or `kielo run RECIPE --to pack`, which makes the text again (with --set name=… if the "
            "run has checkpoints)"
        )


def check_tokens(state: PlainState, run_folder: Path | str) -> None:
    folder = Path(run_folder) / "tokens"
    check_tokenizer(run_folder)
    trained_on, found = state.identity.get("tokens_hash"), hash_manifest(folder)
    if trained_on and trained_on != found:
        raise KieloError(
            f"{folder}: are other tokens ({found[:SHOWN_DIGITS]}) than the checkpoint was trained on "
            f"({trained_on[:SHOWN_DIGITS]}). Fix: the tokens of its run in their place, or a checkpoint that "
            "was trained on these"
        )


def check_tokenizer_of_checkpoint(state: PlainState, run_folder: Path | None, folder: Path) -> None:
    """Raise KieloError if `folder` is known to be another tokenizer than a checkpoint was trained with."""
    found, made_with = tokenizer_hash(folder), state.tokenizer_hash
    # States of earlier versions have none. Then RUN/tokens decides, if the run has the checkpoint's tokens.
    tokens = None if made_with or run_folder is None else run_folder / "tokens"
    if tokens and read_manifest(tokens) and hash_manifest(tokens) == state.identity.get("tokens_hash"):
        check_tokenizer(tokens.parent)
        made_with = tokenizer_hash(tokens.parent / "tokenizer")
    if made_with and found != made_with:
        raise _another_tokenizer(folder, "the checkpoint's tokens", made_with, found[:SHOWN_DIGITS])


def _another_tokenizer(folder: Path, what: Path | str, made_with: str, found: str) -> KieloError:
    return KieloError(
        f"{folder}: is not the tokenizer that made {what}: that was {made_with[:SHOWN_DIGITS]}, this is "
        f"{found}. Fix: the tokenizer that made them in its place (without --tokenizer the run's own), "
        "--set name=… for a run with another tokenizer, or, if nothing was trained yet, `kielo run RECIPE "
        "--to pack`"
    )


def _changes_of_tokens(recipe: Recipe, tokens: Manifest, counts: PackCounts) -> Iterator[str]:
    yield from _changes("dataset.", tokens.section, {"heldout_share": recipe.dataset.heldout_share})
    # Without inputs, another program packed the tokens: nothing to compare with.
    on_answers, now = tokens.section.get("loss_on_answers", []), sorted(sources_with_loss_mask(recipe))
    if tokens.inputs and on_answers != now:
        yield f"corpus.sources with loss = 'answers': were {on_answers}, are now {now}"
    if tokens.inputs and tokens.section.get("begins_with_cls", False) != begins_with_cls(recipe):
        yield "train.objective: encoders have a token before each document, and decoders none"
    packed = sorted(name for name, of in counts.sources.items() if of.folder is not None)
    named = sorted(source.name for source in recipe.corpus.token_sources)
    if tokens.inputs and packed != named:
        yield f"corpus.sources with tokens: were {packed}, are now {named}"


def _changes_of_begin(recipe: Recipe, tokens: Manifest, run_folder: Path) -> Iterator[str]:
    """Yield a change of what begins documents. A run that trained with nothing there keeps its tokens."""
    before, folder = tuple(tokens.section.get(BEGINS_WITH, ())), run_folder / "tokenizer"
    is_known = tokens.inputs and (folder / TOKENIZER_FILE).is_file()
    if not is_known or (not before and has_trained(run_folder)):
        return
    if before != (now := begin_of_documents(recipe, folder)):
        yield f"tokenizer.bos: documents began with the ids {list(before)}, and begin with {list(now)} now"


def _changes_of_corpus(recipe: Recipe, corpus: Manifest | None) -> Iterator[str]:
    if corpus is None or not corpus.section:
        return
    raw_text = recipe.corpus.of_raw_text
    now = effective_settings(raw_text, language(recipe.language), recipe.language)
    if corpus.section.get("language") != now["language"]:
        yield f"language: was {corpus.section.get('language')!r}, is now {now['language']!r}"
        return  # other changes follow from the language's card
    yield from _changes("corpus.", {**as_json(LATER), **corpus.section}, {**LATER, **now})
    before, names = sorted(corpus.inputs), sorted(source.name for source in raw_text.sources)
    if before != names:
        yield f"corpus.sources: were {before}, are now {names}"


def _changes(prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the changed keys among the keys that both have: manifests of earlier versions may lack some."""
    for key, value in as_json(now).items():
        if key in before and before[key] != value:
            yield f"{prefix}{key}: was {before[key]!r}, is now {value!r}"
