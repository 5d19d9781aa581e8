"""Dropout of attention's weights: the hash by hand, fair shares, parts of the whole, alike on all paths."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kielo.models import families
from kielo.models.blocks.attention import InnerAttention, MaskMaker
from kielo.models.blocks.decoder import init_weights
from kielo.models.blocks.dropout import NoiseMaker, WeightNoise, drop_weights
from kielo.recipe.sections import Model
from kielo.train.precision import settle_matrix_products
from tests.models.test_dropout import keys
from tests.models.test_flex import BATCH, HEADS, LENGTH, WINDOW, documents, needs_gpu, projections

RATE, LAYERS = 0.3, 3
ENCODERS = {
    "ltg_bert": {"position_bucket_size": 8},
    "ltg_bert, interleaved": {"position_bucket_size": 8, "position_heads": "interleaved"},
    "modernbert": {"sliding_window": 4, "initializer_range": 0.2},
}


def noise_of(samples: range, rate: float = RATE, positions: Tensor | None = None) -> WeightNoise:
    """The noise of layer 1."""
    maker = NoiseMaker(LAYERS, HEADS)
    maker.weight_rate = rate
    return maker(keys(samples), positions, LENGTH).of_layer(1).weights


def kept(noise: WeightNoise, queries: int = LENGTH, length: int = LENGTH) -> Tensor:
    """Which weights stay, as numbers 0 and 1 [b, h, q, n]."""
    batch, _, heads, _ = noise.keys_blh2.shape
    return drop_weights(torch.ones(batch, heads, queries, length), noise) * (1 - noise.rate)


def by_hand(sample: int, layer: int, head: int, query: int, key: int) -> bool:
    """One weight's bits in unsigned numbers: keys of layer and head, then of query and key."""

    def scrambled(bits: int, key: int) -> int:
        bits = (((bits ^ (bits >> 16)) * 0x85EBCA6B) ^ key) % 2**32
        bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) % 2**32
        return bits ^ (bits >> 16)

    one, other = keys(range(sample, sample + 1))[0].numpy().view(np.uint32).tolist()
    for number in (2 + 2 * LAYERS + layer, head):
        both = [(part + (number + 1) * 0x9E3779B9) % 2**32 for part in (one, other)]
        one, other = (scrambled(both[i] % 2**32, both[1 - i]) for i in (0, 1))
    bits = scrambled((query * LENGTH + key) ^ one, other)
    signed = bits - 2**32 if bits >= 2**31 else bits
    return signed >= round(RATE * 2**32) - 2**31


def test_weights_are_dropped_by_the_hash() -> None:
    """300 weights of all sequences, heads, queries and keys, by integers of Python."""
    found = kept(noise_of(range(8))).round().bool()
    generator = np.random.default_rng(1)
    for _ in range(300):
        place = [int(generator.integers(size)) for size in found.shape]
        sample, head, query, key = place
        assert bool(found[sample, head, query, key]) == by_hand(sample, 1, head, query, key)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_of_dropped_weights_is_the_rate(rate: float) -> None:
    """In each sequence and head, query and key, within five standard deviations of a binomial's count; and
    neighbours, heads, layers and samples are independent as far as their correlations show.
    """
    noise = noise_of(range(4), rate)
    stays = kept(noise)
    for dims in ((2, 3), (0, 1, 3), (0, 1, 2), (0, 1, 2, 3)):
        deviation = math.sqrt(rate * (1 - rate) * stays.sum(dims).numel() / stays.numel())
        assert (stays.mean(dims) - (1 - rate)).abs().max() < 5 * deviation
    centred = stays - (1 - rate)
    maker = NoiseMaker(LAYERS, HEADS)
    maker.weight_rate = rate
    another = kept(maker(keys(range(4)), None, LENGTH).of_layer(2).weights) - (1 - rate)
    deviation = rate * (1 - rate) / math.sqrt(stays.numel())
    for other in (another, *(centred.roll(1, dims=dim) for dim in range(4))):
        assert abs((centred * other).mean().item()) < 5 * deviation


def test_parts_are_those_of_the_whole() -> None:
    """Some samples, some heads and the queries of a context rank drop the same weights."""
    whole = kept(noise_of(range(8)))
    columns = torch.cat((torch.arange(16, 32), torch.arange(96, 112)))
    part = noise_of(range(3, 8, 2), positions=columns).of_heads(slice(1, 3))
    assert torch.equal(kept(part, len(columns)), whole[3:8:2, 1:3][:, :, columns])


def with_dropout(mask, noise: WeightNoise | None, device: str = "cpu", dtype=torch.float32) -> list[Tensor]:
    """[output, dq, dk, dv] in fp32 on the CPU. In blocks on the CPU torch has no gradients: the output."""
    *inputs, gradient = (tensor.to(device, dtype) for tensor in projections(HEADS))
    has_gradients = mask.blocks is None or device != "cpu"
    inputs = [tensor.detach().requires_grad_(has_gradients) for tensor in inputs]
    with torch.set_grad_enabled(has_gradients):
        out = InnerAttention()(*inputs, mask, noise)
    if has_gradients:
        out.backward(gradient)
    found = [out, *(tensor.grad for tensor in inputs)] if has_gradients else [out]
    return [tensor.detach().float().cpu() for tensor in found]


@pytest.mark.parametrize("window", [None, WINDOW], ids=["all", "window"])
def test_both_paths_drop_the_weights_of_a_plain_softmax(window: int | None) -> None:
    """Within 2e-6 of softmax × kept / (1 - rate) × values; dense, gradients too, and in blocks, forward."""
    make_masks, noise = MaskMaker([window], is_causal=False), noise_of(range(BATCH))
    numbers, cpu = documents(), torch.device("cpu")
    q, k, v, gradient = projections(HEADS)
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    seen = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (distance < (window or LENGTH))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = (weights * kept(noise) / (1 - RATE)) @ v
    expected.backward(gradient)
    truth = [expected, q.grad, k.grad, v.grad]
    dense = with_dropout(make_masks.dense(numbers, LENGTH, cpu)[window], noise)
    blocks = with_dropout(make_masks.in_blocks(numbers, LENGTH, cpu)[window], noise)
    for found, one in zip(dense, truth, strict=True):
        torch.testing.assert_close(found, one, atol=5e-6, rtol=0)
    torch.testing.assert_close(blocks[0], expected, atol=2e-6, rtol=0)
    plain = with_dropout(make_masks.dense(numbers, LENGTH, cpu)[window], None)
    assert (plain[0] - dense[0]).abs().max() > 0.1


def test_a_query_that_loses_all_weights_gives_zeros() -> None:
    make_masks, cpu = MaskMaker([None], is_causal=False), torch.device("cpu")
    noise = noise_of(range(BATCH), rate=1 - 2**-30)
    for mask in (make_masks.dense(documents(), LENGTH, cpu), make_masks.in_blocks(documents(), LENGTH, cpu)):
        assert all(not found.any() for found in with_dropout(mask[None], noise))


def tiny(name: str) -> torch.nn.Module:
    asked = Model(
        model_type=name.partition(",")[0], hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, vocab_size=50,
        **ENCODERS[name],
    )  # fmt: skip
    model = families.build_model(families.complete(asked, 16))
    init_weights(model, 3)
    return model


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_drop_in_training_and_nowhere_else(name: str) -> None:
    """With keys and a rate the output is another one, of each layer by itself, the same at each call; dropped
    in blocks it is that of the dense code within 2e-6. Without keys or rate nothing changes.
    """
    model = tiny(name)
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = model(tokens)
    assert torch.equal(model(tokens, None, None, keys(range(2))), plain)
    model.make_noise.weight_rate = RATE
    one, again, other = (
        model(tokens, None, None, keys(samples)) for samples in (range(2), range(2), range(2, 4))
    )
    assert torch.equal(model(tokens), plain) and torch.equal(one, again)
    assert not torch.allclose(one, plain, atol=1e-3) and not torch.allclose(one, other, atol=1e-3)
    if name.startswith("ltg_bert"):
        maker = model.make_relative_mask
        maker.forward = lambda documents, length, device: maker.in_blocks(documents, length)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens, None, None, keys(range(2))), one, atol=5e-6, rtol=0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, WINDOW], ids=["all", "window"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_a_gpu_drops_as_the_cpu_does(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    """Output and gradients in relative L2; bf16: 8 bits of mantissa."""
    torch._dynamo.reset()
    settle_matrix_products("fp32")
    make_masks, noise = MaskMaker([window], is_causal=False), noise_of(range(BATCH))
    truth = with_dropout(make_masks(documents(), None, LENGTH, torch.device("cpu"))[window], noise)
    there = noise._replace(keys_blh2=noise.keys_blh2.to("cuda"), positions_q=noise.positions_q.to("cuda"))
    mask = make_masks(documents().to("cuda"), None, LENGTH, torch.device("cuda"))[window]
    for ours, theirs in zip(with_dropout(mask, there, "cuda", dtype), truth, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
