"""A ledger of memory by purpose: it sees tensors made and freed, and gives peaks by phase and kind.

A storage counts once, with its whole size, however many tensors share it. Its kind may become known late
(that a buffer was a gradient shows when the backward pass is over), so peaks are computed from the whole
record at the end.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kielo.verify.torch_fakes import storage_key


@dataclass
class Holding:
    """One storage. `reference` reports when it is freed."""

    kind: str
    bytes: int
    reference: weakref.ref | None = None


@dataclass(frozen=True)
class Peak:
    """The most bytes held at one time of a phase, by kind."""

    bytes: int
    kinds: dict[str, int]


class MemoryLedger:
    """Records every change of memory; `phase` returns the name under which a change is recorded."""

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._held: dict[int, Holding] = {}
        self._record: list[tuple[Holding, int, str]] = []

    def see(self, tensor: Tensor, kind: str) -> None:
        """Enters the tensor's storage, as `kind` if it is new."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._held:
            return
        holding = Holding(kind, 0)
        holding.reference = weakref.ref(storage, lambda _: self._forget(key, holding))
        self._held[key] = holding
        self._change(holding, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        holding = self._held.get(storage_key(storage))
        if holding is not None:
            self._change(holding, storage.nbytes())

    def kind_of(self, tensor: Tensor) -> str | None:
        holding = self._held.get(storage_key(tensor.untyped_storage()))
        return None if holding is None else holding.kind

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Sets the kind of these tensors, from their first byte on."""
        for tensor in tensors:
            self.see(tensor, kind)
            self._held[storage_key(tensor.untyped_storage())].kind = kind

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes of all their storages, each counted once."""
        found = {storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}
        return sum(found.values())

    def held_bytes(self, kind: str) -> int:
        """Returns the bytes of this kind that are held now."""
        return sum(holding.bytes for holding in self._held.values() if holding.kind == kind)

    def begin(self) -> None:
        """Begins a new record with what is held now."""
        self._record = [(holding, holding.bytes, self._phase()) for holding in self._held.values()]

    def peaks(self) -> dict[str, Peak]:
        """Returns phase → its peak, since `begin`."""
        now, most, at = 0, {}, {}
        for place, (_, change, phase) in enumerate(self._record):
            now += change
            if now > most.get(phase, -1):
                most[phase], at[phase] = now, place
        kinds: dict[str, int] = {}
        found: dict[str, Peak] = {}
        phases = {place: phase for phase, place in at.items()}
        for place, (holding, change, _) in enumerate(self._record):
            kinds[holding.kind] = kinds.get(holding.kind, 0) + change
            if place in phases:
                phase = phases[place]
                found[phase] = Peak(most[phase], {kind: size for kind, size in kinds.items() if size})
        return found

    def _forget(self, key: int, holding: Holding) -> None:
        self._change(holding, 0)
        if self._held.get(key) is holding:
            del self._held[key]

    def _change(self, holding: Holding, size: int) -> None:
        if size != holding.bytes:
            self._record.append((holding, size - holding.bytes, self._phase()))
            holding.bytes = size
