"""Folders of checkpoints, by rank 0: published under their name, replaced, and pruned; torch-free.

`NAME.ID.partial` is being written, `NAME.ID.replaced` was moved away by another save, `NAME.ID.removed` is
being removed; ID is random. `NAME.damaged…` were found damaged. A kill at any moment leaves whole checkpoints
whole. Other names come from a person, and are not touched.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from kielo.artifact.checkpoint_folder import NEWEST_NAME, saved_step, step_folders
from kielo.artifact.checkpoint_marks import marked_checkpoints
from kielo.artifact.durable import bring_to_disk
from kielo.recipe.errors import KieloError, sentence

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FILE_SYSTEM_BLOCK_BYTES = 4096  # the end of each file takes a whole one

_MORE_ROOM = "Free space or raise the quota, lower checkpoint.keep_newest, or set `folder` to another disk"


def shortage(folder: Path, num_bytes: int, num_files: int) -> str | None:
    """Return why a file system has no room for these bytes and files, but for quotas, or None if it has."""
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
    if (found := shortage(folder, num_bytes, num_files)) is not None:
        raise KieloError(found)


def aside_name(path: Path, save_id: str, what: str) -> Path:
    """Return the folder of the checkpoint `path` while it is "partial", "replaced" or "removed"."""
    return path.with_name(f"{path.name}.{save_id}.{what}")


def publish(partial: Path, final: Path) -> None:
    """Rename a whole folder, its files on the disk, to `final`. An older `final` is moved away first."""
    bring_to_disk(partial)
    replaced = _replaced(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    bring_to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(partial: Path, final: Path) -> None:
    """Remove the files of a failed save. Files of another job, which may have taken the folder, stay."""
    shutil.rmtree(partial, ignore_errors=True)
    if _replaced(partial).exists() and not final.exists():
        _replaced(partial).rename(final)


def _replaced(partial: Path) -> Path:
    return partial.with_suffix(".replaced")


def point_newest(path: Path) -> None:
    """Point the symbolic link `newest` beside `path` to it. Only people miss it if it cannot be made."""
    link, aside = path.with_name(NEWEST_NAME), path.with_name(NEWEST_NAME + ".partial")
    if link.exists() and not link.is_symlink():
        return  # a person's copy
    with suppress(OSError):
        aside.unlink(missing_ok=True)
        aside.symlink_to(path.name)
        os.replace(aside, link)
        bring_to_disk(path.parent)


def failure(final: Path, tensor_bytes: int, error: BaseException) -> str:
    cause = error if isinstance(error, OSError) else error.__cause__
    reason = sentence(error) or str(error)
    if getattr(cause, "errno", None) in _DISK_FULL:
        system = os.statvfs(next(folder for folder in final.parents if folder.exists()))
        reason = (
            f"disk full: its tensors need {tensor_bytes:,} bytes, {system.f_bavail * system.f_frsize:,} "
            f"bytes and {system.f_favail:,} inodes are free ({reason}). {_MORE_ROOM}"
        )
    return f"checkpoint {final.name} was not saved in {final.parent}, earlier ones are untouched: {reason}"


_LEFTOVER = re.compile(r"(step_\d{8,})\.[0-9a-f]{16}\.(partial|replaced|removed)")


def prune(
    newest: Path,
    keep_newest: int,
    keep_every_steps: int,
    kept_step: int | None = None,
    kept_names: Collection[str] = (),
) -> None:
    """Remove checkpoints older than the `keep_newest` newest checkpoints up to `newest`.

    Multiples of `keep_every_steps` (0: none), the newest up to `kept_step`, `kept_names`, a person's links,
    and checkpoints that another process reads (`checkpoint_marks.py`) stay.
    """
    up_to_newest = [path for path in step_folders(newest.parent) if saved_step(path) <= saved_step(newest)]
    kept = [path for path in up_to_newest if kept_step is not None and saved_step(path) <= kept_step][:1]
    older = up_to_newest[keep_newest:]
    in_use = marked_checkpoints(newest.parent) if older else set()
    for path in older:
        is_milestone = keep_every_steps and saved_step(path) % keep_every_steps == 0
        is_kept = is_milestone or path in kept or path.name in in_use or path.name in kept_names
        if not is_kept and not path.is_symlink():
            _remove(path)


def remove_later(path: Path) -> None:
    point_newest(path)
    for later in step_folders(path.parent):
        if saved_step(later) > saved_step(path):
            _remove(later)


def remove_leftovers(folder: Path) -> None:
    """Undo the unfinished steps of a killed save. A folder that cannot be removed stays: its ID is unique."""
    for path in sorted(folder.iterdir()):
        if (leftover := _LEFTOVER.fullmatch(path.name)) is None:
            continue
        final = path.with_name(leftover[1])
        if leftover[2] == "replaced" and not final.exists():
            # Killed between the two renames of `publish`: only the older checkpoint of this step exists.
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def mark_damaged(path: Path, damage: str) -> str:
    """Rename a damaged checkpoint to a new `NAME.damaged`, for people to look at. Return the warning."""
    renamed, number = path.with_name(path.name + ".damaged"), 1
    while os.path.lexists(renamed):
        number += 1
        renamed = path.with_name(f"{path.name}.damaged.{number}")
    said = f"checkpoint {path} is damaged and skipped: {damage}"
    try:
        path.rename(renamed)
    except OSError as error:
        return f"{said} (it could not be renamed: {error.strerror})"
    return f"{said}; set aside as {renamed.name}"


def _remove(path: Path) -> None:
    """Rename, then remove: a half-removed folder is never taken for a damaged checkpoint."""
    going = aside_name(path, secrets.token_hex(8), "removed")
    path.rename(going)
    shutil.rmtree(going)
