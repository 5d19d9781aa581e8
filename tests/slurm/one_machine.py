"""A Slurm of four nodes on this machine, for tests: its daemons in a folder, an environment that finds it.

It needs Debian's slurm-wlm and munge, root, and the right to mount, by which the nodes' names lead to this
machine without a change of its /etc/hosts.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = 4
_FIRST_PORT = 17_100
_LIMIT_SECONDS = 60
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
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
EnforcePartLimits=ALL
KillWait=20
SlurmctldTimeout=60
SlurmdTimeout=60
NodeName=kielo[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=2000
PartitionName=work Nodes=ALL Default=YES MaxTime=00:10:00 State=UP DenyAccounts=nobody
"""


def why_not() -> str:
    """Returns why no Slurm can be started here; empty: one can."""
    missing = [
        name for name in ("slurmctld", "slurmd", "munged", "sbatch", "unshare") if not shutil.which(name)
    ]
    if missing:
        return f"{', '.join(missing)} not installed; apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "the daemons of several nodes on one machine need root"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        return "no mount namespace can be made here"
    return ""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Runs the daemons; yields the environment in which sbatch, squeue and the rest find them."""
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    ports = {"port": _FIRST_PORT, "first": _FIRST_PORT + 1, "last": _FIRST_PORT + NODES}
    text = _CONFIGURATION.format(folder=folder, host=socket.gethostname(), nodes=NODES, **ports)
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    names = "".join(f"127.0.0.1 kielo{number}\n" for number in range(1, NODES + 1))
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
    daemons = [
        f"munged --foreground --force --socket={folder}/munge.socket --key-file={folder}/munge.key "
        f"--pid-file={folder}/munge.pid --seed-file={folder}/munge.seed --log-file={folder}/munge.log",
        "sleep 1; exec slurmctld -D",
        *(f"sleep 3; exec slurmd -D -N kielo{number}" for number in range(1, NODES + 1)),
    ]
    lines = [f"({line}) > {folder}/daemon_{number}.txt 2>&1 &" for number, line in enumerate(daemons)]
    script = "\n".join([f"mount --bind {folder}/hosts /etc/hosts", *lines, "wait"])
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    started = subprocess.Popen(
        ["unshare", "-m", "bash", "-c", script],
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        _wait_until_up(environment, folder)
        yield environment
    finally:
        subprocess.run(
            ["scancel", "--user=root"], env=environment, capture_output=True, timeout=_LIMIT_SECONDS
        )
        time.sleep(1)
        os.killpg(started.pid, signal.SIGKILL)
        started.wait(_LIMIT_SECONDS)


def _wait_until_up(environment: dict[str, str], folder: Path) -> None:
    until = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < until:
        asked = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=environment, capture_output=True, text=True
        )
        if asked.stdout.strip() == str(NODES):
            return
        time.sleep(0.5)
    said = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    raise RuntimeError(f"no Slurm within {_LIMIT_SECONDS} s: {said[-3000:]}")
