"""A power cut: what was not on the disk yet is lost, and nothing that was published is.

A run works on a file system of its own in an image file. At random instants its processes are stopped, and
the image is copied as it is: what the kernel holds of it in memory only is not in the copy. The copy is
mounted, which replays its journal, as after a cut. (Root, and /dev/loop*.)
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import xxhash

from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.checkpoint.read_checkpoint import read_tensors
from tests.faults.trial import kielo, went_well, write_workplace

MIB = 1 << 20
OPTIONS = "loop,commit=300"  # the journal is not written by itself within a test


def why_not() -> str:
    if os.geteuid():
        return "mounting needs root"
    missing = [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
    missing += [path for path in ("/dev/loop-control",) if not os.path.exists(path)]
    return f"{', '.join(missing)} is missing" if missing else ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Disk:
    """An ext4 file system in an image. folder: where it is mounted."""

    def __init__(self, above: Path):
        self._above = above
        self._image, self.folder = above / "disk.img", above / "disk"
        self.folder.mkdir(parents=True)
        with open(self._image, "wb") as file:
            file.truncate(300 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", self._image], check=True)
        subprocess.run(["mount", "-o", OPTIONS, self._image, self.folder], check=True)
        device = subprocess.check_output(["findmnt", "-no", "SOURCE", self.folder], text=True).strip()
        self._busy = Path("/sys/block", Path(device).name, "inflight")

    def cut(self) -> Path:
        """Returns an image of what is on the disk now; what writes to it must be stopped."""
        idle = 0
        while idle < 3:
            idle = idle + 1 if self._busy.read_text().split() == ["0", "0"] else 0
            time.sleep(0.002)
        copy = self._above / f"{time.monotonic_ns()}.img"
        subprocess.run(["cp", "--sparse=always", self._image, copy], check=True)
        return copy

    @contextmanager
    def mounted(self, image: Path) -> Iterator[Path]:
        """The file system of an image that was cut; the image is removed after it."""
        place = self._above / "copy"
        place.mkdir(exist_ok=True)
        subprocess.run(["mount", "-o", OPTIONS, image, place], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", place], check=True)
            image.unlink()

    def end(self) -> None:
        for place in (self._above / "copy", self.folder):
            if os.path.ismount(place):
                subprocess.run(["umount", "-l", place], check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "power")
    try:
        yield made
    finally:
        made.end()


def torn(folder: Path) -> list[str]:
    """Returns the files that a manifest of a stage, checkpoint or export lists and that are not so."""
    found = []
    for path in sorted(folder.rglob("manifest.json")):
        if ".partial" in str(path):
            continue
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["files"]
        except (ValueError, KeyError):
            found.append(f"{path}: no manifest")
            continue
        for name, listed in files.items():
            content = (path.parent / name).read_bytes() if (path.parent / name).is_file() else b""
            if len(content) != listed["bytes"]:
                found.append(f"{path.parent / name}: {len(content)} bytes of {listed['bytes']}")
            elif xxhash.xxh3_128(content).hexdigest() != listed.get("xxh3_128", "").rjust(32):
                found += [f"{path.parent / name}: other content"] * ("xxh3_128" in listed)
    return found


def test_a_file_that_was_not_brought_to_the_disk_is_lost(disk: Disk) -> None:
    """Otherwise the cases below could not fail: a rename reaches the disk before what it renames does."""
    folder = disk.folder / "stage"
    folder.mkdir()
    (folder / "a.tmp").write_bytes(b"x" * MIB)
    (folder / "a.tmp").rename(folder / "a")
    manifest = json.dumps({"files": {"a": {"bytes": MIB}}})
    with open(folder / "manifest.json", "w") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    assert torn(disk.folder) == []
    with disk.mounted(disk.cut()) as place:
        assert torn(place) == [f"{place / 'stage' / 'a'}: 0 bytes of {MIB}"]


@pytest.mark.parametrize("cuts", [10, pytest.param(100, marks=pytest.mark.full)])
def test_a_power_cut_at_any_instant(disk: Disk, cuts: int) -> None:
    """All that was published is whole, and the same command goes on to the same weights."""
    chance, workplace = random.Random(cuts), write_workplace(disk.folder / "workplace")
    words = ("run", "tiny.toml", "--to", "export")
    os.sync()
    whole = shutil.copytree(workplace, disk.folder.parent / "undisturbed")
    began = time.monotonic()
    went_well(kielo(whole, *words))
    seconds = time.monotonic() - began
    moments = sorted(chance.uniform(0.1, 1) * seconds for _ in range(cuts))
    gone_on = set(chance.sample(range(cuts), max(1, cuts // 20)))
    process = subprocess.Popen(
        [sys.executable, "-m", "kielo", *words], cwd=workplace, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    worked, found, images = 0.0, [], []
    try:
        for number, moment in enumerate(moments):
            time.sleep(max(0, moment - worked))
            worked = moment
            os.killpg(process.pid, signal.SIGSTOP)
            image = disk.cut()
            if number in gone_on:
                images.append(image)
            else:
                with disk.mounted(image) as place:
                    found += torn(place)
            os.killpg(process.pid, signal.SIGCONT)
        assert process.wait(timeout=120) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert found == []
    images.append(disk.cut())  # the run has ended: nothing of it may be lost
    for image in images:
        with disk.mounted(image) as place:
            assert torn(place) == []
            is_ended = image == images[-1]
            went_well(kielo(place / "workplace", *(("checkpoint", "verify", "run") if is_ended else words)))
            assert_same_weights(place / "workplace" / "run", whole / "run")


def assert_same_weights(run: Path, other: Path) -> None:
    ours, theirs = (read_tensors(newest_checkpoint(folder)) for folder in (run, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (run / "hf" / "model.safetensors").read_bytes() == (
        other / "hf" / "model.safetensors"
    ).read_bytes()
