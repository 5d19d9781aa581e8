"""Resolves the mixture of a phase: which source has which weight, and how often each source is read.

Weights come from the recipe, or from tokens and a temperature (Devlin et al. 2018, multilingual BERT; Conneau
et al. 2020, arXiv:1911.02116). `dataset/mixture.py` shares the samples out by these weights.
"""

import math
from collections.abc import Mapping

from kielo.recipe.errors import KieloError
from kielo.recipe.phases import FullPhase
from kielo.recipe.sections import Dataset, Recipe
from kielo.resolve.text import Text


def num_sequences(tokens: int, sequence_length: int) -> int:
    """Returns the sequences in a stream: each predicts sequence_length tokens, the last may be padded."""
    return max(0, math.ceil((tokens - 1) / sequence_length))


def weights_by_tokens(tokens: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Returns source → tokens^(1/temperature).

    Rounded to nine digits, because the last digit of a power differs between mathematical libraries, and the
    weights are part of a run's identity.
    """
    if temperature == 1:
        return {name: float(number) for name, number in tokens.items()}
    return {name: float(f"{number ** (1 / temperature):.9g}") for name, number in tokens.items()}


def allowed_epochs(recipe: Recipe, source: str) -> float:
    """Returns how often the run may read `source`."""
    return recipe.dataset.source_max_epochs.get(source, recipe.dataset.max_epochs)


def sources_with_text(tokens: Mapping[str, int], sequence_length: int) -> list[str]:
    """Return the sources that have a sequence."""
    return [name for name, number in tokens.items() if num_sequences(number, sequence_length)]


def asked_weights(mixture: Mapping[str, float], dataset: Dataset, text: Text) -> dict[str, float]:
    """Returns the weights of tokens, rounded to nine digits where those asked for are of documents.

    Raises KieloError where the documents of a source are not counted.
    """
    if dataset.mixture_unit == "tokens" or not text.tokens_hash:  # imagined text has documents of one size
        return dict(mixture)
    lengths = text.tokens_per_document
    if unknown := sorted(mixture.keys() - lengths.keys()):
        raise KieloError(
            f'dataset.mixture_unit = "documents": the documents of {", ".join(unknown)} are not counted, as '
            'in files without an index; what would work: mixture_unit = "tokens"'
        )
    return {name: float(f"{weight * lengths[name]:.9g}") for name, weight in mixture.items()}


def mixture_of(phase: FullPhase, text: Text, dataset: Dataset) -> dict[str, float]:
    """Return source → weight, by tokens if the recipe says nothing; sources without text are left out."""
    filled = sources_with_text(text.tokens, phase.sequence_length)
    if not phase.mixture:
        return weights_by_tokens({name: text.tokens[name] for name in filled}, dataset.temperature)
    asked = asked_weights(phase.mixture, dataset, text)
    return {name: weight for name, weight in asked.items() if name in filled}
