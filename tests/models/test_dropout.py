"""Dropout follows from seed, sample, place and position: its numbers are fair, and no cut changes them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kielo.dataset.batches import Batch, with_dropout_keys
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.models.blocks.dropout import Noise, NoiseMaker, drop
from tests.models.tiny_configs import LENGTH as TINY_LENGTH
from tests.models.tiny_configs import TINY, VOCABULARY

RATE, LENGTH, WIDTH, LAYERS = 0.3, 128, 96, 3


def keys(samples: range, seed: int = 5) -> torch.Tensor:
    numbers, none = np.array(samples), np.zeros((len(samples), 1), np.int64)
    return torch.from_numpy(with_dropout_keys(Batch(none, none, None, numbers), seed).dropout_keys)


def noise_of(samples: range, seed: int = 5, rate: float = RATE) -> Noise:
    maker = NoiseMaker(LAYERS, 4)
    maker.rate = rate
    return maker(keys(samples, seed), None, LENGTH)


def kept(noise: Noise, place: int) -> torch.Tensor:
    """Which elements stay, as numbers 0 and 1 [b, s, d]."""
    ones = torch.ones(len(noise.keys_bp2), LENGTH, WIDTH)
    return drop(ones, noise, place) * (1 - noise.rate)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_the_rate(rate: float) -> None:
    """Each sequence, row and column drops within five standard deviations of a binomial's count; what stays
    is scaled so that the mean is kept.
    """
    noise = noise_of(range(16), rate=rate)
    stays = kept(noise, 2)
    assert set(stays.flatten().tolist()) <= {0.0, stays.max().item()}
    assert stays.max().item() == pytest.approx(1.0)
    for dims in ((1, 2), (0, 2), (0, 1), (0, 1, 2)):
        number = stays.numel() / stays.sum(dims).numel()
        deviation = math.sqrt(rate * (1 - rate) / number)
        assert (stays.mean(dims) - (1 - rate)).abs().max() < 5 * deviation


def test_places_samples_seeds_and_neighbours_are_independent() -> None:
    """Correlations of a quarter of a million pairs, each within five of their standard deviations."""
    noise = noise_of(range(20))
    stays = kept(noise, 3) - (1 - RATE)
    others = {
        "another place": kept(noise, 4) - (1 - RATE),
        "another sample": stays.roll(1, dims=0),
        "the next position": stays.roll(1, dims=1),
        "the next column": stays.roll(1, dims=2),
        "another seed": kept(noise_of(range(20), seed=6), 3) - (1 - RATE),
    }
    deviation = RATE * (1 - RATE) / math.sqrt(stays.numel())
    for what, other in others.items():
        assert abs((stays * other).mean().item()) < 5 * deviation, what


def test_parts_are_those_of_the_whole() -> None:
    """Some samples, some positions of a context rank and the part of a tensor rank: the same elements."""
    whole, maker = kept(noise_of(range(8)), 1), NoiseMaker(LAYERS, 4)
    maker.rate, maker.part, maker.parts = RATE, 1, 2
    columns = torch.cat((torch.arange(16, 32), torch.arange(96, 112)))
    part = maker(keys(range(3, 8, 2)), columns, len(columns))
    found = drop(torch.ones(3, 16, WIDTH), part, 1) * (1 - RATE)
    assert torch.equal(found, whole[3:8:2, columns[16:]])


LTG_BERT = {
    "architectures": ["LtgbertForMaskedLM"], "vocab_size": VOCABULARY, "hidden_size": 24,
    "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 32, "position_bucket_size": 8, "layer_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES = {name: config for name, config in TINY.items() if "," not in name} | {"ltg_bert": LTG_BERT}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_drops_in_training_and_nowhere_else(name: str, tmp_path: Path) -> None:
    """Without keys, or at rate 0, nothing is dropped. With both some elements of the first layer's input are
    0, and a layer of which all is dropped gives what it takes.
    """
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name]))
    model = families.build_model(families.read_hf_config(tmp_path))
    init_weights(model, 3)
    tokens = torch.randint(0, VOCABULARY, (2, TINY_LENGTH), generator=torch.Generator().manual_seed(1))
    plain = model(tokens)
    assert torch.equal(model(tokens, None, None, keys(range(2))), plain)
    model.make_noise.rate = RATE
    layer, taken = model.layers["0"], []
    layer.register_forward_pre_hook(lambda _, inputs: taken.append(inputs))
    one, again, other = (
        model(tokens, None, None, keys(samples)) for samples in (range(2), range(2), range(2, 4))
    )
    assert torch.equal(model(tokens), plain) and torch.equal(one, again)
    assert not torch.allclose(one, plain, atol=1e-3) and not torch.allclose(one, other, atol=1e-3)
    x_bsd, *others, noise = taken[0]
    assert 0.5 * RATE < (x_bsd == 0).float().mean() < 1.5 * RATE
    all_dropped = replace(noise, rate=1 - 2**-30)
    assert torch.equal(layer(x_bsd, *others, all_dropped), x_bsd)
    assert taken[-1][-1].keys_bp2.shape == (2, 2, 2) and not torch.equal(layer(x_bsd, *others, None), x_bsd)
