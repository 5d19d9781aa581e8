"""The schedulers: what each is asked for by a job, and the commands that list, end and explain its jobs.

An entry of `SCHEDULERS` and a script in `scripts/` are all that is known of a scheduler, besides its word in
the cards (`recipe/cards.py`). No torch.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kielo.launch.bash import request
from kielo.launch.job_plan import JobPlan
from kielo.recipe.errors import KieloError

LIMIT_SECONDS = 60
SCRIPTS = Path(__file__).resolve().parent / "scripts"
# Slurm has no job of these numbers any more: an error of the command, and an answer.
_OVER = re.compile(r"Invalid job id specified|Invalid job array")
_JOB = re.compile(r"[0-9]+(\[[0-9]*\])?(\.[\w.-]+)?")


@dataclass(frozen=True)
class Scheduler:
    """A scheduler.

    submit: the command that takes jobs. script: its functions in job.sh and, after `# ---- Submission`, those
    in submit.sh. starter: the script that starts tasks, if it is shared. prefix, request: of the lines that
    it reads in job.sh, (plan, folder, packs). listing: lists jobs; with `takes_ids` their ids follow. states:
    what that says → id → state. waiting: pattern of the state of a job that has not begun. end: ends jobs at
    once. ask_to_save: asks jobs that run to save and stop; empty: they look whether their chain was ended
    (scripts/mpirun.sh). settings: prints its settings; pattern of the line that hides other persons' jobs.
    ends: ids → how the jobs ended.
    """

    submit: str
    script: Path
    starter: Path | None
    prefix: str
    request: Callable[[JobPlan, Path, bool], list[str]]
    listing: tuple[str, ...]
    takes_ids: bool
    states: Callable[[str], dict[str, str]]
    waiting: str
    end: tuple[str, ...]
    ask_to_save: tuple[str, ...] = ()
    settings: tuple[tuple[str, ...], str] | None = None
    ends: Callable[[Sequence[str]], dict[str, str]] = lambda ids: {}

    def request_lines(self, plan: JobPlan, folder: Path, packs: bool = False) -> list[str]:
        """Return the lines of job.sh in `folder` that the scheduler reads.

        packs: of a job that packs text, which is one process on a node; its array and its waiting for others
        are of the submission.
        """
        return request(self.prefix, self.request(plan, folder, packs))

    def for_jobs(self) -> list[str]:
        """Return the parts of job.sh that are the scheduler's."""
        own = self.script.read_text(encoding="utf-8").partition(_SUBMISSION)[0]
        return [own] if self.starter is None else [own, self.starter.read_text(encoding="utf-8")]

    def for_submission(self) -> str:
        return self.script.read_text(encoding="utf-8").partition(_SUBMISSION)[2]


_SUBMISSION = "\n# ---- Submission\n"


def clock(seconds: int) -> str:
    """Return hours, minutes and seconds as schedulers read them: 172800 → 48:00:00."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _of_slurm(plan: JobPlan, folder: Path, packs: bool) -> list[str]:
    queue, of_site, account = plan.partition, plan.jobs_of_site, plan.wishes.account
    tasks = 1 if packs else plan.site.devices_per_node
    cores = plan.site.cpu_cores_per_node if packs else plan.cores_per_device
    return [
        f"--job-name={_name(plan, packs)}", f"--partition={queue.name}" * bool(queue.name),
        f"--qos={queue.qos}" * bool(queue.qos), f"--constraint={queue.constraint}" * bool(queue.constraint),
        f"--account={account}" * bool(account), f"--nodes={_nodes(plan)}", of_site.devices, "--exclusive",
        f"--ntasks-per-node={tasks}", f"--cpus-per-task={cores}", *of_site.options,
        f"--time={clock(plan.wall_seconds)}", f"--signal=USR1@{plan.grace_seconds}" * (not packs),
        "--requeue", "--open-mode=append",
        f"--output={_path(str(folder).replace('%', '%%') + '/logs/job_%j.log')}",
    ]  # fmt: skip


def _of_pbs(plan: JobPlan, folder: Path, packs: bool) -> list[str]:
    account = plan.wishes.account
    return [
        f"-N {_name(plan, packs)}", f"-q {plan.partition.name}", f"-P {account}" * bool(account),
        f"-l select={_nodes(plan)}", f"-l walltime={clock(plan.wall_seconds)}", *plan.jobs_of_site.options,
        "-r y", "-j oe", f"-o {_path(f'{folder}/logs/')}",
    ]  # fmt: skip


def _of_grid_engine(plan: JobPlan, folder: Path, packs: bool) -> list[str]:
    return [
        f"-N {_name(plan, packs)}", f"-l {plan.partition.name}={_nodes(plan)}",
        f"-l h_rt={clock(plan.wall_seconds)}", *plan.jobs_of_site.options, "-r y", "-j y", "-S /bin/bash",
        f"-o {_path(f'{folder}/logs/')}",
    ]  # fmt: skip


def _name(plan: JobPlan, packs: bool) -> str:
    return plan.recipe.name + "_pack" * packs


def _nodes(plan: JobPlan) -> int:
    return plan.nodes + plan.wishes.spares


def _path(path: str) -> str:
    """Return the path for a line that a scheduler reads, in quotes if it has blanks."""
    return f'"{path}"' if len(path.split()) > 1 else path


def _first_and_others(told: str) -> dict[str, str]:
    rows = [line.split() for line in told.splitlines()]
    return {row[0]: " ".join(row[1:]) for row in rows if row}


def _first_and_fifth(told: str) -> dict[str, str]:
    """PBS: job, name, user, time, state, … Grid Engine: job, priority, name, user, state, …"""
    rows = [line.split() for line in told.splitlines()]
    return {row[0].split(".")[0]: row[4] for row in rows if len(row) > 4}


def _ends_in_slurm(ids: Sequence[str]) -> dict[str, str]:
    """By Slurm's accounting (sacct), or what its controller keeps for some minutes."""
    found: dict[str, str] = {}
    if shutil.which("sacct"):
        fields = "JobID,State,ExitCode,Reason"
        command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={fields}", "--jobs"]
        rows = [line.split("|") for line in _run([*command, ",".join(ids)]).stdout.splitlines()]
        found = {
            row[0]: f"{row[1]}, exit code {row[2]}" + f", {row[3]}" * (row[3] not in ("", "None"))
            for row in rows
            if len(row) == 4
        }
    for job in ids:
        if job not in found and shutil.which("scontrol"):
            told = _run(["scontrol", "--oneliner", "show", "job", job]).stdout.split()
            facts = dict(word.split("=", 1) for word in told if "=" in word)
            if "JobState" in facts:
                found[job] = f"{facts['JobState']}, exit code {facts.get('ExitCode')}, {facts.get('Reason')}"
    return found


SCHEDULERS = {
    "slurm": Scheduler(
        submit="sbatch",
        script=SCRIPTS / "slurm.sh",
        starter=None,
        prefix="#SBATCH",
        request=_of_slurm,
        # %F: of each job of an array the id of the array, which --parsable told
        listing=("squeue", "--noheader", "--format=%F %T %r", "--jobs"),
        takes_ids=True,
        states=_first_and_others,
        waiting="PENDING",
        end=("scancel",),
        ask_to_save=("scancel", "--signal=USR1"),
        settings=(("scontrol", "show", "config"), r"^PrivateData\s*=.*\bjobs\b"),
        ends=_ends_in_slurm,
    ),
    "pbs": Scheduler(
        submit="qsub",
        script=SCRIPTS / "pbs.sh",
        starter=SCRIPTS / "mpirun.sh",
        prefix="#PBS",
        request=_of_pbs,
        listing=("qstat",),
        takes_ids=False,
        states=_first_and_fifth,
        waiting="Q|H",
        end=("qdel",),
        settings=(("qstat", "-Bf"), r"^\s*query_other_jobs\s*=\s*False"),
    ),
    "grid_engine": Scheduler(
        submit="qsub",
        script=SCRIPTS / "grid_engine.sh",
        starter=SCRIPTS / "mpirun.sh",
        prefix="#$",
        request=_of_grid_engine,
        listing=("qstat", "-u", "*"),  # without -u only the own ones
        takes_ids=False,
        states=_first_and_fifth,
        waiting=".*q.*",  # qw, hqw, Eqw, …
        end=("qdel",),
    ),
}


def job_ids(file: Path) -> list[str]:
    """Return the ids that a chain's file `jobs` lists, a line each; none where there is no file.

    Raises KieloError for a line that is no id: the scheduler's commands would take it for an option.
    """
    if not file.is_file():
        return []
    ids = file.read_text(encoding="utf-8", errors="replace").split()
    if odd := [word for word in ids if not _JOB.fullmatch(word)]:
        raise KieloError(f"{file}: {odd[0][:60]!r} is no id of a job. Fix: one id of the scheduler a line")
    return ids


class NoAnswer(KieloError):
    """A scheduler that cannot be asked just now."""


def states(scheduler: str, ids: Sequence[str]) -> dict[str, str] | None:
    """Return id → state of those jobs that the scheduler still has, in the order of `ids`.

    Of an array it is the state of one of its jobs. None where the scheduler's command is not here. Raises
    NoAnswer where the command fails: that is not an answer of no jobs.
    """
    asked = SCHEDULERS[scheduler]
    if not ids:
        return {}
    if shutil.which(asked.listing[0]) is None:
        return None
    command = [*asked.listing, ",".join(ids)] if asked.takes_ids else asked.listing
    told = _answer(command, _OVER if asked.takes_ids else None)
    found = asked.states(told)
    return {job: found[job] for job in ids if job in found}


def states_or_reason(scheduler: str, ids: Sequence[str]) -> tuple[dict[str, str] | None, str]:
    """Return the states, or None and why they are not known, for a screen that shows more than them."""
    try:
        found = states(scheduler, ids)
    except NoAnswer as error:
        return None, str(error)
    return found, "" if found is not None else f"{scheduler}'s commands are not on this machine"


def hides_jobs(scheduler: str) -> bool:
    """Return True if the scheduler shows a person only their own jobs; False where its command is not here.

    Raises NoAnswer where the command fails.
    """
    command, line = SCHEDULERS[scheduler].settings or (("",), "")
    if shutil.which(command[0]) is None:
        return False
    return re.search(line, _answer(command), re.MULTILINE) is not None


def ends(scheduler: str, ids: Sequence[str]) -> dict[str, str]:
    """Return id → how the job ended, in the scheduler's words, of those of which it still knows."""
    found = SCHEDULERS[scheduler].ends(ids) if ids else {}
    return {job: found[job] for job in ids if job in found}


def end_jobs(scheduler: str, found: dict[str, str], at_once: bool) -> None:
    """Cancel jobs that wait, and asks those that run to save and stop, or ends them `at_once`.

    found: id → state. The chain's file `stopped` must be written. Raises KieloError with the scheduler's
    answer if it refuses.
    """
    asked = SCHEDULERS[scheduler]
    waiting = [job for job, state in found.items() if re.fullmatch(asked.waiting, state.split()[0])]
    running = [job for job in found if job not in waiting]
    for command, ids in ((asked.end, waiting), (asked.end if at_once else asked.ask_to_save, running)):
        done = _run([*command, *ids]) if command and ids else None
        if command and done is not None and done.returncode:
            raise KieloError(f"{' '.join([*command, *ids])}: {' '.join(done.stderr.split())}")


def _answer(command: Sequence[str], answers: re.Pattern[str] | None = None) -> str:
    """Return what the command says; raises NoAnswer if it fails, but for errors that are `answers`."""
    done = _run(command)
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    if done.returncode and not (answers and answers.search(said)):
        raise NoAnswer(
            f"{command[0]} failed, so it is not known which jobs wait or run ({said}). Fix: the "
            "same once more, when the scheduler answers"
        )
    return done.stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # SQUEUE_PARTITION and others would hide jobs; and answers are read, so they are not translated.
    own = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=own | {"LC_ALL": "C"}
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {LIMIT_SECONDS} s; try again") from None
