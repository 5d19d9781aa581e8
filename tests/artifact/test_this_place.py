"""Names that tell the processes of two containers apart, which may have one host name and one number."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kielo.artifact.this_place import is_alive, this_place


def proc(folder: Path, boot: str) -> Path:
    """A /proc with this boot. Each has a set of process numbers of its own."""
    for name, text in (("sys/kernel/random/boot_id", boot), ("self/ns/pid", "")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_place_is_a_host_a_boot_and_a_set_of_process_numbers(tmp_path: Path) -> None:
    """A clone has another boot, and a container another set. Without /proc it is the host."""
    one = proc(tmp_path / "one", "boot 1")
    names = [this_place(one), this_place(proc(tmp_path / "two", "boot 1"))]
    (one / "sys/kernel/random/boot_id").write_text("boot 2")
    names += [this_place(one), this_place()]
    assert len(set(names)) == 4 and this_place(one) == names[2]
    assert all(name.rpartition("-")[0] == platform.node() for name in names)
    assert this_place(tmp_path / "none") == platform.node()


def test_a_process_of_another_set_has_another_place() -> None:
    words = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    said = "from kielo.artifact.this_place import this_place; import os; print(this_place(), os.getpid())"
    try:
        found = subprocess.run([*words, said], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to make a set of process numbers")
    assert found[1] == "1" and found[0] != this_place()


def test_a_process_lives_until_it_is_collected() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        assert is_alive(str(dead.pid))
    assert not is_alive(str(dead.pid)) and is_alive(str(os.getpid())) and is_alive("no number")
