"""Launches of the small run on the Slurm of this machine, and what its queue says."""

from kielo.cli.main import main
from tests.slurm.launched_run import NAME, LaunchedRun
from tests.slurm.one_machine import Machine

# Slurm takes this account, and refuses "refused_project" (one_machine.py).
TWO_NODES = ["--account", "granted_project", "--nodes", "2", "--hours", "0.3", "--grace", "120"]


def queue(machine: Machine) -> dict[str, str]:
    """Job → its state and the reason why it waits."""
    lines = machine.ask("squeue", "-h", "-o", "%i %T %r").splitlines()
    return {line.split()[0]: line.partition(" ")[2] for line in lines}


def launch(*flags: str) -> None:
    assert main(["launch", f"runs/{NAME}", *flags]) == 0


def start_again(machine: Machine, run: LaunchedRun, job: str) -> None:
    """Waits until the job is back in the queue, and spares it the two minutes that Slurm has it wait then."""
    run.wait(lambda: queue(machine)[job].startswith("PENDING"))
    run.wait(lambda: machine.tell("scontrol", "update", f"JobId={job}", "StartTime=now").returncode == 0)
