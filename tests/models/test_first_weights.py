"""First weights: the normal distribution to fp32's precision, and each family's deviations by hand."""

import hashlib
import math

import numpy as np
import pytest
import torch

from kielo.models.blocks.init import seeded_normal
from kielo.models.families import complete, family_defaults, module
from kielo.models.parameter_shapes import parameter_shapes
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Model

LAYERS, HIDDEN, RANGE, SEED = 3, 24, 0.3, 7
# 2 / 5d, and a residual stream of 3 layers
SMALL, OF_RESIDUALS = math.sqrt(2 / (5 * HIDDEN)), math.sqrt(2 * LAYERS)
WRITES_RESIDUALS = ("attention.o", "mlp.down")


@pytest.mark.parametrize("cutoff", [None, 2.0])
def test_numbers_are_the_inverse_of_the_normal_distribution(cutoff: float | None) -> None:
    """Element i has the i-th 32 bits of Philox, as a signed number of the middle of its step, in fp64."""
    found = seeded_normal("a.weight", (600, 500), 0.25, SEED, cutoff=cutoff).flatten().double()
    key = hashlib.blake2b(f"{SEED}/a.weight".encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(150_000).view(np.int32)
    uniform = (torch.from_numpy(bits.astype(np.float64)) + 0.5) / 2**31
    edge = 1.0 if cutoff is None else math.erf(cutoff / math.sqrt(2))
    expected = 0.25 * math.sqrt(2) * torch.special.erfinv(uniform * edge)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-9)
    assert cutoff is not None or found.abs().max() > 4 * 0.25


def deviation(model_type: str, name: str) -> tuple[float, float | None]:
    """The deviation of a matrix, and the cutoff in deviations."""
    writes = name.endswith(WRITES_RESIDUALS)
    if model_type == "ltg_bert":
        layer = int(name.split(".")[1]) if ".mlp." in name else None
        return SMALL / (1 if layer is None else math.sqrt((2, 4, 6)[layer])), 2.0
    if model_type == "gpt_neox":
        return 2 / (LAYERS * math.sqrt(HIDDEN)) if writes else SMALL, None
    if model_type.startswith("olmo"):
        return RANGE, 3.0
    if model_type.startswith("gemma"):
        return RANGE, None
    if model_type == "modernbert":
        return RANGE / (OF_RESIDUALS if writes or name == "transform.dense" else 1), 2.0
    return RANGE / (OF_RESIDUALS if writes else 1), None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_parameter_begins_by_its_familys_rule(model_type: str) -> None:
    """Norms do nothing, biases are 0, rows beyond the vocabulary too; a box has the values of the whole."""
    asked = Model(
        model_type=model_type, vocab_size=97, hidden_size=HIDDEN, num_attention_heads=2,
        initializer_range=RANGE,
        num_hidden_layers=LAYERS, intermediate_size=4 * HIDDEN, tie_word_embeddings=None, vocab_multiple=8,
    )  # fmt: skip
    config = complete(asked, 40)
    if family_defaults(model_type)["tie_word_embeddings"] and not FAMILIES[model_type].is_encoder:
        config = config.model_copy(update={"tie_word_embeddings": False})
    initial_value, shapes = module(model_type, "model").initial_value, parameter_shapes(config)
    assert shapes["embed.weight"] == (104, HIDDEN) and len(shapes) > 20
    for parameter, shape in shapes.items():
        name, _, kind = parameter.rpartition(".")
        box = tuple(slice(size // 3, size) for size in shape)
        if kind == "bias":
            expected = torch.zeros(shape)
        elif name.endswith("norm"):
            expected = torch.full(shape, 0.0 if model_type.startswith("gemma") else 1.0)
        else:
            deviated, cutoff = deviation(model_type, name)
            rows = 97 if name in ("embed", "head") else shape[0]
            expected = torch.zeros(shape)
            expected[:rows] = seeded_normal(parameter, shape, deviated, SEED, cutoff=cutoff)[:rows]
        found = initial_value(parameter, shape, config, SEED)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, msg=parameter)
        assert torch.equal(initial_value(parameter, shape, config, SEED, box), found[box])
