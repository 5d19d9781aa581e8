"""Text of a run in numbers: read or imagined; its mixtures, and the budget that follows from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
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
from kielo.recipe.phases import FullPhase, full_phases, longest_sequence_length
from kielo.recipe.sections import PACKED, Dataset, Recipe
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
    sizes = packing.section["sequence_lengths"]
    return {size: {name: of[str(size)].sequences for name, of in sources.items()} for size in sizes}


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


# Weights come from the recipe, or from tokens and a temperature (Devlin et al. 2018, multilingual BERT;
# Conneau et al. 2020, arXiv:1911.02116). `dataset/order.py` shares the samples out by these weights.


def num_sequences(tokens: int, sequence_length: int) -> int:
    """Return the sequences of a stream: each predicts sequence_length tokens, and the last can be padded."""
    return max(0, math.ceil((tokens - 1) / sequence_length))


def weights_by_tokens(tokens: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Return source → tokens^(1/temperature).

    Rounded to nine digits, because the last digit of a power differs between mathematical libraries, and the
    weights are in a run's identity.
    """
    if temperature == 1:
        return {name: float(number) for name, number in tokens.items()}
    return {name: float(f"{number ** (1 / temperature):.9g}") for name, number in tokens.items()}


def allowed_epochs(recipe: Recipe, source: str) -> float:
    return recipe.dataset.source_max_epochs.get(source, recipe.dataset.max_epochs)


def sources_with_text(tokens: Mapping[str, int], sequence_length: int) -> list[str]:
    return [name for name, number in tokens.items() if num_sequences(number, sequence_length)]


def asked_weights(mixture: Mapping[str, float], dataset: Dataset, text: Text) -> dict[str, float]:
    """Return the weights of tokens, rounded to nine digits if the recipe weights documents.

    Raises KieloError if the documents of a source are not counted.
    """
    if dataset.mixture_unit == "tokens" or not text.tokens_hash:  # imagined text has documents of one size
        return dict(mixture)
    lengths = text.tokens_per_document
    if unknown := sorted(mixture.keys() - lengths.keys()):
        raise KieloError(
            f'dataset.mixture_unit = "documents": the documents of {", ".join(unknown)} are not counted, as '
            'in files without an index. Fix: mixture_unit = "tokens"'
        )
    return {name: float(f"{weight * lengths[name]:.9g}") for name, weight in mixture.items()}


def mixture_of(phase: FullPhase, text: Text, dataset: Dataset) -> dict[str, float]:
    """Return source → weight, by tokens if the recipe has no mixture. Sources without text are left out."""
    filled = sources_with_text(text.tokens, phase.sequence_length)
    if not phase.mixture:
        return weights_by_tokens({name: text.tokens[name] for name in filled}, dataset.temperature)
    asked = asked_weights(phase.mixture, dataset, text)
    return {name: weight for name, weight in asked.items() if name in filled}


# Tokens of a tokenizer have at least these bytes on average, except for text of single bytes.
_LEAST_BYTES_PER_TOKEN = 2


def has_budget(recipe: Recipe) -> bool:
    """Return False if train.tokens follows from the text."""
    return recipe.train.tokens is not None or bool(recipe.phases)


def check_budget(recipe: Recipe) -> None:
    if not has_budget(recipe):
        raise KieloError(
            "train.tokens is not set, so it follows from the text once it is packed. Fix for a "
            "plan: --set train.tokens=1000000000"
        )


def with_budget_of_ready_tokens(recipe: Recipe) -> Recipe:
    """Return the recipe with train.tokens set if all its sources are ready tokens on this machine."""
    if has_budget(recipe) or recipe.corpus.of_raw_text.sources:
        return recipe
    tokens = ready_tokens(recipe)
    # Only the budget looks at these facts. A hash that is not empty says that the text is not imagined.
    return with_budget(recipe, Text(tokens, 0, "ready tokens", 0, 0))


def with_budget(recipe: Recipe, text: Text) -> Recipe:
    """Return the recipe with train.tokens set: whole steps that read no source more often than its
    max_epochs.

    Raises KieloError for imagined text, and for text that is too short for a step or for the batch ramp.
    """
    if has_budget(recipe):
        return recipe
    if not text.tokens_hash:
        check_budget(recipe)
    length = recipe.dataset.sequence_length
    sequences = {name: max(0, math.ceil(text.epoch_tokens(name, length) / length)) for name in text.tokens}
    mixture = asked_weights(recipe.dataset.mixture, recipe.dataset, text)
    mixture = mixture or weights_by_tokens(text.tokens, recipe.dataset.temperature)
    weights = {name: Fraction(weight) for name, weight in mixture.items() if sequences.get(name)}
    most = min(
        (
            Fraction(allowed_epochs(recipe, name)) * sequences[name] * length * sum(weights.values()) / weight
            for name, weight in weights.items()
        ),
        default=Fraction(),
    )
    step = recipe.train.tokens_per_step
    steps = math.floor(most / step)
    if weights and not steps:
        raise KieloError(
            f"the text has {sum(text.tokens.values()):,} tokens; {recipe.dataset.max_epochs:g} epochs of "
            f"them are less than one step of train.tokens_per_step = {step:,}. Fix: more text, or "
            f"train.tokens_per_step = {max(length, int(most) // length * length)} or less"
        )
    tokens, ramp = max(1, steps) * step, recipe.train.batch_ramp
    if ramp is not None and ramp.tokens >= tokens:
        raise KieloError(
            f"train.batch_ramp.tokens = {ramp.tokens} does not end before the {tokens:,} tokens of the text. "
            "Fix: fewer tokens of the ramp, or more text"
        )
    train = recipe.train.model_copy(update={"tokens": tokens})
    return recipe.model_copy(update={"train": train})


def check_text_suffices(recipe: Recipe, text_bytes: int, what: str) -> None:
    """Raise KieloError if `text_bytes` of the text `what` cannot give train.tokens in dataset.max_epochs.

    An estimate, for text that has no tokens yet: a token has 2 bytes or more.
    """
    asked = sum(phase.tokens for phase in recipe.phases) or recipe.train.tokens
    epochs = max([recipe.dataset.max_epochs, *recipe.dataset.source_max_epochs.values()])
    most = int(text_bytes / _LEAST_BYTES_PER_TOKEN * epochs)
    if asked is not None and asked > most:
        raise KieloError(
            f"train.tokens = {asked:,}, but {what} has {text_bytes:,} bytes, at most "
            f"{text_bytes // _LEAST_BYTES_PER_TOKEN:,} tokens, and dataset.max_epochs = {epochs:g}. Fix: "
            "leave train.tokens out, so that it follows from the text, or give more text"
        )
