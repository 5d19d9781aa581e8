"""The beats of a lease, what its file says, and what is told when it is lost; nothing is waited for."""

import json
import os
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kielo.artifact import lease as module
from kielo.artifact.lease import BEAT_SECONDS, HANDED_DOWN, LOOKS_PER_BEAT, QUIET_BEATS, Holder, Lease, held
from kielo.recipe.errors import KieloError


@pytest.fixture
def beats(monkeypatch):
    """beats(answers): what `wait` of the beating thread answers, after calling each; returns its seconds.

    Then it is over, and a thread that asks again ends.
    """

    def prepare(*answers) -> list[float]:
        waited: list[float] = []
        left = [*answers, lambda: True]

        class Over:
            def wait(self, seconds: float) -> bool:
                waited.append(seconds)
                return left.pop(0)()

            def set(self) -> None:
                pass

        monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Over, Thread=threading.Thread))
        return waited

    return prepare


def test_a_beat_moves_the_time_of_the_file(tmp_path, beats) -> None:
    """After each wait; the content stays, and the file goes at the end."""
    lease = Lease.take(tmp_path, 7.5)
    text, seen = lease.path.read_text(), []

    def look() -> bool:
        seen.append((os.stat(lease.path).st_mtime_ns > 0, lease.path.read_text()))
        os.utime(lease.path, (0, 0))
        return False

    waited = beats(look, look, look)
    with lease.beating() as same:
        pass
    assert same is lease and waited == [7.5] * 4 and seen == [(True, text)] * 3
    assert not lease.path.exists()


def test_a_failed_beat_is_tried_again_and_a_lost_lease_is_told_once(
    tmp_path, beats, monkeypatch, caplog
) -> None:
    lease = Lease.take(tmp_path, 3.0)
    original, failures = os.utime, [OSError("hangs")]

    def utime(path, *times) -> None:
        if failures:
            raise failures.pop()
        original(path, *times)

    def lose() -> bool:
        assert failures == []
        lease.path.write_text("{}")
        return False

    monkeypatch.setattr(os, "utime", utime)
    waited = beats(lambda: False, lose, lambda: False)
    with lease.beating():
        pass
    told = (
        f"{lease.path} is no longer this job's: it was removed or replaced; this job stops and publishes "
        "nothing more. Its last checkpoint is untouched"
    )
    assert waited == [3.0, 3.0] and caplog.messages == [told] and lease.path.exists()
    lease.path.unlink()
    with pytest.raises(KieloError) as caught:
        lease.check()
    assert str(caught.value) == told


def test_who_took_a_lease_is_told(tmp_path) -> None:
    """The holder of the next number, or the one whose file is in its place; others' numbers say nothing."""
    other = json.loads(Lease.take(tmp_path / "other", 3600).path.read_text()) | {"pid": 5, "host": "h"}
    other |= {"slurm_job_id": None, "started_at": "then"}
    for name, is_taken in (
        ("lease.00000002.json", True),
        ("lease.00000001.json", True),
        ("lease.00000003.json", False),
    ):
        folder = tmp_path / name
        lease = Lease.take(folder, 3600)
        (folder / name).write_text(json.dumps(other))
        if is_taken:
            with pytest.raises(
                KieloError, match="no longer this job's: process 5 on h, since then works in this fold"
            ):
                lease.check()
        else:
            lease.check()


def test_what_a_lease_says(tmp_path, monkeypatch) -> None:
    """Who holds it since when, as JSON with a line's end; of this process."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    lease = Lease.take(tmp_path / "a" / "b")
    text = lease.path.read_text()
    content = json.loads(text)
    assert lease.path == tmp_path / "a" / "b" / "lease.00000001.json"
    assert list(content) == [
        "token",
        "host",
        "machine",
        "pid",
        "process_started",
        "slurm_job_id",
        "started_at",
    ]
    assert text == json.dumps(content, indent=1) + "\n" and content["token"] == lease.token
    assert (content["host"], content["pid"]) == (socket.gethostname(), os.getpid())
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert content["process_started"] == int(after_name[19]) and content["slurm_job_id"] == "42"
    assert content["machine"] == f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", content["started_at"])
    assert lease.path.stat().st_mode & 0o777 == 0o644 & ~_umask()
    assert (BEAT_SECONDS, QUIET_BEATS, LOOKS_PER_BEAT) == (10.0, 3, 5)


def _umask() -> int:
    return int(re.search(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text())[1], 8)


def test_a_process_of_another_user_runs(tmp_path, monkeypatch) -> None:
    """So does one that /proc hides."""
    holder = Holder(**json.loads(Lease.take(tmp_path).path.read_text()))

    def refused(*_: object) -> None:
        raise PermissionError

    asked = []
    monkeypatch.setattr(os, "kill", lambda *what: asked.append(what))
    assert Holder(**vars(holder) | {"pid": 2**22 + 1}).is_running() and asked == [(2**22 + 1, 0)]
    monkeypatch.setattr(os, "kill", refused)
    assert holder.is_running()


def test_a_folder_that_cannot_be_written_is_told(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        KieloError, match="file: no lease can be taken there .*. Fix: a writable folder with free space"
    ):
        Lease.take(tmp_path / "file")


def test_a_block_hands_its_lease_down_and_takes_it_back(tmp_path, monkeypatch) -> None:
    """Whatever was handed down before is there again, also after an error."""
    monkeypatch.setenv(HANDED_DOWN, "of another folder")
    with pytest.raises(ZeroDivisionError), held(tmp_path) as lease:
        assert os.environ[HANDED_DOWN] == lease.token
        raise ZeroDivisionError
    assert os.environ[HANDED_DOWN] == "of another folder" and not lease.path.exists()


def test_a_lease_that_is_lost_is_not_given_back(tmp_path) -> None:
    """It is another's now."""
    lease = Lease.take(tmp_path, 3600)
    with lease.beating():
        lease.path.write_text("another's")
    assert lease.path.read_text() == "another's"
