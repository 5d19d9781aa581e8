"""Facts of the text that a run's numbers follow from: read from a run folder, or imagined for a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kielo.artifact.manifest import Manifest, hash_manifest
from kielo.artifact.stage_counts import PackingCounts
from kielo.artifact.stage_json import counts_of
from kielo.artifact.token_sources import find_token_sources
from kielo.artifact.weights_folder import resolve_tokenizer
from kielo.dataset.batches import packed_counts
from kielo.dataset.heldout_sets import check_outside_texts
from kielo.dataset.pack_token_files import training_tokens
from kielo.dataset.packed_sequences import FOLDER, PACKING, packing_folder, packing_manifest
from kielo.dataset.provenance import tokenizer_of_tokens
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases, longest_sequence_length
from kielo.recipe.sections import PACKED, Recipe
from kielo.tokenizer.load import load_tokenizer, tokenizer_facts, vocabulary_size


@dataclass(frozen=True)
class Text:
    """Facts of the tokens and the tokenizer.

    tokens: source → its number of tokens. tokenizer_hash: "" if not known. packed_sequences: length → source
    → sequences of an epoch, if they are best-fit packed or ready blocks; else {}. tokens_per_document: the
    mean of each source whose documents are counted.
    """

    tokens: Mapping[str, int]
    heldout_tokens: int
    tokens_hash: str
    vocabulary_size: int
    end_of_text_id: int
    tokenizer_hash: str = ""
    packed_sequences: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    tokens_per_document: Mapping[str, float] = field(default_factory=dict)

    def epoch_tokens(self, source: str, sequence_length: int) -> int:
        """Return the tokens that an epoch of a source has to predict, with the filling of sequences."""
        packed = self.packed_sequences.get(sequence_length)
        return self.tokens[source] - 1 if packed is None else packed[source] * sequence_length


def text_of_run(recipe: Recipe, run_folder: Path) -> Text:
    """Read the facts of a run folder.

    Raises KieloError for an unfinished stage, for another tokenizer than the tokens', for documents that are
    not packed as the recipe says, and for texts to be scored that are not packed.
    """
    tokens = packed_counts(run_folder / "tokens")
    check_outside_texts((text.name for text in recipe.evaluate.texts), run_folder / "tokens")
    tokenizer = tokenizer_of_tokens(run_folder)
    return Text(
        {name: of.tokens for name, of in tokens.sources.items()},
        tokens.heldout.tokens,
        hash_manifest(run_folder / "tokens"),
        tokenizer.vocabulary_size,
        tokenizer.end_of_text_id,
        tokenizer.hash,
        packed_sequences(recipe, run_folder / "tokens"),
        tokens_per_document({name: (of.tokens, of.documents) for name, of in tokens.sources.items()}),
    )


def tokens_per_document(counts: Mapping[str, tuple[int, int | None]]) -> dict[str, float]:
    """Return source → mean tokens of a document. `counts`: (tokens, documents or None if not counted)."""
    return {name: tokens / documents for name, (tokens, documents) in counts.items() if documents}


def packed_sequences(recipe: Recipe, tokens_folder: Path) -> dict[int, dict[str, int]]:
    """Return length → source → packed sequences of an epoch, or {} if the recipe has one stream.

    Raises KieloError if the documents are not packed, or not into sequences of the recipe's lengths.
    """
    if recipe.dataset.packing == "as_is":
        tokens = {name: of.tokens for name, of in packed_counts(tokens_folder).sources.items()}
        return blocks_as_they_are(recipe, tokens)
    if recipe.dataset.packing not in PACKED:
        return {}
    manifest = packing_manifest(tokens_folder)
    if (made := manifest.section.get(PACKING, "best_fit")) != recipe.dataset.packing:
        raise KieloError(
            f"{packing_folder(tokens_folder)}: was made with dataset.packing = {made!r}. Fix: `kielo run "
            "RECIPE --to pack` makes it again"
        )
    lengths = {phase.sequence_length for phase in full_phases(recipe)}
    missing = lengths - set(manifest.section["sequence_lengths"])
    if missing:
        raise KieloError(
            f"{packing_folder(tokens_folder)}: has no sequences of {', '.join(map(str, sorted(missing)))} "
            "tokens. Fix: `kielo run RECIPE --to pack` makes them"
        )
    return sequences_by_length(manifest)


def blocks_as_they_are(recipe: Recipe, tokens: Mapping[str, int]) -> dict[int, dict[str, int]]:
    """Return sequence length → source → number of whole blocks. `tokens` has each source's tokens."""
    lengths = {phase.sequence_length for phase in full_phases(recipe)}
    return {length: {name: number // length for name, number in tokens.items()} for length in lengths}


def sequences_by_length(packing: Manifest) -> dict[int, dict[str, int]]:
    sources = counts_of(FOLDER, packing, PackingCounts).sources
    return {
        length: {name: of[str(length)].sequences for name, of in sources.items()}
        for length in packing.section["sequence_lengths"]
    }


def imagined_text(recipe: Recipe) -> Text:
    """Return as much text as the recipe asks for, for plans without a corpus.

    Its vocabulary has `model.vocab_size` tokens, the ready tokenizer's, or the number that is to be learned.
    """
    tokenizer, model = recipe.tokenizer, recipe.model
    # The vocabulary of weights is read with them.
    size = None if model.transplant else model.vocab_size or (1 if model.weights else None)
    if size is None:
        path = tokenizer.path
        size = vocabulary_size(load_tokenizer(resolve_tokenizer(path))) if path else tokenizer.vocab_size
    enough = 2 * sum(phase.tokens for phase in full_phases(recipe)) + longest_sequence_length(recipe)
    return Text({source.name: enough for source in recipe.corpus.sources}, enough, "", size, 0)


def ready_tokens(recipe: Recipe) -> dict[str, int]:
    """Return source → tokens, without the held-out share, of ready tokens here. KieloError if unreadable."""
    if not recipe.corpus.token_sources:
        return {}
    tokenizer = recipe.tokenizer.path or ""
    size = recipe.model.vocab_size or tokenizer_facts(resolve_tokenizer(tokenizer)).vocabulary_size
    found = find_token_sources(recipe, size)
    return {
        name: training_tokens(sum(file.tokens for file in files.files), recipe.dataset.heldout_share)
        for name, files in found.items()
    }
