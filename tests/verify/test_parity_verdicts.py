"""The parity check of two sides that are made by hand: what passes, what is named, and what is measured."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.artifact.manifest import read_manifest, write_stage
from kielo.artifact.stage_json import read_stage_json, write_json
from kielo.artifact.verify_results import Parity
from kielo.verify import parity
from kielo.verify.certificate import ParityOptions, asked, current_certificate
from kielo.verify.parity import verify_parity
from kielo.verify.trace import Trace
from tests.train.tiny_run import resolve, write_tokens

OPTIONS = ParityOptions(steps=3, sequences_per_step=5, sequence_length=8, tolerance=1e-3)
TOKENS = torch.tensor([[7, 6, 5, 4, 3], [1, 2, 3, 4, 5]])


class Side:
    """One side; both are alike but for what a test changes."""

    def __init__(self, **changes: Any):
        usual: dict[str, Any] = {
            "losses": [4.0, 3.0, 2.0], "norms": [2.0, 3.0, 4.0], "clipped": [2.0, 2.998, 3.0],
            "weights": {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}, "updated": {},
            "grads": {"a": torch.tensor([1.2, 1.6]), "b": torch.tensor([0.0])}, "named": {"lr": 0.5},
            "middle": torch.tensor([3.0, 4.0]), "logits": torch.tensor([1.0, 2.0]),
        }  # fmt: skip
        self.of = SimpleNamespace(**(usual | changes))
        self.taken: list[Any] = []

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.of.weights | (self.of.updated if self.taken else {})

    def gradients(self) -> dict[str, torch.Tensor]:
        return self.of.grads

    def modules(self) -> list[str]:
        return ["embed", "x.y"]

    def trace(self, batch: Any, modules: Any = ()) -> Trace:
        out = torch.ones(2, dtype=torch.bfloat16)
        return Trace({"embed": (TOKENS, out), "x.y": (self.of.middle, self.of.middle)}, self.of.logits)

    def settings(self) -> dict[str, Any]:
        return self.of.named

    def _measured(self) -> dict[str, float]:
        at = len(self.taken) - 1
        return {"learning_rate": at / 4, "gradient_norm": self.of.norms[at],
                "clipped_gradient_norm": self.of.clipped[at]}  # fmt: skip

    def step(self, batch: Any, on_gradients: Any) -> dict[str, float]:
        on_gradients(batch)
        self.taken.append(batch)
        return {"loss": self.of.losses[len(self.taken) - 1]} | self._measured()

    def backward(self, batch: Any) -> float:
        self.taken.append(batch)
        return self.of.losses[len(self.taken) - 1]

    def update(self) -> dict[str, float]:
        return self._measured()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_tokens(folder / "tokens")
    return folder


@pytest.fixture
def compare(run_folder: Path, tmp_path: Path, monkeypatch):
    """Returns a function that compares two sides with these changes; it has what the sides were asked for."""

    @contextmanager
    def world_of_one(seconds: float, device: str):
        yield SimpleNamespace(device=torch.device(device))

    def compared(ours: Any = None, theirs: Any = None, rounding: Any = None, **resolving: Any) -> Parity:
        sides = Side(**(ours or {})), Side(**(theirs or {}))
        made, measured = [], []
        monkeypatch.setattr(parity, "world_of_one", world_of_one)
        monkeypatch.setattr(parity, "KieloSide", lambda *given: made.append(given) or sides[0])
        monkeypatch.setattr(
            parity, "HuggingFaceSide", lambda *given, **named: made.append((*given, named)) or sides[1]
        )
        monkeypatch.setattr(
            parity, "rounding_differences", lambda begin, losses: measured.append(losses) or rounding
        )
        compared.sides, compared.made, compared.measured = sides, made, measured
        resolved = resolve(run_folder, **resolving)
        return verify_parity(resolved, tmp_path / f"verify_{len(list(tmp_path.iterdir()))}", None, OPTIONS)

    return compared


def test_equal_sides_pass(compare, tmp_path: Path) -> None:
    """Of two micro-batches a step, with the whole run in fp32 by AdamW on one rank."""
    found = compare(shard=2, tensor=2)
    assert found.passed and found.first_difference is None and found.max_relative_loss_difference == 0
    assert (found.logits_max_difference, found.gradient_max_relative_difference) == (0, 0)
    assert (found.steps, found.sequences_per_step, found.sequence_length, found.tolerance) == (3, 5, 8, 1e-3)
    assert found.weights == "initial values of seed 3" and compare.measured == []
    assert found.losses.ours == found.losses.theirs == [4, 3, 2]
    assert found.losses.relative_differences == [0, 0, 0] and found.losses.rounding_differences is None
    assert found.gradient_norms.ours == found.gradient_norms.theirs == [2, 3, 4]
    assert found.settings.ours == found.settings.theirs == {
        "lr": 0.5, "learning rate of each step": [0, 0.25, 0.5], "first tokens": [7, 6, 5, 4],
        "precision of activations": ["bfloat16", "float32"], "clipping, norm let through": 3.0,
    }  # fmt: skip
    assert read_manifest(tmp_path / "verify_0").counts == {
        "steps": 3, "passed": True, "max_relative_loss_difference": 0.0,
    }  # fmt: skip
    assert read_stage_json(tmp_path / "verify_0", Parity) == found
    for side in compare.sides:
        assert [batch.step for batch in side.taken] == [1, 2, 3]
        shapes = [[tuple(one.inputs_bs.shape) for one in batch.micro_batches] for batch in side.taken]
        assert shapes == [[(3, 8), (2, 8)]] * 3
    identity, placement, _, checkpoint = compare.made[0]
    assert (identity.train.precision, identity.train.optimiser) == ("fp32", "adamw") and checkpoint is None
    layout = placement.layout
    assert (layout.shard, layout.tensor, layout.cpu_offload, placement.world_size) == (1, 1, False, 1)
    assert compare.made[1][1] == "cpu" and compare.made[1][-1] == {}


def test_a_norm_that_is_let_through_is_the_first_that_clipping_lowered(compare) -> None:
    """By more than a thousandth; without one it was never clipped."""
    name = "clipping, norm let through"
    found = compare({"clipped": [2.0, 2.996, 3.0]}, {"clipped": [2.0, 3.0, 4.0]})
    assert (found.settings.ours[name], found.settings.theirs[name]) == (2.996, "never clipped")
    assert not found.passed and found.settings.differing == [name]
    at_the_edge = compare({"clipped": [0.999 * 2.0, 3.0, 4.0]}, {"clipped": [2.0, 3.0, 4.0]})
    assert at_the_edge.passed


def test_a_setting_that_differs_is_named(compare) -> None:
    found = compare({"named": {"lr": 0.5, "x": 1}}, {"named": {"lr": 0.25, "x": 1}})
    assert not found.passed and found.settings.differing == ["lr"] == found.first_difference.settings
    first = found.first_difference
    assert first.layer is first.weight is first.gradient is first.update is first.step is None


@pytest.mark.parametrize(("off", "passes"), [(0.9e-3, True), (1.1e-3, False)])
def test_a_gradient_may_be_off_by_a_thousandth(compare, off: float, passes: bool) -> None:
    """One that is truly zero is compared with a thousandth of the largest one's norm."""
    found = compare({"grads": {"a": torch.tensor([1.2, 1.6]), "b": torch.tensor([off * 2e-3])}})
    assert found.gradient_max_relative_difference == pytest.approx(off, rel=1e-3)
    assert found.passed is passes
    assert passes or (found.first_difference.gradient, found.first_difference.step) == ("b", None)


def test_losses_that_part_by_less_than_the_tolerance(compare) -> None:
    found = compare({"losses": [4.0, 3.0, 2.0018]}, {"logits": torch.tensor([1.5, 2.0])})
    assert found.passed and found.max_relative_loss_difference == pytest.approx(9e-4)
    assert found.logits_max_difference == 0.5 and compare.measured == []


def test_rounding_is_measured_where_only_later_losses_part(compare) -> None:
    """Ten times as far as by rounding is allowed; the first step beyond that is named."""
    far = {"losses": [4.0, 3.06, 2.1]}  # by 2 % and by 5 %
    found = compare(far, rounding=[0.0, 0.0021, 0.0051])
    assert found.passed and compare.measured == [[4, 3, 2]]
    assert found.losses.rounding_differences == [0, 0.0021, 0.0051]
    found = compare(far, rounding=[0.0, 0.0021, 0.0049])
    assert not found.passed and found.first_difference.step == 3 and found.first_difference.update == "a"
    found = compare(far, rounding=[0.0, 0.0, 0.0])
    assert found.first_difference.step == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": [4.1, 3.0, 2.0]}, {"step": 1}),
        ({"named": {"lr": 0.25}}, {"settings": ["lr"], "step": 2}),
        ({"weights": {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0 + 1e-6])}},
         {"weight": "b", "step": 2}),
        ({"grads": {"a": torch.tensor([1.2, 1.8]), "b": torch.tensor([0.0])}}, {"gradient": "a", "step": 2}),
        ({"middle": torch.tensor([3.0, 4.1])},
         {"layer": "x", "where": "before y", "step": 2}),
    ],
)  # fmt: skip
def test_rounding_explains_nothing_where_the_beginning_differs(compare, changes: dict, said: dict) -> None:
    """In the first loss, a setting, a weight, a gradient or a layer: each is named, with the step."""
    found = compare({"losses": [4.0, 3.06, 2.1]} | changes)
    assert not found.passed and compare.measured == []
    first = found.first_difference
    assert {key: getattr(first, key) for key in said} == said
    named = {key for key in ("layer", "weight", "gradient") if getattr(first, key)}
    assert named == said.keys() & {"layer", "weight", "gradient"} and bool(first.settings) is (
        "settings" in said
    )


def test_the_weight_that_an_update_moves_most_is_one_with_a_gradient(compare) -> None:
    """b has none in truth, and moves by rounding alone."""
    far = {"losses": [4.0, 3.5, 2.0], "updated": {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([9.0])}}
    found = compare(far, rounding=[0.0] * 3)
    assert found.first_difference.update == "a"
    for size, moved in ((1.5e-6, "a"), (3e-6, "b")):  # a millionth of the largest norm, 2, is none
        gradients = {"a": torch.tensor([1.2, 1.6]), "b": torch.tensor([size])}
        found = compare(far | {"grads": gradients}, {"grads": gradients}, rounding=[0.0] * 3)
        assert found.first_difference.update == moved


def test_a_loss_that_is_not_a_number_fails(compare) -> None:
    found = compare({"losses": [4.0, float("nan"), 2.0]}, rounding=[0.0] * 3)
    assert not found.passed and found.first_difference.step == 2


def test_a_certificate_that_passed_is_not_made_again(compare, run_folder: Path, tmp_path: Path) -> None:
    """One that failed, is of another version or other options is."""
    passed = compare()
    failed = passed.model_copy(update={"passed": False})
    resolved = resolve(run_folder)
    for number, (certificate, version, is_current) in enumerate(
        ((passed, 3, True), (failed, 3, False), (passed, 2, False), (passed, 4, False))
    ):
        folder = tmp_path / f"stage_{number}"
        with write_stage(folder, "parity", version, *asked(resolved, None, OPTIONS)) as stage:
            write_json(stage.folder, certificate)
        found = current_certificate(resolved, folder, None, OPTIONS)
        assert found == (certificate if is_current else None)
    folder = tmp_path / "stage_0"
    other = ParityOptions(steps=4, sequences_per_step=5, sequence_length=8, tolerance=1e-3)
    assert current_certificate(resolved, folder, None, other) is None
    assert verify_parity(resolved, folder, None, OPTIONS) == passed and len(compare.made) == 2
    inputs, section = asked(resolved, None, ParityOptions(sequence_length=99))
    assert inputs == {"tokens": resolved.identity.tokens_hash} and section["sequence_length"] == 16


def test_usual_options_of_parity() -> None:
    """20 steps of 4 sequences of 128 tokens, and losses within 1e-5."""
    usual = ParityOptions()
    assert (usual.steps, usual.sequences_per_step, usual.sequence_length, usual.tolerance) == (
        20,
        4,
        128,
        1e-5,
    )
    assert usual.hugging_face_overrides == {}
