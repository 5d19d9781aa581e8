"""Copies of finished folders at an address, such as an object storage: each file verified, manifest last.

A file is verified by reading it back. So a copy with a manifest is complete, and an interrupted copy resumes.
A copy that is being made has a claim, so that no other run writes into it.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import ClassVar

from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.checkpoint_inspection import check_checkpoint
from kielo.artifact.json_object import JsonObject
from kielo.artifact.manifest import MANIFEST_NAME, hash_file
from kielo.artifact.remote_files import ChangedFile, RemoteFiles
from kielo.artifact.stage_json import JsonFile, read_json, write_json
from kielo.recipe.errors import KieloError

Say = Callable[[str], None]
CLAIM_NAME = ".kielo-claim"  # its content: the SHA-256 of the manifest of the copy that is being made


class CopiesAt(JsonObject):
    """The checkpoints of a run at one address."""

    copied: dict[str, str] = {}
    """Folder of a checkpoint that was verified there → hash of its manifest."""
    begun: dict[str, list[str]] = {}
    """Folder of a checkpoint → claims of this run's copies of it, finished or not."""


class CheckpointCopies(JsonFile):
    """The checkpoints of a run that were copied to addresses and verified there."""

    FILE_NAME: ClassVar[str] = "checkpoint_copies.json"

    addresses: dict[str, CopiesAt]


def not_copied(checkpoints: Path, address: str) -> list[Path]:
    """Return the complete checkpoints of a run without a verified copy at the address, oldest first."""
    copied = _copies(checkpoints, address).copied
    return [
        path
        for path in reversed(step_folders(checkpoints))
        if (identity := _manifest_hash(path)) is not None and copied.get(path.name) != identity
    ]


def copy_checkpoints(checkpoints: Path, address: str, say: Say) -> list[str]:
    """Copy the complete checkpoints of a run that the address lacks. Return their names.

    Raises KieloError for the first that fails, after the others were tried.
    """
    made, problems = list[str](), list[KieloError]()
    for path in not_copied(checkpoints, address):
        identity, noted = _manifest_hash(path), _copies(checkpoints, address)
        try:
            begin = partial(_begin, checkpoints, address, path.name)
            upload_folder(path, address, say, noted.begun.get(path.name, []), begin)
        except (FileNotFoundError, KieloError) as problem:
            if _manifest_hash(path) != identity:
                continue  # the training went back and removed it
            if not isinstance(problem, KieloError):
                raise
            problems.append(problem)
            continue
        noted = _copies(checkpoints, address)
        copied = noted.copied | {path.name: str(identity)}
        _note(checkpoints, address, noted.model_copy(update={"copied": copied}))
        made.append(path.name)
    if problems:
        raise problems[0]
    return made


def _manifest_hash(folder: Path) -> str | None:
    """Return the hash of the folder's manifest, or None: the training can remove a checkpoint meanwhile."""
    try:
        return hash_file(folder / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _copies(checkpoints: Path, address: str) -> CopiesAt:
    noted = read_json(checkpoints.parent, CheckpointCopies)
    return CopiesAt() if noted is None else noted.addresses.get(address, CopiesAt())


def _note(checkpoints: Path, address: str, copies: CopiesAt) -> None:
    noted = read_json(checkpoints.parent, CheckpointCopies)
    others = {} if noted is None else noted.addresses
    write_json(checkpoints.parent, CheckpointCopies(addresses={**others, address: copies}))


def _begin(checkpoints: Path, address: str, name: str, claim: str) -> None:
    noted = _copies(checkpoints, address)
    begun = noted.begun | {name: sorted({*noted.begun.get(name, []), claim})}
    _note(checkpoints, address, noted.model_copy(update={"begun": begun}))


def upload_folder(
    folder: Path,
    address: str,
    say: Say,
    begun: Sequence[str] = (),
    begin: Callable[[str], None] = lambda claim: None,
) -> str:
    """Copy a finished folder to the address, below its name. Return the address of the copy.

    begun: claims of earlier copies of this run, which are replaced. Others are refused. begin: gets the new
    claim before anything is written.
    """
    there, own = RemoteFiles(address, say), (folder / MANIFEST_NAME).read_bytes()
    copy, claim = f"{address.rstrip('/')}/{folder.name}", sha256(own).hexdigest()
    manifest, claim_there = (there.below(folder.name, name) for name in (MANIFEST_NAME, CLAIM_NAME))
    theirs = there.read(manifest)
    if theirs == own:
        return copy
    other = KieloError(f"{copy}: another {folder.name} is there, and stays. Fix: another address")
    found = (there.read(claim_there) or b"").decode("utf-8", "replace")
    known = {"", claim, *begun}
    if found not in known or theirs is not None and sha256(theirs).hexdigest() not in known:
        raise other
    begin(claim)
    there.write(claim_there, claim.encode())
    if theirs is not None:
        there.remove(manifest)  # until the new files are complete
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME):
        name = path.relative_to(folder).as_posix()
        if there.put(path, there.below(folder.name, name)):
            say(f"{folder.name}/{name}: copied, {path.stat().st_size / 1e6:,.1f} MB")
    if there.read(claim_there) != claim.encode() or there.read(manifest) is not None:
        raise other
    if (folder / MANIFEST_NAME).read_bytes() != own:
        raise KieloError(f"{folder}: was saved again while it was copied. Fix: the same command again")
    there.put(folder / MANIFEST_NAME, manifest)
    there.remove(claim_there)
    return copy


def download_folder(address: str, to: Path, say: Say) -> Path:
    """Copy a finished folder from an address into the folder `to`, complete or not at all. Return it."""
    there, name = RemoteFiles(address.rstrip("/"), say), address.rstrip("/").rpartition("/")[2]
    final, aside = to / name, to / f".{name}.downloads"
    if final.exists():
        raise KieloError(f"{final}: is there already, and stays. Fix: another folder")
    if (manifest := there.read(there.below(MANIFEST_NAME))) is None:
        raise KieloError(
            f"{address}: has no {MANIFEST_NAME}, so no finished copy is there. Fix: another address"
        )
    wanted = {MANIFEST_NAME, *json.loads(manifest)["files"]}
    if odd := [one for one in wanted if PurePosixPath(one).is_absolute() or ".." in PurePosixPath(one).parts]:
        raise KieloError(f"{address}: {odd[0]!r} leads out of the folder. Fix: another checkpoint")
    for one in there.files():
        if one.name not in wanted:
            continue
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
