"""Processes of `kielo train` on this machine, one a rank: they are started, get signals, and are watched.

torchrun turns every exit code into 1 and a stop into a traceback, and imports torch again in restarted ranks.
These ranks get its variables, and are forked from a process that has imported torch (`rank_template.py`).
Without torch.
"""

import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STACKS_SECONDS = 3.0  # until a frozen process has written its stacks
# The letters of proc(5), field "state".
_STATES = {
    "T": "it was stopped by a signal (SIGSTOP), a debugger or the scheduler",
    "t": "a debugger has stopped it",
    "D": "the kernel does not let it continue: a disk, a network file system or a driver",
    "Z": "it has ended",
    "": "it has ended",
}
_OTHER_STATE = "none of its Python threads runs: a library may hold Python's lock"
_TEMPLATE = "kielo.ranks.rank_template"
_LOOK_SECONDS = 0.05
# The process from which the ranks are forked beats every second, once it has imported what they need.
MOST_SILENT_SECONDS, MOST_START_SECONDS = 60, 1200
# When a rank has failed, the others notice it by themselves, if their communication says so, and end.
_NOTICE_SECONDS = 5.0
# Below 32768, where Linux begins with the ports that it chooses itself.
_PORTS, _PORT_TRIES = range(20_000, 32_768), 20


def name_of_this_node() -> str:
    """Return the scheduler's name of this node, by which a job can exclude it, or else the host's name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, as another rank of its node sees it.

    On SIGUSR2, which does no harm, faulthandler writes all stacks into descriptor `stacks_file`.
    """

    host: str
    pid: int
    stacks_file: int

    @classmethod
    def own(cls, stacks_file: int) -> "RankProcess":
        return cls(name_of_this_node(), os.getpid(), stacks_file)

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})"

    def is_here(self) -> bool:
        return self.host == name_of_this_node()

    def state(self) -> str:
        return _STATES.get(self._letter(), _OTHER_STATE)

    def stacks(self) -> str:
        """Return the stacks of a silent process, by its faulthandler or py-spy. It may end when it wakes."""
        text, file = "", Path(f"/proc/{self.pid}/fd/{self.stacks_file}")
        with suppress(OSError), file.open(encoding="utf-8", errors="replace") as written:
            os.kill(self.pid, signal.SIGUSR2)
            os.kill(self.pid, signal.SIGCONT)
            until, is_running = time.monotonic() + STACKS_SECONDS, True
            while not text and is_running and time.monotonic() < until:
                time.sleep(0.1)
                is_running = self._letter() not in ("", "Z")
                text = written.read()
        if not text and shutil.which("py-spy"):
            command = ["py-spy", "dump", "--nonblocking", "--pid", str(self.pid)]
            with suppress(OSError, subprocess.SubprocessError):
                text = subprocess.run(
                    command, capture_output=True, text=True, timeout=STACKS_SECONDS, check=False
                ).stdout
        return text

    def _letter(self) -> str:
        with suppress(OSError):
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
            return text.rpartition(")")[2].split()[0]
        return ""


@dataclass(frozen=True)
class Failure:
    """The first rank that failed: its exit code, or minus the number of the signal that ended it."""

    rank: int
    code: int

    def __str__(self) -> str:
        how = f"exit code {self.code}"
        if self.code < 0:
            is_known = -self.code in set(signal.Signals)
            how = signal.Signals(-self.code).name if is_known else f"signal {-self.code}"
            how += " (out of memory?)" if -self.code == signal.SIGKILL else ""
        return f"rank {self.rank} ended with {how}"


class Ranks:
    """`number` processes of this Python with `arguments` (`-m MODULE ...` or `-c CODE`).

    In their own session Ctrl-C at a terminal reaches them once, through their parent. stop_code: the exit
    code after a stop. `modules` are imported once for all ranks. They must not start threads or use a GPU.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        number: int,
        stop_code: int,
        variables: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
    ):
        self._arguments, self._number, self._stop_code = list(arguments), number, stop_code
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
        self._environment = os.environ | {"OMP_NUM_THREADS": threads} | dict(variables or {})
        self._modules = modules
        self._template: subprocess.Popen | None = None
        self._running: set[int] = set()
        self._attempt = 0
        self._text = b""
        self._has_beaten, self._silent_looks = False, 0
        self._stop_signal: signal.Signals | None = None

    def start(self, is_quiet: bool = False, number: int | None = None) -> None:
        """Start the ranks, also again after `wait`. is_quiet: they print to stderr. number: a new number."""
        self._number = number or self._number
        if self._template is None or self._template.poll() is not None:
            self._start_template(is_quiet)
        everyone = {
            "WORLD_SIZE": str(self._number),
            "LOCAL_WORLD_SIZE": str(self._number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
        }
        ranks = [everyone | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self._number)]
        self._running, self._attempt = set(range(self._number)), self._attempt + 1
        self._send({"start": ranks, "arguments": self._arguments})

    def stop(self, number: int) -> None:
        self._stop_signal = signal.Signals(number)

    @property
    def is_stopping(self) -> bool:
        return self._stop_signal is not None

    def wait(self, shutdown_seconds: int) -> Failure | None:
        """Wait until all ranks have ended. Return the first that failed, or None.

        After a failure the others are ended. Ranks that run `shutdown_seconds` after a stop are killed.
        """
        failures: list[Failure] = []
        until, is_told, is_killing = None, False, False
        while self._running and self._template is not None:
            for rank, code in self._ends(self._template):
                self._running.discard(rank)
                if code not in (0, self._stop_code) and not (is_killing and failures):
                    failures.append(Failure(rank, code))
                    until = _sooner(until, _NOTICE_SECONDS)
            if self._stop_signal is not None and not is_told:
                self._send({"signal": self._stop_signal})
                is_told, until = True, _sooner(until, shutdown_seconds)
            if until is not None and time.monotonic() > until and not is_killing:
                self._send({"signal": signal.SIGKILL})
                is_killing = True
        # of simultaneous ends, a signal is the cause and an exit code its effect on another rank
        return min(failures, key=lambda failure: failure.code >= 0, default=None)

    def kill(self) -> None:
        if self._template is not None:
            self._template.kill()  # the kernel ends its children
            self.close()

    def close(self) -> None:
        if self._template is not None:
            os.close(self._control)
            self._template.wait()
            os.close(self._report)
            self._template = None

    def _start_template(self, is_quiet: bool) -> None:
        self._has_beaten, self._silent_looks, self._text = False, 0, b""
        control, self._control = os.pipe()
        self._report, report = os.pipe()
        self._template = subprocess.Popen(
            [sys.executable, "-P", "-m", _TEMPLATE, str(control), str(report), *self._modules],
            env=self._environment,
            stdout=2 if is_quiet else None,
            pass_fds=(control, report),
            start_new_session=True,
        )
        os.close(control)
        os.close(report)

    def _send(self, message: Mapping[str, object]) -> None:
        with suppress(BrokenPipeError):  # `_ends` finds that it has ended, and its ranks with it
            os.write(self._control, json.dumps(message).encode() + b"\n")

    def _ends(self, template: subprocess.Popen) -> list[tuple[int, int]]:
        if not select.select([self._report], [], [], _LOOK_SECONDS)[0]:
            self._look_for_life(template)
            return []
        self._silent_looks = 0
        received = os.read(self._report, 2**16)
        if not received:
            code = template.wait()
            return [(rank, code or -signal.SIGKILL) for rank in sorted(self._running)]
        *lines, self._text = (self._text + received).split(b"\n")
        found = [json.loads(line) for line in lines]
        self._has_beaten = self._has_beaten or any("alive" in one for one in found)
        return [(one["ended"], one["code"]) for one in found if "ended" in one]

    def _look_for_life(self, template: subprocess.Popen) -> None:
        """Kill the frozen process that forked the ranks. Looks count, because the caller can freeze too."""
        self._silent_looks += 1
        limit = MOST_SILENT_SECONDS if self._has_beaten else MOST_START_SECONDS
        if self._silent_looks * _LOOK_SECONDS < limit:
            return
        print(
            f"kielo: process {template.pid}, from which the ranks were forked, has not answered for "
            f"{limit} s. It is frozen (SIGSTOP?), so it is killed, and the ranks with it",
            file=sys.stderr,
            flush=True,
        )
        self._silent_looks = 0
        template.kill()


def _sooner(until: float | None, seconds: float) -> float:
    return min(until or float("inf"), time.monotonic() + seconds)


def free_port() -> int:
    """Return a free TCP port, outside the range from which the kernel serves other programs meanwhile."""
    for _ in range(_PORT_TRIES):
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
