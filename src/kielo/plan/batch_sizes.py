"""Larger steps: their speed by the plan, and their cost in tokens by two published laws; no torch.

A batch of B tokens needs (1 + B / B_noise) times the tokens of a very small batch for the same loss, and
(1 + B_noise / B) times the steps of a very large batch (McCandlish et al. 2018, arXiv:1812.06162).

* Kaplan et al. 2020 (arXiv:2001.08361, section 5.1): B_noise = 2e8 tokens / L^(1 / 0.21), with the loss L in
  nats a token. It grows as the loss falls.
* Zhang et al. 2024 (arXiv:2410.21676): the critical batch of 22.91 · D^0.47 sequences of 512 tokens, with D
  in millions of tokens, needs 20 % more steps than linear scaling promises, so it is a fifth of B_noise. It
  depends on the length of the training and hardly on the size of the model (85 million to 1.2 billion
  parameters).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kielo.models.parameter_shapes import parameters
from kielo.plan.compare import with_larger_steps
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.scaling_laws import CHINCHILLA
from kielo.plan.search import search
from kielo.recipe.errors import KieloError

FACTORS = (0.25, 0.5, 1, 2, 4, 8)  # times the run's own tokens a step
_KAPLAN_TOKENS, _KAPLAN_EXPONENT = 2e8, 1 / 0.21
_ZHANG_SEQUENCES, _ZHANG_EXPONENT, _ZHANG_LENGTH, _ZHANG_OVERHEAD = 22.91, 0.47, 512, 0.2


@dataclass(frozen=True)
class Law:
    """A law for one run. critical: tokens of a step, as its authors define it."""

    name: str
    critical: float
    overhead: float  # more tokens at the critical batch than at a very small batch

    def tokens(self, batch: float, own: float) -> float:
        """Return the tokens that steps of `batch` need for one loss, by those that steps of `own` need."""
        noise = self.critical / self.overhead
        return (1 + batch / noise) / (1 + own / noise)


@dataclass(frozen=True)
class BatchSize:
    """A number of tokens a step, with its fastest layout, None if no layout runs."""

    tokens_per_step: int
    planned: PlannedLayout | None
    speed: float  # by the speed of the run's own steps
    tokens: tuple[float, ...]  # for the same loss, by the run's own steps; one of each law


def laws(loss: float, tokens: float) -> tuple[Law, Law]:
    """Return both laws for a training of `tokens` that ends at `loss` nats a token."""
    kaplan = _KAPLAN_TOKENS / loss**_KAPLAN_EXPONENT
    zhang = _ZHANG_SEQUENCES * (tokens / 1e6) ** _ZHANG_EXPONENT * _ZHANG_LENGTH
    return Law("Kaplan et al. 2020", kaplan, 1.0), Law("Zhang et al. 2024", zhang, _ZHANG_OVERHEAD)


def laws_of(run: RunToPlan) -> tuple[tuple[Law, Law], float]:
    """Return both laws for the run, and its expected loss by Chinchilla's law."""
    tokens = sum(phase.tokens for phase in run.phases)
    loss = CHINCHILLA.loss(parameters(run.model), tokens)
    return laws(loss, tokens), loss


def batch_sizes(run: RunToPlan, nodes: int, factors: Sequence[float] = FACTORS) -> list[BatchSize]:
    """Plan the run on `nodes` with smaller and larger steps. Raises KieloError if its own do not run."""
    own, (both, _) = run.phase.tokens_per_step, laws_of(run)
    found = {}
    for factor in factors:
        changed = with_larger_steps(run, factor)
        if changed is not None:
            ranked = search(changed, [nodes]).ranked[nodes]
            found[factor] = changed.phase.tokens_per_step, ranked[0] if ranked else None
    first = found[1][1] if 1 in found else None
    if first is None:
        raise KieloError(
            f"no layout of {run.recipe.name} runs on {nodes} nodes. Fix: kielo plan without --batch"
        )
    return [
        BatchSize(
            batch,
            planned,
            planned.tokens_per_second / first.tokens_per_second if planned else 0.0,
            tuple(law.tokens(batch, own) for law in both),
        )
        for batch, planned in found.values()
    ]
