"""Inspection of checkpoints, without torch and without changes: choice, faults and content."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

from tqdm import tqdm

from kielo.artifact.checkpoint_folder import (
    INDEX_NAME,
    CheckpointFile,
    Fault,
    FaultyCheckpoint,
    find_fault,
    step_folders,
    step_of,
)
from kielo.artifact.checkpoint_index import (
    CheckpointIndex,
    PlainState,
    TensorEntry,
    listed_files,
    read_checkpoint_manifest,
    read_index,
    read_state,
)
from kielo.artifact.json_object import JsonTable
from kielo.recipe.errors import KieloError


def check_checkpoint(folder: Path, checksums: bool = True) -> Fault | None:
    try:
        files = listed_files(folder)
    except FaultyCheckpoint as error:
        return error.fault
    return find_fault(folder, sorted(files), files, checksums)


def list_checkpoints(folder: Path, checksums: bool = False) -> list[JsonTable]:
    """Return a row for each checkpoint in `folder`, newest first.

    A row is {"name", "step", "tokens", "loss", "bytes", "written_at", "state"}. state: "verified" (every byte
    was read and compared), "complete" (without `checksums`: only sizes and save ids), or a fault: "damaged:
    …", "unreadable: …", "of another version: …". Other values are None if the checkpoint lacks them or cannot
    be read.
    """
    rows = []
    for path in step_folders(folder):
        with suppress(FileNotFoundError):  # the training job removed it meanwhile
            rows.append(_row(path, checksums))
    return rows


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and a warning for each newer damaged checkpoint.

    FaultyCheckpoint for a newer checkpoint that is unreadable or of another version: it can be complete.
    """
    warnings: list[str] = []
    for path in step_folders(folder):
        fault = check_checkpoint(path)
        if fault is None:
            return path, warnings
        if fault.kind != "damaged":
            raise FaultyCheckpoint(path, fault)
        warnings.append(f"checkpoint {path} is {fault}")
    return None, warnings


def newest_checkpoint(run_folder: Path, warn: Callable[[str], object] | None = None) -> Path:
    """Return the newest complete checkpoint of a run, or raise KieloError. warn: called for damaged ones."""
    folder = Path(run_folder) / "train" / "checkpoints"
    path, warnings = newest_complete(folder)
    if warn is not None:
        for warning in warnings:
            warn(warning)
    if path is None:
        damaged = f" ({'; '.join(warnings)})" if warnings else ""
        raise KieloError(f"{folder} has no complete checkpoint{damaged}. Fix: run the train stage first")
    return path


def _row(path: Path, checksums: bool) -> JsonTable:
    fault, written_at, state = check_checkpoint(path, checksums), None, PlainState()
    with suppress(KieloError):
        written_at = read_checkpoint_manifest(path).written_at
        state = read_state(path)
    return {
        "name": path.name,
        "step": step_of(path),
        "tokens": state.tokens,
        "loss": state.loss,
        "bytes": _folder_bytes(path),
        "written_at": written_at,
        "state": str(fault) if fault else "verified" if checksums else "complete",
    }


def _folder_bytes(path: Path) -> int | None:
    try:
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    except FileNotFoundError:
        raise
    except OSError:
        return None


def checkpoints_folder(run: Path) -> Path | None:
    """Return the folder of checkpoints in a run or train folder, or that folder itself; else None."""
    for folder in (run / "train" / "checkpoints", run / "checkpoints", run):
        if step_folders(folder):
            return folder
    return None


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or all of the run there, newest first. KieloError for neither."""
    if _is_checkpoint(path):
        return [path.parent.resolve() / path.resolve().name if path.is_symlink() else path]
    if (folder := checkpoints_folder(path)) is None:
        raise KieloError(
            f"{path}: neither a checkpoint nor a run folder with checkpoints. Fix: a folder such as "
            "runs/demo_estonian or runs/demo_estonian/train/checkpoints/newest"
        )
    return step_folders(folder)


def refuse_no_checkpoint(path: Path) -> None:
    if not _is_checkpoint(path):
        raise KieloError(
            f"{path}: not the folder of a checkpoint. Fix: one that `kielo checkpoint list RUN` names"
        )


def newest_whole(paths: list[Path]) -> Path:
    """Return the newest checkpoint that is complete by its sizes, else the newest, to show its damage."""
    return next((path for path in paths if check_checkpoint(path, checksums=False) is None), paths[0])


def find_faults(paths: Iterable[Path]) -> dict[Path, list[Fault]]:
    """Return the faults of each checkpoint, one a file. Every byte is read, with a progress bar on stderr."""
    files: dict[Path, Mapping[str, CheckpointFile]] = {}
    faults: dict[Path, list[Fault]] = {}
    for path in paths:
        faults[path] = []
        try:
            files[path] = listed_files(path)
        except FaultyCheckpoint as error:
            faults[path] = [error.fault]
    total = sum(record.bytes for listed in files.values() for record in listed.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None) as bar:
        for path, listed in files.items():
            for name in sorted(listed):
                fault = find_fault(path, [name], listed)
                faults[path] += [fault] if fault else []
                bar.update(listed[name].bytes)
    return faults


def state_after_verification(faults: list[Fault]) -> str:
    faults = sorted(faults, key=lambda fault: fault.kind != "damaged")
    return f"{faults[0].kind}: {'; '.join(fault.reason for fault in faults)}" if faults else "verified"


def describe_checkpoint(path: Path) -> JsonTable:
    index, manifest = read_index(path), read_checkpoint_manifest(path)
    state, files = index.plain, manifest.files
    # Only the index is read completely; of other files sizes and save ids.
    fault = find_fault(path, [INDEX_NAME], files) or check_checkpoint(path, checksums=False)
    return {
        "checkpoint": str(path),
        "state": str(fault) if fault else "complete",
        "step": index.step,
        "tokens": state.tokens,
        "samples": state.samples,
        "loss": state.loss,
        "save_id": index.save_id,
        "written_at": manifest.written_at,
        "written_by": f"kielo {manifest.versions['kielo']}",
        "recipe": state.identity.get("name"),
        "model": state.identity.get("model"),
        "averaged_from": [source.content() for source in state.averaged_from] or None,
        "parts": _parts(index),
        "files": {name: record.bytes for name, record in files.items()},
    }


def describe_tensors(path: Path) -> list[JsonTable]:
    index = read_index(path)
    return [
        {
            "name": name,
            "dtype": index.entry(name).dtype,
            "shape": list(index.entry(name).shape),
            "chunks": len(index.entry(name).chunks),
            "tied_to": index.aliases.get(name),
        }
        for name in index.names()
    ]


def _is_checkpoint(path: Path) -> bool:
    """Return True for a damaged checkpoint too, by its name. `newest` is a symbolic link."""
    return (path / INDEX_NAME).is_file() or (path.is_dir() and step_of(path.resolve()) is not None)


def _parts(index: CheckpointIndex) -> list[JsonTable]:
    """Count tensors, elements and bytes by part (`model`, `optimiser`) and dtype, tied tensors once."""
    groups: dict[tuple[str, str], list[TensorEntry]] = {}
    for name, entry in index.tensors.items():
        groups.setdefault((name.partition("/")[0], entry.dtype), []).append(entry)
    return [
        {
            "part": part,
            "dtype": dtype,
            "tensors": len(entries),
            "elements": (elements := sum(prod(entry.shape) for entry in entries)),
            # A safetensors dtype (F32, F8_E4M3, I64) names its bits. BOOL takes a byte.
            "bytes": elements * (int(bits[0]) // 8 if (bits := re.search(r"\d+", dtype)) else 1),
        }
        for (part, dtype), entries in sorted(groups.items())
    ]
