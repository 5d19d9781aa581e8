"""The folder of a stage, and the folder aside in which its next content is written.

    RUN/corpus              the stage's folder, PLACE; a symbolic link stays a link to PLACE
    PLACE/../.corpus.kielo/ the folder aside, while the stage works
        journal.jsonl       marks this folder as Kielo's; a folder without it is never emptied or removed
        new/                the next content, which takes the place when it is finished
        old/                the content before, during the exchange

A kill at any moment leaves the old or the new content, in the place or in the folder aside; `begin` puts it
back. `manifest.refuse_foreign` decides whether the content of the place is Kielo's.
"""

import fcntl
import json
import os
import shutil
from contextlib import suppress
from io import FileIO
from pathlib import Path

from kielo.artifact.durable import bring_to_disk, make_folder, name_durably
from kielo.recipe.errors import KieloError
from kielo.recipe.places import place


class StageFolder:
    """The folder of a `kind` stage. identity: hash of the output, in `head`, the journal's first line.

    Order of use: `refuse`, `begin`, files into `new`, `publish`, `close`. `journal` is open from `begin` on.
    """

    def __init__(self, folder: Path | str, kind: str, identity: str):
        self.folder, self.kind = place(folder), kind
        self.place = Path(os.path.realpath(self.folder))
        self._aside = self.place.parent / f".{self.place.name}.kielo"
        self.new, self._old = self._aside / "new", self._aside / "old"
        self.journal_path = self._aside / "journal.jsonl"
        head = {"stage": kind, "folder": self.place.name, "identity": identity}
        self.head = json.dumps(head).encode() + b"\n"
        self.journal: FileIO | None = None

    def refuse(self) -> None:
        what, is_folder = "", os.path.isdir(self.place)
        if not is_folder and self.folder.is_symlink():
            what = (
                f"a symbolic link to {os.readlink(self.folder)}, which is no folder. Is its disk mounted? "
                "Fix: make that folder, or remove the link"
            )
        elif not is_folder and os.path.lexists(self.place):
            what = f"a file, but the {self.kind} stage makes a folder. Fix: move it away"
        elif is_folder and os.path.ismount(self.place):
            what = (
                f"the root of a file system, which no finished {self.kind} folder can replace. Fix: a "
                "symbolic link to a folder in it"
            )
        if what:
            raise KieloError(f"{self.folder}: {what}")
        if os.path.lexists(self._aside) and not self._is_ours():
            what = "is not Kielo's, which would work there. Fix: move it away; nothing was changed"
            raise KieloError(f"{self._aside} {what}")

    def begin(self, is_resumed: bool = False) -> FileIO:
        """Make the folder aside, or open a killed attempt's. Return the journal. is_resumed: keep `new`."""
        make_folder(self._aside)
        # Unbuffered: a line is in the file when `write` returns.
        journal = self.journal = FileIO(self.journal_path, "a+")
        self._claim(journal)
        if not os.fstat(journal.fileno()).st_size:
            journal.write(self.head)
            os.fsync(journal.fileno())
            bring_to_disk(self._aside)
        self.settle()
        if self.new.exists() and not is_resumed:
            shutil.rmtree(self.new)
        self.new.mkdir(exist_ok=True)
        return journal

    def settle(self) -> None:
        """End a killed exchange: the old content returns to an empty place, else it is removed."""
        if self.journal_path.exists() and self._old.exists():
            if self.place.exists() and os.listdir(self.place):
                shutil.rmtree(self._old, ignore_errors=True)
            else:
                name_durably(self._old, self.place)

    def publish(self) -> None:
        """Move `new`, whose files are on the disk, to the place, and remove the folder aside."""
        bring_to_disk(self.new)
        if self.place.exists():
            os.rename(self.place, self._old)
        try:
            name_durably(self.new, self.place)
        except OSError:
            self.settle()
            raise
        self.remove()
        self.close()

    def remove(self) -> None:
        """Remove the folder aside if it is Kielo's, and the journal, its mark, last."""
        if not self._is_ours():
            return
        with suppress(OSError):
            self.settle()
            shutil.rmtree(self.new, ignore_errors=True)
            if set(os.listdir(self._aside)) <= {self.journal_path.name}:
                self.journal_path.unlink(missing_ok=True)
                self._aside.rmdir()

    def discard(self) -> None:
        """Leave nothing of this attempt. Do nothing if another process holds the folder aside."""
        if self.journal is not None and not self.journal.closed:
            self.remove()
            self.close()

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def _is_ours(self) -> bool:
        """Return True if Kielo made the folder aside. A kill before or after the journal leaves it empty."""
        if not self._aside.is_dir() or self._aside.is_symlink():
            return False
        return self.journal_path.is_file() or not any(self._aside.iterdir())

    def _claim(self, journal: FileIO) -> None:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise KieloError(
                f"{self._aside}: another process is writing there. Fix: wait for it, or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
