"""The checkpoint folder on disk, without torch: its files, their names, and the folders of a run.

    checkpoints/step_00000100/
        rank_00000.safetensors ...  chunks of tensors, keys `NAME@offset,offset`
        index.json                  dtype, shape and chunks of every tensor; plain JSON state
        manifest.json               size and checksums of each file above, and of itself; written last
    checkpoints/newest              a symbolic link for people; readers choose by step and checksums

Every save has an id, which each of its files stores, so that a file of another save is recognised. A folder
without a manifest is not a checkpoint. Nothing is ever pickled.
"""

import errno
import os
import re
from pathlib import Path

from kielo.recipe.errors import KieloError

VERSION = 2  # of the index and of the manifest
INDEX_NAME = "index.json"
NEWEST_NAME = "newest"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_RANK_FILE = re.compile(r"rank_(\d{5,})\.safetensors")


def step_folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(folder: Path | str) -> int | None:
    """Return 100 for `.../step_00000100`; None for any other name (`.partial`, `.damaged`, ...)."""
    match = _STEP_FOLDER.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def saved_step(folder: Path) -> int:
    """Return the step of a folder with a checkpoint's name. Raises ValueError for another name."""
    step = step_of(folder)
    if step is None:
        raise ValueError(f"{folder} is not named as a checkpoint")
    return step


def rank_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def rank_of(file_name: str) -> int | None:
    """Return the rank that wrote the file, or None for files that rank 0 writes for all ranks."""
    match = _RANK_FILE.fullmatch(file_name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Return the folders with names of checkpoints inside `folder`, newest first, complete or not.

    Raises KieloError if the file system does not list `folder`, which does not mean that it is empty.
    """
    folder = Path(folder)
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if step_of(entry.name) is not None and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise KieloError(
            f"{folder}: {os_error_text(error)}. Fix: retry when the file system is back"
        ) from error
    return sorted((folder / name for name in names), key=saved_step, reverse=True)


def newest_written(folder: Path) -> str:
    """Return the name of the newest checkpoint in `folder` that has its manifest, or ""."""
    return next((path.name for path in step_folders(folder) if (path / "manifest.json").exists()), "")


def os_error_text(error: OSError) -> str:
    """Return the reason and the errno's name: "Input/output error (EIO)"."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, error.errno)})"


def run_around(path: Path) -> Path | None:
    """Return the folder of the run that contains `path`, absolute and without links, None outside a run."""
    return next(
        (parent for parent in path.resolve().parents if (parent / "train" / "checkpoints").is_dir()), None
    )
