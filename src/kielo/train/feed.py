"""Feed torch micro-batches to the device, one step ahead, from `dataset`'s numpy batches.

A thread reads, and on a GPU pins and copies on a stream of its own, so that neither the host nor the
arithmetic waits.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kielo.artifact.token_file import file_being_read
from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.recipe.errors import KieloError

_TRIES = 2  # readers for one step
_CLOSING_SECONDS = 5.0


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward: token ids, labels (-100: not counted) and document numbers, each [b, s]."""

    inputs_bs: Tensor
    labels_bs: Tensor
    documents_bs: Tensor | None
    dropout_keys_b2: Tensor | None = None  # int32, None without dropout
    positions_s: Tensor | None = None  # columns of the sequences, int64, None for all
    counted: int | None = None  # counted labels, None if the host does not know


@dataclass(frozen=True)
class StepBatch:
    step: int
    samples: tuple[int, ...]
    micro_batches: list[MicroBatch]
    counted_tokens: Tensor  # int64 scalar on the device: labels of this rank that count


@dataclass(frozen=True)
class _Arriving:
    batch: StepBatch
    tensors: tuple[Tensor, ...]
    arrived: torch.cuda.Event | None = None


class _Tensors(NamedTuple):
    inputs: Tensor  # [n, s], as the next two
    labels: Tensor
    documents: Tensor | None
    dropout_keys: Tensor | None  # [n, 2]

    def each(self, change: Callable[[Tensor], Tensor]) -> "_Tensors":
        documents = None if self.documents is None else change(self.documents)
        keys = None if self.dropout_keys is None else change(self.dropout_keys)
        return _Tensors(change(self.inputs), change(self.labels), documents, keys)


class Reader:
    """A thread that runs calls, after `begin`, and ends with the process, whatever it waits for."""

    def __init__(self, begin: Callable[[], None]):
        self._begin = begin
        self._calls: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()
        self.thread = self._thread.ident

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        self._calls.put((future, call, arguments))
        return future

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        has_begun = False
        while (entry := self._calls.get()) is not None:
            future, call, arguments = entry
            try:
                if not has_begun:
                    self._begin()
                    has_begun = True
                future.set_result(call(*arguments))
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)


@dataclass(frozen=True)
class Replacement:
    """How a feed replaces a frozen reader."""

    reopened: Callable[[], Callable[[int], Batch]]  # another `read_step`, in the thread that will use it
    waiting: Callable[[], AbstractContextManager[float]]  # `Progress.at_files`, which gives its limit
    alert: Callable[[int, str], None]


class Feed:
    """The batches of the steps. A thread reads, cuts and copies one step ahead.

    read_step: step (1-based) → this rank's sequences. positions_s: the columns that this rank takes, or None
    for all. Without `replacement` it waits for a frozen reader forever. The device has at most one more step.
    """

    def __init__(
        self,
        read_step: Callable[[int], Batch],
        micro_batch_sequences: int,
        last_step: int,
        device: torch.device,
        positions_s: Tensor | None = None,
        replacement: Replacement | None = None,
    ):
        self._read_step, self._replacement = read_step, replacement
        self._micro_batch_sequences, self._last_step = micro_batch_sequences, last_step
        self._device, self._columns_s = device, positions_s
        self._positions_s = None if positions_s is None else positions_s.to(device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        # One thread hides the reading. More threads would compete with the arithmetic.
        self._reader = Reader(self._choose_device)
        self._ahead: tuple[int, Future[_Arriving]] | None = None

    def take(self, step: int) -> StepBatch:
        """Return the batch of any `step`, or raise the reading thread's error."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = self._begin(step)
        arriving = self._arrived(step, self._ahead[1])
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
        self._reader.close()

    def _begin(self, step: int) -> tuple[int, Future[_Arriving]]:
        return step, self._reader.submit(self._read, step)

    def _arrived(self, step: int, reading: Future[_Arriving]) -> _Arriving:
        """Wait for a step. If its reader takes too long, abandon the reader and start another."""
        replacement = self._replacement
        if replacement is None or reading.done():
            return reading.result()
        with replacement.waiting() as limit_seconds:
            seconds = limit_seconds / _TRIES
            for tries_left in reversed(range(_TRIES)):
                try:
                    return reading.result(seconds)
                except TimeoutError:
                    if reading.done():  # an error of the file system has this type too
                        raise
                file = file_being_read(self._reader.thread) or "the text"
                if tries_left:
                    why = f"{file}: no answer for {seconds:g} s. Another reader tries again"
                    replacement.alert(step, why)
                    self._reader = Reader(self._choose_device)
                    reading = self._reader.submit(self._reopen_and_read, replacement.reopened, step)
        raise KieloError(
            f"step {step}: {file}: {_TRIES} readers had no answer for {seconds:g} s each. The cause is the "
            "file's disk or file system. Fix: the same command once it answers, or a copy elsewhere"
        )

    def _choose_device(self) -> None:
        # The current device belongs to the thread. Without this, every rank would take memory on GPU 0.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _reopen_and_read(self, reopened: Callable[[], Callable[[int], Batch]], step: int) -> _Arriving:
        self._read_step = reopened()
        return self._read(step)

    def _read(self, step: int) -> _Arriving:
        batch = self._read_step(step)
        tensors = _on_host(batch, self._columns_s)
        samples, counted_n = tuple(batch.samples.tolist()), _counted(tensors)
        if self._copies is None:
            return self._arriving(step, samples, tensors, counted_n)
        with torch.cuda.stream(self._copies):
            # A copy to the device makes the host wait, except from pinned memory.
            copied = tensors.each(lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
            arriving = self._arriving(step, samples, copied, counted_n)
            return replace(arriving, arrived=self._copies.record_event())

    def _arriving(
        self, step: int, samples: tuple[int, ...], tensors: _Tensors, counted_n: np.ndarray
    ) -> _Arriving:
        # Filled on the device: the number is an argument of the kernel, not a copy from the host.
        counted_tokens = torch.full((), int(counted_n.sum()), dtype=torch.int64, device=self._device)
        micro_batches = _split(tensors, counted_n, self._micro_batch_sequences, self._positions_s)
        held = (*(tensor for tensor in tensors if tensor is not None), counted_tokens)
        return _Arriving(StepBatch(step, samples, micro_batches, counted_tokens), held)


def cut(batch: Batch, micro_batch_sequences: int, positions_s: Tensor | None = None) -> list[MicroBatch]:
    """Cut a batch into micro-batches on the CPU. `positions_s` has the columns to take, None for all."""
    tensors = _on_host(batch, positions_s)
    return _split(tensors, _counted(tensors), micro_batch_sequences, positions_s)


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    tensors = _Tensors(
        micro_batch.inputs_bs, micro_batch.labels_bs, micro_batch.documents_bs, micro_batch.dropout_keys_b2
    )
    positions_s = micro_batch.positions_s
    if positions_s is not None:
        positions_s = positions_s.to(device, non_blocking=True)
    moved = tensors.each(lambda tensor: tensor.to(device, non_blocking=True))
    return MicroBatch(*moved, positions_s, micro_batch.counted)


def _on_host(batch: Batch, positions_s: Tensor | None) -> _Tensors:

    def columns(array: np.ndarray) -> Tensor:
        chosen = array if positions_s is None else array.take(positions_s.numpy(), axis=1)
        return torch.from_numpy(np.ascontiguousarray(chosen))

    documents = None if batch.documents is None else columns(batch.documents)
    keys = None if batch.dropout_keys is None else torch.from_numpy(np.ascontiguousarray(batch.dropout_keys))
    return _Tensors(columns(batch.inputs), columns(batch.labels), documents, keys)


def _counted(tensors: _Tensors) -> np.ndarray:
    return np.count_nonzero(tensors.labels.numpy() != NOT_COUNTED, axis=1)


def _split(
    tensors: _Tensors, counted_n: np.ndarray, micro_batch_sequences: int, positions_s: Tensor | None
) -> list[MicroBatch]:
    """Split tensors [n, s] into views, one a micro-batch. counted_n: counted labels of each sequence."""
    rows = [
        slice(first, first + micro_batch_sequences)
        for first in range(0, max(1, len(counted_n)), micro_batch_sequences)
    ]
    return [MicroBatch(*tensors.each(itemgetter(of)), positions_s, int(counted_n[of].sum())) for of in rows]
