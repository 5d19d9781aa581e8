"""Durable writes: what a finished file or folder needs so that a power cut does not undo it.

A rename is durable once the folder that holds the name is on the disk, and a file's content once the file itself is.
Write the file, `bring_to_disk` it, rename it, `bring_to_disk` its folder, and only then let a manifest vouch for it.
"""

import os
from pathlib import Path


def bring_to_disk(path: Path | str) -> None:
    """Wait until the content of a closed file, or the entries of a folder, are on the disk. OSError where it fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
