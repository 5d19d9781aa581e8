"""Completes the model section of a recipe: sizes from config.json, the tokenizer and the sequence length."""

from collections.abc import Sequence

from kielo.artifact.weights_folder import pinned, resolve_weights
from kielo.models.families import complete, read_hf_config
from kielo.models.proportions import with_shape
from kielo.recipe.phases import FullPhase
from kielo.recipe.sections import Model, Recipe


def complete_model(
    recipe: Recipe, asked: Sequence[FullPhase], tokenizer_vocab_size: int, complaints: list[str]
) -> Model:
    """Returns the model section with every derived key set, from config.json where it has weights.

    Adds what does not fit to `complaints`.
    """
    model, longest = recipe.model, max(asked, key=lambda phase: phase.sequence_length)
    length = longest.sequence_length
    if model.weights is not None:
        model = _model_of_weights(model)
    vocab_size = model.vocab_size or tokenizer_vocab_size
    if vocab_size < tokenizer_vocab_size:
        complaints.append(
            f"model.vocab_size = {vocab_size} is less than the tokenizer's {tokenizer_vocab_size} tokens; "
            f"what would work: {tokenizer_vocab_size} or more, or the tokenizer that belongs to "
            "model.weights"
        )
    positions = model.max_position_embeddings or length
    if positions < length:
        complaints.append(
            f"{longest.key('sequence_length')} = {length} is more than model.max_position_embeddings = "
            f"{positions}; what would work: a sequence_length of at most {positions}"
        )
    model = model.model_copy(update={"vocab_size": vocab_size})
    if model.params is not None:
        model = with_shape(model.model_copy(update={"max_position_embeddings": positions}))
    return complete(model, positions)


def _model_of_weights(model: Model) -> Model:
    """Reads the model of `model.weights`, which becomes the commit of a repository on the hub.

    A run does not change because a repository did.
    """
    assert model.weights is not None
    folder = resolve_weights(model.weights)
    kept = {"weights": pinned(model.weights, folder), "vocab_multiple": model.vocab_multiple}
    return read_hf_config(folder).model_copy(update=kept)
