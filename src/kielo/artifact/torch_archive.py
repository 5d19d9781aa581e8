"""Files that `torch.save` writes, without torch and without running anything: content and places of bytes.

Such a file is a zip with a pickle and one uncompressed member for each storage, so any part of a tensor can
be read at its place. https://docs.pytorch.org/docs/stable/notes/serialization.html describes the members.
"""

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kielo.artifact.inert_data import check_size, read_as_data
from kielo.recipe.errors import KieloError

_LOCAL_HEADER_BYTES = 30
_MOST_OF_ORDER = 16  # bytes of the member that says "little" or "big"


@dataclass(frozen=True)
class TorchArchive:
    """The content of a file, or of a part of it, as plain data; storages: key → (first byte, bytes)."""

    path: Path
    content: Any
    storages: dict[str, tuple[int, int]]


def read_archive(
    path: Path, begin: int = 0, length: int | None = None, plain_under: str | None = None
) -> TorchArchive:
    """Read what `torch.save` wrote at byte `begin`. Raise KieloError by the file, also for hostile pickles.

    plain_under: as of `read_as_data`.
    """
    try:
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if begin < 0 or begin + (length or 0) > file_bytes:
                raise KieloError(f"{path}: cut short: a tensor of its table ends beyond byte {file_bytes}")
            window = _Window(file, begin, file_bytes - begin if length is None else length)
            try:
                with zipfile.ZipFile(io.BufferedReader(window)) as archive:
                    data, storages = _members(path, archive, file, begin, window.length)
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, KeyError) as error:
                raise KieloError(
                    f"{path}: cannot be read: no zip of torch.save ({error}). It is cut short, damaged, "
                    "being written, or of a torch before 1.6. Fix: copy it again, or save it again by "
                    "torch.load and torch.save"
                ) from error
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror or error})") from error
    return TorchArchive(path, read_as_data(data, str(path), plain_under), storages)


def _members(
    path: Path, archive: zipfile.ZipFile, file: IO[bytes], begin: int, length: int
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
    if "data.pkl" not in members:
        raise KieloError(f"{path}: a zip without data.pkl, so torch.save did not write it")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
        raise KieloError(f"{path}: compressed, which torch.save never does. Fix: save it again by torch.save")
    check_size(members["data.pkl"].file_size, str(path))
    order = members.get("byteorder")
    if order is not None and (order.file_size > _MOST_OF_ORDER or archive.read(order) != b"little"):
        raise KieloError(f"{path}: not little-endian, which Kielo does not read")
    storages = {}
    for name, member in members.items():
        if not name.startswith("data/"):
            continue
        file.seek(begin + member.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
        # The lengths of the member's name and of its extra field, which pads to 64 bytes.
        skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        first = member.header_offset + _LOCAL_HEADER_BYTES + skipped
        if not header.startswith(b"PK\3\4") or first + member.file_size > length:
            raise KieloError(f"{path}: cut short or damaged: {member.filename} ends beyond the file")
        storages[name.removeprefix("data/")] = (begin + first, member.file_size)
    return archive.read(members["data.pkl"]), storages


class _Window(io.RawIOBase):
    """Bytes `begin` to `begin + length` of a file, as a file of their own."""

    def __init__(self, file: IO[bytes], begin: int, length: int):
        self.length, self._file, self._begin, self._place = length, file, begin, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.length}[whence]
        self._place = max(0, start + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self._place)]
        self._file.seek(self._begin + self._place)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._place += len(data)
        return len(data)
