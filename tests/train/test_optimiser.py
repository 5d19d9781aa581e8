"""AdamW is torch's, and a flag undoes a step completely."""

from types import SimpleNamespace

import torch
from torch import nn

from kielo.train.optimiser import build_optimiser

SETTINGS = SimpleNamespace(learning_rate=1.0, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def set_gradients(network: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_a_skipped_step_leaves_no_trace() -> None:
    """With the flag set, NaN gradients touch neither weights nor moments nor the count of updates, and the steps after
    it are those of torch's plain AdamW that never saw it (matrices decayed, vectors not).
    """
    ours, theirs = model(), model()
    optimiser = build_optimiser(ours, SETTINGS)
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": [theirs[0].weight], "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step, bad in enumerate([False, True, False, True, False]):
        set_gradients(ours, step)
        if bad:
            ours[0].weight.grad[0, 0] = float("nan")
        optimiser.step(0.01 * (step + 1), torch.tensor(float(bad)))
        optimiser.zero_grad()
        if not bad:
            set_gradients(theirs, step)
            for group in reference.param_groups:
                group["lr"] = 0.01 * (step + 1)
            reference.step()
    assert optimiser.updates == 3
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            optimiser.adamw.state[mine]["exp_avg_sq"], reference.state[other]["exp_avg_sq"], rtol=1e-6, atol=1e-9
        )


def test_moments_are_there_before_the_first_step_and_have_names() -> None:
    """A checkpoint can be restored into an optimiser that has not stepped; a frozen parameter has none."""
    network = model()
    network[0].bias.requires_grad_(False)
    optimiser = build_optimiser(network, SETTINGS)
    names = {f"{name}/{moment}" for name in ("0.weight", "1.weight", "1.bias") for moment in ("exp_avg", "exp_avg_sq")}
    assert optimiser.moments().keys() == names
    optimiser.updates = 7
    set_gradients(network, 0)
    optimiser.step(0.1)
    assert optimiser.updates == 8
