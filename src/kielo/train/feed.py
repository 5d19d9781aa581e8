"""Numpy batches from `dataset` as torch micro-batches, the next step's made while the device works on this one's.

In: the step number. Out: this rank's share of the step, cut into micro-batches on the device.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kielo.dataset.batches import NOT_COUNTED, Batch


@dataclass(frozen=True)
class MicroBatch:
    """What one forward takes: token ids, labels (-100: not counted) and document numbers, each [b, s].

    positions_s: which columns of their sequences these are, int64 [s]; None where the rank holds whole sequences.
    """

    inputs_bs: Tensor
    labels_bs: Tensor
    documents_bs: Tensor | None
    positions_s: Tensor | None = None


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one optimiser step."""

    step: int
    samples: tuple[int, ...]
    micro_batches: list[MicroBatch]
    counted_tokens: Tensor  # int64 scalar on the device: labels of this rank that count


class Feed:
    """`take(step)` gives the batch of that step; reading and cutting run one step ahead in a thread.

    read_step: from the step (1-based) to this rank's sequences of it. positions_s: the columns that this rank takes of
    each sequence; None: all.
    """

    def __init__(
        self,
        read_step: Callable[[int], Batch],
        micro_batch_sequences: int,
        last_step: int,
        device: torch.device,
        positions_s: Tensor | None = None,
    ):
        self._read_step = read_step
        self._micro_batch_sequences = micro_batch_sequences
        self._last_step = last_step
        self._device = device
        self._positions_s = positions_s
        # One thread: it only hides the reading; more would only compete with the arithmetic.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed", initializer=self._choose_device)
        self._ahead: tuple[int, Future] | None = None

    def take(self, step: int) -> StepBatch:
        """The batch of `step`, whatever was taken before. An error of the reading thread is raised here."""
        if self._ahead is not None and self._ahead[0] == step:
            arrays = self._ahead[1].result()
        else:
            arrays = self._read(step)
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1)) if step < self._last_step else None
        return self._on_device(step, *arrays)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _choose_device(self) -> None:
        # The current device belongs to the thread: without this every rank would take memory on GPU 0.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _read(self, step: int) -> tuple[tuple[int, ...], list[MicroBatch], Tensor]:
        batch = self._read_step(step)
        samples = tuple(int(sample) for sample in batch.samples)
        pieces = cut(batch.inputs, batch.labels, batch.documents, self._micro_batch_sequences, self._positions_s)
        counted = torch.tensor(sum(int((piece.labels_bs != NOT_COUNTED).sum()) for piece in pieces), dtype=torch.int64)
        if self._device.type == "cuda":
            # Only from pinned memory does a copy to the device not stop the host.
            pieces = [MicroBatch(*(None if t is None else t.pin_memory() for t in _fields(piece))) for piece in pieces]
            counted = counted.pin_memory()
        return samples, pieces, counted

    def _on_device(self, step: int, samples: tuple[int, ...], pieces: list[MicroBatch], counted: Tensor) -> StepBatch:
        moved = [to_device(piece, self._device) for piece in pieces]
        return StepBatch(step, samples, moved, counted.to(self._device, non_blocking=True))


def cut(
    inputs: np.ndarray,
    labels: np.ndarray,
    documents: np.ndarray | None,
    micro_batch_sequences: int,
    positions_s: Tensor | None = None,
) -> list[MicroBatch]:
    """Arrays [n, s] as micro-batches of up to `micro_batch_sequences` sequences and the columns `positions_s`, on the CPU."""
    columns = slice(None) if positions_s is None else positions_s.numpy()
    pieces = []
    for first in range(0, len(inputs), micro_batch_sequences):
        rows = slice(first, first + micro_batch_sequences)
        arrays = (None if array is None else array[rows][:, columns] for array in (inputs, labels, documents))
        tensors = [None if array is None else torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        pieces.append(MicroBatch(*tensors, positions_s))
    return pieces


def to_device(piece: MicroBatch, device: torch.device) -> MicroBatch:
    return MicroBatch(*(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in _fields(piece)))


def _fields(piece: MicroBatch) -> tuple[Tensor | None, ...]:
    return piece.inputs_bs, piece.labels_bs, piece.documents_bs, piece.positions_s
