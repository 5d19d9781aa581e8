"""A small model laid out on gloo ranks, and its named tensors, for the tests of this folder."""

from typing import Any

import torch
from torch import nn

from kielo.models.blocks.init import constant
from kielo.models.families import complete
from kielo.models.llama.model import Llama, initial_value
from kielo.models.piece import Box
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import AXES, build_mesh
from kielo.parallel.parallelise import parallelise
from kielo.ranks.world import start_world
from kielo.recipe.sections import Layout, Model


def config(tied: bool = False, vocab_size: int = 67) -> Model:
    """67 rows do not divide by the ranks: shards are uneven."""
    return complete(
        Model(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            vocab_size=vocab_size,
            vocab_multiple=1,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
        ),
        32,
    )


def model_on_ranks(
    model: Model, replicate: int, shard: int, fill=None, context: int = 1, tensor: int = 1, **layout: Any
) -> tuple[nn.Module, object]:
    """One rank's part of the model, filled by `fill(name, shape)` (default: zeros), and its mesh."""
    world = start_world(30, "cpu")
    sizes = dict.fromkeys(AXES, 1) | {
        "replicate": replicate,
        "shard": shard,
        "context": context,
        "tensor": tensor,
    }
    placement = Layout(**(sizes | layout))
    mesh = build_mesh(world, placement)
    with torch.device("meta"):
        whole = Llama(model)
    laid_out = parallelise(whole, mesh, placement, "fp32")
    return materialise(laid_out, world.device, fill or zeros), mesh


def zeros(name: str, shape: torch.Size, box: Box) -> torch.Tensor:
    return constant(0.0, shape, box)


def values(model: Model, seed: int):
    return lambda name, shape, box=None: (
        initial_value(name, shape, model, seed, box) + (0.5 if "norm" in name else 0)
    )
