"""Every verb that writes, on a disk that is full or read-only: one sentence, and nothing is changed.

And files that are also somebody else's: hard links, closed streams, names as long as they may be.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.trial import belongings, kielo, rest_marked_full, went_well

VERBS = {
    "run": ("run", "tiny.toml"),
    "run in a new folder": ("run", "tiny.toml", "--set", "folder=new"),
    "train": ("train", "tiny.toml", "--set", "train.tokens=4_000"),
    "plan --plot": ("plan", "estonian_llama31_70b", "--nodes", "4..8", "--plot", "pictures"),
    "preflight": ("preflight", "tiny.toml"),
    "site": ("site", "lumi_g", "--to", "site"),
    "site --new": ("site", "--new", "mine"),
    "launch": (
        "launch", "poro_34b", "--cluster", "lumi_g", "--nodes", "64", "--account", "project_462000000",
        "--dry-run",
    ),
    "verify parity": ("verify", "parity", "tiny.toml"),
    "evaluate": ("evaluate", "tiny.toml"),
    "export": ("export", "run", "--to", "out"),
    "checkpoint average": ("checkpoint", "average", "run/train/checkpoints/step_00000015",
                           "run/train/checkpoints/step_00000020", "--to", "average"),
    "recipes --copy": ("recipes", "--copy", "demo_estonian"),
}  # fmt: skip
DISKS = {"full": "No space left on device", "read-only": "Read-only file system"}
CASES = [(disk, verb) for disk in DISKS for verb in VERBS]
KEPT = [("full", "site"), ("full", "recipes --copy"), ("read-only", "launch"), ("read-only", "export")]


@pytest.fixture
def small_disk(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB with a finished run."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", place], check=True)
    try:
        yield Path(shutil.copytree(finished, place / "workplace", symlinks=True))
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def spoil(workplace: Path, disk: str) -> None:
    if disk == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", workplace.parent], check=True)
        return
    for size in (1 << 20, 1 << 10, 1):
        try:
            with open(workplace.parent / "filling", "ab", buffering=0) as file:
                while True:
                    file.write(b"x" * size)
        except OSError:
            continue


@pytest.mark.parametrize("case", rest_marked_full(CASES, KEPT), ids=" ".join)
def test_a_disk_that_takes_nothing(small_disk: Path, case: tuple[str, str]) -> None:
    disk, verb = case
    spoil(small_disk, disk)
    before = belongings(small_disk)
    found = kielo(small_disk, *VERBS[verb], HOME=str(small_disk.parent))
    assert found.code == 1 and "Traceback" not in found.told, found.told
    last = found.err.strip().splitlines()[-1]
    assert "bug of Kielo" not in last and "[Errno" not in last.partition("(")[0], last
    assert DISKS[disk] in last or "disk full" in last or "is read-only" in last, last
    after = belongings(small_disk)
    assert before.items() <= after.items()
    assert not [name for name in after if name not in before and "journal" not in name], after.keys() - before


def test_a_hard_link_of_an_output_stays_what_it_was(finished: Path, here) -> None:
    """Kielo writes the output anew, aside; the file that a person linked keeps its bytes."""
    kept = finished.parent / "kept"
    kept.mkdir()
    names = ["report.html", "recipe.toml", "resolved.toml", "evaluate/scores.json", "train/metrics.jsonl"]
    for name in names:
        os.link(finished / "run" / name, kept / Path(name).name)
    before = belongings(kept)
    went_well(here(finished, "run", "tiny.toml", "--set", "evaluate.ngram_order=2"))
    mine, theirs = belongings(finished / "run"), belongings(kept)
    assert {name for name in names if mine[name] != theirs[Path(name).name]} >= {
        "report.html", "recipe.toml", "evaluate/scores.json",
    }  # fmt: skip
    assert belongings(kept) == before


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.mark.parametrize("closed", rest_marked_full(CLOSED, CLOSED[-1:]))
def test_streams_that_are_closed(finished: Path, closed: str) -> None:
    """No verb writes into a file that got the number of a closed stream."""
    before = belongings(finished / "run" / "train")
    words = f"'{sys.executable}' -m kielo run tiny.toml --only report"
    done = subprocess.run(["bash", "-c", f"{words} {closed}"], cwd=finished, timeout=120)
    assert done.returncode in (0, 1)
    assert belongings(finished / "run" / "train") == before
    assert (finished / "run" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


PLACES = ["missing", "a file", "x" * 140, "relative", ""]


@pytest.mark.parametrize("place", rest_marked_full(PLACES, ["x" * 140]))
def test_a_folder_for_temporary_files_that_is_none(workplace: Path, place: str) -> None:
    """Workers and ranks meet without it, or by a name that is short enough, under the lease of their run."""
    (workplace / "a file").touch()
    (workplace / ("x" * 140)).mkdir()
    where = place if place in ("relative", "") else str(workplace / place)
    words = ("run", "tiny.toml", "--to", "train", "--ranks", "2", "--set", "corpus.workers=2")
    went_well(kielo(workplace, *words, TMPDIR=where))
    assert not list((workplace / "run").glob("lease.*"))


@pytest.mark.parametrize("length", [200, 255, 256])
def test_a_name_as_long_as_it_may_be(workplace: Path, here, length: int) -> None:
    """A folder's name of 255 bytes is the longest there is; what stands beside it needs a longer one."""
    found = here(workplace, "run", "tiny.toml", "--to", "tokenizer", "--set", f"folder={'x' * length}")
    assert "Traceback" not in found.told and "bug of Kielo" not in found.told
    assert found.code == 0 if length == 200 else found.code in (0, 1), found.told
    if found.code:
        assert "File name too long" in found.err
