"""Durable writes: a file or folder that is finished is not undone by a power cut.

A rename is durable once the folder that holds the name is on the disk, and a file's content once the file
itself is. `DurableFile` does all of it for one file. For files that another program wrote: `bring_to_disk`
the file, `name_durably` it, or `bring_tree_to_disk` a whole folder; only then may a manifest vouch for them.

Kielo's own texts in folders where people keep theirs, such as a model card, end with a mark: a comment with a
checksum of the text above it. Kielo replaces such a text if nobody has changed it, and refuses others.
"""

import errno
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from kielo.artifact.this_place import this_place
from kielo.recipe.errors import KieloError

logger = logging.getLogger(__name__)

_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_told_devices: set[int] = set()
_ASIDE = re.compile(r"\..*\.\d+\.kielo-partial")
# File systems bring many files to the disk at once: 2,500 small ones took a fifth of the time.
_SYNC_THREADS = 16

_ADVICE = {
    errno.ENOSPC: "free some space, or set `folder` in the recipe to a larger disk",
    errno.EDQUOT: "free some space, or set `folder` in the recipe to a larger disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or set `folder` in the recipe to another disk",
    errno.EROFS: "set `folder` in the recipe to a disk that can be written",
    errno.EACCES: "set `folder` in the recipe to one that can be written",
}


class WrittenAside(ABC):
    """A file written aside. A `with` block gives it its name by `close`, or abandons it at an exception."""

    @abstractmethod
    def close(self) -> None:
        """Finish the file, bring it to the disk and give it its name."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave nothing behind."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class DurableFile(WrittenAside):
    """A new file of bytes, or the file before, after a power cut too. OSError names it, not the aside."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        make_folder(self.path.parent)
        # Place and process keep ranks and jobs apart that write the same file.
        writer = f"{this_place()}.{os.getpid()}"
        self._aside = self.path.with_name(f".{self.path.name}.{writer}.kielo-partial")
        with self._named():
            self._file = open(self._aside, "wb")  # noqa: SIM115 (closed by close or abandon)

    def write(self, data: bytes | memoryview) -> int:
        with self._named():
            return self._file.write(data)

    def close(self) -> None:
        try:
            with self._named():
                self._file.close()
                bring_to_disk(self._aside)
                name_durably(self._aside, self.path)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        for leave in (self._file.close, self._aside.unlink):
            with suppress(OSError):  # on a full disk closing fails too
                leave()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            if problem.filename is None or str(problem.filename) == str(self._aside):
                problem.filename, problem.filename2 = str(self.path), None
            raise


def is_aside(name: str) -> bool:
    """Return True for the name of a file that a killed `DurableFile` left."""
    return _ASIDE.fullmatch(name) is not None


@contextmanager
def disk_problems_reported(what: str) -> Iterator[None]:
    """Raise a KieloError that begins with `what` for an error of the disk inside: full, read-only, gone."""
    try:
        yield
    except OSError as problem:
        if isinstance(problem, ConnectionError | BlockingIOError):  # a pipe or process, not the disk
            raise
        why = problem.strerror or str(problem)
        where = f" ({problem.filename})" if problem.filename else ""
        advice = _ADVICE.get(problem.errno or 0, "mend that, and run the same command")
        raise KieloError(f"{what} was not written: {why}{where}. Fix: {advice}") from problem


def bring_to_disk(path: Path | str) -> None:
    """Wait until a closed file's content, or a folder's entries, are on the disk. OSError if it fails.

    Some file systems (CIFS, FUSE, some Ceph) cannot do it for folders (EINVAL), which is logged once.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in _NO_FSYNC or not os.path.isdir(path):
            raise
        if (device := os.fstat(descriptor).st_dev) not in _told_devices:
            _told_devices.add(device)
            told = (
                "its file system has no fsync of folders; after a power cut its newest files may be missing"
            )
            logger.warning("%s: %s", path, told)
    finally:
        os.close(descriptor)


def bring_tree_to_disk(folder: Path | str) -> None:
    paths = [Path(folder)]
    for place, folders, files in os.walk(folder):
        paths += [path for name in (*folders, *files) if not (path := Path(place, name)).is_symlink()]
    with ThreadPoolExecutor(_SYNC_THREADS) as threads:
        list(threads.map(bring_to_disk, paths))


def name_durably(aside: Path, path: Path) -> None:
    """Give a file or folder on the disk its name, replacing an older file or an empty folder."""
    os.replace(aside, path)
    bring_to_disk(path.parent)


def make_folder(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        bring_to_disk(made.parent)


HTML_COMMENT, HASH_COMMENT = "<!-- {} -->", "# {}"  # Markdown and SVG; TOML
_MARK = "written by kielo, which replaces this file while the text above has the xxh3_128 {}"
_MAX_BYTES = 64 * 2**20  # larger files are not read, and are not Kielo's
_LAST_LINE = re.compile(rb"[^\n]*" + re.escape(_MARK.format("")).encode() + rb"([0-9a-f]{32})[^\n]*\n")


def marked(text: str, comment: str = HTML_COMMENT) -> str:
    """Return `text`, which ends in a line end, with the line that marks it as Kielo's."""
    return text + comment.format(_MARK.format(xxhash.xxh3_128_hexdigest(text.encode()))) + "\n"


def is_own_text(path: Path | str) -> bool:
    """Return True if Kielo wrote the file and nobody changed it since. OSError if it cannot be read."""
    path = Path(path)
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return False
    content = path.read_bytes()
    begin = content.rfind(b"\n", 0, -1) + 1
    mark = _LAST_LINE.fullmatch(content, begin)
    return mark is not None and mark[1].decode() == xxhash.xxh3_128_hexdigest(content[:begin])


def refuse_other_text(path: Path | str) -> None:
    path = Path(path)
    if path.is_symlink() and not path.exists():
        raise KieloError(f"{path}: a symbolic link that leads nowhere. Fix: remove it; nothing was written")
    if path.exists() and not (path.is_file() and is_own_text(path)):
        raise KieloError(
            f"{path}: exists, and Kielo did not write it or it was changed since. Fix: move it away; "
            "nothing was written"
        )


def refuse_other_json(path: Path | str, key: str) -> None:
    path = Path(path)
    is_own = not os.path.lexists(path)
    with suppress(OSError, ValueError, TypeError):
        is_own = is_own or key in json.loads(path.read_text(encoding="utf-8"))
    if not is_own:
        raise KieloError(
            f"{path}: exists, and Kielo did not write it. Fix: move it away; nothing was written"
        )


def write_own_text(path: Path | str, text: str, comment: str = HTML_COMMENT) -> None:
    refuse_other_text(path)
    with DurableFile(path) as file:
        file.write(marked(text, comment).encode())
