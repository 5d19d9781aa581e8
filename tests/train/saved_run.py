"""A run's checkpoints over a checkpointer that only notes what is asked of it, for tests of `state.py`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved
from kielo.train.state import RunCheckpoints, State
from kielo.train.watch.checks import GuardState
from tests.train.tiny_run import resolve


def resolved_in(folder: Path, tokens: Path, **changes: Any) -> Resolved:
    """A run of twenty steps in `folder`, saved every six of them and copied to memory every four."""
    return resolve(
        tokens, every_steps=6, memory_every_steps=4, train_folder=str(folder / "train"), **changes
    )  # fmt: skip


class Checkpointer:
    """Notes each call in `done`; the newest checkpoint is of `plain`, None for none."""

    def __init__(self, folder: Path, plain: dict[str, Any] | None = None, step: int = 6):
        self.folder, self.done, self.filled = folder / "checkpoints", [], {}
        self.of_newest, self.later = plain, None
        self.path = self.folder / f"step_{step:08d}"
        self.failure: str | None = None

    def newest(self) -> Path | None:
        return None if self.of_newest is None else self.path

    def plain(self, path: Path) -> dict[str, Any]:
        assert path == self.path
        return self.of_newest

    def restore(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        assert path == self.path
        for number, (name, tensor) in enumerate(sorted(tensors.items()), start=1):
            tensor.fill_(number)
            self.filled[name] = number

    def settle(self) -> Path | None:
        self.done.append("settle")
        if self.failure:
            raise KieloError(self.failure)
        return self.later

    def go_back_to(self, step: int) -> Path | None:
        self.done.append(("go back to", step))
        return self.later

    def go_back_before(self, step: int) -> Path | None:
        self.done.append(("go back before", step))
        return self.later

    def reserve(self, tensors: dict[str, Any]) -> None:
        self.done.append(("reserve", list(tensors)))

    def save(self, *given: Any) -> None:
        self.done.append(("save", *given))

    def copy_to_memory(self, *given: Any) -> None:
        self.done.append(("copy", *given))

    def shortage(self) -> str:
        return "disk full"

    def close(self) -> None:
        self.done.append("close")


class Optimiser:
    """Of three parameters, of which `made` made updates."""

    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, made: int = 5):
        self.parameters = {
            name: torch.zeros(2) for name in ("embed.weight", "head.weight", "layers.0.mlp.up.weight")
        }
        self.updates, self.resumed = made, None
        self.of = {
            f"{name}/{moment}": torch.full((2,), 9.0)
            for name in self.parameters for moment in ("exp_avg", "exp_avg_sq")
        }  # fmt: skip

    def moments(self) -> dict[str, torch.Tensor]:
        return self.of

    def resume(self, updates: int, begun: dict[str, int]) -> None:
        self.resumed = updates, begun


class Saved:
    """The checkpoints of a run whose guard and watch for spikes say what a test sets."""

    def __init__(self, resolved: Resolved, plain: dict[str, Any] | None = None, **options: Any):
        self.checkpointer = Checkpointer(Path(resolved.placement.train_folder), plain)
        self.done, self.state = self.checkpointer.done, State()
        self.guard = SimpleNamespace(
            bad_in_a_row=0, skipped=0, restored=None, last=lambda steps: [(2.5, 1.0)],
            state=lambda: GuardState(self.guard.bad_in_a_row, self.guard.skipped),
            restore=lambda state: setattr(self.guard, "restored", state),
        )  # fmt: skip
        self.spikes = SimpleNamespace(
            episode=None, plain_state=lambda: {"past": []}, restored=None,
            restore=lambda state: setattr(self.spikes, "restored", state),
        )  # fmt: skip
        self.of = RunCheckpoints(
            self.checkpointer, resolved, self.guard, self.spikes, self.state, **options
        )  # fmt: skip
        self.optimiser = Optimiser()
        self.weights = {name: torch.zeros(2) for name in self.optimiser.parameters}

    def track(self) -> "Saved":
        self.of.track(self.weights, self.optimiser, {"a.weight": "BF16"})
        self.done.clear()
        return self

    def save(self, step: int, loss: Any = 2.5) -> tuple[Any, Any, Any]:
        """Saves at `step`; returns what is written of trouble, the step that is kept, and why all are."""
        self.state.step = step
        self.of.save(loss)
        kind, of_step, tensors, plain, kept, keep_all = self.done.pop()
        assert (kind, of_step, list(tensors)) == ("save", step, list(self.of.tensors)) and plain[
            "step"
        ] == step
        return plain["trouble"], kept, keep_all


def found_of(resolved: Resolved, **changes: Any) -> dict[str, Any]:
    """The plain state of a checkpoint of step 6, after JSON."""
    saved = Saved(resolved).track()
    saved.state.step, saved.state.tokens = 6, 768
    saved.of.save(2.0)
    plain = saved.done.pop()[3] | {"guard": {"in_a_row": 0, "skipped": 4}} | changes
    return json.loads(json.dumps(plain))


def in_folder(resolved: Resolved, *steps: int) -> Path:
    folder = Path(resolved.placement.train_folder) / "checkpoints"
    for step in steps:
        (folder / f"step_{step:08d}").mkdir(parents=True)
    return folder
