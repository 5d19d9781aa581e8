"""The whole checkpoints of a run: one checked, all of them listed, and the newest that is whole."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kielo.artifact.checkpoint_faults import Fault, FaultyCheckpoint, find_fault
from kielo.artifact.checkpoint_folder import step_folders, step_of
from kielo.artifact.checkpoint_index import read_index
from kielo.artifact.checkpoint_manifest import listed_files, read_checkpoint_manifest
from kielo.recipe.errors import KieloError


def check_checkpoint(folder: Path, checksums: bool = True) -> Fault | None:
    """Returns the fault of one checkpoint folder, naming the file; None if it is whole."""
    try:
        files = listed_files(folder)
    except FaultyCheckpoint as error:
        return error.fault
    return find_fault(folder, sorted(files), files, checksums)


def list_checkpoints(folder: Path, checksums: bool = False) -> list[dict[str, Any]]:
    """Lists the checkpoints in `folder`, newest first, one row each.

    A row is {"name", "step", "tokens", "loss", "bytes", "written_at", "state"}. state:
    "verified" (every byte was read and compared), "complete" (without `checksums`: sizes and save ids only),
    or a fault: "damaged: …", "unreadable: …", "of another version: …". tokens, loss, written_at and bytes are
    None where the checkpoint does not hold them or cannot be read.
    """
    rows = []
    for path in step_folders(folder):
        with suppress(FileNotFoundError):  # pruned by the training job while we look
            rows.append(_row(path, checksums))
    return rows


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """Finds the newest whole checkpoint in `folder`, with a warning for each newer one that is damaged.

    Changes nothing. Raises FaultyCheckpoint for a newer one that is unreadable or of another version: it may
    well be whole.
    """
    warnings = []
    for path in step_folders(folder):
        fault = check_checkpoint(path)
        if fault is None:
            return path, warnings
        if fault.kind != "damaged":
            raise FaultyCheckpoint(path, fault)
        warnings.append(f"checkpoint {path} is {fault}")
    return None, warnings


def newest_checkpoint(run_folder: Path, warn: Callable[[str], object] | None = None) -> Path:
    """Finds the newest whole checkpoint of a run; `warn` is called for each newer one that is damaged.

    Raises KieloError if there is none, and what `newest_complete` raises.
    """
    folder = Path(run_folder) / "train" / "checkpoints"
    path, warnings = newest_complete(folder)
    for warning in warnings if warn else ():
        warn(warning)
    if path is None:
        damaged = f" ({'; '.join(warnings)})" if warnings else ""
        raise KieloError(f"{folder} holds no whole checkpoint{damaged}; run the train stage first")
    return path


def _row(path: Path, checksums: bool) -> dict[str, Any]:
    fault = check_checkpoint(path, checksums)
    plain: dict[str, Any] = {}
    written_at = None
    with suppress(KieloError):
        written_at = read_checkpoint_manifest(path).written_at
        plain = read_index(path, names=()).plain
    return {
        "name": path.name,
        "step": step_of(path),
        "tokens": plain.get("tokens"),
        "loss": plain.get("loss"),
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
