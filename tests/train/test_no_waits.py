"""A normal step never makes the host wait for the device: the real loop, watched;
on a CPU by the operators that would.

Places where the loop says that it waits (rows of the log, held-out text, checkpoints), and the late reader,
are let pass.
"""

import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kielo
from kielo.resolve.software import BACKEND_VARIABLE
from kielo.train import run
from kielo.train.parts import PhaseParts, Run
from kielo.train.watch import checks
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

aten = torch.ops.aten
KIELO = Path(kielo.__file__).parent
# Their result, or its size, must be known to the host.
WAITING_OPERATORS = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.nonzero_static,
    aten.masked_select,
    aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.repeat_interleave,
}  # fmt: skip
WAITING_FUNCTIONS = {
    # These read memory without an operator.
    Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    # And these make tensors of the host's numbers; to bring them to a device from ordinary memory stops the
    # host.
    torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy,
}  # fmt: skip
# Asked of a CPU alone, where it costs nothing.
ONLY_ON_A_CPU = {("gradient_clipping.py", "clip_gradients")}
# The ranks of a mesh are a small tensor, on the host whatever the device.
ON_THE_HOST = ("torch/distributed/device_mesh.py", "torch/distributed/_mesh_layout.py")


def of_kielo(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Those in Kielo's own files, wherever the checkout and its .venv lie."""
    return [frame for frame in frames if Path(frame.filename).is_relative_to(KIELO)]


class Watch:
    """Notes what would wait, unless it is allowed to just now."""

    def __init__(self) -> None:
        self.is_allowed, self.steps, self.found = True, 0, set()

    def note(self, name: str) -> None:
        if self.is_allowed:
            return
        frames = traceback.extract_stack()
        ours = of_kielo(frames) or frames
        place = Path(ours[-1].filename).name, ours[-1].name
        if place not in ONLY_ON_A_CPU and not any(frame.filename.endswith(ON_THE_HOST) for frame in frames):
            self.found.add(f"{name} in {place[0]}, {place[1]}: {ours[-1].line}")

    @contextmanager
    def allowing(self) -> Iterator[None]:
        before, self.is_allowed = self.is_allowed, True
        self.switch()
        try:
            yield
        finally:
            self.is_allowed = before
            self.switch()

    def allow(self, function: Callable) -> Callable:
        @wraps(function)
        def allowed(*args: Any, **keys: Any) -> Any:
            with self.allowing():
                return function(*args, **keys)

        return allowed

    def switch(self) -> None:
        """Switches looking on and off."""

    def watched(self, of_run: Run, phase: PhaseParts) -> None:
        """Let the places pass where the loop waits, and look on from the moment when the third step is taken.

        The first compile, choose kernels, and compare once what they rely on.
        """
        heldout = of_run.current.heldout
        of_run.step_row, heldout.row = self.allow(of_run.step_row), self.allow(heldout.row)
        of_run.checkpoints.save = self.allow(of_run.checkpoints.save)
        replicas = of_run.current.replicas
        replicas.differences = self.allow(replicas.differences)
        checks.DelayedReader.read = self.allow(checks.DelayedReader.read)
        take = phase.feed.take

        def counted(step: int) -> Any:
            self.steps += 1
            self.is_allowed = self.steps < 3
            self.switch()
            return take(step)

        phase.feed.take = counted


class WatchedOperators(TorchDispatchMode):
    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the tensors of this rank
        if function.overloadpacket in WAITING_OPERATORS or _is_by_mask(function, args):
            self._watch.note(str(function))
        return function(*args, **(kwargs or {}))


class WatchedFunctions(TorchFunctionMode):
    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in WAITING_FUNCTIONS:
            self._watch.note(function.__name__)
        return function(*args, **(kwargs or {}))


def _is_by_mask(function: Any, args: tuple) -> bool:
    """Returns True if elements on the device decide how many are read or written; one number for all is
    written without (DTensor's embedding does it: torch turns it into masked_fill).
    """
    if function.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
        return False
    if function.overloadpacket != aten.index and args[2].numel() == 1:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def train_watched(resolved: Any) -> tuple[int, list[str]]:
    """Steps looked at and what would have waited in them, on one rank."""
    watch, fit = Watch(), run.fit

    def watched_fit(of_run: Run, phase: PhaseParts) -> bool:
        watch.watched(of_run, phase)
        with WatchedOperators(watch), WatchedFunctions(watch):
            stopped = fit(of_run, phase)
        watch.is_allowed = True
        return stopped

    run.fit = watched_fit
    os.environ[BACKEND_VARIABLE] = "aot_eager"  # of this rank's process only
    run.train(resolved)
    return watch.steps, sorted(watch.found)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"shard": 2},
        {"tensor": 2},
        {"context": 2},
        pytest.param({"shard": 2, "compile": True}, marks=pytest.mark.full),
    ],
    ids=lambda layout: "x".join(layout) or "one rank",
)
def test_a_step_does_not_wait(tmp_path, layout):
    """Six steps with clipping, guard, optimiser and a documents mask; a row every fifth."""
    write_tokens(tmp_path / "tokens")
    for steps, found in run_ranks(
        train_watched,
        math.prod(size for size in layout.values() if size is not True),
        resolve(tmp_path, total_steps=6, log_every_steps=5, **layout),
    ):
        assert (steps, "\n".join(found)) == (6, "")


def test_the_watch_sees_what_waits():
    """Each kind of waiting, so that an empty list above means something."""
    watch = Watch()
    watch.is_allowed, numbers = False, torch.arange(4.0)
    waiting = {
        "item": lambda: numbers[0].item(), "tolist": numbers.tolist, "truth": lambda: bool(numbers[0] > 1),
        "nonzero": numbers.nonzero, "mask": lambda: numbers[numbers > 1],
        "equal": lambda: torch.equal(numbers, numbers + 1),
        "number": lambda: float(numbers.sum()), "host's numbers": lambda: torch.tensor([1.0]),
        "slice": lambda: numbers[: numbers.argmax()],
    }  # fmt: skip
    for name, wait in waiting.items():
        watch.found.clear()
        with WatchedOperators(watch), WatchedFunctions(watch):
            wait()
        assert watch.found, name
    watch.found.clear()
    with WatchedOperators(watch), WatchedFunctions(watch):
        torch.where(numbers > 1, numbers, 0).clamp(min=1).masked_fill(numbers > 2, 0)[1:].sum()
        with watch.allowing():
            numbers.tolist()
    assert not watch.found


def test_a_checkout_named_kielo_makes_no_frame_ours():
    """torch's frames lie below `kielo/.venv` there; those of the package are Kielo's."""
    files = [run.__file__, str(KIELO.parents[1] / "kielo" / ".venv" / "lib" / "torch" / "nn.py"), __file__]
    frames = [traceback.FrameSummary(file, 1, "f") for file in files]
    assert of_kielo(frames) == frames[:1]


class OnGpu(Watch):
    """torch itself raises where it would wait."""

    def switch(self) -> None:
        torch.cuda.set_sync_debug_mode("default" if self.is_allowed else "error")


def train_on_gpu(resolved: Any) -> int:
    watch, fit = OnGpu(), run.fit

    def watched_fit(of_run: Run, phase: PhaseParts) -> bool:
        watch.watched(of_run, phase)
        try:
            return fit(of_run, phase)
        finally:
            watch.is_allowed = True
            watch.switch()

    run.fit = watched_fit
    run.train(resolved)
    return watch.steps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torch_sees_no_step_wait_on_a_gpu(tmp_path, precision):
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path, device="cuda", precision=precision, log_every_steps=5)
    assert run_ranks(train_on_gpu, 1, resolved) == [20]
