"""A run made longer while its rate is level is the run that was that long from the start."""

import shutil
from pathlib import Path

import pytest
import torch

from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.recipe.errors import KieloError
from kielo.train.run import train
from tests.train.tiny_run import resolve, write_tokens

SCHEDULE = {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 4}


def losses(folder: Path) -> dict[int, float]:
    rows = of_kind(read_metrics(folder / "train" / "metrics.jsonl"), TrainingStep)
    return {row.step: row.loss for row in rows}


def test_a_longer_level_is_the_run_that_was_that_long_from_the_start(tmp_path: Path) -> None:
    """Stopped at step 6 of 10, which would decay from step 7 on; 14 steps have the losses of 14 at
    once, to the last bit."""
    torch.set_num_threads(1)
    long, grown = tmp_path / "long", tmp_path / "grown"
    for folder in (long, grown):
        write_tokens(folder / "tokens")
    assert train(resolve(long, total_steps=14, **SCHEDULE)).outcome == "finished"
    assert train(resolve(grown, total_steps=10, **SCHEDULE), max_steps=6).outcome == "requeue"
    assert train(resolve(grown, total_steps=14, **SCHEDULE)).outcome == "finished"
    assert losses(grown) == losses(long) and len(losses(long)) == 14


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps, stopped after four."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("stopped")
    write_tokens(folder / "tokens")
    train(resolve(folder, total_steps=10, **SCHEDULE), max_steps=4)
    return folder


@pytest.mark.parametrize(
    ("stopped_at", "changes", "way"),
    [
        (8, {}, r"step 8 is in the decay, which began after step 6: .*model\.weights=hf:"),
        (4, {"warmup_steps": 3}, r"train\.warmup_share=0\.142857143"),
        (4, {"decay_steps": 12}, r"would decay before step 4: a smaller decay_share"),
        (4, {"schedule": "cosine"}, r"schedule: was 'wsd', is now 'cosine'"),
        (4, {"learning_rate": 1e-2}, r"peak: was 0\.005, is now 0\.01"),
    ],
)
def test_another_past_is_refused_with_the_way_to_go(
    tmp_path: Path, stopped, stopped_at, changes, way
) -> None:
    """Steps that were trained at another rate are steps of another run."""
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    if stopped_at != 4:
        train(resolve(folder, total_steps=10, **SCHEDULE), max_steps=stopped_at)
    with pytest.raises(KieloError, match=way):
        train(resolve(folder, total_steps=14, **(SCHEDULE | changes)))


def test_a_cosine_cannot_grow(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens")
    train(resolve(tmp_path, total_steps=10), max_steps=2)
    with pytest.raises(KieloError, match='only train.schedule = "wsd" has a level part'):
        train(resolve(tmp_path, total_steps=14))
