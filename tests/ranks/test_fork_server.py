"""Ranks that are forked from a server of `multiprocessing` start whatever TMPDIR is."""

import os
import subprocess
import sys

import pytest

from tests.started_ranks import preload

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


# What asks the driver something; a process that did so cannot give CUDA to those that are forked from it.
LOOKS = """
import importlib, sys
import torch
asked = []
for module, name in ((torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.cuda, "_lazy_init")):
    setattr(module, name, lambda *_, name=name: asked.append(name) or 0)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*asked)
"""


@pytest.mark.full
@pytest.mark.parametrize("has_cuda", [True, False])
def test_the_server_of_a_gpus_tests_asks_the_driver_nothing(has_cuda):
    """torchao, which asks at its import, is there for builds without CUDA alone."""
    if not has_cuda:
        pytest.importorskip("torchao")
    done = subprocess.run([sys.executable, "-c", LOOKS, *preload(has_cuda)], capture_output=True, text=True)
    assert (done.stdout == "\n") == has_cuda, done.stdout + done.stderr
