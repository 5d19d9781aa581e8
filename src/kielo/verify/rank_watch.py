"""A watch over the operators of one rank, with a ledger of its memory by purpose."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from kielo.models.blocks import blocked_attention
from kielo.parallel.projection import summed_product
from kielo.verify.torch_fakes import (
    group_name,
    is_fake,
    is_in_backward,
    is_wrapper,
    plain_parts,
    sharding_watched,
    storage_key,
    storages_watched,
)


@dataclass
class Holding:
    kind: str
    bytes: int
    reference: weakref.ref | None = None


@dataclass(frozen=True)
class Peak:
    bytes: int
    kinds: dict[str, int]


class Change(NamedTuple):
    """A change of one of the storages that an operator makes: its number among them, kind and bytes."""

    number: int
    kind: str
    bytes: int


@dataclass(frozen=True)
class Inside:
    """The work of an operator's parts: changes of memory, and operations by the names of `RankWatch.flops`.

    results: the numbers of the storages of what it returns.
    """

    changes: list[Change]
    results: list[int]
    flops: Counter[str]


class MemoryLedger:
    """A record of tensors made and freed, which gives peaks by phase and kind.

    A storage counts once, with its whole size, however many tensors share it. Its kind may become known late
    (that a buffer was a gradient shows when the backward pass is over), so peaks are computed from the whole
    record at the end. `phase` returns the name of the running phase.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._held: dict[int, Holding] = {}
        self._record: list[tuple[Holding, int, str]] = []

    def see(self, tensor: Tensor, kind: str) -> None:
        """Enter the tensor's storage, as `kind` if it is new."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._held:
            holding = Holding(kind, 0)
            self._hold(storage, holding)
            self._change(holding, storage.nbytes())

    @contextmanager
    def noted(self) -> Iterator[tuple[list[Change], dict[int, int]]]:
        """Give, at the end, the changes of storages made meanwhile; and keys and numbers of those held."""
        before, place = {id(holding) for holding in self._held.values()}, len(self._record)
        changes, held, numbers = list[Change](), dict[int, int](), dict[int, int]()
        yield changes, held
        for holding, change, _ in self._record[place:]:
            if id(holding) not in before:
                number = numbers.setdefault(id(holding), len(numbers))
                changes.append(Change(number, holding.kind, change))
        held |= {key: numbers[id(one)] for key, one in self._held.items() if id(one) in numbers}

    def repeat(self, inside: Inside, results: Sequence[Tensor]) -> None:
        """Enter the same changes again, with the storages of other results."""
        made = dict[int, Holding]()
        for number, kind, change in inside.changes:
            holding = made.setdefault(number, Holding(kind, 0))
            self._change(holding, holding.bytes + change)
        for number, result in zip(inside.results, results, strict=True):
            self._hold(result.untyped_storage(), made[number])

    def resized(self, storage: torch.UntypedStorage) -> None:
        holding = self._held.get(storage_key(storage))
        if holding is not None:
            self._change(holding, storage.nbytes())

    def kind_of(self, tensor: Tensor) -> str | None:
        holding = self._held.get(storage_key(tensor.untyped_storage()))
        return None if holding is None else holding.kind

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of these tensors, from their first byte on."""
        for tensor in tensors:
            self.see(tensor, kind)
            self._held[storage_key(tensor.untyped_storage())].kind = kind

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        found = {storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}
        return sum(found.values())

    def held_bytes(self, kind: str) -> int:
        return sum(holding.bytes for holding in self._held.values() if holding.kind == kind)

    def begin(self) -> None:
        self._record = [(holding, holding.bytes, self._phase()) for holding in self._held.values()]

    def peaks(self) -> dict[str, Peak]:
        now = 0
        most: dict[str, int] = {}
        at: dict[str, int] = {}
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

    def _hold(self, storage: torch.UntypedStorage, holding: Holding) -> None:
        key = storage_key(storage)
        holding.reference = weakref.ref(storage, lambda _: self._forget(key, holding))
        self._held[key] = holding

    def _forget(self, key: int, holding: Holding) -> None:
        self._change(holding, 0)
        if self._held.get(key) is holding:
            del self._held[key]

    def _change(self, holding: Holding, size: int) -> None:
        if size != holding.bytes:
            self._record.append((holding, size - holding.bytes, self._phase()))
            holding.bytes = size


_aten = torch.ops.aten
_QUESTIONS = (_aten._local_scalar_dense.default, _aten.equal.default)
_IN_PLACE = {_aten.addmm_: _aten.addmm}  # flop_registry knows the other only
_COMPOSED = (_aten.matmul.default,)  # whole inside of an operator of Kielo's own; else autograd decomposes it
# Kielo's operators whose parts are watched: each time, or only once for hundreds of blocks in each layer.
_OWN: dict[Any, Callable[..., Any]] = {torch.ops.kielo.summed_product.default: summed_product}
_OF_BLOCKS: dict[Any, Callable[..., Any]] = {
    torch.ops.kielo.blocked_attention.default: blocked_attention.forward,
    torch.ops.kielo.blocked_attention_backward.default: blocked_attention.backward,
}
_COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}


class RankWatch(TorchDispatchMode):
    """A count of memory, FLOPs and collectives of one rank's local tensors, while it is entered.

    torch decomposes DTensors, and weights in FP8, first, so that sizes are of this rank and not of the whole
    model. A fake tensor has no value: a question for its value is answered with 1, and a comparison of two
    with True.

    axes: a communicator's name → its axis of the mesh. weights_group: the name of FSDP2's communicator.

    flops: "matrix products" and "attention" → operations. The causal half of attention's scores counts, as in
    `models/parameter_shapes.py`. calls and bytes: (axis, operation) → calls, and bytes of the whole buffers.
    """

    def __init__(self, axes: Mapping[str, str], weights_group: str) -> None:
        super().__init__()
        self._axes, self._weights_group = axes, weights_group
        self.section = "passes"
        self.ledger = MemoryLedger(self._phase)
        self.flops: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self._insides: dict[tuple[Any, ...], Inside] = {}
        self._stack = ExitStack()
        self._is_paused = False

    def __enter__(self) -> "RankWatch":
        self._stack.enter_context(storages_watched(self.ledger.resized))
        self._stack.enter_context(sharding_watched(partial(setattr, self, "_is_paused")))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def begin(self) -> None:
        """Start the counts from zero. Memory that is held stays held."""
        self.flops.clear()
        self.calls.clear()
        self.bytes.clear()
        self.ledger.begin()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return operator(*args, **kwargs)
        self._note_parameters(args)
        if any(map(is_wrapper, types)):
            return NotImplemented
        if operator in _OWN:
            return self._watched(_OWN[operator], args)
        if operator in _OF_BLOCKS:
            return self._repeated(operator, args)
        if operator in _QUESTIONS and any(is_fake(arg) for arg in args):
            return True if operator is _aten.equal.default or args[0].dtype == torch.bool else 1
        if operator in _COMPOSED:
            return self._watched(operator.decompose, args)
        result = operator(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        kind = self._kind(operator, args)
        for tensor in made:
            self.ledger.see(tensor, kind)
        self._count_flops(operator, args, kwargs, result)
        if operator.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(operator, args, made)
        return result

    def _watched(self, function: Callable[..., Any], args: tuple) -> Any:
        """Run the parts of an operator, watched."""
        TorchDispatchMode.__enter__(self)
        try:
            return function(*args)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def _repeated(self, operator: Any, args: tuple) -> Any:
        """Watch the parts of an operator once for arguments of such forms, and later enter the same again."""
        key = (operator, self._phase(), *(_form(arg) for arg in args))
        inside = self._insides.get(key)
        if inside is not None:
            self.flops.update(inside.flops)
            result = operator(*args)
            self.ledger.repeat(inside, tree_leaves(result))
            return result
        flops = self.flops.copy()
        with self.ledger.noted() as (changes, held):
            result = self._watched(_OF_BLOCKS[operator], args)
        results = [held[storage_key(leaf.untyped_storage())] for leaf in tree_leaves(result)]
        self._insides[key] = Inside(changes, results, self.flops - flops)
        return result

    def _phase(self) -> str:
        if self.section != "passes":
            return self.section
        return "backward" if is_in_backward() else "forward"

    def _kind(self, operator: Any, args: tuple) -> str:
        if self.section != "passes":
            return self.section
        # FSDP2 sums gradients over micro-batches in another precision than the backward pass makes them in.
        if operator is _aten._to_copy.default and self.ledger.kind_of(args[0]) == "gradients":
            return "gradients"
        return "backward" if is_in_backward() else "activations"

    def _note_parameters(self, args: Iterable[Any]) -> None:
        """Name parameters in an operator that are not the rank's own: FSDP2 has gathered them."""
        for arg in args:
            if isinstance(arg, nn.Parameter) and not arg.is_meta:
                parts = plain_parts(arg)
                kinds = {self.ledger.kind_of(part) for part in parts}
                if kinds - {None, "parameters", "gathered parameters"}:
                    self.ledger.name(parts, "gathered parameters")
                    if arg.is_leaf and arg.requires_grad:
                        arg.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.ledger.name(plain_parts(parameter.grad), "gradients")

    def _count_flops(self, operator: Any, args: tuple, kwargs: dict, result: Any) -> None:
        count: Callable[..., int]
        packet = _IN_PLACE.get(operator.overloadpacket, operator.overloadpacket)
        name = packet.__name__
        if "scaled_dot_product" in name:
            if "backward" in name:
                queries, keys, is_causal = args[1].shape, args[2].shape, args[7]
                count = partial(sdpa_backward_flop_count, queries)
            else:
                queries, keys, count = args[0].shape, args[1].shape, sdpa_flop_count
                is_causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
            every = queries[:2] + keys[2:]  # grouped keys count for each head; torch before 2.13 refuses them
            flops = count(queries, every, every)
            self.flops["attention"] += flops // 2 if is_causal else flops
        elif name.startswith("lower_right_attention"):
            # The last queries see all keys before them and half of their own. Grouped keys count for each.
            is_backward = "backward" in name
            queries, keys = (arg.shape for arg in args[is_backward : is_backward + 2])
            every, own = (queries[:2] + (number, keys[3]) for number in (keys[2], queries[2]))
            count = partial(sdpa_backward_flop_count, queries) if is_backward else sdpa_flop_count
            self.flops["attention"] += count(queries, every, every) - count(queries, own, own) // 2
        elif packet in flop_registry:
            self.flops["matrix products"] += flop_registry[packet](*args, **kwargs, out_val=result)

    def _count_collective(self, operator: Any, args: tuple, made: list[Tensor]) -> None:
        operation = _COLLECTIVES.get(operator.overloadpacket.__name__)
        if operation is None:
            return
        name = next((found for arg in args if (found := group_name(arg)) in self._axes), None)
        axis = self._axes.get(name or "", "world")
        buffers = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in (*args, made)]
        self.calls[axis, operation] += 1
        self.bytes[axis, operation] += max(
            sum(t.numel() * t.element_size() for t in tensors) for tensors in buffers
        )
        if operation == "receive" and axis == "pipeline":
            self.ledger.name(buffers[0], "receive buffers")
        if name == self._weights_group and operator.namespace == "c10d" and self.section == "passes":
            kinds = {"all-gather": "gathered parameters", "reduce-scatter": "gradients"}
            if operation in kinds:
                own = [t for tensors in buffers for t in tensors if self.ledger.kind_of(t) != "parameters"]
                self.ledger.name(own, kinds[operation])


def _form(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.shape, argument.stride(), argument.dtype, argument.device
