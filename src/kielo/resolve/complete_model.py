"""Completes the model section of a recipe: sizes from config.json, the tokenizer and the sequence length."""

from collections.abc import Sequence

from kielo.artifact.megatron_folder import FORM, is_checkpoint
from kielo.artifact.weights_folder import passed_over_in_words, pinned, resolve_weights, weights_here
from kielo.models.families import complete, keys_passed_over, read_hf_config
from kielo.models.megatron_config import left_open
from kielo.models.proportions import with_shape
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import FullPhase
from kielo.recipe.sections import CompleteModel, Model, Recipe, Tokenizer
from kielo.tokenizer.load import tokenizer_facts

# All other keys of [model] come from config.json.
KEPT_BESIDE_WEIGHTS = ("weights", "vocab_multiple", "transplant", "transplant_vectors")
# What a plan needs of weights that are not on this machine.
_SHAPE = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


def complete_model(
    recipe: Recipe, asked: Sequence[FullPhase], tokenizer_vocab_size: int, is_imagined: bool = False
) -> CompleteModel:
    """Return the model section with every derived key set, from config.json if it has weights.

    is_imagined: the model is planned before there is a text. If its weights are not on this machine, it has
    the recipe's shape. `rules.py` checks whether the vocabulary and the sequences fit the model.
    """
    model, length = recipe.model, max(phase.sequence_length for phase in asked)
    if model.weights is not None and not (is_imagined and is_shape_of_absent_weights(model)):
        model = _model_of_weights(model)
    positions = model.max_position_embeddings or length
    model = model.model_copy(update={"vocab_size": model.vocab_size or tokenizer_vocab_size})
    if model.params is not None:
        model = with_shape(model.model_copy(update={"max_position_embeddings": positions}))
    return complete(model, positions)


def is_shape_of_absent_weights(model: Model) -> bool:
    """Return True if the recipe gives the shape of weights that are not on this machine."""
    needed = _SHAPE if model.transplant else _SHAPE | {"vocab_size"}
    return (
        needed <= model.model_fields_set and model.weights is not None and weights_here(model.weights) is None
    )


def _model_of_weights(model: Model) -> Model:
    """Read the model of `model.weights`, which becomes a commit, so that the repository can change."""
    assert model.weights is not None
    folder = resolve_weights(model.weights)
    kept = {key: getattr(model, key) for key in KEPT_BESIDE_WEIGHTS}
    kept["weights"] = pinned(model.weights, folder)
    if model.transplant is not None:
        kept["vocab_size"] = None  # the tokenizer's
    return Model(**dict(read_hf_config(folder)) | kept)


def model_of_weights_here(model: Model) -> CompleteModel | None:
    """Read config.json of `model.weights`; None without weights, and if they are not downloaded yet."""
    folder = model.weights and weights_here(model.weights)
    return read_hf_config(folder) if folder else None


def overridden_by_weights(model: Model) -> list[str]:
    """Return the given keys of [model] that config.json changes, or all keys if it is not here yet."""
    if model.weights is None:
        return []
    found = model_of_weights_here(model)
    given = [key for key in Model.model_fields if key in model.model_fields_set]
    own = [key for key in given if key not in KEPT_BESIDE_WEIGHTS]
    return [key for key in own if found is None or getattr(found, key) != getattr(model, key)]


def overridden_by_tokenizer(tokenizer: Tokenizer) -> list[str]:
    """Return the keys of [tokenizer] without effect: a ready tokenizer at `path` is not trained."""
    in_force = ("path", "bos", "eos")
    return [] if tokenizer.path is None else [key for key in Tokenizer.model_fields if key not in in_force]


def size_of_ready_tokenizer(tokenizer: Tokenizer) -> int | None:
    """Return the tokens of the tokenizer at `path`, or None if it cannot be read."""
    try:
        return tokenizer_facts(tokenizer.path or "").vocabulary_size
    except KieloError:
        return None


def overridden_in_words(model: Model) -> str:
    """Return the keys and files without effect, of [model] and the folder of weights, as text; or ""."""
    found = model_of_weights_here(model)
    keys = [
        f"model.{key} = {getattr(model, key)}" + (f" ({getattr(found, key)} there)" if found else "")
        for key in overridden_by_weights(model)
    ]
    is_megatron = (model.weights or "").startswith(FORM)
    what = (
        f"the arguments of {model.weights} replace"
        if is_megatron
        else f"config.json of {model.weights} replaces"
    )
    why = f"not used, because {what} it"
    if is_shape_of_absent_weights(model):
        why = f"only for plans, because {model.weights} is not on this machine"
    said = [f"{why}: {', '.join(keys)}"] if keys else []
    folder = model.weights and weights_here(model.weights)
    if folder and found and (passed_over := keys_passed_over(folder)):
        said.append(
            f"ignored keys of config.json, which {found.model_type} models have neither here nor in "
            f"transformers: {', '.join(passed_over)}"
        )
    if folder and is_checkpoint(folder):
        said.append(left_open(folder))
    if files := passed_over_in_words(folder) if folder else "":
        said.append(files)
    return "; ".join(said)
