"""Copies of finished folders at an address, such as an object storage: each file verified, manifest last.

A file is verified by reading it back. So a copy with a manifest is complete, and an interrupted copy resumes.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.checkpoint_inspection import check_checkpoint
from kielo.artifact.manifest import MANIFEST_NAME, hash_file
from kielo.artifact.remote_files import ChangedFile, RemoteFiles
from kielo.artifact.stage_json import JsonFile, read_json, write_json
from kielo.recipe.errors import KieloError

Say = Callable[[str], None]


class CheckpointCopies(JsonFile):
    """The checkpoints of a run that were copied to an address and verified there."""

    FILE_NAME: ClassVar[str] = "checkpoint_copies.json"

    address: str
    copied: dict[str, str]
    """Folder of the checkpoint → hash of its manifest."""


def not_copied(checkpoints: Path, address: str) -> list[Path]:
    """Return the complete checkpoints of a run without a verified copy at the address, oldest first."""
    copied = _copied(checkpoints, address)
    complete = [path for path in step_folders(checkpoints) if (path / MANIFEST_NAME).is_file()]
    return [path for path in reversed(complete) if copied.get(path.name) != hash_file(path / MANIFEST_NAME)]


def copy_checkpoints(checkpoints: Path, address: str, say: Say) -> list[str]:
    """Copy the complete checkpoints of a run that the address lacks. Return their names."""
    made = []
    for path in not_copied(checkpoints, address):
        try:
            identity, is_own = hash_file(path / MANIFEST_NAME), path.name in _copied(checkpoints, address)
            upload_folder(path, address, say, is_own)
        except FileNotFoundError:
            if path.exists():
                raise
            continue  # the training went back and removed it
        copied = _copied(checkpoints, address) | {path.name: identity}
        write_json(checkpoints.parent, CheckpointCopies(address=address, copied=copied))
        made.append(path.name)
    return made


def _copied(checkpoints: Path, address: str) -> dict[str, str]:
    noted = read_json(checkpoints.parent, CheckpointCopies)
    return dict(noted.copied) if noted is not None and noted.address == address else {}


def upload_folder(folder: Path, address: str, say: Say, is_own: bool = False) -> str:
    """Copy a finished folder to the address, below its name. Return the address of the copy.

    is_own: replace another folder of this name there. Otherwise it is refused.
    """
    there, own = RemoteFiles(address, say), (folder / MANIFEST_NAME).read_bytes()
    copy = f"{address.rstrip('/')}/{folder.name}"
    manifest = there.below(folder.name, MANIFEST_NAME)
    theirs = there.read(manifest)
    if theirs == own:
        return copy
    if theirs is not None and not is_own:
        raise KieloError(f"{copy}: another {folder.name} is there, and stays. Fix: another address")
    if theirs is not None:
        there.remove(manifest)  # until the new files are complete
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME):
        name = path.relative_to(folder).as_posix()
        if there.put(path, there.below(folder.name, name)):
            say(f"{folder.name}/{name}: copied, {path.stat().st_size / 1e6:,.1f} MB")
    there.put(folder / MANIFEST_NAME, manifest)
    return copy


def download_folder(address: str, to: Path, say: Say) -> Path:
    """Copy a finished folder from an address into the folder `to`, complete or not at all. Return it."""
    there, name = RemoteFiles(address.rstrip("/"), say), address.rstrip("/").rpartition("/")[2]
    final, aside = to / name, to / f".{name}.downloads"
    if final.exists():
        raise KieloError(f"{final}: is there already, and stays. Fix: another folder")
    if there.read(there.below(MANIFEST_NAME)) is None:
        raise KieloError(
            f"{address}: has no {MANIFEST_NAME}, so no finished copy is there. Fix: another address"
        )
    for one in there.files():
        part = aside / one.name
        part.parent.mkdir(parents=True, exist_ok=True)
        say(f"{name}/{one.name}: {(one.bytes or 0) / 1e6:,.1f} MB")
        try:
            there.download(one, part)
        except ChangedFile:
            shutil.rmtree(aside)
            raise KieloError(f"{one.path}: changed while it was read. Fix: run again") from None
    if (fault := check_checkpoint(aside)) is not None:
        shutil.rmtree(aside)
        raise KieloError(f"{address}: the copy is {fault}. Fix: another checkpoint")
    aside.rename(final)
    return final
