"""Parity over ranks: Kielo in a layout, then transformers under accelerate with FSDP, in fp32 and bf16."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kielo.artifact.verify_results import Parity
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.dataset.batches import Batches
from kielo.evaluate.score_on_ranks import bytes_of_scoring
from kielo.models.llama.model import Llama, initial_value
from kielo.recipe.cards import accelerator
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.resolve.memory import usable_bytes
from kielo.resolve.resolve import resolve as resolve_recipe
from kielo.resolve.resolved import Resolved
from kielo.resolve.shares import rank_of_stage
from kielo.resolve.text import imagined_text
from kielo.verify import kielo_ranks
from kielo.verify.parity_on_ranks import Job, verify_parity_on_ranks
from kielo.verify.parity_size import (
    RanksOptions,
    bytes_of_sides,
    phase_of,
    refuse_too_large_parity,
    rows_of,
    scaled,
)
from kielo.verify.rehearse import rehearse
from kielo.verify.sketch import relative_distance, sketch_of
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

FULL = pytest.mark.full


def test_a_sketch_tells_the_distance_of_tensors_whose_parts_are_apart() -> None:
    """Sketches of parts add up to the whole's; distances of known size come out within a factor of two. Equal
    weights are equal by whichever dim they are split: parity allows 1e-6, and sums in fp32 were 1.2e-6 off.
    """
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(1024, 2816, generator=generator)
    columns = slice(0, 1408), slice(1408, 2816)
    halves = [sketch_of(wide[:, one], (slice(0, 1024), one), wide.shape) for one in columns]
    every = sketch_of(wide, (slice(0, 1024), slice(0, 2816)), wide.shape)
    torch.testing.assert_close(sum(halves), every, rtol=1e-12, atol=1e-9)
    whole = torch.randn(60, 40, generator=generator)
    found = sketch_of(whole, (slice(0, 60), slice(0, 40)), whole.shape)
    parts = [
        sketch_of(whole[rows, columns], (rows, columns), whole.shape)
        for rows in (slice(0, 17), slice(17, 60))
        for columns in (slice(0, 40),)
    ]
    torch.testing.assert_close(sum(parts), found, rtol=1e-6, atol=1e-4)
    assert found[0].item() == pytest.approx(whole.double().square().sum().item(), rel=1e-6)
    for size in (1e-1, 1e-3):
        noise = torch.randn(60, 40, generator=generator)
        moved = whole + size * noise * whole.norm() / noise.norm()
        there = sketch_of(moved, (slice(0, 60), slice(0, 40)), whole.shape)
        assert size / 2 < relative_distance(there.tolist(), found.tolist()) < size * 2


def saved(folder: Path, resolved: Resolved) -> Path:
    """A checkpoint of the model's first weights."""
    model = resolved.identity.model
    with torch.device("meta"):
        named = dict(Llama(model).named_parameters())
    checkpointer = Checkpointer(folder / "checkpoints")
    weights = {f"model/{name}": initial_value(name, p.shape, model, 11) for name, p in named.items()}
    checkpointer.save(5, weights, {})
    return checkpointer.settle()


def certified(
    folder: Path, resolved: Resolved, options: RanksOptions, planted: str = ""
) -> dict[str, Any] | None:
    """The certificate on a rank. planted: the error of 1e-3 that only Kielo's side has."""
    torch.set_num_threads(1)
    checkpoint = folder / "checkpoints" / "step_00000005"
    if planted == "layer":
        build = kielo_ranks.built

        def with_wrong_layer(*given: Any) -> Any:
            model, mesh = build(*given)
            model.layers["1"].mlp.register_forward_hook(lambda _, inputs, output: output * 1.001)
            return model, mesh

        kielo_ranks.built = with_wrong_layer
    if planted == "data":
        read, run = Batches.step, Job.kielo

        def with_wrong_token(self: Batches, step: int, rank: int, ranks: int) -> Any:
            batch = read(self, step, rank, ranks)
            if (rank, ranks) == (1, 2):
                np.put(batch.inputs, 3, (batch.inputs.flat[3] + 1) % 7)
            return batch

        def with_wrong_rank(self: Job, *given: Any) -> Any:
            Batches.step = with_wrong_token
            try:
                return run(self, *given)
            finally:
                Batches.step = read

        Job.kielo = with_wrong_rank
    found = verify_parity_on_ranks(resolved, folder / "parity_on_ranks", lambda: checkpoint, options)
    return None if found is None else found.content()


def check(folder: Path, options: RanksOptions, planted: str = "", **axes: int) -> Parity:
    write_tokens(folder / "tokens")
    is_tied = bool(axes.pop("tied", False))
    stages = {"pipeline_layers": (1, 1), "pipeline_stages_per_rank": 1} if "pipeline" in axes else {}
    resolved = resolve(folder, **axes, **stages)
    model = resolved.identity.model.model_copy(update={"tie_word_embeddings": is_tied})
    resolved = resolved.model_copy(update={"identity": resolved.identity.model_copy(update={"model": model})})
    saved(folder, resolved)
    ranks = resolved.placement.world_size
    first, *others = run_ranks(certified, ranks, folder, resolved, options, planted, timeout_seconds=280)
    assert others == [None] * (ranks - 1)
    on_disk = json.loads((folder / "parity_on_ranks" / "parity.json").read_text())
    assert on_disk == json.loads(json.dumps(first))
    return Parity.model_validate(first)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "axes", [{}, {"tensor": 2}, {"shard": 2}, {"pipeline": 2}, {"context": 2}, {"tensor": 2, "pipeline": 2},
     {"shard": 2, "tied": 1}, {"pipeline": 2, "tied": 1}],
    ids=str,
)  # fmt: skip
@pytest.mark.full
def test_layouts_agree_with_accelerate(axes: dict[str, int], precision: str, tmp_path: Path) -> None:
    found = check(tmp_path, RanksOptions(steps=3, precision=precision), **axes)
    assert found.passed, found.first_difference
    assert found.gradient_max_relative_difference < 1e-5 and found.logits_max_difference < 1e-5
    assert found.precision == precision and found.layout.endswith(f", in {precision}")
    assert (found.losses.rounding_differences is not None) == (precision == "bf16")


@pytest.mark.parametrize("planted", ["layer", "data", "rate"])
@pytest.mark.full
def test_an_error_of_a_thousandth_is_refused_in_bf16(planted: str, tmp_path: Path) -> None:
    """In one layer, in one rank's data or in the learning rate; and it is named."""
    rate = {"learning_rate": 5e-3 * 1.001} if planted == "rate" else {}
    options = RanksOptions(steps=2, precision="bf16", hugging_face_overrides=rate)
    found = check(tmp_path, options, planted, **({"tensor": 2} if planted == "layer" else {"shard": 2}))
    first = found.first_difference
    assert not found.passed and first is not None
    if planted == "layer":
        assert first.gradient is not None and not first.settings
    else:
        what = "sequences of all steps" if planted == "data" else "learning rate of each step"
        assert first.settings == [what]


@pytest.mark.parametrize(
    ("name", "ranks", "card", "axes"),
    [
        ("estonian_llama31_8b", 4, "a100_64", {"tensor": 2, "pipeline": 2, "shard": 1}),
        ("estonian_llama31_8b", 1, "h200", {"tensor": 1, "pipeline": 1, "shard": 1}),
        ("estonian_llama31_70b", 128, "mi250x_gcd", {}),
    ],
)
def test_both_sides_of_large_models_fit_their_devices(
    name: str, ranks: int, card: str, axes: dict[str, int]
) -> None:
    """At least the states of AdamW, 16 bytes a parameter, are counted; longer sequences are refused."""
    recipe = read_recipe(name, [f"layout.{axis}={size}" for axis, size in axes.items()]).recipe
    resolved = resolve_recipe(recipe, run_folder(recipe), ranks, "cuda", card, text=imagined_text(recipe))
    options = RanksOptions(precision="bf16", sequence_length=1024).fitting(resolved)
    found = bytes_of_sides(resolved, options)
    states = 16 * resolved.placement.parameters / ranks
    assert all(states < needed <= usable_bytes(accelerator(card)) for needed in found.values())
    refuse_too_large_parity(resolved, options)
    scoring = bytes_of_scoring(resolved, resolved.placement.layout, "fp32", False)
    assert 4 * resolved.placement.parameters / ranks < scoring < min(found.values())
    too_long = replace(options, sequence_length=2**17)
    with pytest.raises(KieloError, match=r"needs .* GB on each of .* usable\. Fix: --sequence-length 65536"):
        refuse_too_large_parity(resolved, too_long)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks", "card", "axes", "precision"),
    [
        ("estonian_llama31_8b", 4, "a100_64", {"tensor": 2, "pipeline": 2, "shard": 1}, "bf16"),
        ("estonian_llama31_8b", 1, "h200", {"tensor": 1, "pipeline": 1, "shard": 1}, "fp32"),
        ("estonian_llama31_8b", 1, "h200", {"tensor": 1, "pipeline": 1, "shard": 1}, "bf16"),
        ("estonian_llama31_70b", 128, "mi250x_gcd", {}, "fp32"),
    ],
)
def test_kielos_side_needs_no_more_in_a_rehearsal_than_was_counted(
    name: str, ranks: int, card: str, axes: dict[str, int], precision: str
) -> None:
    """Of the first and the last pipeline rank, by the operators of a whole step; 5 % are the formula's."""
    recipe = read_recipe(name, [f"layout.{axis}={size}" for axis, size in axes.items()]).recipe
    resolved = resolve_recipe(recipe, run_folder(recipe), ranks, "cuda", card, text=imagined_text(recipe))
    options = RanksOptions(precision=precision, sequence_length=1024).fitting(resolved)
    of_run = scaled(resolved, options)
    layout = of_run.placement.layout
    phase = phase_of(of_run.identity, options, 1)
    sequences = -(-phase.sequences_per_step // (layout.replicate * layout.shard))
    placed = of_run.placement.phases[0].model_copy(
        update={"micro_batch_sequences": 1, "micro_batches_per_step": rows_of(layout, sequences)}
    )
    of_run = Resolved(
        identity=of_run.identity.model_copy(update={"phases": (phase,)}),
        placement=of_run.placement.model_copy(update={"phases": (placed,)}),
    )
    counted = bytes_of_sides(resolved, options)["Kielo"]
    for rank in {rank_of_stage(layout, 0), rank_of_stage(layout, layout.pipeline - 1)}:
        needed = rehearse(of_run, rank)["needed_bytes"]
        assert needed <= 1.05 * counted and needed <= usable_bytes(accelerator(card))
