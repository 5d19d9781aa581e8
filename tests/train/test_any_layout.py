"""A checkpoint of one layout goes on in any other:
the same state bit for bit, the same text, the same losses.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.checkpoint_folder import step_of
from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.metrics import HeldOutLoss, Kind, TrainingStep, of_kind, read_metrics
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.resolve.resolved import Resolved
from kielo.resolve.software import schedule_complaint
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.tiny_run import LENGTH, SEQUENCES, resolve, write_tokens

STEPS = 8
HALF, LATER, END = (f"train/checkpoints/step_{step:08d}" for step in (4, 6, STEPS))


def resolved_for(folder: Path, tied: bool = False, **layout: Any) -> Resolved:
    """Three layers, for stages that have as many and stages that have more than others."""
    plan = resolve(folder, total_steps=STEPS, heldout_every_steps=4, **layout)
    model = plan.identity.model.model_copy(update={"num_hidden_layers": 3, "tie_word_embeddings": tied})
    return plan.model_copy(update={"identity": plan.identity.model_copy(update={"model": model})})


def rows(folder: Path, *keys: str) -> torch.Tensor:
    """The last four steps' values of these keys."""
    return torch.tensor(
        [[getattr(row, key) for key in keys] for row in logged(folder, TrainingStep)[-4:]],
        dtype=torch.float64,
    )


def logged(folder: Path, kind: type[Kind]) -> list[Kind]:
    return of_kind(read_metrics(folder / "train" / "metrics.jsonl"), kind)


WITHIN_STAGES = {"shard": 2, "tensor": 2, "micro_batch": 4}
WITH_STAGES = {"shard": 2, "tensor": 2, "pipeline": 2, "micro_batch": 1, "pipeline_layers": (2, 1)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict], Path]:
    """Layout → the folder of eight steps on its ranks, step 3 not finite, and a checkpoint after four."""
    made: dict[bool, Path] = {}

    def run(layout: dict[str, Any]) -> Path:
        has_stages = "pipeline" in layout
        if has_stages not in made:
            folder = made[has_stages] = tmp_path_factory.mktemp("whole")
            write_tokens(folder / "tokens", spoilt_steps=(3,))
            resolved = resolved_for(folder, **layout, every_steps=4)
            run_ranks(train, resolved.placement.world_size, resolved, timeout_seconds=160)
        return made[has_stages]

    return run


def goes_on(folder: Path, checkpoint: str = HALF, **layout: Any) -> None:
    """Trains on from `checkpoint`. The ranks restore all of it: saved again after a step that was passed
    over, it is the same bit for bit.
    """
    step = step_of(folder / checkpoint) + 1
    rest = folder / "at_rest"
    copy(folder, rest, checkpoint)
    at_rest = resolved_for(rest, **layout, skip_steps=((step, step),))
    resolved = resolved_for(folder, **layout)
    for asked, max_steps in ((at_rest, step), (resolved, None)):
        run_ranks(train, resolved.placement.world_size, asked, max_steps)
    saved = rest / checkpoint
    again = rest / "train" / "checkpoints" / f"step_{step:08d}"
    assert_equal_tensors(again, saved)
    before, after = read_plain(saved), read_plain(again)
    assert all(after[name] == before[name] for name in ("guard", "optimiser_updates"))
    step_sizes = {"step": 1, "samples": SEQUENCES, "tokens": SEQUENCES * LENGTH}
    assert {name: after[name] - before[name] for name in step_sizes} == step_sizes


def assert_equal_tensors(found: Path, expected: Path) -> None:
    """Two checkpoints hold the same tensors, bit for bit."""
    one, other = read_tensors(found), read_tensors(expected)
    assert one.keys() == other.keys()
    assert [name for name in other if not torch.equal(one[name], other[name])] == []


def skip_unless_torch_runs(schedule: str) -> None:
    complaint = schedule_complaint(schedule, torch.__version__)
    if complaint is not None:
        pytest.skip(complaint)


def copy(whole: Path, to: Path, checkpoint: str = HALF) -> None:
    shutil.copytree(whole / "tokens", to / "tokens")
    shutil.copytree(whole / checkpoint, to / checkpoint)


def assert_equal_runs(folder: Path, whole: Path) -> None:
    """The last four steps, and how held-out text scores at their end: it comes in parts of unequal sizes,
    which depend on the layout.
    """
    exact = ("step", "samples", "tokens", "learning_rate", "skipped")
    assert torch.equal(rows(folder, *exact), rows(whole, *exact))
    torch.testing.assert_close(rows(folder, "loss"), rows(whole, "loss"), rtol=1e-5, atol=0)
    scores = [logged(run, HeldOutLoss)[-1] for run in (folder, whole)]
    assert scores[0].step == scores[1].step == STEPS
    assert scores[0].heldout_loss == pytest.approx(scores[1].heldout_loss, rel=1e-5)


@pytest.mark.parametrize(("saved_on", "layout"), [
    pytest.param(WITHIN_STAGES, {"micro_batch": 4}, marks=pytest.mark.full),
    pytest.param(WITHIN_STAGES, {"context": 2, "micro_batch": 3}, marks=pytest.mark.full),
    pytest.param(WITHIN_STAGES, {"tensor": 2, "micro_batch": 3}, marks=pytest.mark.full),
    pytest.param(
        WITHIN_STAGES, {"replicate": 2, "context": 2, "zero": 2, "micro_batch": 1}, marks=pytest.mark.full
    ),
    pytest.param(WITH_STAGES, {"micro_batch": 3}, marks=pytest.mark.full),
    pytest.param(
        WITH_STAGES,
        {"pipeline": 2, "pipeline_schedule": "interleaved_zero_bubble", "pipeline_layers": (1, 1, 1, 0)},
        marks=pytest.mark.full,
    ),
    pytest.param(WITH_STAGES, {"shard": 2, "tensor": 2}, marks=pytest.mark.full),
], ids="-".join)  # fmt: skip
def test_saved_on_many_ranks_it_goes_on_in_any_layout(tmp_path, undisturbed, saved_on, layout):
    """Weights, moments, guard and counts are those saved, bit for bit; the next four steps see the same
    text, as their losses say: these and the held-out score are within 1e-5, at the same learning rates.
    """
    skip_unless_torch_runs(layout.get("pipeline_schedule", "1f1b"))
    whole = undisturbed(saved_on)
    copy(whole, tmp_path)
    goes_on(tmp_path, **layout)
    plain = read_plain(tmp_path / HALF)
    guard = plain["guard"]
    assert (plain["optimiser_updates"], guard["in_a_row"], guard["skipped"]) == (3, 0, 1)
    assert [row[0] is None for row in guard["last"]] == [step == 3 for step in range(1, 5)]
    assert_equal_runs(tmp_path, whole)


def test_one_rank_goes_on_as_a_v_and_that_resumes_to_the_bit(tmp_path):
    """Saved on one rank with tied embeddings, continued on two pipeline ranks, the first with both ends: the
    same run. Stopped there and started again, the pipeline's weights and moments are those of the one that
    never stopped, bit for bit.
    """
    skip_unless_torch_runs("zbv")
    one, stages, again = (tmp_path / name for name in ("one", "stages", "again"))
    write_tokens(one / "tokens")
    run_ranks(train, 1, resolved_for(one, tied=True, every_steps=4))
    v = {"pipeline": 2, "pipeline_schedule": "zbv", "pipeline_layers": (1, 1, 1, 0), "tied": True}
    copy(one, stages)
    goes_on(stages, **v, every_steps=2)
    assert_equal_runs(stages, one)
    copy(stages, again, LATER)
    goes_on(again, LATER, **v)
    assert_equal_tensors(again / END, stages / END)
    assert read_tensors(again / END).keys() == read_tensors(one / END).keys()
