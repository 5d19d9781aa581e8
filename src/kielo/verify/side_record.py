"""The results of one side of the parity check on ranks, which the disk keeps until the other side has run.

One side's model is gone when the other begins, so that a model is checked which fits a device only once.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonObject
from kielo.dataset.batches import NOT_COUNTED, Batch, Batches, filled_up
from kielo.train.feed import Feed, StepBatch
from kielo.verify.sketch import Sketch

LOGIT_TOKENS, LOGIT_POSITIONS = 256, 64  # of the first sequence, and how many of them are kept


class SideSteps(JsonObject):
    """Measurements of a side's steps, and its settings."""

    losses: list[float]
    gradient_norms: list[float]
    clipped_norms: list[float]
    learning_rates: list[float]
    settings: JsonTable
    weights: dict[str, list[float]] = {}
    """Our name → sketch of the weight before the first step."""
    gradients: dict[str, list[float]] = {}
    """Our name → sketch of the first step's gradient."""


@dataclass(frozen=True)
class SideRecord:
    """`SideSteps`, and the first logits [positions, vocabulary] if they were asked for."""

    steps: SideSteps
    logits: Tensor | None = None

    def write(self, folder: Path, name: str) -> None:
        (folder / f"{name}.json").write_text(json.dumps(self.steps.content()), encoding="utf-8")
        if self.logits is not None:
            save_file({"logits": self.logits.contiguous()}, folder / f"{name}_logits.safetensors")

    @staticmethod
    def read(folder: Path, name: str) -> "SideRecord":
        text, file = (folder / f"{name}.json").read_text("utf-8"), folder / f"{name}_logits.safetensors"
        logits = load_file(file)["logits"] if file.exists() else None
        return SideRecord(SideSteps.model_validate(json.loads(text)), logits)


class Side(Protocol):
    """A side on the ranks. All ranks call each function together, and rank 0 gets the result."""

    def sketches(self, of_gradients: bool) -> dict[str, list[float]]: ...

    def logits(self, tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor: ...

    def step(self, batch: StepBatch, on_gradients: Callable[[], None]) -> dict[str, float]: ...

    def settings(self) -> dict[str, object]: ...


def run_side(side: Side, text: "SideText", steps: int, is_traced: bool) -> SideRecord:
    """Train the side for `steps`. is_traced: keep logits, and sketches of weights and gradients of step 1."""
    weights: dict[str, list[float]] = {}
    gradients: dict[str, list[float]] = {}
    logits = None
    feed = text.feed()
    try:
        if is_traced:
            weights = side.sketches(of_gradients=False)
            tokens_bs, documents_bs = text.first_tokens()
            positions = torch.linspace(0, tokens_bs.shape[1] - 1, min(LOGIT_POSITIONS, tokens_bs.shape[1]))
            logits = side.logits(tokens_bs, documents_bs)[0, positions.long().to(tokens_bs.device)]
            logits = logits.float().cpu()

        def on_gradients() -> None:
            if is_traced and not gradients:
                gradients.update(side.sketches(of_gradients=True))

        rows = [side.step(feed.take(step), on_gradients) for step in range(1, steps + 1)]
    finally:
        feed.close()
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    settings = side.settings() | {"sequences of all steps": text.checksum()}
    measured = SideSteps(**columns, settings=settings, weights=weights, gradients=gradients)
    return SideRecord(measured, logits)


@dataclass
class SideText:
    """The sequences that a rank trains on, in micro-batches of one, and a checksum of them.

    This rank is `data_rank` of the `data_ranks` that have different sequences, and takes `rows` of them a
    step. gather: collects a value of every rank. positions_s: columns that this rank takes, None for all.
    """

    batches: Batches
    end_of_text_id: int
    last_step: int
    data_rank: int
    data_ranks: int
    rows: int
    device: torch.device
    gather: Callable[[Any], list[Any]]
    positions_s: Tensor | None = None
    _checksums: dict[int, list[int]] = field(default_factory=dict)

    def feed(self) -> Feed:
        return Feed(self._read, 1, self.last_step, self.device, self.positions_s)

    def first_tokens(self) -> tuple[Tensor, Tensor | None]:
        """Return the beginning of the first sequence of step 1 [1, s], the same on every rank."""
        batch = self.batches.step(1, 0, 1)
        documents = None if batch.documents is None else batch.documents[:1, :LOGIT_TOKENS]
        tokens = torch.from_numpy(np.ascontiguousarray(batch.inputs[:1, :LOGIT_TOKENS])).long()
        documents_bs = None if documents is None else torch.from_numpy(np.ascontiguousarray(documents))
        return tokens.to(self.device), None if documents_bs is None else documents_bs.to(self.device)

    def checksum(self) -> str:
        """Return a checksum of the sequences that all ranks were given, in which order does not count."""
        found = self.gather({str(step): rows for step, rows in self._checksums.items()})
        steps = sorted({int(step) for of_rank in found for step in of_rank})
        rows = [sorted({row for of_rank in found for row in of_rank.get(str(step), ())}) for step in steps]
        text = json.dumps(rows)
        return f"{crc32(text.encode()):08x} of {len(steps)} steps"

    def _read(self, step: int) -> Batch:
        batch = self.batches.step(step, self.data_rank, self.data_ranks)
        counted = (batch.labels != NOT_COUNTED).any(axis=1)
        self._checksums[step] = [
            crc32(np.concatenate([inputs, labels]).astype(np.int64).tobytes())
            for inputs, labels, is_counted in zip(batch.inputs, batch.labels, counted, strict=True)
            if is_counted
        ]
        return filled_up(batch, self.rows, self.end_of_text_id)


def merged(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of all ranks' parts of a model: the union of lists and tables, else the first."""
    found: dict[str, Any] = {}
    for of_rank in settings:
        for name, value in of_rank.items():
            before = found.get(name)
            if isinstance(value, dict):
                found[name] = {**(before or {}), **value}
            elif isinstance(value, list) and name not in _ORDERED:
                found[name] = sorted({*map(_plain, before or ()), *map(_plain, value)})
            elif before is None:
                found[name] = value
    return {name: dict(sorted(one.items())) if isinstance(one, dict) else one for name, one in found.items()}


_ORDERED = ("RoPE inverse frequencies", "RoPE inverse frequencies of windowed layers")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def as_lists(names: Sequence[str], sketches: Sequence[Tensor]) -> dict[str, Sketch]:
    return {name: one.tolist() for name, one in zip(names, sketches, strict=True)}
