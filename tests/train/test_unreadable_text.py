"""Text that cannot be read in mid-run stops every rank, by name; the run resumes once it is whole again."""

import errno
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.stage_json import read_json
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.dataset.batches import Batch, Batches
from kielo.recipe.errors import KieloError, sentence
from kielo.resolve.resolved import Resolved
from kielo.train.feed import Feed
from kielo.train.run import train
from tests.fault_times import FaultTimes
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

SAMPLE = 45  # of "books", in step 6; the second of two data ranks reads it once both have opened the file
NAMED = r"^step \d: sample \d+ of books \(a\.txt:\d+.*\): "
FIX = r"Fix: restore the file and start again; the run resumes from its newest checkpoint$"
REASONS = {
    "cut": r".*tokens/books\.bin: ends at byte [\d,]+: it was cut",
    "ids": r".*tokens/books\.bin: has ids up to 60,000, but the vocabulary has 70 rows",
    "unreadable": r"books\.bin: Input/output error",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A packed folder that lists the documents of "books"."""
    write_tokens(tmp_path / "tokens")
    ids = "".join(f"a.txt:{number}\n" for number in range(30))
    (tmp_path / "tokens" / "books.ids.txt").write_text(ids, encoding="utf-8")
    return tmp_path


def damage(file: Path, kind: str) -> None:
    if kind == "cut":
        os.truncate(file, 0)
    elif kind == "ids":
        tokens = np.full(file.stat().st_size // 2, 60_000, "<u2").tobytes()
        with open(file, "r+b") as content:
            content.write(tokens)
    else:
        raise OSError(errno.EIO, "Input/output error", "books.bin")


def on_rank(
    resolved: Resolved, kind: str, stop_at: int | None = None, times: FaultTimes | None = None
) -> str:
    """Trains; the last rank's disk fails when it reads `SAMPLE`. Returns the outcome or the error."""
    file = Path(resolved.placement.tokens_folder) / "books.bin"
    read, take = Batches.read, Feed.take

    def read_or_not(self: Batches, samples: np.ndarray) -> Batch:
        if int(os.environ["RANK"]) == resolved.placement.world_size - 1 and SAMPLE in samples:
            if times is not None:
                times.note("planted")
            damage(file, kind)
        return read(self, samples)

    def take_or_stop(self: Feed, step: int) -> Any:
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, step)

    Batches.read, Feed.take = read_or_not, take_or_stop
    try:
        return train(resolved).outcome
    except Exception as error:
        if times is not None:
            times.note("found")
        return sentence(error) or repr(error)


def go_on(resolved: Resolved, times: FaultTimes | None = None) -> str:
    if times is not None:
        times.watch_steps()
    return train(resolved).outcome


@pytest.mark.full
@pytest.mark.parametrize("kind", ["cut", "unreadable"])
@pytest.mark.parametrize("layout", [{}, {"shard": 2}, {"tensor": 2}], ids=["1 rank", "2 shards", "2 parts"])
def test_every_rank_stops_and_the_run_goes_on(
    folder: Path, tmp_path: Path, layout: dict[str, int], kind: str, fault_times: FaultTimes
) -> None:
    """One rank alone may see the fault: it names step, sample, documents and file, and no rank hangs.

    With the file restored, the same command ends with the bits of a run that had no fault.
    """
    ranks = 2 if layout else 1
    places = {name: tmp_path / name for name in ("undisturbed", "failing")}
    for place in places.values():
        shutil.copytree(folder / "tokens", place / "tokens")
    undisturbed, failing = (resolve(place, **layout, total_steps=10) for place in places.values())
    run_ranks(go_on, ranks, undisturbed)
    assert run_ranks(on_rank, ranks, failing, kind, 3) == ["requeue"] * ranks
    said = run_ranks(on_rank, ranks, failing, kind, None, fault_times)
    assert not {"requeue", "finished"} & set(said)
    assert [one for one in said if re.search(f"{NAMED}{REASONS[kind]}.*{FIX}", one)], said
    assert read_json(places["failing"] / "train", Outcome).outcome == "failed"
    shutil.copy(folder / "tokens" / "books.bin", places["failing"] / "tokens")
    assert run_ranks(go_on, ranks, failing, fault_times) == ["finished"] * ranks
    ends = [read_tensors(place / "train" / "checkpoints" / "step_00000010") for place in places.values()]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("kind", ["cut", "ids"])
def test_damage_in_mid_run_and_while_it_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In mid-run the step that needs it stops the run; the next start refuses the file before any step."""
    resolved, take = resolve(folder, total_steps=8), Feed.take
    file = folder / "tokens" / "books.bin"
    whole = file.read_bytes()

    def take_and_damage(self: Feed, step: int) -> Any:
        found = take(self, step)
        if step == 3:
            damage(file, kind)
        return found

    monkeypatch.setattr(Feed, "take", take_and_damage)
    with pytest.raises(KieloError, match=NAMED + REASONS[kind]):
        train(resolved)
    outcome = read_json(folder / "train", Outcome)
    assert outcome.outcome == "failed" and "books.bin" in outcome.message
    monkeypatch.setattr(Feed, "take", take)
    refusal = "it has 0 bytes, but the stage wrote" if kind == "cut" else "is not what the pack stage wrote"
    with pytest.raises(KieloError, match=rf"tokens/books\.bin: {refusal}"):
        train(resolved)
    file.write_bytes(whole)
    assert train(resolved).outcome == "finished"
