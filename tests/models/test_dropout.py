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
from kielo.models.blocks import dropout
from kielo.models.blocks.decoder import init_weights
from kielo.models.blocks.dropout import ATTENTION, MLP, Noise, NoiseMaker, drop, drop_weights
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


def test_elements_are_dropped_by_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place, sequence, position and column of 60 elements, by integers of Python; each place has its keys."""
    maker = NoiseMaker(LAYERS, 4)
    maker.rate = RATE
    positions = torch.tensor([0, 3, 100, 127])
    noise = maker(keys(range(2)), positions, 4)
    assert noise.keys_bp2.shape == (2, 2 + 2 * LAYERS, 2) and noise.positions_s.tolist() == positions.tolist()

    def scrambled(bits: int, key: int) -> int:
        bits = (((bits ^ (bits >> 16)) * 0x85EBCA6B) ^ key) % 2**32
        bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) % 2**32
        return bits ^ (bits >> 16)

    places = {0: noise.of_embedding, 7: noise.of_head}
    for layer in range(LAYERS):
        for place in (ATTENTION, MLP):
            places[1 + 2 * layer + place] = lambda x, layer=layer, place=place: drop(
                x, noise.of_layer(layer), place
            )
    generator = np.random.default_rng(1)
    for place in range(2 + 2 * LAYERS):
        found = places[place](torch.ones(2, 4, WIDTH))
        for _ in range(8):
            sample, row, column = (int(generator.integers(size)) for size in found.shape)
            one, other = keys(range(sample, sample + 1))[0].numpy().view(np.uint32).tolist()
            both = [(part + (place + 1) * 0x9E3779B9) % 2**32 for part in (one, other)]
            one, other = (scrambled(both[i], both[1 - i]) for i in (0, 1))
            bits = scrambled((int(positions[row]) * WIDTH + column) ^ one, other)
            signed = bits - 2**32 if bits >= 2**31 else bits
            stays = signed >= round(RATE * 2**32) - 2**31
            assert found[sample, row, column].item() == pytest.approx(1 / (1 - RATE) if stays else 0.0)


def test_the_first_bits_that_stay_are_those_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are counted from -2^31: a quarter of them are below -2^30."""
    maker = NoiseMaker(1, 4)
    maker.rate = maker.weight_rate = 0.25
    noise = maker(keys(range(2)), None, 8)
    for bits, stays in ((-(2**30), 1 / 0.75), (-(2**30) - 1, 0.0)):
        monkeypatch.setattr(
            dropout, "_scrambled", lambda given, key, bits=bits: torch.full_like(given, bits)
        )  # fmt: skip
        assert drop(torch.ones(2, 8, 3), noise, 1).flatten().tolist() == pytest.approx([stays] * 48)
        weights = drop_weights(torch.ones(2, 4, 8, 8), noise.weights.of_layer(0))
        assert weights.flatten().tolist() == pytest.approx([stays] * 512)


def test_noise_is_made_of_what_is_asked_for() -> None:
    """None without keys or rates; the weights' keys are those of their layer, after those of all places."""
    maker, given = NoiseMaker(LAYERS, 4), keys(range(2))
    assert maker(given, None, 8) is None
    maker.weight_rate = 0.2
    assert maker(None, None, 8) is None
    noise = maker(given, None, 8)
    assert (noise.rate, noise.weights.rate) == (0.0, 0.2)
    assert noise.positions_s.tolist() == noise.weights.positions_q.tolist() == list(range(8))
    assert noise.positions_s.dtype == noise.weights.positions_q.dtype == torch.int32
    x = torch.ones(2, 8, WIDTH)
    assert drop(x, noise, 0) is x and drop(x, None, 0) is x
    assert noise.weights.keys_blh2.shape == (2, LAYERS, 4, 2)
    for layer in range(LAYERS):
        of_layer = noise.of_layer(layer)
        assert torch.equal(of_layer.weights.keys_blh2, noise.weights.keys_blh2[:, layer : layer + 1])
        assert torch.equal(of_layer.keys_bp2, noise.keys_bp2[:, 1 + 2 * layer : 3 + 2 * layer])
    maker.weight_rate, maker.rate = 0.0, RATE
    assert maker(given, None, 8).weights is None and maker(given, None, 8).of_layer(1).weights is None
    all_keys = maker(given, None, 8).keys_bp2.flatten(0, 1).tolist()
    assert len({tuple(pair) for pair in all_keys}) == 2 * (2 + 2 * LAYERS)


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
