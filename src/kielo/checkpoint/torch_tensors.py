"""Tensors of an archive that was read as plain data: nested tables → flat names and their places."""

import math
from collections.abc import Iterator
from typing import Any

from kielo.artifact.inert_data import Made, Named, Stored
from kielo.artifact.torch_archive import TorchArchive
from kielo.checkpoint.split_tensor import SplitTensor
from kielo.checkpoint.tensor_table import DTYPES, StoredTensor
from kielo.recipe.errors import KieloError

_MOST_TENSORS, _MOST_DEPTH = 100_000, 16
# The classes of storages, which name the dtype.
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_WRAPPERS = ("torch._utils._rebuild_parameter", "torch._tensor._rebuild_from_type_v2")


def tensors_of(archive: TorchArchive, content: Any) -> dict[str, SplitTensor]:
    """Return the tensors in nested tables by their joined names. KieloError for impossible places."""
    found = dict[str, SplitTensor]()
    for name, value in _flat(archive, content, "", 0):
        if (tensor := tensor_of(archive, value, name)) is not None:
            found[name] = tensor
        if len(found) > _MOST_TENSORS:
            raise KieloError(f"{archive.path}: refused: more than {_MOST_TENSORS:,} tensors in one file")
    return found


def _flat(archive: TorchArchive, content: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(content, dict):
        yield prefix, content
        return
    if depth > _MOST_DEPTH:
        raise KieloError(f"{archive.path}: refused: its tables are nested more than {_MOST_DEPTH} deep")
    for key, value in content.items():
        if isinstance(key, str):
            yield from _flat(archive, value, f"{prefix}.{key}" if prefix else key, depth + 1)


def tensor_of(archive: TorchArchive, value: Any, name: str) -> SplitTensor | None:
    """Return the place of a tensor's bytes; None for what is no tensor. KieloError for impossible places."""
    try:
        while isinstance(value, Made) and value.name in _WRAPPERS:
            is_parameter = value.name == _WRAPPERS[0]
            value = value.arguments[0] if is_parameter else Made(value.arguments[0], value.arguments[2])
        if not isinstance(value, Made) or value.name != "torch._utils._rebuild_tensor_v2":
            return None
        storage, offset, shape, strides = value.arguments[:4]
        return _checked(archive, name, storage, (offset, tuple(shape), tuple(strides)))
    except (TypeError, ValueError, IndexError) as error:
        raise KieloError(f"{archive.path}: damaged: {name} is no tensor ({error})") from None


def _checked(
    archive: TorchArchive, name: str, storage: Any, place: tuple[int, tuple[int, ...], tuple[int, ...]]
) -> SplitTensor:
    offset, shape, strides = place
    identity = storage.identity if isinstance(storage, Stored) else None
    if not isinstance(identity, tuple) or len(identity) < 5 or not isinstance(identity[1], Named):
        raise KieloError(f"{archive.path}: {name} has no storage that Kielo can read")
    kind, key = identity[1].name.rpartition(".")[2], str(identity[2])
    dtype = _STORAGES.get(kind)
    if dtype is None:
        raise KieloError(f"{archive.path}: {name} is stored as {kind}; known: {', '.join(_STORAGES)}")
    numbers = (offset, *shape, *strides)
    if not all(type(one) is int and one >= 0 for one in numbers) or len(shape) != len(strides):
        raise KieloError(f"{archive.path}: damaged: {name} has the shape {shape}, strides {strides}")
    first, size = archive.storages.get(key, (0, 0))
    item_bytes = DTYPES[dtype].itemsize
    begin = first + offset * item_bytes
    end = begin + (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))) * item_bytes
    if math.prod(shape) and end > first + size:
        raise KieloError(
            f"{archive.path}: cut short or damaged: {name} of {math.prod(shape) * item_bytes:,} bytes ends "
            f"beyond its storage of {size:,}"
        )
    if math.prod(shape) * item_bytes > size:  # a stride of 0 repeats elements without end
        raise KieloError(
            f"{archive.path}: refused: {name} of {math.prod(shape) * item_bytes:,} bytes is larger than its "
            f"storage of {size:,}"
        )
    return SplitTensor.of_file(archive.path, StoredTensor(dtype, shape, begin, strides))
