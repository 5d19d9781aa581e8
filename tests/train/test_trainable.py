"""A phase that trains some modules: the others stay as they are, and the run resumes in and across phases."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.checkpoint_index import read_plain
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.models.families import complete
from kielo.models.parameter_shapes import parameter_shapes
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout, Model, Recipe
from kielo.resolve.planned_phases import (
    flops_per_token,
    frozen_share,
    trains,
)
from kielo.resolve.resolve import refuse_before_text
from kielo.resolve.resolved import Resolved
from kielo.resolve.rules import MODEL_RULES, Case, Machine, complaints
from kielo.resolve.state_bytes import state_bytes
from kielo.train import build
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.tiny_run import SEQUENCES, resolve, write_tokens

STEPS, BORDER = 8, 3  # the last step, and that of the phase with a frozen body
ENDS = ("embed", "head")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens")
    return tmp_path


def in_two_phases(folder: Path, name: str, trainable: tuple[str, ...] = ENDS, **changes: Any) -> Resolved:
    """The run of eight steps, of which the first three train only some modules, in a folder of its own."""
    (folder / name).mkdir(exist_ok=True)
    if not (folder / name / "tokens").exists():
        (folder / name / "tokens").symlink_to(folder / "tokens")
    resolved = resolve(
        folder / name, **({"every_steps": 1, "keep_newest": 50, "total_steps": STEPS} | changes)
    )
    (phase,), (placed,) = resolved.identity.phases, resolved.placement.phases
    first = phase.model_copy(update={"steps": BORDER, "trainable": trainable})
    second = phase.model_copy(
        update={"first_step": BORDER + 1, "steps": phase.steps - BORDER, "first_sample": BORDER * SEQUENCES}
    )
    identity = resolved.identity.model_copy(update={"phases": (first, second)})
    placement = resolved.placement.model_copy(update={"phases": (placed, placed)})
    return Resolved(identity=identity, placement=placement)


def stored(resolved: Resolved, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(Path(resolved.placement.train_folder) / "checkpoints" / f"step_{step:08d}")


def plain(resolved: Resolved, step: int) -> dict[str, Any]:
    return read_plain(Path(resolved.placement.train_folder) / "checkpoints" / f"step_{step:08d}")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def train_on_rank(resolved: Resolved, max_steps: int | None) -> str:
    torch.set_num_threads(1)
    return train(resolved, max_steps).outcome


def test_only_the_named_modules_are_trained(folder: Path) -> None:
    """Frozen weights keep every bit and have no moments; gradients are those of a model without frozen parts.

    After the border every weight changes. The moments of the body begin there, and so does their bias
    correction: the first update of AdamW moves a weight without decay by the learning rate.
    """
    changes = {"max_gradient_norm": 1e9, "warmup_steps": 1}
    resolved = in_two_phases(folder, "frozen", **changes)
    train(resolved)
    trained = {"embed.weight", "head.weight"}
    first, before, after, last = (stored(resolved, step) for step in (1, BORDER, BORDER + 1, STEPS))
    weights = {name.removeprefix("model/") for name in first if name.startswith("model/")}
    assert weights == set(parameter_shapes(resolved.identity.model))
    assert {name.split("/")[1] for name in before if name.startswith("optimiser/")} == trained
    assert {name.split("/")[1] for name in after if name.startswith("optimiser/")} == weights
    for name in weights:
        is_same = torch.equal(first[f"model/{name}"], before[f"model/{name}"])
        assert is_same != (name in trained), name
        assert not torch.equal(before[f"model/{name}"], last[f"model/{name}"]), name
    whole = in_two_phases(folder, "whole", (), **changes)
    train(whole, 1)
    for name in trained:  # a tenth of the first gradient
        assert torch.equal(first[f"optimiser/{name}/exp_avg"], stored(whole, 1)[f"optimiser/{name}/exp_avg"])
    assert plain(resolved, BORDER)["trained"] == [[0, list(ENDS)]]
    assert plain(resolved, STEPS)["trained"] == [[0, list(ENDS)], [BORDER, []]]
    assert [plain(resolved, step)["optimiser_updates"] for step in (BORDER, STEPS)] == [BORDER, STEPS]
    rate = build.learning_rate(resolved.identity)(resolved.identity.tokens_after(BORDER + 1))
    name = "layers.1.mlp_norm.weight"
    moved = (after[f"model/{name}"] - before[f"model/{name}"]).abs()
    # eps is 1e-8, and gradients here are above 1e-4
    assert torch.allclose(moved, torch.full_like(moved, rate), rtol=1e-3)


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param((2,), marks=pytest.mark.full),
        pytest.param((BORDER,), marks=pytest.mark.full),
        (BORDER + 2, 7),
    ],
)
def test_a_stop_in_or_between_phases_changes_nothing(folder: Path, stops: tuple[int, ...]) -> None:
    """Weights and moments are bitwise those of a run that was never stopped."""
    whole, stopped = (in_two_phases(folder, name, every_steps=BORDER) for name in ("whole", "stopped"))
    train(whole)
    for step in stops:
        assert train(stopped, step).outcome == "requeue"
    assert train(stopped).outcome == "finished"
    assert_equal(stored(whole, STEPS), stored(stopped, STEPS))
    assert plain(whole, STEPS)["trained"] == plain(stopped, STEPS)["trained"]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        pytest.param({"shard": 2, "zero": 3}, False, marks=pytest.mark.full),
        pytest.param({"tensor": 2}, True, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "pipeline_layers": (1, 1)}, True, marks=pytest.mark.full),
    ],
)
def test_layouts_and_other_ranks_train_the_same(folder: Path, layout: dict[str, Any], tied: bool) -> None:
    """One rank to the middle of the frozen phase, two ranks from there: the run of one, but for rounding."""
    model = resolve(folder).identity.model.model_copy(update={"tie_word_embeddings": tied})
    changes = {"model": model, "every_steps": BORDER}
    alone = in_two_phases(folder, "alone", **changes)
    train(alone)
    changed = in_two_phases(folder, "changed", **changes)
    train(changed, BORDER - 1)
    more = in_two_phases(folder, "changed", **changes, **layout)
    assert run_ranks(train_on_rank, 2, more, None) == ["finished", "finished"]
    assert plain(more, BORDER)["trained"] == [[0, list(ENDS)]]
    for step in (BORDER, STEPS):
        one, two = stored(alone, step), stored(more, step)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            # in fp32, over steps that AdamW makes of nearly equal gradients
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def small(tied: bool = False) -> Model:
    return complete(Model(
        hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=4, vocab_size=30, vocab_multiple=1, max_position_embeddings=8,
        tie_word_embeddings=tied,
    ), 8)  # fmt: skip


def test_what_a_frozen_part_costs() -> None:
    """By hand: no gradients and moments of the body, and two FLOPs fewer for each of its parameters."""
    model, vocabulary = small(), 30 * 8
    body = sum(
        torch.Size(shape).numel()
        for name, shape in parameter_shapes(model).items()
        if name.split(".")[0] not in ENDS
    )
    whole, frozen = (state_bytes(model, Layout(shard=1), 0, trainable=names) for names in ((), ENDS))
    assert frozen.parameters == whole.parameters == 4 * (2 * vocabulary + body)
    assert (frozen.gradients, frozen.optimiser) == (4 * 2 * vocabulary, 8 * 2 * vocabulary + 4 * 2)
    assert flops_per_token(model, 8, ()) - flops_per_token(model, 8, ENDS) == 2 * body
    assert (frozen_share(model, ENDS), frozen_share(model, ())) == (1.0, 0.0)
    assert frozen_share(model, ("layers.0", "norm")) == pytest.approx(2 / 3)


def test_names_that_match_nothing_are_refused() -> None:
    """Each with the fix; a tied head is the embedding; a pipeline must reach the embedding."""
    recipe = Recipe(
        name="t", language="et", corpus={"sources": ["a"]}, dataset={"sequence_length": 8},
        train={"trainable": ["embed", "hed"]},
        phases=[{"tokens": 1}, {"tokens": 1, "trainable": ["layers.*.mlp", "layers.7"]}],
    )  # fmt: skip
    case = Case.of(recipe, small(), Machine()).with_layout(Layout(pipeline=3))
    said = complaints(case, MODEL_RULES)
    assert [sentence.partition(" names no")[0] for sentence in said[:2]] == [
        'train.trainable: "hed"', 'phases.2.trainable: "layers.7"',
    ]  # fmt: skip
    assert "Fix: embed, layers, norm, head, or a module" in said[0]
    assert len(said) == 3 and "phases.2.trainable" in said[2] and "layout.pipeline = 1" in said[2]
    given = recipe.model_copy(update={"model": small()})
    with pytest.raises(KieloError, match='(?s)train.trainable: "hed" .*phases.2.trainable: "layers.7"'):
        refuse_before_text(given)
    refuse_before_text(
        given.model_copy(update={"phases": (), "train": recipe.train.model_copy(update={"trainable": ()})})
    )
    away = small().model_copy(update={"weights": "hf:OWNER/NOT_HERE"})
    refuse_before_text(recipe.model_copy(update={"model": away}))  # known when they are fetched
    assert trains(small(tied=True), ("head",), "embed.weight") and not trains(
        small(), ("head",), "embed.weight"
    )
    assert trains(small(), ("layers.1",), "layers.1.mlp.up.weight")
    assert not trains(small(), ("layers.1",), "layers.11.mlp.up.weight")
