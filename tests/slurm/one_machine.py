"""A Slurm of four nodes on this machine, for tests: its daemons in a folder, an environment that finds it.

It needs Debian's slurm-wlm and munge, root, and the right to make namespaces: in one of mounts the nodes'
names lead to this machine without a change of its /etc/hosts; in one of processes every daemon, and whatever
a job started, ends with the first process, which ends with this one.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NODES = 4
NAMES = [f"kielo{number}" for number in range(1, NODES + 1)]
# Long beside what it takes here (seconds): other work may have the machine.
START_LIMIT_SECONDS = 180
COMMAND_LIMIT_SECONDS = 60
_NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Slurm calls a node dead that is silent for SlurmdTimeout, and kills a job KillWait after it asked it to end.
_CONFIGURATION = """\
ClusterName=kielo
SlurmctldHost={host}(127.0.0.1)
MailProg=/bin/true
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd_%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
EnforcePartLimits=ALL
KillWait=90
MessageTimeout=60
SlurmctldTimeout=120
SlurmdTimeout=60
NodeName=kielo[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=2000
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=work Nodes=ALL Default=YES MaxTime=00:30:00 State=UP DenyAccounts=refused_project GraceTime=600
PartitionName=urgent Nodes=ALL MaxTime=00:30:00 State=UP PriorityTier=2
"""


def why_not() -> str:
    """Returns why no Slurm can be started here; empty: one can."""
    commands = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "setpriv")
    missing = [name for name in commands if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not installed; apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "the daemons of several nodes on one machine need root"
    if subprocess.run([*_NAMESPACES, "true"], capture_output=True, timeout=COMMAND_LIMIT_SECONDS).returncode:
        return "no namespaces of mounts and processes can be made here"
    return ""


@dataclass(frozen=True)
class Machine:
    """A running Slurm. environment: that in which sbatch, squeue and the rest find it."""

    folder: Path
    environment: dict[str, str]

    def ask(self, *command: str) -> str:
        """Returns what a command of Slurm says on stdout; raises where it fails or does not end."""
        done = self.tell(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def tell(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=COMMAND_LIMIT_SECONDS
        )

    def kill_daemon(self, node: str) -> None:
        """Ends slurmd of a node by kill -9, and keeps it down. What it started goes on."""
        (self.folder / f"down_{node}").touch()
        (daemon,) = self._daemons(node)
        os.kill(daemon, signal.SIGKILL)

    def start_daemons(self) -> None:
        """Starts every slurmd that is kept down."""
        for kept in self.folder.glob("down_*"):
            kept.unlink()

    def is_up(self) -> bool:
        """Are all nodes idle?"""
        return self.tell("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(NODES)

    def is_gone(self) -> bool:
        """Has every daemon ended, and every process of a job?"""
        return not processes({"SLURM_CONF": self.environment["SLURM_CONF"]})

    def logs(self) -> str:
        """Returns the ends of what the daemons wrote."""
        paths = sorted([*self.folder.glob("*.log"), *self.folder.glob("daemon_*.txt")])
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in paths)

    def _daemons(self, node: str) -> list[int]:
        own = {"SLURM_CONF": self.environment["SLURM_CONF"]}
        return [pid for pid, words in processes(own).items() if words[:4] == ["slurmd", "-D", "-N", node]]


@contextmanager
def slurm(folder: Path) -> Iterator[Machine]:
    """Runs the daemons in `folder`, which must not be there yet. On every path all are gone after it."""
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    first = free_ports(NODES + 1)
    ports = {"port": first, "first": first + 1, "last": first + NODES}
    text = _CONFIGURATION.format(folder=folder, host=socket.gethostname(), nodes=NODES, **ports)
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    own = "".join(f"127.0.0.1 {name}\n" for name in NAMES)
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + own)
    machine = Machine(folder, os.environ | {"SLURM_CONF": str(folder / "slurm.conf")})
    command = ["setpriv", "--pdeathsig", "KILL", *_NAMESPACES, "bash", "-c", _daemons_script(folder)]
    started = subprocess.Popen(
        command, env=machine.environment, start_new_session=True, stdin=subprocess.DEVNULL
    )
    try:
        wait_until(machine.is_up, START_LIMIT_SECONDS, lambda: f"no Slurm: {machine.logs()}")
        yield machine
    finally:
        started.kill()  # and with it, by the namespace of processes, all daemons and jobs
        started.wait(COMMAND_LIMIT_SECONDS)
        wait_until(machine.is_gone, COMMAND_LIMIT_SECONDS, lambda: "daemons or jobs of this Slurm are left")


def _daemons_script(folder: Path) -> str:
    """Bash of the first process: the daemons, each started again when it ended, unless it is kept down."""
    daemons = [
        f"munged --foreground --force --socket={folder}/munge.socket --key-file={folder}/munge.key "
        f"--pid-file={folder}/munge.pid --seed-file={folder}/munge.seed --log-file={folder}/munge.log",
        f"[ -S {folder}/munge.socket ] && slurmctld -D",
        *(f"[ ! -e {folder}/down_{name} ] && slurmd -D -N {name}" for name in NAMES),
    ]
    lines = [
        f"(while true; do {line}; sleep 1; done) > {folder}/daemon_{number}.txt 2>&1 &"
        for number, line in enumerate(daemons)
    ]
    return "\n".join([f"mount --bind {folder}/hosts /etc/hosts", *lines, "wait"])


def processes(environment: dict[str, str]) -> dict[int, list[str]]:
    """Returns pid → words of its command, of the processes with all of these variables."""
    wanted = {f"{name}={value}".encode() for name, value in environment.items()}
    found = {}
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            if place.name.isdecimal() and wanted <= set((place / "environ").read_bytes().split(b"\0")):
                found[int(place.name)] = (place / "cmdline").read_bytes().decode().split("\0")[:-1]
    return found


def wait_until(what: Callable[[], bool], limit_seconds: float, said: Callable[[], str]) -> None:
    """Waits for `what`. Raises TimeoutError with what `said` returns."""
    until = time.monotonic() + limit_seconds
    while not what():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {limit_seconds:.0f} s; {said()}")
        time.sleep(0.05)


def free_ports(number: int) -> int:
    """Returns the first of so many ports in a row on which nothing listens, below those that systems lend."""
    for first in range(17_100 + os.getpid() % 500 * 20, 30_000, 20):
        with suppress(OSError):
            for port in range(first, first + number):
                with socket.socket() as tried:
                    tried.bind(("", port))
            return first
    raise OSError(f"no {number} ports in a row are free")
