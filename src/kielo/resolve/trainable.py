"""The parameters that a phase trains: patterns of module names → names of parameters; torch-free.

All others are frozen: they have no gradients and no moments (`train/build.py`, `resolve/state_bytes.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from kielo.artifact.weights_folder import weights_here
from kielo.models.families import module
from kielo.models.parameter_shapes import parameter_shapes
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import FullPhase, full_phases
from kielo.recipe.sections import Layout, Model, Recipe
from kielo.resolve.complete_model import complete_model
from kielo.resolve.fp8_check import is_kept, layer_matrices

_VOCABULARY = {"embed.weight", "head.weight"}


def trains(model: Model, patterns: Sequence[str], name: str) -> bool:
    """Returns True if the parameter is trained. patterns: none for all; see `train.trainable`.

    A tied head is the embedding, and either name means both.
    """
    if not patterns:
        return True
    names = _VOCABULARY if model.tie_word_embeddings and name in _VOCABULARY else {name}
    return any(is_kept(one.rpartition(".")[0], patterns) for one in names)


def frozen_share(model: Model, patterns: Sequence[str]) -> float:
    """Returns the share of the layers' matrices that are frozen, by elements; `model` is complete."""
    if not patterns:
        return 0.0
    shapes = parameter_shapes(model)
    sizes = {name: prod(shapes[name]) for name in (f"{matrix}.weight" for matrix in layer_matrices(model))}
    return sum(size for name, size in sizes.items() if not trains(model, patterns, name)) / sum(
        sizes.values()
    )


def flops_per_token(model: Model, sequence_length: int, patterns: Sequence[str]) -> int:
    """Computes the model FLOPs of one token of a phase, without the gradients of weights that are frozen.

    The products for the gradients of inputs count, also where nothing before them is trained. Two FLOPs for
    each frozen parameter that multiplies a token are left out.
    """
    looked_up = {"position_table.weight"} | ({"embed.weight"} if not model.tie_word_embeddings else set())
    frozen = sum(
        prod(shape)
        for name, shape in parameter_shapes(model).items()
        if name not in looked_up and not trains(model, patterns, name)
    )
    return module(model.model_type, "count").flops_per_token(model, sequence_length) - 2 * frozen


def check_trainable(recipe: Recipe) -> None:
    """Raises KieloError for what `trainable_complaints` finds, before there is a text or a vocabulary.

    Not where the model is that of weights which are not on this machine yet.
    """
    phases, weights = full_phases(recipe), recipe.model.weights
    if not any(phase.trainable for phase in phases) or (weights and weights_here(weights) is None):
        return
    model = complete_model(recipe, phases, tokenizer_vocab_size=1, complaints=[])
    if complaints := list(trainable_complaints(model, recipe.layout, phases)):
        raise KieloError("; ".join(complaints))


def trainable_complaints(model: Model, layout: Layout, phases: Iterable[FullPhase]) -> Iterator[str]:
    """Yields the patterns that match no parameter of `model` (complete), and what a pipeline cannot train."""
    names = list(parameter_shapes(model))
    for phase in phases:
        key = phase.key("trainable")
        for pattern in phase.trainable:
            if not any(trains(model, [pattern], name) for name in names):
                first = list(dict.fromkeys(name.split(".")[0] for name in names))
                tied = ["head"] if model.tie_word_embeddings else []
                yield (
                    f'{key}: "{pattern}" names no parameter of the model; what would work: '
                    f"{', '.join(first + tied)}, or a module such as layers.0 or layers.*.mlp"
                )
        if layout.pipeline > 1 and not trains(model, phase.trainable, "embed.weight"):
            yield (
                f"{key} = {list(phase.trainable)} leaves the embedding frozen, and with layout.pipeline = "
                f"{layout.pipeline} every stage hands a gradient to the one before it; what would work: "
                f"{key.rpartition('.')[2]} with embed, or layout.pipeline = 1"
            )
