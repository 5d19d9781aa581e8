"""A packer whose process is killed once, in the middle of a batch; workers import it from here."""

import os
import signal
from pathlib import Path
from typing import Any

from kielo.dataset.document_packer import DocumentBatch, PackedDocuments, load_packer


def killed_once(mark: Path, *arguments: Any) -> Any:
    """Loads the packer. The first process that packs a second batch of a file leaves `mark` and is killed."""
    packer = load_packer(*arguments)

    def work(batch: DocumentBatch) -> PackedDocuments:
        packed = packer(batch)
        if batch.first and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return packed

    return work
