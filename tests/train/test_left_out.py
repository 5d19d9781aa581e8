"""Sequences that cannot be read in mid-run: exactly they are left out, by all ranks, and all others stay."""

import errno
import os
import shutil
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kielo.artifact.attempt_files import ALERTS_NAME
from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.metrics import LeftOutSequence, of_kind, read_metrics
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_sources import check_unchanged, find_token_files
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.dataset.batches import NOT_COUNTED, Batch, Batches, Unreadable
from kielo.dataset.readable import read_sequences, without_sequences
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved
from kielo.train.feed import Feed
from kielo.train.left_out import LeftOut
from kielo.train.run import train
from kielo.train.state import State
from tests.fault_times import FaultTimes
from tests.started_ranks import run_ranks
from tests.train.tiny_run import LENGTH, VOCABULARY, resolve, write_tokens

ROWS = 70  # of the embedding
SAMPLES = np.arange(64)
# two of step 5 and one of step 9
UNREADABLE = [33, 34, 70]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "tokens")
    return tmp_path


def opened(folder: Path) -> Batches:
    identity = resolve(folder).identity
    return Batches(folder / "tokens", identity.seed, identity.phases[0], LENGTH, 0, mask_documents=True)


def cut(file: Path) -> range:
    """Cuts a file in half; returns the tokens that are gone, as the others do."""
    tokens = file.stat().st_size // 2
    os.truncate(file, tokens)
    return range(tokens // 2, tokens)


def remove(file: Path) -> range:
    tokens = file.stat().st_size // 2
    file.unlink()
    return range(tokens)


def spoil(file: Path) -> range:
    """Makes two tokens in the middle ids that the embedding has no row for."""
    first = file.stat().st_size // 4
    with open(file, "r+b") as content:
        content.seek(2 * first)
        content.write(np.array([ROWS, 60_000], "<u2").tobytes())
    return range(first, first + 2)


@pytest.mark.parametrize(
    ("harm", "reason"), [(cut, "books.bin: ends at byte"), (remove, "No such file"), (spoil, "ids up to")]
)
def test_only_sequences_that_need_what_is_lost_are_unreadable(
    folder: Path, harm: Callable[[Path], range], reason: str
) -> None:
    """The other rows are the same; what is lost of a row is told with its source, place and documents."""
    ids = [f"a.txt:{number}" for number in range(30)]
    (folder / "tokens" / "books.ids.txt").write_text("\n".join(ids) + "\n", encoding="utf-8")
    batches = opened(folder)
    sound, located = opened(folder).read(SAMPLES), batches.order.locate(SAMPLES)
    lost = harm(folder / "tokens" / "books.bin")
    is_books = located.source == batches.names.index("books")
    first, last = located.sequence * LENGTH, located.sequence * LENGTH + LENGTH  # it needs a label too
    is_lost = is_books & (last >= lost.start) & (first < lost.stop)
    found = read_sequences(batches, SAMPLES, ROWS)
    assert is_lost.any() and not is_lost.all()
    assert [one.sample for one in found.unreadable] == SAMPLES[is_lost].tolist()
    for name in ("inputs", "labels", "documents"):
        assert np.array_equal(getattr(found, name)[~is_lost], getattr(sound, name)[~is_lost])
    one = found.unreadable[0]
    assert one.source == "books" and reason in one.reason
    assert one.documents and set(one.documents) <= set(ids)
    assert one.ranges == tuple(batches.ranges(located)[int(np.flatnonzero(is_lost)[0])])


def test_an_empty_sequence_counts_nothing(folder: Path) -> None:
    batch = opened(folder).read(SAMPLES[:4])
    found = without_sequences(batch, {1, 40}, 0)
    assert (
        (found.labels[1] == NOT_COUNTED).all() and not found.inputs[1].any() and not found.documents[1].any()
    )
    assert np.array_equal(found.labels[[0, 2, 3]], batch.labels[[0, 2, 3]])
    assert (batch.labels[1] != NOT_COUNTED).any() and batch.labels.max() < VOCABULARY


def test_the_policy() -> None:
    """By default the first one stops the run; else so many are left out; nothing left of a step stops it."""
    rows: list[LeftOutSequence] = []
    alerts: list[str] = []

    def asked(most: int, sequences: int = 8, numbers: Collection[int] = (3, 2)) -> frozenset[int]:
        state = State(left_out=[{"sample": 1}])
        left_out = LeftOut(most, state, None, rows.append, lambda step, message: alerts.append(message))
        found = [Unreadable(one, "books", ((0, 5),), ("a.txt:1",), "books.bin: gone") for one in numbers]
        chosen = left_out.agree(sequences, 7, found)
        assert [entry["sample"] for entry in state.left_out] == [1, *sorted(numbers)]
        return chosen

    with pytest.raises(
        KieloError, match=r"step 7: sample 3 of books \(a.txt:1\): books.bin: gone.*would work"
    ):
        asked(0)
    assert not rows and asked(0, numbers=()) == frozenset()
    assert asked(3) == {2, 3} and [row.left_out_sample for row in rows] == [2, 3]
    assert "3 of at most 3" in alerts[0] and "1 more" in alerts[0]
    with pytest.raises(KieloError, match="would be 3 of at most 2"):
        asked(2)
    with pytest.raises(KieloError, match="no sequence of it can be read"):
        asked(3, sequences=2)


def on_rank(
    resolved: Resolved,
    failing_rank: int | None,
    stop_at: int | None = None,
    times: FaultTimes | None = None,
) -> str:
    """Trains; `UNREADABLE` fail on one rank's disk, or (None) are empty on all ranks."""
    if times is not None:
        times.watch_training()
    read, take = Batches.read, Feed.take

    def read_or_not(self: Batches, samples: np.ndarray) -> Batch:
        if failing_rank is None:
            return without_sequences(read(self, samples), UNREADABLE, 0)
        if int(os.environ["RANK"]) == failing_rank and np.isin(samples, UNREADABLE).any():
            if times is not None:
                times.note("planted")
            raise OSError(errno.EIO, "Input/output error", "books.bin")
        return read(self, samples)

    def take_or_stop(self: Feed, step: int) -> Any:
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, step)

    Batches.read, Feed.take = read_or_not, take_or_stop
    return train(resolved).outcome


@pytest.mark.full
def test_the_end_is_that_of_a_run_without_them(folder: Path, tmp_path: Path, fault_times: FaultTimes) -> None:
    """One of two tensor ranks cannot read what the other can; both leave it out, as a resumed attempt does.

    The end has the bits of a run that never had these sequences; that of one rank differs by rounding.
    """
    places = {name: tmp_path / name for name in ("undisturbed", "failing", "one rank")}
    for place in places.values():
        shutil.copytree(folder / "tokens", place / "tokens")
    layout = {"tensor": 2, "micro_batch": 8, "total_steps": 10}
    run_ranks(on_rank, 2, resolve(places["undisturbed"], **layout), None)
    failing = resolve(places["failing"], **layout, max_left_out_sequences=3)
    assert run_ranks(on_rank, 2, failing, 1, 7, fault_times) == ["requeue"] * 2
    assert run_ranks(on_rank, 2, failing, 1) == ["finished"] * 2
    run_ranks(on_rank, 1, resolve(places["one rank"], total_steps=10, max_left_out_sequences=3), 0)
    ends = {name: place / "train" / "checkpoints" / "step_00000010" for name, place in places.items()}
    expected, found, others = (read_tensors(end) for end in ends.values())
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    torch.testing.assert_close(others, expected, rtol=1e-3, atol=1e-6)
    left_out = read_plain(ends["failing"])["left_out"]
    assert [(one["step"], one["sample"]) for one in left_out] == [(5, 33), (5, 34), (9, 70)]
    rows = of_kind(read_metrics(places["failing"] / "train" / "metrics.jsonl"), LeftOutSequence)
    assert [row.left_out_sample for row in rows] == UNREADABLE
    assert "sample 70 of" in (places["failing"] / "chronicle.md").read_text(encoding="utf-8")


def harm_tail(folder: Path, is_cut: bool) -> None:
    """Takes the last 40 tokens of "books" away, or makes them ids that the embedding has no row for."""
    file = folder / "tokens" / "books.bin"
    size = file.stat().st_size
    if is_cut:
        os.truncate(file, size - 80)
    else:
        with open(file, "r+b") as content:
            content.seek(size - 80)
            content.write(np.full(40, 60_000, "<u2").tobytes())


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "ids outside"])
def test_a_resumed_attempt_leaves_out_what_a_run_in_progress_would(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """Damage while a run is stopped ends in the bits and records of the same damage in mid-run."""
    resumed, running = tmp_path / "resumed", tmp_path / "running"
    shutil.copytree(folder / "tokens", resumed / "tokens")
    shutil.copytree(folder / "tokens", running / "tokens")
    changes = {"total_steps": 8, "max_left_out_sequences": 50}
    assert train(resolve(resumed, **changes), max_steps=3).outcome == "requeue"
    harm_tail(resumed, is_cut)
    reason = (
        "it has .* bytes, and the stage wrote" if is_cut else "is not what the pack stage wrote, its checksum"
    )
    with pytest.raises(KieloError, match=rf"books\.bin: {reason}"):  # the policy is to stop
        train(resolve(resumed, total_steps=8))
    assert train(resolve(resumed, **changes)).outcome == "finished"
    alerts = (resumed / "train" / ALERTS_NAME).read_text(encoding="utf-8")
    assert "books.bin: has" in alerts and "damaged since the run began" in alerts

    take = Feed.take

    def take_and_harm(self: Feed, step: int) -> Any:
        if step == 3:  # step 4, whose sequences are read, needs none of the tail
            harm_tail(running, is_cut)
        return take(self, step)

    monkeypatch.setattr(Feed, "take", take_and_harm)
    assert train(resolve(running, **changes)).outcome == "finished"
    ends = [place / "train" / "checkpoints" / "step_00000008" for place in (resumed, running)]
    found, expected = map(read_tensors, ends)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    left_out, as_running = (read_plain(end)["left_out"] for end in ends)
    assert left_out == as_running and left_out
    rows = of_kind(read_metrics(resumed / "train" / "metrics.jsonl"), LeftOutSequence)
    assert [row.left_out_sample for row in rows] == [one["sample"] for one in left_out]


def lengthen(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 64)


def write_other_words(file: Path) -> None:
    with open(file, "r+b") as content:
        content.write(np.array([3, 3, 3], "<u2").tobytes())


def remove_index(file: Path) -> None:
    file.with_suffix(".idx").unlink()


def test_damage_that_nobody_can_leave_out_is_refused(folder: Path) -> None:
    """Nothing was trained yet, or nobody can tell which sequences are spoilt, whatever the policy is."""
    changes = {"total_steps": 6, "max_left_out_sequences": 1000}
    tokens, whole = folder / "tokens", folder / "whole"
    shutil.copytree(tokens, whole)

    def is_refused_after(harm: Callable[[Path], object], reason: str) -> bool:
        harm(tokens / "books.bin")
        with pytest.raises(KieloError, match=rf"tokens/books\.{reason}"):
            train(resolve(folder, **changes))
        shutil.rmtree(tokens)
        shutil.copytree(whole, tokens)
        return True

    size = "bin: it has .* bytes, and the stage wrote"
    assert is_refused_after(cut, size)
    assert train(resolve(folder, **changes), max_steps=2).outcome == "requeue"
    assert is_refused_after(lengthen, size)
    assert is_refused_after(write_other_words, "bin: is not what the pack stage wrote, its checksum differs")
    assert is_refused_after(remove_index, "idx: it is missing, and the stage wrote")
    assert train(resolve(folder, **changes), max_steps=3).outcome == "requeue"


def test_files_read_in_place_may_be_cut_but_not_changed(folder: Path) -> None:
    file = folder / "tokens" / "books.bin"
    found = find_token_files("books", str(file), 2)
    tokens = TokenSet(found.folder, found.files, found.files[0].tokens, 0)
    sound = tokens.read(0, 50)
    os.truncate(file, 100)
    in_place = "books", found.folder, found.files, found.times_ns
    check_unchanged(*in_place, may_be_cut=True)
    reopened = TokenSet(found.folder, found.files, found.files[0].tokens, 0)
    assert np.array_equal(reopened.read(0, 50), sound)
    with pytest.raises(OSError, match="ends at byte 100"):
        reopened.read(0, 51)
    with pytest.raises(KieloError, match="changed since"):
        check_unchanged(*in_place)
    os.truncate(file, found.files[0].bytes)  # as long as before, and filled with zeros
    with pytest.raises(KieloError, match="changed since"):
        check_unchanged(*in_place, may_be_cut=True)
