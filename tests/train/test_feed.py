"""Promises of the feed: the right step in any order, read one step ahead,
cut into micro-batches without copies.
"""

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kielo.artifact.token_file import FileArray
from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.recipe.errors import KieloError
from kielo.train.feed import Feed, Replacement, cut

SEQUENCES, LENGTH, LAST_STEP = 6, 8, 5
CPU = torch.device("cpu")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = [CPU, pytest.param(torch.device("cuda:0"), marks=gpu)]


def read_step(step: int, has_documents: bool = True) -> Batch:
    """Random arrays that depend on the step alone; some labels do not count."""
    generator = np.random.default_rng(step)
    inputs, labels, documents = generator.integers(0, 100, (3, SEQUENCES, LENGTH))
    labels[generator.random(labels.shape) < 0.3] = NOT_COUNTED
    samples = np.arange(SEQUENCES, dtype=np.int64) + 100 * step
    return Batch(inputs, labels, documents.astype(np.int32) if has_documents else None, samples)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("positions", [None, [0, 1, 6, 7]], ids=["all columns", "a context rank's columns"])
def test_steps_are_right_in_any_order(device, positions):
    """A step taken twice, steps left out, one gone back to: each gives its own samples, columns and count, in
    micro-batches of four and the two that are left.
    """
    columns = list(range(LENGTH)) if positions is None else positions
    feed = Feed(read_step, 4, LAST_STEP, device, None if positions is None else torch.tensor(positions))
    for step in (1, 2, 2, 5, 3, 4, 5):
        expected, found = read_step(step), feed.take(step)
        if device.type == "cuda":
            # the next step's copy overtakes this; what was given must not change
            torch.cuda._sleep(10_000_000)
        pieces = found.micro_batches
        assert found.step == step and found.samples == tuple(expected.samples.tolist())
        assert [len(piece.inputs_bs) for piece in pieces] == [4, 2]
        for name, array in (
            ("inputs_bs", expected.inputs),
            ("labels_bs", expected.labels),
            ("documents_bs", expected.documents),
        ):
            tensor = torch.cat([getattr(piece, name) for piece in pieces])
            assert tensor.device == device and torch.equal(tensor.cpu(), torch.from_numpy(array[:, columns]))
        assert found.counted_tokens.dtype == torch.int64 and found.counted_tokens.device == device
        is_counted = expected.labels[:, columns] != NOT_COUNTED
        assert found.counted_tokens.item() == is_counted.sum()
        assert [piece.counted for piece in pieces] == [is_counted[:4].sum(), is_counted[4:].sum()]
        for piece in pieces:
            assert (
                (piece.positions_s is None) if positions is None else piece.positions_s.tolist() == positions
            )
    feed.close()


def test_one_step_is_read_ahead_in_another_thread():
    """Step n + 1 is read after `take(n)` without being asked for, n + 2 is not, nor any beyond the last."""
    read, threads = [], set()
    came = threading.Condition()

    def noted(step: int) -> Batch:
        with came:
            read.append(step)
            threads.add(threading.get_ident())
            came.notify_all()
        return read_step(step, has_documents=False)

    feed = Feed(noted, 4, LAST_STEP, CPU)
    for step in range(1, LAST_STEP + 1):
        assert feed.take(step).micro_batches[0].documents_bs is None
        ahead = list(range(1, min(step + 1, LAST_STEP) + 1))
        with came:
            assert came.wait_for(lambda ahead=ahead: len(read) >= len(ahead), timeout=30)
            assert read == ahead
    feed.close()
    assert read == list(range(1, LAST_STEP + 1)) and threading.get_ident() not in threads


def test_an_error_of_the_reading_thread_is_raised_when_its_step_is_taken():
    def broken(step: int) -> Batch:
        if step == 2:
            raise OSError("the file is gone")
        return read_step(step)

    feed = Feed(broken, 4, LAST_STEP, CPU)
    feed.take(1)
    with pytest.raises(OSError, match="the file is gone"):
        feed.take(2)
    feed.close()


def reader_of(path: Path) -> Callable[[int], Batch]:
    """Opens a file that steps from the third on need."""
    array = FileArray(path, "<i8", SEQUENCES)

    def read(step: int) -> Batch:
        return replace(
            read_step(step), samples=array[:] + 100 * step if step > 2 else read_step(step).samples
        )

    return read


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_frozen_reader_is_replaced(tmp_path, comes_back, fault_times):
    """A pipe that nobody writes to freezes whoever opens it. The new reader finds the file, and the steps are
    those of a reader that never froze; or it is frozen too, and the file is named.
    """
    path, alerts = tmp_path / "text.bin", []
    os.mkfifo(path)
    os.link(path, tmp_path / "pipe")

    def reopened() -> Callable[[int], Batch]:
        if comes_back:
            path.unlink()
            path.write_bytes(np.arange(SEQUENCES, dtype="<i8").tobytes())
        return reader_of(path)

    def alert(step: int, message: str) -> None:
        fault_times.note("found")
        alerts.append((step, message))

    feed = Feed(
        reader_of(path), 4, LAST_STEP, CPU, replacement=Replacement(reopened, lambda: nullcontext(1.2), alert)
    )
    try:
        for step in range(1, 3):
            feed.take(step)
        fault_times.note("planted")
        if not comes_back:
            with pytest.raises(KieloError, match="step 3: .*text.bin: 2 readers had no answer for 0.6 s"):
                feed.take(3)
        for step in range(3, LAST_STEP + 1) if comes_back else ():
            assert feed.take(step).samples == tuple(read_step(step).samples.tolist())
            fault_times.note("next_step")
        assert [step for step, _ in alerts] == [3] and "text.bin: no answer for 0.6 s" in alerts[0][1]
    finally:
        os.close(os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK))  # which ends whoever waits to open it
        feed.close()


def test_cutting_copies_nothing_but_chosen_columns():
    """Micro-batches of whole sequences are views of the arrays; those of a context rank are contiguous."""
    batch = read_step(1)
    for piece in cut(batch, 4):
        assert np.shares_memory(piece.inputs_bs.numpy(), batch.inputs) and piece.inputs_bs.is_contiguous()
        assert np.shares_memory(piece.documents_bs.numpy(), batch.documents)
    for piece in cut(replace(batch, documents=None), 4, torch.tensor([0, 7])):
        assert (
            piece.labels_bs.is_contiguous() and piece.labels_bs.shape[1] == 2 and piece.documents_bs is None
        )
