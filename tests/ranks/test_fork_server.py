"""Ranks that are forked from a server of `multiprocessing` start whatever TMPDIR is."""

import os
import subprocess
import sys

FORK = """
import multiprocessing, tempfile
from tests.started_ranks import listen_at_a_short_path
listen_at_a_short_path()
process = multiprocessing.get_context("forkserver").Process(target=print, args=("forked",))
process.start()
process.join()
print(tempfile.gettempdir())
"""


def test_a_server_starts_below_a_tmpdir_that_no_socket_takes(tmp_path):
    """A path of a socket has 107 bytes; files that are temporary stay where they were."""
    long = tmp_path / ("a folder of a job " * 6)
    long.mkdir()
    environment = os.environ | {"TMPDIR": str(long)}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["forked", str(long)], done.stderr
