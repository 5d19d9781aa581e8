"""Values that are not tensors, between the ranks: sent as JSON and never unpickled, because anybody may reach
the port.

They are `None`, truth values, numbers, text, bytes, paths, lists, tuples, sets, dictionaries, dtypes, plain
numpy arrays, and the data classes, named tuples and pydantic models of Kielo. Reading runs none of their
code.
"""

import base64
import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from kielo.recipe.errors import KieloError

_OWN = "kielo."
_PLAIN = frozenset((type(None), bool, int, float, str))
_ARRAYS = "biufc"  # kinds of numpy's dtypes of which no element is an object


def to_json(value: Any) -> str:
    return json.dumps(_encoded(value), separators=(",", ":"))


def from_json(text: str | bytes) -> Any:
    """Return a value equal to the value that `to_json` got. Raises KieloError for any other text."""
    try:
        return _decoded(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise KieloError(
            f"a rank sent what cannot be read ({type(error).__name__}: {error}). The ranks run different "
            "versions of Kielo, or another program wrote to their ports. Fix: one version, and a network "
            "that only the job reaches (docs/clusters.md)"
        ) from error


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    sent, sizes = _sent(value, group)
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent, group=group)
    return [_value(part, size) for part, size in zip(received, sizes, strict=True)]


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    sent, sizes = _sent(value, group)
    is_first = dist.get_rank(group) == 0
    received = [torch.empty_like(sent) for _ in sizes] if is_first else None
    dist.gather(sent, received, group=group, group_dst=0)
    return [_value(part, size) for part, size in zip(received or (), sizes, strict=False)]


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    device = _device(group)
    content = _bytes_of(value if dist.get_rank(group) == 0 else None, device)
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    if dist.get_rank(group) != 0:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=0)
    return _value(content, int(size))


def scatter(values: list[Any], group: dist.ProcessGroup | None = None) -> Any:
    """Return to each rank its entry of rank 0's `values`. The values of the others are ignored."""
    device, is_first = _device(group), dist.get_rank(group) == 0
    contents = [_bytes_of(value, device) for value in values] if is_first else []
    sizes = torch.tensor([*map(len, contents)] or [0] * dist.get_world_size(group), device=device)
    dist.broadcast(sizes, group=group, group_src=0)
    longest = int(sizes.max())
    received = torch.empty(longest, dtype=torch.uint8, device=device)
    parts = [_padded(content, longest) for content in contents] if is_first else None
    dist.scatter(received, parts, group=group, group_src=0)
    return _value(received, int(sizes[dist.get_rank(group)]))


def _sent(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    content = _bytes_of(value, _device(group))
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=content.device)
    sizes[dist.get_rank(group)] = len(content)
    dist.all_reduce(sizes, group=group)
    return _padded(content, int(sizes.max())), sizes.tolist()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    backends = str(dist.get_backend_config(group))
    if "cpu:" in backends:
        return torch.device("cpu")
    kind = backends.partition(":")[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _bytes_of(value: Any, device: torch.device) -> Tensor:
    content = bytearray(to_json(value).encode())
    return torch.frombuffer(content, dtype=torch.uint8).to(device)


def _padded(content: Tensor, size: int) -> Tensor:
    return torch.cat((content, content.new_zeros(size - len(content))))


def _value(content: Tensor, size: int) -> Any:
    return from_json(content[:size].cpu().numpy().tobytes())


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return _list(value)
    if kind in _KINDS:
        tag, encode, _ = _KINDS[kind]
        return {tag: encode(value)}
    if isinstance(value, np.generic):
        return _encoded(value.item())
    if kind.__module__.startswith(_OWN) and (fields := _fields(value)) is not None:
        return {f"{kind.__module__}:{kind.__qualname__}": fields}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not sent between ranks")


def _decoded(read: Any) -> Any:
    kind = type(read)
    if kind in _PLAIN:
        return read
    if kind is list:
        return _read_list(read)
    ((tag, content),) = read.items()
    if tag in _READERS:
        return _READERS[tag](content)
    return _with_fields(_own_class(tag), content)


def _fields(value: Any) -> Any:
    if isinstance(value, tuple):
        return _list(value)
    if isinstance(value, BaseModel):
        return [_pairs(vars(value)), sorted(value.model_fields_set)]
    return _pairs(vars(value)) if is_dataclass(value) else None


def _with_fields(kind: type, content: Any) -> Any:
    """Return a value of the class, whose own code does not run."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, _read_list(content))
    if issubclass(kind, BaseModel):
        return kind.model_construct(set(content[1]), **_dict(content[0]))
    value = object.__new__(kind)
    for name, part in _dict(content).items():
        object.__setattr__(value, name, part)
    return value


def _own_class(tag: str) -> type:
    """Return the class `kielo.module:Name`. Raise KeyError, AttributeError or TypeError for any other."""
    module, _, names = tag.partition(":")
    if not module.startswith(_OWN):
        raise KeyError(tag)
    kind: Any = sys.modules[module]
    for name in names.split("."):
        kind = vars(kind)[name]
    if not (isinstance(kind, type) and kind.__module__ == module):
        raise TypeError(f"{tag} is no class of Kielo")
    if not (is_dataclass(kind) or issubclass(kind, tuple | BaseModel)):
        raise TypeError(f"{tag} is not sent between ranks")
    return kind


def _list(value: Collection[Any]) -> list[Any]:
    return list(value) if _PLAIN.issuperset(map(type, value)) else [*map(_encoded, value)]


def _read_list(read: list[Any]) -> list[Any]:
    return read if _PLAIN.issuperset(map(type, read)) else [*map(_decoded, read)]


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[_encoded(key), _encoded(part)] for key, part in value.items()]


def _dict(pairs: list[list[Any]]) -> dict[Any, Any]:
    return {_decoded(key): _decoded(part) for key, part in pairs}


def _array(value: np.ndarray) -> list[Any]:
    if value.dtype.kind not in _ARRAYS:
        raise TypeError(f"a numpy array of {value.dtype} is not sent between ranks")
    return [value.dtype.str, value.shape, base64.b64encode(np.ascontiguousarray(value).data).decode()]


def _read_array(content: list[Any]) -> np.ndarray:
    dtype, shape, text = content
    if np.dtype(dtype).kind not in _ARRAYS:
        raise TypeError(f"a numpy array of {dtype}")
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


# type → (its tag, how it is written, how it is read)
_KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("tuple", _list, lambda read: tuple(_read_list(read))),
    set: ("set", _list, lambda read: set(_read_list(read))),
    dict: ("dict", _pairs, _dict),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    type(Path()): ("path", str, Path),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch."), _dtype),
    np.ndarray: ("array", _array, _read_array),
}
_READERS = {tag: read for tag, _, read in _KINDS.values()}
