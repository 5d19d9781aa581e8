"""Gradients reduced in bf16, against one process: each rank's sum over micro-batches is rounded once."""

import pytest
import torch

from kielo.models.llama.model import Llama
from kielo.parallel.fsdp import set_last_micro_batch
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import build_mesh, data_rank, data_ranks, sum_over_data
from kielo.parallel.parallelise import parallelise
from kielo.ranks.world import start_world
from tests.parallel.test_layouts import batch, config, fill, layout, loss_of
from tests.started_ranks import run_ranks

HALF_STEP = 2.0**-8  # rounding to bf16 changes a number by at most this share of it
DIVISOR = 100


def reduced(sizes: dict, micro_batches: int, dtype: str) -> dict[str, torch.Tensor]:
    """Gradients of a step on this rank's samples, computed in fp32."""
    world, placement = start_world(30, "cpu"), layout(**sizes)
    mesh = build_mesh(world, placement)
    with torch.device("meta"):
        model = Llama(config(True))
    parallel = parallelise(model, mesh, placement, "fp32", gradient_reduce_dtype=dtype)
    model = materialise(parallel, world.device, fill(config(True)))
    mine = slice(data_rank(mesh), None, data_ranks(mesh))
    parts = list(zip(*(whole[mine].chunk(micro_batches) for whole in batch())))
    for number, part in enumerate(parts):
        set_last_micro_batch(model, number == len(parts) - 1)
        loss_of(model, *part, DIVISOR).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def gradients_of_parts(ranks: int, micro_batches: int) -> list[list[dict[str, torch.Tensor]]]:
    """Gradients of each rank's micro-batches, by one process."""
    model = Llama(config(True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fill(config(True))(name, parameter.shape))
    found = []
    for rank in range(ranks):
        found.append([])
        for part in zip(*(whole[rank::ranks].chunk(micro_batches) for whole in batch())):
            model.zero_grad()
            loss_of(model, *part, DIVISOR).backward()
            found[-1].append({name: one.grad.clone() for name, one in model.named_parameters()})
    return found


@pytest.mark.parametrize("sizes", [
    {"shard": 2}, {"shard": 2, "zero": 2}, {"replicate": 2}, {"replicate": 2, "shard": 2},
])  # fmt: skip
def test_a_gradient_is_rounded_as_often_as_it_is_sent(sizes):
    """Rounded are what a rank sends and each sum of two ranks, never the sum over micro-batches.

    At ZeRO 2 each micro-batch is sent.
    """
    micro_batches, ranks = 2, sizes.get("shard", 1) * sizes.get("replicate", 1)
    found = run_ranks(reduced, ranks, sizes, micro_batches, "bf16")[0]
    parts = gradients_of_parts(ranks, micro_batches)
    times = 1 + (sizes.get("shard", 1) > 1) + (sizes.get("replicate", 1) > 1)  # sent, scattered, summed
    for name, gradient in found.items():
        of_ranks = [[part[name] for part in one] for one in parts]
        if sizes.get("zero", 1) == 1:
            of_ranks = [[sum(one)] for one in of_ranks]
            assert torch.equal(gradient, gradient.bfloat16().float()), name  # what was sent was bf16
        exact = sum(sum(one) for one in of_ranks)
        sizes_of_terms = sum(part.abs() for one in of_ranks for part in one)
        allowed = times * HALF_STEP * (1 + HALF_STEP) ** times * sizes_of_terms + 1e-6 * exact.abs().max()
        assert ((gradient - exact).abs() <= allowed).all(), name
        assert (gradient - exact).abs().max() > 1e-4 * exact.abs().max(), name  # fp32 is within 1e-6


def losses(dtype: str, steps: int) -> list[float]:
    """Losses of AdamW on the same samples in each step, by two ranks with four micro-batches each."""
    world, placement = start_world(30, "cpu"), layout(shard=2)
    mesh = build_mesh(world, placement)
    with torch.device("meta"):
        model = Llama(config(False))
    parallel = parallelise(model, mesh, placement, "fp32", gradient_reduce_dtype=dtype)
    model = materialise(parallel, world.device, fill(config(False)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    inputs, labels = (whole[data_rank(mesh) :: 2] for whole in batch())
    divisor, found = int((batch()[1] >= 0).sum()), []
    for _ in range(steps):
        optimiser.zero_grad()
        total = torch.zeros(())
        for number in range(len(inputs)):
            set_last_micro_batch(model, number == len(inputs) - 1)
            loss = loss_of(model, inputs[number : number + 1], labels[number : number + 1], divisor)
            loss.backward()
            total += loss.detach()
        optimiser.step()
        found.append(sum_over_data(total, mesh).item())
    return found


@pytest.mark.full
def test_training_hardly_changes():
    """The loss of 100 steps, in which it falls to a tenth, in bf16 by that in fp32: within 1 % at each step.

    A gradient's element is off by at most 2 × 2^-8 of its terms, and AdamW divides by the same elements.
    """
    wide, narrow = (torch.tensor(run_ranks(losses, 2, dtype, 100)[0]) for dtype in ("fp32", "bf16"))
    print("loss in fp32", wide[[0, 9, 49, 99]], "largest change", (narrow / wide - 1).abs().max())
    assert wide[-1] < 0.1 * wide[0]
    assert 0 < (narrow / wide - 1).abs().max() < 0.01
