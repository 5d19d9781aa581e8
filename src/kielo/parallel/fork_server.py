"""Where the fork server of `multiprocessing` listens: at a path that the kernel takes, whatever TMPDIR is."""

import multiprocessing.util
import os
import tempfile

# A socket's path has at most 107 bytes; multiprocessing adds two names of 15 and 18 to the folder.
_MOST_FOLDER_BYTES = 70
_SHORT_FOLDER = "/tmp"


def listen_at_a_short_path() -> None:
    """Has `multiprocessing` keep its sockets in /tmp where TMPDIR is too long for them; call it before the
    server starts. Python does this by itself from 3.14 on.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _MOST_FOLDER_BYTES:
        return
    tempfile.tempdir = _SHORT_FOLDER
    try:
        multiprocessing.util.get_temp_dir()  # is made once, and kept
    finally:
        tempfile.tempdir = usual
