"""The accelerator card's settings of torch's allocator are in the environment before CUDA starts."""

import ctypes
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kielo.ranks.process_settings import settings_of_device
from kielo.recipe.cards import accelerator, accelerators

PROGRAM = """
import json, os, sys
from kielo.ranks.process_settings import settle_allocator
said = settle_allocator(sys.argv[1])
print(json.dumps([said, {name: value for name, value in os.environ.items() if "ALLOC_CONF" in name}]))
"""


@pytest.mark.parametrize(
    ("card", "own", "expected"),
    [
        ("h200", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("h200", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("h200", {"PYTORCH_ALLOC_CONF": ""}, None),
        ("mi250x_gcd", {}, None),
    ],
)
def test_a_process_has_the_cards_settings_unless_it_was_given_some(card, own, expected):
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, accelerator(card).allocator_settings],
        env=plain | own,
        capture_output=True,
        check=True,
    )
    said, found = json.loads(done.stdout)
    assert found == (own if expected is None else expected)
    assert ("expandable_segments:True" in said) == (expected is not None)


def test_only_nvidias_segments_can_grow():
    """AMD's allocator has not been tried with them; a CPU has none."""
    for card in map(accelerator, accelerators()):
        is_nvidia = card.device == "cuda" and not card.architecture.startswith("cdna")
        assert card.allocator_settings == ("expandable_segments:True" if is_nvidia else "")


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 0, "expandable_segments:True"),
        ("NVIDIA H100 80GB HBM3", 9, ""),  # of the driver
        ("an unknown one", 0, ""),
        (None, 0, ""),  # no driver
    ],
)
def test_settings_are_those_of_the_device_whatever_the_cluster(monkeypatch, name, error, expected):
    """The card `laptop` knows of no GPU; the driver does, and is asked without starting CUDA."""

    def fill(device: object, buffer: ctypes.Array, size: int) -> int:
        buffer.value = name.encode()
        return 0

    def load(file: str) -> SimpleNamespace:
        if name is None:
            raise OSError(f"{file}: cannot open shared object file")
        return SimpleNamespace(
            nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByIndex_v2=lambda *_: error, nvmlDeviceGetName=fill
        )

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert settings_of_device() == expected


FAULTS = """
import resource, torch
from kielo.ranks.world import start_world
start_world(60, "cpu")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    torch.ones(2**24)
for _ in range(8):  # some pieces between come to lie at the heap's end first
    use()
before = faults()
for _ in range(4):
    use()
print(faults() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
@pytest.mark.parametrize(("own", "keeps"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False)])
def test_ranks_on_cpus_keep_freed_memory_unless_glibc_was_told_otherwise(own, keeps):
    """64 MiB are of new pages, of at most 2 MiB each, in the first uses or in every use."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=plain | own, capture_output=True, check=True)
    assert (int(done.stdout) < 4 * 32) == keeps, done.stdout
