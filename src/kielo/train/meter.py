"""Figures of the log: the speed of training, and the row of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch import Tensor

from kielo.artifact.metrics import PassedOver, TrainingStep
from kielo.train.state import State
from kielo.train.watch.checks import Guard, has_no_label


class Lap(TypedDict):
    """Figures over all ranks since the last lap. TFLOP/s and mfu (Chowdhery et al. 2022): of one rank."""

    tokens_per_second: float
    planned_tokens_per_second: float | None
    tflops_per_second: float
    mfu: float | None
    seconds: float
    seconds_left: float


class Meter:
    """A stopwatch over training steps, without held-out text and saves, for the phase set by `use`."""

    def __init__(self, ranks: int, total_tokens: int, device: torch.device):
        self._ranks, self._total_tokens, self._device = ranks, total_tokens, device
        self._flops_per_token = 0.0
        self._planned: float | None = None
        self._peak_tflops: float | None = None
        self.start(0)

    def start(self, tokens: int) -> None:
        self._tokens = self._tokens_counted = tokens
        self._flops = 0.0
        self._since = time.perf_counter()
        self.seconds = 0.0

    def use(
        self,
        flops_per_token: float,
        tokens: int,
        peak_tflops: float | None,
        planned_tokens_per_second: float | None = None,
    ) -> None:
        """Set the figures of tokens after the first `tokens`. `peak_tflops` is one accelerator's, if known.

        `flops_per_token` has forward and backward, without recomputation.
        """
        self._count_flops(tokens)
        self._flops_per_token = flops_per_token
        self._peak_tflops, self._planned = peak_tflops, planned_tokens_per_second

    def go_back(self, tokens: int) -> None:
        """Return to an earlier number of tokens. The work beyond it is discarded, its time still counts."""
        self._tokens = self._tokens_counted = tokens
        self._flops = 0.0

    def pass_over(self, before: int, after: int) -> None:
        self._count_flops(before)
        self._tokens += after - before
        self._tokens_counted = after

    def lap(self, tokens: int) -> Lap:
        """Return figures since the last lap. Call it after the host has read a number from the device."""
        now = time.perf_counter()
        elapsed = max(now - self._since, 1e-9)
        tokens_per_second = (tokens - self._tokens) / elapsed
        self._tokens, self._since = tokens, now
        self.seconds += elapsed
        self._count_flops(tokens)
        tflops = self._flops / elapsed / self._ranks / 1e12
        self._flops = 0.0
        return {
            "tokens_per_second": tokens_per_second,
            "planned_tokens_per_second": self._planned,
            "tflops_per_second": tflops,
            "mfu": tflops / self._peak_tflops if self._peak_tflops else None,
            "seconds": self.seconds,
            "seconds_left": (self._total_tokens - tokens) / max(tokens_per_second, 1e-9),
        }

    def _count_flops(self, tokens: int) -> None:
        self._flops += (tokens - self._tokens_counted) * self._flops_per_token
        self._tokens_counted = tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside. On a GPU it first waits for the running steps."""
        self._synchronise()
        paused_at = time.perf_counter()
        yield
        self._synchronise()
        self._since += time.perf_counter() - paused_at

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StepRow:
    def __init__(self, meter: Meter, guard: Guard):
        self.phase = 1
        self._meter, self._guard = meter, guard

    def __call__(
        self, state: State, loss: Tensor, gradient_norm: Tensor, learning_rate: float
    ) -> TrainingStep:
        loss_of_step, norm = loss.item(), gradient_norm.item()  # waits, so it comes before the meter
        return TrainingStep(
            step=state.step,
            tokens=state.tokens,
            samples=state.samples,
            phase=self.phase,
            loss=None if has_no_label(loss_of_step, norm) else loss_of_step,
            gradient_norm=norm,
            learning_rate=learning_rate,
            **self._meter.lap(state.tokens),
            skipped=self._guard.skipped,
            without_labels=self._guard.without_labels,
        )


def passed_over_row(state: State, phase: int, first_step: int, reason: str) -> PassedOver:
    return PassedOver(
        step=state.step,
        tokens=state.tokens,
        samples=state.samples,
        phase=phase,
        passed_over_from=first_step,
        passed_over_for=reason,
    )
