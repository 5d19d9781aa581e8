"""Publication of a checkpoint by rank 0: room foreseen, the written folder renamed, a failed one discarded.

Torch-free; nothing here communicates with other ranks. `NAME.ID.partial` is being written, `NAME.ID.replaced`
was moved away by another save of the same step, `NAME.ID.removed` is being removed; ID is random.
`NAME.damaged`, `NAME.damaged.2`, … were found damaged. A kill at any moment leaves whole checkpoints whole.
Whatever has another name was put there by a person, and is not touched.
"""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from kielo.artifact.checkpoint_folder import NEWEST_NAME
from kielo.artifact.durable import bring_to_disk
from kielo.recipe.error_messages import sentence
from kielo.recipe.errors import KieloError

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FILE_SYSTEM_BLOCK_BYTES = 4096  # the end of each file takes a whole one

_MORE_ROOM = "Free space or raise the quota, lower checkpoint.keep_newest, or set `folder` to another disk"


def shortage(folder: Path, num_bytes: int, num_files: int) -> str | None:
    """Returns why the file system of `folder` has no room for so many bytes and files; None if it has.

    A quota is not seen here; writing meets it.
    """
    system = os.statvfs(folder)
    needed_bytes = num_bytes + num_files * _FILE_SYSTEM_BLOCK_BYTES
    free_bytes = system.f_bavail * system.f_frsize
    if needed_bytes > free_bytes:
        return f"disk full: it needs about {needed_bytes:,} bytes, {free_bytes:,} are free. {_MORE_ROOM}"
    # Some file systems do not count inodes and say 0.
    if system.f_files and num_files > system.f_favail:
        return f"too few inodes: it needs {num_files:,}, {system.f_favail:,} are free. {_MORE_ROOM}"
    return None


def refuse_if_too_full(folder: Path, num_bytes: int, num_files: int) -> None:
    """Raises KieloError if the file system of `folder` has no room for so many bytes and files."""
    found = shortage(folder, num_bytes, num_files)
    if found is not None:
        raise KieloError(found)


def aside_name(path: Path, save_id: str, what: str) -> Path:
    """Names the folder aside of the checkpoint `path` while it is "partial", "replaced" or "removed".

    `remove_leftovers` finds it.
    """
    return path.with_name(f"{path.name}.{save_id}.{what}")


def publish(partial: Path, final: Path) -> None:
    """Rename a whole folder, its files on the disk, to `final`; one of that name is moved away first."""
    bring_to_disk(partial)
    replaced = _replaced(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    bring_to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(partial: Path, final: Path) -> None:
    """Remove what a failed save wrote; files of another job, which may have taken the folder, stay."""
    shutil.rmtree(partial, ignore_errors=True)
    if _replaced(partial).exists() and not final.exists():
        _replaced(partial).rename(final)


def _replaced(partial: Path) -> Path:
    return partial.with_suffix(".replaced")


def point_newest(path: Path) -> None:
    """Point the symbolic link `newest` beside `path` to it; only people miss it where none can be made."""
    link, aside = path.with_name(NEWEST_NAME), path.with_name(NEWEST_NAME + ".partial")
    if link.exists() and not link.is_symlink():
        return  # a person's copy
    with suppress(OSError):
        aside.unlink(missing_ok=True)
        aside.symlink_to(path.name)
        os.replace(aside, link)
        bring_to_disk(path.parent)


def failure(final: Path, tensor_bytes: int, error: BaseException) -> str:
    """Returns why `final` was not saved, as a sentence."""
    cause = error if isinstance(error, OSError) else error.__cause__
    reason = sentence(error) or str(error)
    if getattr(cause, "errno", None) in _DISK_FULL:
        system = os.statvfs(next(folder for folder in final.parents if folder.exists()))
        reason = (
            f"disk full: its tensors need {tensor_bytes:,} bytes, {system.f_bavail * system.f_frsize:,} "
            f"bytes and {system.f_favail:,} inodes are free ({reason}). {_MORE_ROOM}"
        )
    return f"checkpoint {final.name} was not saved in {final.parent}, earlier ones are untouched: {reason}"
