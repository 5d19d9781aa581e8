"""Feeds torch micro-batches to the device, one step ahead, from `dataset`'s numpy batches.

In: the step number. Out: this rank's share of the step, cut into micro-batches on the device. A thread reads
one step ahead; on a GPU it also pins what it read and starts its copy, on a stream of its own, so that
neither the host nor the arithmetic waits for data.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from kielo.dataset.batches import NOT_COUNTED, Batch


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward: token ids, labels (-100: not counted) and document numbers, each [b, s].

    dropout_keys_b2: int32, what dropout follows from; None where none is done. positions_s: which columns of
    their sequences these are, int64 [s]; None where the rank holds whole sequences.
    """

    inputs_bs: Tensor
    labels_bs: Tensor
    documents_bs: Tensor | None
    dropout_keys_b2: Tensor | None = None
    positions_s: Tensor | None = None


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one optimiser step."""

    step: int
    samples: tuple[int, ...]
    micro_batches: list[MicroBatch]
    counted_tokens: Tensor  # int64 scalar on the device: labels of this rank that count


@dataclass(frozen=True)
class _Arriving:
    """A step's batch, the tensors that hold it, and on a GPU the event after which they are all there."""

    batch: StepBatch
    tensors: tuple[Tensor, ...]
    arrived: torch.cuda.Event | None = None


# inputs, labels and document numbers, [n, s] each, and keys of dropout [n, 2]
_Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Feed:
    """Gives the batch of each step; a thread reads, cuts and copies one step ahead.

    read_step: from the step (1-based) to this rank's sequences of it. positions_s: the columns that this rank
    takes of each sequence; None: all. The device holds at most one step more than the one that was taken.
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
        self._columns_s = positions_s
        self._positions_s = None if positions_s is None else positions_s.to(device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        # One thread is enough to hide the reading; more would compete with the arithmetic.
        self._reader = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="feed", initializer=self._choose_device
        )
        self._ahead: tuple[int, Future[_Arriving]] | None = None

    def take(self, step: int) -> StepBatch:
        """Returns the batch of `step`, whatever was taken before; raises an error of the reading thread."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = self._begin(step)
        arriving = self._ahead[1].result()
        self._ahead = self._begin(step + 1) if step < self._last_step else None
        if arriving.arrived is not None:
            # The device waits here, not the host: work queued from now on runs after the copies. The memory
            # belongs to the copying stream, so its allocator must know that this stream uses it too.
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arriving.arrived)
            for tensor in arriving.tensors:
                tensor.record_stream(stream)
        return arriving.batch

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _begin(self, step: int) -> tuple[int, Future[_Arriving]]:
        return step, self._reader.submit(self._read, step)

    def _choose_device(self) -> None:
        # The current device belongs to the thread: without this every rank would take memory on GPU 0.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _read(self, step: int) -> _Arriving:
        batch = self._read_step(step)
        tensors = _on_host(batch, self._columns_s)
        samples, labels = tuple(batch.samples.tolist()), tensors[1].numpy()
        counted = int(np.count_nonzero(labels != NOT_COUNTED))
        if self._copies is None:
            return self._arriving(step, samples, tensors, counted)
        with torch.cuda.stream(self._copies):
            # A copy to the device makes the host wait, except from pinned memory.
            copied = (
                None if tensor is None else tensor.pin_memory().to(self._device, non_blocking=True)
                for tensor in tensors
            )  # fmt: skip
            arriving = self._arriving(step, samples, tuple(copied), counted)
            return replace(arriving, arrived=self._copies.record_event())

    def _arriving(self, step: int, samples: tuple[int, ...], tensors: _Tensors, counted: int) -> _Arriving:
        # Filled on the device: the number is an argument of the kernel, and not a copy from the host.
        counted_tokens = torch.full((), counted, dtype=torch.int64, device=self._device)
        micro_batches = _split(tensors, self._micro_batch_sequences, self._positions_s)
        held = (*(tensor for tensor in tensors if tensor is not None), counted_tokens)
        return _Arriving(StepBatch(step, samples, micro_batches, counted_tokens), held)


def cut(batch: Batch, micro_batch_sequences: int, positions_s: Tensor | None = None) -> list[MicroBatch]:
    """Cuts a batch into micro-batches of up to `micro_batch_sequences` sequences, on the CPU.

    positions_s: the columns to take; None: all.
    """
    return _split(_on_host(batch, positions_s), micro_batch_sequences, positions_s)


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    return MicroBatch(
        *(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in _fields(micro_batch))
    )


def _on_host(batch: Batch, positions_s: Tensor | None) -> _Tensors:
    """Returns the columns `positions_s` of each array as tensors; all columns without a copy."""
    arrays: tuple[np.ndarray | None, ...] = (batch.inputs, batch.labels, batch.documents)
    if positions_s is not None:
        arrays = tuple(None if array is None else array.take(positions_s.numpy(), axis=1) for array in arrays)
    arrays = (*arrays, batch.dropout_keys)
    return tuple(None if array is None else torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)


def _split(tensors: _Tensors, micro_batch_sequences: int, positions_s: Tensor | None) -> list[MicroBatch]:
    """Splits tensors [n, s] into micro-batches, which are views of them."""
    parts = (repeat(None) if tensor is None else tensor.split(micro_batch_sequences) for tensor in tensors)
    return [MicroBatch(*micro_batch, positions_s) for micro_batch in zip(*parts)]


def _fields(micro_batch: MicroBatch) -> tuple[Tensor | None, ...]:
    return tuple(getattr(micro_batch, field.name) for field in fields(micro_batch))
