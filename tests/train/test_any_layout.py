"""A checkpoint of one layout goes on in any other: the same state bit for bit, the same text, the same
losses.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.metrics import HeldOutLoss, Kind, TrainingStep, of_kind, read_metrics
from kielo.checkpoint.store import read_plain, read_tensors
from kielo.resolve.resolved import Resolved
from kielo.train import build, next_token
from kielo.train.run import train
from kielo.train.state import Checkpoints
from tests.ranks import run_ranks
from tests.train.tiny_run import SEQUENCES, resolve, write_tokens

HALF, LATER, END = (f"train/checkpoints/step_000000{step}" for step in (10, 15, 20))


# What a rank found: tensors and counts that are not those saved, the names of the tensors that it has,
# samples by step.
Found = tuple[list[str], set[str], dict[int, tuple[int, ...]]]


def resolved_for(folder: Path, tied: bool = False, **layout: Any) -> Resolved:
    """Three layers, for stages that have as many and stages that have more than others."""
    plan = resolve(folder, **layout)
    model = plan.identity.model.model_copy(update={"num_hidden_layers": 3, "tie_word_embeddings": tied})
    return plan.model_copy(update={"identity": plan.identity.model_copy(update={"model": model})})


def on_rank(resolved: Resolved, half: Path | None = None) -> Found:
    """Train to the end, and see what the run holds after restoring and before its first step that `half` does
    not say. Without `half`, from the start: the loss of step 4 is no number, so that there is a skip to
    count.
    """
    differing: list[str] = []
    names: set[str] = set()
    samples: dict[int, tuple[int, ...]] = {}
    original_restore, original_take, original_loss = (
        Checkpoints.restore,
        build.Feed.take,
        next_token.chunked_loss,
    )

    def restore(self: Checkpoints) -> None:
        original_restore(self)
        if half is None:
            return
        saved, plain = read_tensors(half), read_plain(half)
        restored = {name: tensor.detach().full_tensor() for name, tensor in self._tensors.items()}
        names.update(restored)
        differing.extend(name for name, tensor in restored.items() if not torch.equal(saved[name], tensor))
        state = {"guard": self._guard.plain_state(), "optimiser_updates": self._optimiser.updates}
        state |= {name: getattr(self._state, name) for name in ("step", "tokens", "samples")}
        differing.extend(name for name, value in state.items() if plain[name] != value)

    def take(self: Any, step: int) -> Any:
        batch = original_take(self, step)
        samples[step] = batch.samples
        return batch

    def loss(*args: Any) -> torch.Tensor:
        return original_loss(*args) * (float("nan") if half is None and max(samples) == 4 else 1.0)

    Checkpoints.restore, build.Feed.take, next_token.chunked_loss = restore, take, loss
    assert train(resolved).outcome == "finished"
    return differing, names, samples


def samples_of(results: list[Found]) -> dict[int, list[int]]:
    """Step → sample numbers over all ranks, sorted; tensor, context and pipeline ranks share theirs."""
    return {step: sorted({s for *_, samples in results for s in samples[step]}) for step in results[0][2]}


def rows(folder: Path, *keys: str) -> torch.Tensor:
    """Of the last ten steps."""
    return torch.tensor(
        [[getattr(row, key) for key in keys] for row in logged(folder, TrainingStep)[-10:]],
        dtype=torch.float64,
    )


def logged(folder: Path, kind: type[Kind]) -> list[Kind]:
    return of_kind(read_metrics(folder / "train" / "metrics.jsonl"), kind)


WITHIN_STAGES = {"shard": 2, "context": 2, "tensor": 2, "micro_batch": 2}
WITH_STAGES = {"shard": 2, "tensor": 2, "pipeline": 2, "micro_batch": 1, "pipeline_layers": (2, 1)}


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[dict], tuple[Path, dict[int, list[int]]]]:
    """Layout → the folder of twenty steps on eight ranks, a checkpoint after ten, and the samples of each
    step.
    """
    made: dict[bool, tuple[Path, dict[int, list[int]]]] = {}

    def run(layout: dict[str, Any]) -> tuple[Path, dict[int, list[int]]]:
        has_stages = "pipeline" in layout
        if has_stages not in made:
            folder = tmp_path_factory.mktemp("eight")
            write_tokens(folder / "tokens")
            results = run_ranks(
                on_rank, 8, resolved_for(folder, **layout, checkpoint_every_steps=10), timeout_seconds=160
            )
            made[has_stages] = folder, samples_of(results)
        return made[has_stages]

    return run


def goes_on(folder: Path, resolved: Resolved, checkpoint: str = HALF) -> list[Found]:
    """Train on from `checkpoint`; all ranks together had restored all of it, bit for bit."""
    saved = read_tensors(folder / checkpoint).keys()
    results = run_ranks(on_rank, resolved.placement.world_size, resolved, folder / checkpoint)
    assert [differing for differing, *_ in results] == [[]] * len(results)
    assert set().union(*(names for _, names, _ in results)) == saved
    return results


def copy(whole: Path, to: Path, checkpoint: str = HALF) -> None:
    shutil.copytree(whole / "tokens", to / "tokens")
    shutil.copytree(whole / checkpoint, to / checkpoint)


def assert_equal_runs(folder: Path, whole: Path) -> None:
    """The last ten steps, and how held-out text scores at their end: it comes in pieces of unequal sizes,
    which depend on the layout.
    """
    exact = ("step", "samples", "tokens", "learning_rate", "skipped")
    assert torch.equal(rows(folder, *exact), rows(whole, *exact))
    torch.testing.assert_close(rows(folder, "loss"), rows(whole, "loss"), rtol=1e-5, atol=0)
    scores = [logged(run, HeldOutLoss)[-1] for run in (folder, whole)]
    assert scores[0].step == scores[1].step == 20
    assert scores[0].heldout_loss == pytest.approx(scores[1].heldout_loss, rel=1e-5)


@pytest.mark.parametrize(("saved_on", "layout"), [
    (WITHIN_STAGES, {"micro_batch": 4}),
    (WITHIN_STAGES, {"tensor": 2, "micro_batch": 3}),
    (WITHIN_STAGES, {"replicate": 2, "context": 2, "zero": 2, "micro_batch": 1}),
    pytest.param(WITH_STAGES, {"micro_batch": 3}, marks=pytest.mark.full),
    pytest.param(
        WITH_STAGES, {"pipeline": 2, "pipeline_schedule": "interleaved_zero_bubble", "pipeline_layers": (1, 1, 1, 0)},
        marks=pytest.mark.full,
    ),
    pytest.param(WITH_STAGES, {"shard": 2, "tensor": 2}, marks=pytest.mark.full),
], ids="-".join)  # fmt: skip
def test_saved_on_eight_ranks_it_goes_on_in_any_layout(tmp_path, undisturbed, saved_on, layout):
    """Weights, moments, guard and counts are those saved, bit for bit; the next ten steps see the same
    samples at the same learning rates, and their losses and the held-out score are within 1e-5.
    """
    whole, samples = undisturbed(saved_on)
    copy(whole, tmp_path)
    results = goes_on(tmp_path, resolved_for(tmp_path, **layout))
    assert samples_of(results) == {step: samples[step] for step in range(11, 21)}
    plain = read_plain(tmp_path / HALF)
    guard = plain["guard"]
    assert (plain["optimiser_updates"], guard["in_a_row"], guard["skipped"]) == (9, 0, 1)
    assert [row[0] is None for row in guard["last"]] == [step == 4 for step in range(1, 11)]
    assert samples[11] == list(range(10 * SEQUENCES, 11 * SEQUENCES))
    assert_equal_runs(tmp_path, whole)


def test_one_rank_goes_on_as_a_v_and_that_resumes_to_the_bit(tmp_path):
    """Saved on one rank with tied embeddings, continued on two pipeline ranks, the first with both ends: the
    same run. Stopped there and started again, the pipeline's weights and moments are those of the one that
    never stopped, bit for bit.
    """
    one, stages, again = (tmp_path / name for name in ("one", "stages", "again"))
    write_tokens(one / "tokens")
    run_ranks(on_rank, 1, resolved_for(one, tied=True, checkpoint_every_steps=10))
    v = {"pipeline": 2, "pipeline_schedule": "zbv", "pipeline_layers": (1, 1, 1, 0), "tied": True}
    copy(one, stages)
    goes_on(stages, resolved_for(stages, **v, checkpoint_every_steps=5))
    assert_equal_runs(stages, one)
    copy(stages, again, LATER)
    goes_on(again, resolved_for(again, **v), LATER)
    resumed, whole = (read_tensors(run / END) for run in (again, stages))
    assert resumed.keys() == whole.keys() == read_tensors(one / END).keys()
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []
