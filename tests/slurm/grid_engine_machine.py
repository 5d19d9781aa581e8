"""A Grid Engine of one node on this machine, for tests: daemons in a folder, an environment that finds it.

It needs Debian's gridengine-master, -exec and -client, Open MPI's mpirun, and root, who is here the one that
submits. The cell of the installed packages is left alone.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.one_machine import (
    COMMAND_LIMIT_SECONDS,
    START_LIMIT_SECONDS,
    free_ports,
    processes,
    wait_until,
)

_LIBRARY = Path("/usr/lib/gridengine")
_SHARE = Path("/usr/share/gridengine")
_NAMESPACE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
# The type of node that a job asks for, as on TSUBAME, and a parallel environment, which gives PE_HOSTFILE.
_COMPLEX = """\
name        node_f
shortcut    node_f
type        INT
relop       <=
requestable YES
consumable  YES
default     0
urgency     0
"""
_PARALLEL = """\
pe_name            nodes
slots              99
user_lists         NONE
xuser_lists        NONE
start_proc_args    NONE
stop_proc_args     NONE
allocation_rule    1
control_slaves     TRUE
job_is_first_task  TRUE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
"""


def why_not() -> str:
    """Returns why no Grid Engine can be started here; empty: one can."""
    missing = [name for name in ("qsub", "qconf", "mpirun", "unshare", "setpriv") if not shutil.which(name)]
    missing += [name for name in ("sge_qmaster", "sge_execd") if not (_LIBRARY / name).exists()]
    if missing:
        return (
            f"{', '.join(missing)} not installed; apt-get install --no-install-recommends gridengine-master "
            "gridengine-exec gridengine-client openmpi-bin"
        )
    return "" if os.geteuid() == 0 else "the daemons need root"


@dataclass(frozen=True)
class GridEngine:
    """A running Grid Engine. environment: that in which qsub, qstat and the rest find it."""

    folder: Path
    environment: dict[str, str]

    @property
    def own(self) -> dict[str, str]:
        """The variable that its daemons, and all processes of its jobs, have."""
        return {"SGE_ROOT": self.environment["SGE_ROOT"]}

    def ask(self, *command: str) -> str:
        """Returns what a command says on stdout; raises where it fails or does not end."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=COMMAND_LIMIT_SECONDS
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def logs(self) -> str:
        """Returns the ends of what the daemons wrote."""
        paths = sorted([*self.folder.glob("*.txt"), *self.folder.glob("spool/**/messages")])
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in paths)


@contextmanager
def grid_engine(folder: Path) -> Iterator[GridEngine]:
    """Runs the daemons in `folder`, which must not be there yet. On every path all are gone after it."""
    _write_cell(folder)
    port = free_ports(2)
    environment = os.environ | {
        "SGE_ROOT": str(folder),
        "SGE_CELL": "default",
        "SGE_QMASTER_PORT": str(port),
        "SGE_EXECD_PORT": str(port + 1),
        "SGE_ND": "1",  # the daemons stay in the foreground
    }
    machine = GridEngine(folder, environment)
    _fill_spool(machine)
    script = "\n".join(
        f"(while true; do {_LIBRARY}/{name}; sleep 1; done) > {folder}/{name}.txt 2>&1 &"
        for name in ("sge_qmaster", "sge_execd")
    )
    started = subprocess.Popen(
        [*_NAMESPACE, "bash", "-c", f"{script}\nwait"],
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        _set_up(machine)
        yield machine
    finally:
        started.kill()  # and with it, by the namespace of processes, the daemons and jobs
        started.wait(COMMAND_LIMIT_SECONDS)
        wait_until(
            lambda: not processes(machine.own), COMMAND_LIMIT_SECONDS, lambda: "daemons or jobs are left"
        )


def _write_cell(folder: Path) -> None:
    """Makes the folder that SGE_ROOT names: where the master is, where things are kept, who may do what."""
    common, spool = folder / "default" / "common", folder / "spool"
    for new in (common, spool / "qmaster", spool / "execd"):
        new.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "util").symlink_to(_SHARE / "util")
    host = socket.gethostname()
    (common / "act_qmaster").write_text(f"{host}\n")
    # The name by which each address of this machine is known, whatever /etc/hosts says first.
    (common / "host_aliases").write_text(f"{host} localhost {socket.getfqdn()} {_name_of_loopback()}\n")
    (common / "bootstrap").write_text(
        "admin_user none\ndefault_domain none\nignore_fqdn true\nspooling_method classic\n"
        f"spooling_lib libspoolc\nspooling_params {common};{spool / 'qmaster'}\nbinary_path {_LIBRARY}\n"
        f"qmaster_spool_dir {spool / 'qmaster'}\nsecurity_mode none\nlistener_threads 2\nworker_threads 2\n"
        "scheduler_threads 1\n"
    )
    own = {
        "min_uid": "0", "min_gid": "0", "execd_spool_dir": f"{spool / 'execd'}", "mailer": "/bin/true",
        "load_report_time": "00:00:05",
        "login_shells": "csh",  # so that no job reads the profile of the user who tests
    }  # fmt: skip
    (folder / "configuration").write_text(_with((_SHARE / "default-configuration").read_text(), own))
    shutil.copytree(_SHARE / "util" / "resources" / "centry", folder / "complexes")
    (folder / "complexes" / "node_f").write_text(_COMPLEX)


def _name_of_loopback() -> str:
    return socket.gethostbyaddr("127.0.0.1")[0]


def _fill_spool(machine: GridEngine) -> None:
    folder = machine.folder
    kept = f"{folder / 'default' / 'common'};{folder / 'spool' / 'qmaster'}"
    machine.ask(f"{_LIBRARY}/spoolinit", "classic", "libspoolc", kept, "init")
    for kind, value in (
        ("configuration", str(folder / "configuration")),
        ("complexes", str(folder / "complexes")),
        ("usersets", str(_SHARE / "util" / "resources" / "usersets")),
        ("managers", "root"),
    ):
        machine.ask(f"{_LIBRARY}/spooldefaults", kind, value)


def _set_up(machine: GridEngine) -> None:
    """Waits for the daemons, and makes the queue."""
    host, folder = socket.gethostname(), machine.folder

    def answers(*command: str) -> bool:
        return (
            subprocess.run(
                command, env=machine.environment, capture_output=True, timeout=COMMAND_LIMIT_SECONDS
            ).returncode
            == 0
        )

    wait_until(lambda: answers("qconf", "-sconf"), START_LIMIT_SECONDS, machine.logs)
    machine.ask("qconf", "-as", host)
    wait_until(lambda: answers("qconf", "-se", host), START_LIMIT_SECONDS, machine.logs)
    (folder / "pe").write_text(_PARALLEL)
    machine.ask("qconf", "-Ap", str(folder / "pe"))
    machine.ask("qconf", "-mattr", "exechost", "complex_values", "node_f=1", host)
    own = {"qname": "all.q", "hostlist": host, "pe_list": "nodes", "slots": "1", "shell": "/bin/bash"}
    own |= {"load_thresholds": "NONE", "rerun": "TRUE"}  # other work on the machine is no reason to wait
    (folder / "queue").write_text(_with(machine.ask("qconf", "-sq"), own))
    machine.ask("qconf", "-Aq", str(folder / "queue"))
    quick = {"schedule_interval": "0:0:2", "flush_submit_sec": "1", "flush_finish_sec": "1"}
    (folder / "scheduler").write_text(_with(machine.ask("qconf", "-ssconf"), quick))
    machine.ask("qconf", "-Msconf", str(folder / "scheduler"))


def _with(text: str, values: dict[str, str]) -> str:
    """Returns lines of names and values with these values in place of theirs."""
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return "".join(f"{line[0]} {values.get(line[0], line[1] if len(line) > 1 else '')}\n" for line in lines)
