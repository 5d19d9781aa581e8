"""The formats of ready token files: a path → its description, and a description → the opened file.

    megatron  PREFIX.bin and PREFIX.idx, as Megatron and Kielo write them (`token_shards.py`)
    npy       OLMo's flat ids: no header and no index, documents end with end-of-text; numpy's own .npy too
    ds        nanotron's and datatrove's: NAME.ds, NAME.ds.index (ends of documents), NAME.ds.metadata

Only heads and last entries are read, so that 100 GB take as long as 100 kB. Raises KieloError, with the file
and the number, for files that cannot be what they seem.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from kielo.artifact.token_file import DocumentIndex, EndsIndex, MegatronIndex, OpenTokenFile, TokenFile
from kielo.artifact.token_shards import LOSS_MASK, MegatronHead
from kielo.recipe.errors import KieloError

FINGERPRINT_BYTES = 4096  # of each end of a file
READ_AT_ONCE = 1 << 20  # entries of an index
NPY_MAGIC = b"\x93NUMPY"
_OLMO_IDS, _OLMO_MASKS = "token_ids", "labels_mask"


@dataclass(frozen=True)
class Format:
    """A format. `suffix` ends the names of data files, and `index` opens a file's index."""

    suffix: str
    describe: Callable[[Path, int], TokenFile]
    index: Callable[[Path, TokenFile], DocumentIndex | None]


def describe(path: Path, width: int) -> TokenFile:
    """Describe a data file with its loss mask. width: bytes of an id, if the file does not store it."""
    file = next(kind for kind in FORMATS.values() if path.name.endswith(kind.suffix)).describe(path, width)
    mask = _mask_path(path, file.format)
    if not mask.is_file():
        return file
    if (size := mask.stat().st_size) != file.tokens:
        raise KieloError(
            f"{mask}: {size:,} bytes for the {file.tokens:,} tokens of {path.name}, but a loss mask has one "
            "for each. Fix: copy both again, or remove it if it is no loss mask"
        )
    marked = fingerprint(path, index_path(path, file.format), mask)
    return file.model_copy(update={"loss_mask": mask.name, "fingerprint": marked})


def _mask_path(path: Path, kind: str) -> Path:
    """Return PREFIX.loss_mask, datatrove's NAME.ds.loss, or OLMo-core's labels_mask_… of token_ids_….npy."""
    if kind == "ds":
        return path.with_name(path.name + ".loss")
    if kind == "npy" and path.name.startswith(_OLMO_IDS):
        return path.with_name(_OLMO_MASKS + path.name.removeprefix(_OLMO_IDS))
    return path.with_name(path.name.removesuffix(FORMATS[kind].suffix) + LOSS_MASK)


def is_mask(name: str) -> bool:
    return name.startswith(_OLMO_MASKS)


def open_file(root: Path, file: TokenFile, end_of_text_id: int) -> OpenTokenFile:
    index = FORMATS[file.format].index(root / file.name, file)
    return OpenTokenFile(root / file.name, file, index, end_of_text_id)


@dataclass(frozen=True)
class _Ends:
    """The size of a file and its first and last FINGERPRINT_BYTES, read in one opening."""

    size: int
    first: bytes
    last: bytes

    @classmethod
    def of(cls, path: Path) -> "_Ends":
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            places = (0, max(0, size - FINGERPRINT_BYTES))
            return cls(size, *(os.pread(file.fileno(), FINGERPRINT_BYTES, place) for place in places))


def fingerprint(path: Path, *beside: Path | None) -> str:
    """Return a hash of the sizes and both ends of a file and the files beside it, which is cheap."""
    return _fingerprint(*(_Ends.of(part) for part in (path, *beside) if part is not None))


def _fingerprint(*parts: _Ends) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.size.to_bytes(8, "little"))
        digest.update(part.first)
        digest.update(part.last)
    return digest.hexdigest()


def index_path(path: Path, kind: str) -> Path | None:
    return {"megatron": _megatron_index_path(path), "ds": _ds_index_path(path), "npy": None}[kind]


def _megatron_index_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".bin") + ".idx")


def _ds_index_path(path: Path) -> Path:
    return path.with_name(path.name + ".index")


def check_index(path: Path, file: TokenFile) -> None:
    """Raise KieloError if documents go backwards or past the data, or Megatron sequences have gaps."""
    if file.format == "megatron":
        MegatronHead(_megatron_index_path(path)).check_sequences()
    if (index := FORMATS[file.format].index(path, file)) is None:
        return
    before = 0
    for first in range(0, index.num_documents, READ_AT_ONCE):
        starts = index.starts(first, min(first + READ_AT_ONCE, index.num_documents))
        steps = np.diff(starts, prepend=before)
        wrong = np.flatnonzero((steps < 0) | (starts > file.tokens))
        if len(wrong) or (first == 0 and starts[0] != 0):
            number = int(wrong[0]) if len(wrong) else 0
            raise KieloError(
                f"{index_path(path, file.format)}: document {first + number} begins at token "
                f"{starts[number]:,}, after one at {int(starts[number - 1]) if number else before:,}, in "
                f"{path.name} of {file.tokens:,} tokens. The index is damaged or another file's. Fix: copy "
                "both again"
            )
        before = int(starts[-1])


def _describe_megatron(path: Path, width: int) -> TokenFile:
    head = MegatronHead(index := _megatron_index_path(path))
    size, end = path.stat().st_size, head.end_of_data()
    _check_whole(path, size, head.dtype)
    if end != size:
        raise KieloError(
            f"{index} does not match {path.name}: its last sequence ends at byte {end:,}, but the data has "
            f"{size:,} bytes. Fix: copy both files again"
        )
    return TokenFile(
        name=path.name,
        format="megatron",
        dtype=head.dtype.str,
        first_byte=0,
        tokens=size // head.dtype.itemsize,
        documents=head.num_boundaries - 1,
        bytes=size,
        index_bytes=index.stat().st_size,
        fingerprint=fingerprint(path, index),
    )


def _megatron_index(path: Path, file: TokenFile) -> DocumentIndex:
    head = MegatronHead(_megatron_index_path(path))
    return MegatronIndex(*head.arrays(), file.tokens, head.dtype.itemsize)


def _describe_npy(path: Path, width: int) -> TokenFile:
    dtype, first_byte, ends = np.dtype(f"<u{width}"), 0, _Ends.of(path)
    if ends.first.startswith(NPY_MAGIC):  # written by numpy.save, unlike OLMo's flat ids
        dtype, first_byte = _npy_header(path)
    size = ends.size
    _check_whole(path, size - first_byte, dtype)
    return TokenFile(
        name=path.name,
        format="npy",
        dtype=dtype.str,
        first_byte=first_byte,
        tokens=(size - first_byte) // dtype.itemsize,
        documents=None,
        bytes=size,
        index_bytes=0,
        fingerprint=_fingerprint(ends),
    )


def _npy_header(path: Path) -> tuple[np.dtype, int]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as problem:  # a header is Python text, and fails in many ways
        raise KieloError(f"{path}: a NumPy file that cannot be mapped ({problem})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
        raise KieloError(
            f"{path}: {array.dtype} of shape {array.shape}, but a row of little-endian integers is expected"
        )
    return array.dtype, int(array.offset)


def _describe_ds(path: Path, width: int) -> TokenFile:
    index_path = _ds_index_path(path)
    width = _width_of_metadata(f"{path}.metadata") or width
    data, index = _Ends.of(path), None
    with suppress(FileNotFoundError, IsADirectoryError):
        index = _Ends.of(index_path)
    dtype, size = np.dtype(f"<u{width}"), data.size
    _check_whole(path, size, dtype)
    if index is None or index.size % 8:
        found = "missing" if index is None else f"{index.size:,} bytes, which are no whole uint64s"
        raise KieloError(
            f"{index_path}: {found}, but it has the ends of the documents of {path.name}. Fix: copy it "
            "again, or write the shard with save_index"
        )
    end = int.from_bytes(index.last[-8:], "little")
    if size and end != size // width:
        raise KieloError(
            f"{index_path} does not match {path.name}: its last document ends at token {end:,}, but the data "
            f"has {size // width:,} of {width} bytes. Fix: copy both files again"
        )
    return TokenFile(
        name=path.name,
        format="ds",
        dtype=dtype.str,
        first_byte=0,
        tokens=size // width,
        documents=index.size // 8,
        bytes=size,
        index_bytes=index.size,
        fingerprint=_fingerprint(data, index),
    )


def _ds_index(path: Path, file: TokenFile) -> DocumentIndex:
    is_empty = not (index := _ds_index_path(path)).stat().st_size
    return EndsIndex(np.zeros(0, "<u8") if is_empty else np.memmap(index, "<u8", "r").view(np.ndarray))


def _width_of_metadata(path: str) -> int | None:
    """Return the bytes of an id from "TOKENIZER|4", the first line of the metadata."""
    try:
        with open(path, "rb", buffering=0) as file:
            first = (file.read(FINGERPRINT_BYTES) or b"").partition(b"\n")[0]
    except OSError:
        return None
    width = first.rpartition(b"|")[2]
    return int(width) if width in (b"2", b"4") else None


def _check_whole(path: Path, size: int, dtype: np.dtype) -> None:
    if size % dtype.itemsize:
        raise KieloError(
            f"{path}: {size:,} bytes of data are no whole number of ids of {dtype.itemsize} bytes. "
            "Fix: copy the file again if it is cut short, or set tokens_dtype of the source for other ids"
        )


FORMATS = {
    "megatron": Format(".bin", _describe_megatron, _megatron_index),
    "npy": Format(".npy", _describe_npy, lambda path, file: None),
    "ds": Format(".ds", _describe_ds, _ds_index),
}
