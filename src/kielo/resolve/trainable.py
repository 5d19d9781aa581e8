"""The parameters that a phase trains: patterns of module names → names of parameters; torch-free.

All others are frozen: they have no gradients and no moments (`train/build.py`, `resolve/state_bytes.py`).
"""

from collections.abc import Sequence
from math import prod

from kielo.models.families import module
from kielo.models.parameter_shapes import parameter_shapes
from kielo.recipe.sections import Model
from kielo.resolve.fp8_matrices import is_kept, layer_matrices

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
