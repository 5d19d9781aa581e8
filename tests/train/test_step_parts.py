"""Small parts of a step by hand: precision, determinism, the head's tokens, the probe of FP8's gradients."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kielo.artifact.metrics import Fp8GradientProbe
from kielo.train import forward_backward, precision
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.forward_backward import NextToken, PlainForwardBackward, pick_counted, tensor_axis
from kielo.train.loss import LossOptions
from kielo.train.precision import Fp8Probe, change_before, determinism, next_precision, settle_matrix_products
from kielo.train.state import State


@pytest.mark.parametrize(
    ("labels", "counted", "rows"),
    [
        (40, 0, 3),
        (40, 3, 3),
        (40, 4, 6),
        (40, 7, 9),
        (40, 40, 40),
        (37, 36, 36),
        (34, 4, 6),
        (32, 5, 6),
        (8, 3, 3),
    ],
)
def test_the_head_takes_a_few_more_tokens_than_count(labels: int, counted: int, rows: int) -> None:
    """In sixteenths of all, of 40 tokens three: those that count come first, in their order."""
    places = torch.arange(labels).roll(11)[:counted].sort().values
    labels_n = torch.full((labels,), -100)
    labels_n[places] = 5 * places
    hidden_nd = torch.stack((torch.arange(labels), torch.arange(labels) + 100), dim=1)
    hidden, found = pick_counted(hidden_nd.view(1, labels, 2), labels_n.view(1, labels), counted)
    others = [place for place in range(labels) if place not in places.tolist()]
    expected = [*places.tolist(), *others][:rows]
    assert hidden.tolist() == [[place, place + 100] for place in expected]
    assert found.tolist() == labels_n[expected].tolist()


def test_products_of_fp32_are_exact_in_an_fp32_run_alone() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for precision, found in (
            ("bf16", ("high", True)),
            ("fp32", ("highest", False)),
            ("fp8", ("high", True)),
        ):
            settle_matrix_products(precision)
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == found
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_a_step_has_the_precision_of_the_last_change_that_counts() -> None:
    changes = ((4, "fp8"), (7, "bf16"))
    identity = SimpleNamespace(train=SimpleNamespace(precision="fp32", precision_changes=changes))
    found = [next_precision(identity, State(step=step)) for step in range(8)]
    assert found == ["fp32"] * 3 + ["fp8"] * 3 + ["bf16"] * 2
    assert next_precision(identity, State(step=5, refused_changes=[4])) == "fp32"
    assert [change_before(identity, step, [4]) for step in (4, 7)] == [(1, "fp32"), (7, "bf16")]
    assert change_before(identity, 6, [1, 4]) == (1, "bf16")


@pytest.mark.parametrize("warns", (False, True))
def test_settings_of_determinism_end_with_it(monkeypatch: pytest.MonkeyPatch, warns: bool) -> None:
    """cuBLAS' workspaces stay, as its handles do; one that a person set is kept."""
    import torch._inductor.config as inductor

    def found() -> tuple:
        return (
            torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark, inductor.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )  # fmt: skip

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    was_deterministic, inductor.deterministic = inductor.deterministic, False
    try:
        torch.use_deterministic_algorithms(warns, warn_only=warns)
        before = found()
        with determinism(False):
            assert found() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        with pytest.raises(ValueError, match="inside"), determinism(True):
            assert found() == (False, True, False, True, True, False)
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            raise ValueError("inside")
        assert found() == before == (True, False, True, warns, warns, warns)  # torch sets Inductor's too
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        with determinism(True):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)
        inductor.deterministic = was_deterministic


class Model(nn.Module):
    """Two trained weights and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def set_gradients(self, a: list[float], b: list[float]) -> None:
        self.a.grad, self.b.grad = torch.tensor(a), torch.tensor(b)


class Probed:
    """Gradients (3, 0, 4) in FP8 and (0, 5, 12) in bf16, of norms 5 and 13: the cosine is 48 / 65."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False):
        self.model, self.rows, self.fails, self.is_in_bf16 = Model(), [], fails, False
        self.model.set_gradients([3.0, 0.0], [4.0])
        monkeypatch.setattr(precision, "in_bf16", self.in_bf16)
        monkeypatch.setattr(precision, "gradient_norm", lambda model, mesh: torch.cat(
            [parameter.grad for parameter in (model.a, model.b)]).norm()
        )  # fmt: skip
        self.probe = Fp8Probe(self.forward_backward, self.model, "mesh", 4, 10, self.rows.append, self.paused)
        self.is_paused = False

    @contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        self.is_paused = True
        yield
        self.is_paused = False

    @contextmanager
    def in_bf16(self, model: nn.Module, mesh: str) -> Iterator[None]:
        self.is_in_bf16 = True
        yield
        self.is_in_bf16 = False

    def forward_backward(self, batch: StepBatch) -> None:
        assert self.is_in_bf16 and self.is_paused and self.model.a.grad is None and self.model.b.grad is None
        self.model.set_gradients([0.0, 5.0], [12.0])
        if self.fails:
            raise ValueError("out of memory")


def test_the_probe_is_the_cosine_of_both_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step, every fourth and the last; the gradients are FP8's again afterwards."""
    for fails in (False, True):
        probed = Probed(monkeypatch, fails)
        for step in range(1, 11):
            batch = StepBatch(step, (), [], torch.tensor(1))
            if fails and step == 1:
                with pytest.raises(ValueError, match="out of memory"):
                    probed.probe(batch)
            elif not fails:
                probed.probe(batch)
            assert probed.model.a.grad.tolist() == [3.0, 0.0] and probed.model.b.grad.tolist() == [4.0]
        expected = [] if fails else [(step, pytest.approx(48 / 65)) for step in (1, 4, 8, 10)]
        assert [(row.step, row.fp8_gradient_cosine) for row in probed.rows] == expected
        assert probed.model.frozen.grad is None
        assert all(isinstance(row, Fp8GradientProbe) for row in probed.rows)


@pytest.mark.parametrize("counted", (0, 1, 6))
def test_a_steps_loss_is_divided_by_the_labels_of_all_ranks(monkeypatch, counted: int) -> None:
    """On each of two equal ranks; micro-batches' losses and gradients add up, and the last one is told."""
    told: list[bool] = []
    monkeypatch.setattr(
        "kielo.train.forward_backward.set_last_micro_batch", lambda model, last: told.append(last)
    )
    weight = nn.Parameter(torch.tensor(3.0))

    def objective(model: nn.Module, micro_batch: float, divisor: torch.Tensor) -> torch.Tensor:
        return weight * micro_batch / divisor

    step = PlainForwardBackward(nn.Linear(1, 1), objective, lambda tensor: 2 * tensor)
    assert step.own_loss.isnan()
    loss = step(StepBatch(1, (), [0.5, 2.0, 4.0], torch.tensor(counted)))
    divisor = max(1, 2 * counted)
    assert loss.item() == pytest.approx(2 * 3.0 * 6.5 / divisor) and told == [False, False, True]
    assert step.own_loss.item() == pytest.approx(3.0 * 6.5 / divisor)
    assert weight.grad.item() == pytest.approx(6.5 / divisor)


class Headed:
    """A model whose hidden states are its inputs."""

    config = SimpleNamespace(vocab_size=67, final_logit_softcapping=30.0)

    @staticmethod
    def head(hidden: object, use: Callable[..., object]) -> object:
        return use(hidden, "weight", "bias")

    def __init__(self) -> None:
        self.given: tuple = ()

    def __call__(self, *given: object) -> object:
        self.given = given
        return given[0]


def test_the_loss_is_asked_for_as_the_layout_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank of the vocabulary and on several; which labels count is asked of masked tokens alone."""
    asked: list[tuple] = []
    monkeypatch.setattr(forward_backward, "chunked_loss", lambda *given: asked.append(given) or "loss")
    monkeypatch.setattr(forward_backward, "gather_sequence", lambda *given: given)
    monkeypatch.setattr(forward_backward, "pick_counted", lambda *given: (given, "picked"))
    axis = SimpleNamespace(get_group=lambda: "group", size=lambda: 2)
    piece, model = MicroBatch("inputs", "labels", "documents", "keys", "positions", 3), Headed()
    assert NextToken(0.5, 24)(model, piece, "divisor") == "loss"
    assert model.given == ("inputs", "documents", "positions", "keys")
    assert asked.pop() == (
        "inputs", "weight", "labels", "divisor", LossOptions(0.5, 24, vocab_size=67, softcap=30.0), "bias",
    )  # fmt: skip
    model.fp8_head = "settings"
    NextToken(0.25, 9, axis, True, True, True, True)(model, piece, "divisor")
    options = LossOptions(0.25, 9, "group", 67, 30.0, True, True, True, "settings")
    hidden = ("inputs", axis, True), "labels", 3
    assert asked.pop() == (hidden, "weight", "picked", "divisor", options, "bias")
    NextToken(0.25, 9, axis, picks_counted=True)(model, replace(piece, counted=None), "divisor")
    assert asked.pop()[0] == ("inputs", axis, False)
    for size, found in ((1, None), (2, axis)):
        axis.size = lambda size=size: size
        assert tensor_axis(SimpleNamespace(of_parameters={"tensor": axis}.get)) is found
