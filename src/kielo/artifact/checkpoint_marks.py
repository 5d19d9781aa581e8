"""Marks that keep a checkpoint from being pruned while another process reads it. Torch-free.

    checkpoints/step_00000100.ID.in_use    its modification time is the beat, renewed every few seconds

The training job removes old checkpoints and holds the run's lease. A reader beside it has no lease: it makes
a mark, and pruning leaves the checkpoint until the next save. A mark without a beat for `EXPIRY_SECONDS` is a
dead reader's. Pruning removes it, and the checkpoint with it.
"""

import os
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kielo.artifact.checkpoint_folder import os_error_text, step_of

BEAT_SECONDS = 20.0
EXPIRY_SECONDS = 600.0
_MARK = re.compile(r"(step_\d{8,})\.[0-9a-f]{16}\.in_use")


@contextmanager
def kept_from_pruning(checkpoint: Path, beat_seconds: float = BEAT_SECONDS) -> Iterator[str]:
    """Keep the checkpoint inside the block. Yield why no mark can be made, or ""."""
    if step_of(checkpoint) is None:  # pruning removes no other name
        yield ""
        return
    mark = checkpoint.with_name(f"{checkpoint.name}.{secrets.token_hex(8)}.in_use")
    try:
        mark.touch(exist_ok=False)
    except OSError as error:
        yield os_error_text(error)
        return
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(beat_seconds):
            with suppress(OSError):
                os.utime(mark)

    thread = threading.Thread(target=beat, name="checkpoint mark", daemon=True)
    thread.start()
    try:
        yield ""
    finally:
        is_over.set()
        thread.join()
        with suppress(OSError):
            mark.unlink()


def marked_checkpoints(folder: Path) -> set[str]:
    """Return the names of the checkpoints in `folder` that a live reader keeps. Remove marks of dead readers.

    Ages come from the file system alone: the folder was changed by the save that prunes. So the clocks of two
    machines are not compared.
    """
    kept = set()
    now = folder.stat().st_mtime
    for path in folder.iterdir():
        if (found := _MARK.fullmatch(path.name)) is None:
            continue
        with suppress(OSError):  # its reader removed it
            if now - path.stat().st_mtime < EXPIRY_SECONDS:
                kept.add(found[1])
            else:
                path.unlink()
    return kept
