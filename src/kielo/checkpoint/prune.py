"""Removal by rank 0: old and later checkpoints, leftovers of killed saves; damaged ones are renamed.

Names are those of `publish.py`. A kill at any moment leaves whole checkpoints whole.
"""

import os
import re
import secrets
import shutil
from pathlib import Path

from kielo.artifact.checkpoint_folder import step_folders, step_of
from kielo.checkpoint.publish import aside_name, point_newest

_LEFTOVER = re.compile(r"(step_\d{8,})\.[0-9a-f]{16}\.(partial|replaced|removed)")


def prune(newest: Path, keep_newest: int, keep_every_steps: int, kept_step: int | None = None) -> None:
    """Remove what is older than the `keep_newest` newest checkpoints up to `newest`.

    Multiples of `keep_every_steps` (0: none) stay, and so does the newest up to `kept_step`. A symbolic link
    was made by a person, and stays.
    """
    up_to_newest = [path for path in step_folders(newest.parent) if step_of(path) <= step_of(newest)]
    kept = [path for path in up_to_newest if kept_step is not None and step_of(path) <= kept_step][:1]
    for path in up_to_newest[keep_newest:]:
        is_milestone = keep_every_steps and step_of(path) % keep_every_steps == 0
        if not is_milestone and path not in kept and not path.is_symlink():
            _remove(path)


def remove_later(path: Path) -> None:
    """Remove the checkpoints of later steps than `path`'s."""
    point_newest(path)
    for later in step_folders(path.parent):
        if step_of(later) > step_of(path):
            _remove(later)


def remove_leftovers(folder: Path) -> None:
    """Undo what a killed save left halfway. What cannot be removed is left: no later save has its name."""
    for path in sorted(folder.iterdir()):
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None:
            continue
        final = path.with_name(leftover[1])
        if leftover[2] == "replaced" and not final.exists():
            # Killed between the two renames of `publish`: only the older checkpoint of this step exists.
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def mark_damaged(path: Path, damage: str) -> str:
    """Rename a damaged checkpoint to `NAME.damaged`, for people to look at; returns the warning.

    Damaged ones that were renamed before stay.
    """
    renamed, number = path.with_name(path.name + ".damaged"), 1
    while os.path.lexists(renamed):
        number += 1
        renamed = path.with_name(f"{path.name}.damaged.{number}")
    try:
        path.rename(renamed)
    except OSError as error:
        return (
            f"checkpoint {path} is damaged and skipped: {damage} (it could not be renamed: {error.strerror})"
        )
    return f"checkpoint {path} is damaged and skipped: {damage}; set aside as {renamed.name}"


def _remove(path: Path) -> None:
    """Rename, then remove: a half-removed folder is never taken for a damaged checkpoint."""
    going = aside_name(path, secrets.token_hex(8), "removed")
    path.rename(going)
    shutil.rmtree(going)
