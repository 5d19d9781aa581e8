"""The tensors of `torch_dist`: torch's distributed checkpoint as Megatron's core writes it, by any ranks.

`.metadata` is a bare pickle with the chunks of each tensor and their places. A chunk is what `torch.save`
wrote, at its place in a file. https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kielo.artifact.inert_data import Made, check_size, read_as_data
from kielo.artifact.torch_archive import read_archive
from kielo.checkpoint.split_tensor import FilePart, SplitTensor, assembled
from kielo.checkpoint.torch_tensors import tensor_of
from kielo.recipe.errors import KieloError


def read_tensors(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, SplitTensor]:
    """Return each wanted tensor with its parts. KieloError for files and chunks that are missing."""
    path = folder / ".metadata"
    try:
        check_size(path.stat().st_size, str(path))
        content = read_as_data(path.read_bytes(), str(path))
    except OSError as error:
        raise KieloError(
            f"{path}: cannot be read ({error.strerror}); it is written last. Fix: an older iteration"
        ) from None
    state = content.state if isinstance(content, Made) else None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict_metadata"), dict):
        raise KieloError(f"{path}: is no table of a distributed checkpoint of torch")
    shapes = {
        name: tuple(_field(path, entry, "size"))
        for name, entry in state["state_dict_metadata"].items()
        if isinstance(name, str) and is_wanted(name) and isinstance(entry, Made)
        and entry.name.endswith("TensorStorageMetadata")
    }  # fmt: skip
    parts = dict[str, list[FilePart]]()
    dtypes = dict[str, str]()
    for name, one, first in _chunks(path, state.get("storage_data"), shapes):
        dtypes[name] = one.dtype
        (part,) = one.parts
        parts.setdefault(name, []).append(replace(part, first=first))
    found = {}
    for name, shape in shapes.items():
        tensor = assembled(dtypes.get(name, ""), shape, parts.get(name, ()))
        if not tensor.is_whole():
            raise KieloError(f"{path}: damaged: the parts of {name} are not {list(shape)} together")
        found[name] = tensor
    return found


def _chunks(
    path: Path, storage: Any, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, SplitTensor, tuple[int, ...]]]:
    """Yield (tensor, its chunk, the chunk's first element) for each chunk of `shapes`."""
    if not isinstance(storage, dict):
        raise KieloError(f"{path}: damaged: it has no places of tensors")
    for index, info in storage.items():
        name = _field(path, index, "fqn")
        if name not in shapes:
            continue
        file, begin, length = (_field(path, info, key) for key in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise KieloError(f"{path}: {name} is in {file!r}, which is no name of a file in that folder")
        if (info.state or {}).get("transform_descriptors"):
            raise KieloError(f"{path}: {name} is compressed, which Kielo does not read")
        if not (path.parent / file).is_file():
            raise KieloError(
                f"{path.parent / file}: is missing, and has {name}. Fix: copy the iteration again, or take "
                "an older iteration"
            )
        archive = read_archive(path.parent / file, begin, length)
        tensor = tensor_of(archive, archive.content, name)
        if tensor is None:
            raise KieloError(f"{archive.path}: has no tensor at byte {begin}, where {name} should be")
        first = tuple(_field(path, index, "offset") or (0,) * len(tensor.shape))
        if len(first) != len(shapes[name]) or len(tensor.shape) != len(first):
            raise KieloError(f"{path}: damaged: {name} of {list(shapes[name])} has a part at {list(first)}")
        yield name, tensor, first


def _field(path: Path, one: Any, name: str) -> Any:
    if not isinstance(one, Made) or not isinstance(one.state, dict) or name not in one.state:
        raise KieloError(f"{path}: damaged: an entry without {name}")
    return one.state[name]
