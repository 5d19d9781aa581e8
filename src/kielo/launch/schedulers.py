"""The schedulers: a job's request to each, and the commands that list, end and explain its jobs; no torch.

A scheduler is an entry of `SCHEDULERS`, a script in `scripts/`, and its word in the cards
(`recipe/cards.py`).
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
ESTIMATE_SECONDS = 10  # for an answer that is only good to know
SCRIPTS = Path(__file__).resolve().parent / "scripts"
# Slurm no longer has jobs of these numbers: an error of the command, and an answer.
_OVER = re.compile(r"Invalid job id specified|Invalid job array")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
_REFUSED = re.compile(r"allocation failure: (.+)")
_START = re.compile(rf"to start at ({_TIME.pattern})")
_JOB = re.compile(r"[0-9]+(\[[0-9]*\])?(\.[\w.-]+)?")


@dataclass(frozen=True)
class Scheduler:
    """A scheduler."""

    submit: str  # the command that takes jobs
    script: Path  # functions in job.sh and, after `# ---- Submission`, in submit.sh
    starter: Path | None  # the script that starts tasks, if it is shared
    prefix: str  # of the lines that it reads in job.sh
    request: Callable[[JobPlan, Path], list[str]]  # (plan, folder) → these lines
    listing: tuple[str, ...]  # lists jobs
    takes_ids: bool  # ids follow `listing`
    states: Callable[[str], dict[str, str]]  # output of `listing` → id → state
    waiting: str  # pattern of the state of a job that has not begun
    end: tuple[str, ...]  # ends jobs at once
    ask_to_save: tuple[str, ...] = ()  # asks running jobs to stop; (): they look for their chain's end
    # prints its settings; pattern of the line that hides other persons' jobs
    settings: tuple[tuple[str, ...], str] | None = None
    ends: Callable[[Sequence[str]], dict[str, str]] = lambda ids: {}  # ids → how the jobs ended
    test: tuple[str, ...] = ()  # says when a job would start, and submits nothing; (): it cannot say
    starts: tuple[str, ...] = ()  # ids follow: lists when waiting jobs start

    def request_lines(self, plan: JobPlan, folder: Path) -> list[str]:
        """Return the scheduler's lines of job.sh. Jobs that share a stage request one process on a node."""
        return request(self.prefix, self.request(plan, folder))

    def parts(self) -> tuple[str, str]:
        """Return the scheduler's bash for job.sh, and for submit.sh."""
        own, _, submission = self.script.read_text(encoding="utf-8").partition("\n# ---- Submission\n")
        starter = "" if self.starter is None else "\n" + self.starter.read_text(encoding="utf-8")
        return own + starter, submission


def clock(seconds: int) -> str:
    """Return hours, minutes and seconds as schedulers read them: 172800 → 48:00:00."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _of_slurm(plan: JobPlan, folder: Path) -> list[str]:
    queue, of_site = plan.partition, plan.jobs_of_site
    tasks = 1 if plan.shared_stage else plan.site.devices_per_node
    cores = plan.site.cpu_cores_per_node if plan.shared_stage else plan.cores_per_device
    asked = {
        "job-name": plan.job_name,
        "partition": queue.name,
        "qos": queue.qos,
        "constraint": queue.constraint,
        "account": plan.wishes.account,
        "nodes": plan.nodes + plan.wishes.spares,
    }
    places = [f"--{option}={value}" for option, value in asked.items() if value]
    size = [of_site.devices, "--exclusive", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cores}"]
    time = [
        f"--time={clock(plan.wall_seconds)}",
        f"--signal=USR1@{plan.grace_seconds}" * (not plan.shared_stage),
    ]
    log = _path(str(folder).replace("%", "%%") + "/logs/job_%j.log")
    return [*places, *size, *of_site.options, *time, "--requeue", "--open-mode=append", f"--output={log}"]


def _of_pbs(plan: JobPlan, folder: Path) -> list[str]:
    name, account = f"-N {plan.job_name}", plan.wishes.account
    place = [name, f"-q {plan.partition.name}", f"-P {account}" * bool(account)]
    size = [f"-l select={plan.nodes + plan.wishes.spares}", f"-l walltime={clock(plan.wall_seconds)}"]
    return [*place, *size, *plan.jobs_of_site.options, "-r y", "-j oe", f"-o {_path(f'{folder}/logs/')}"]


def _of_grid_engine(plan: JobPlan, folder: Path) -> list[str]:
    nodes, seconds = plan.nodes + plan.wishes.spares, clock(plan.wall_seconds)
    size = [f"-l {plan.partition.name}={nodes}", f"-l h_rt={seconds}"]
    same = ["-r y", "-j y", "-S /bin/bash", f"-o {_path(f'{folder}/logs/')}"]
    return [f"-N {plan.job_name}", *size, *plan.jobs_of_site.options, *same]


def _path(path: str) -> str:
    """Return the path for a line that a scheduler reads, in quotes if it has blanks."""
    return f'"{path}"' if len(path.split()) > 1 else path


def _first_and_others(answer: str) -> dict[str, str]:
    rows = [line.split() for line in answer.splitlines()]
    return {row[0]: " ".join(row[1:]) for row in rows if row}


def _first_and_fifth(answer: str) -> dict[str, str]:
    """Return id → state. PBS: job, name, user, time, state. Grid Engine: job, priority, name, user, state."""
    rows = [line.split() for line in answer.splitlines()]
    return {row[0].split(".")[0]: row[4] for row in rows if len(row) > 4}


def _ends_in_slurm(ids: Sequence[str]) -> dict[str, str]:
    """Ask Slurm's accounting (sacct), or its controller, which keeps jobs for some minutes."""
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
            words = _run(["scontrol", "--oneliner", "show", "job", job]).stdout.split()
            facts = dict(word.split("=", 1) for word in words if "=" in word)
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
        # %F: of each job of an array the id of the array, as --parsable prints it
        listing=("squeue", "--noheader", "--format=%F %T %r", "--jobs"),
        takes_ids=True,
        states=_first_and_others,
        waiting="PENDING",
        end=("scancel",),
        ask_to_save=("scancel", "--signal=USR1"),
        settings=(("scontrol", "show", "config"), r"^PrivateData\s*=.*\bjobs\b"),
        ends=_ends_in_slurm,
        test=("sbatch", "--test-only"),
        starts=("squeue", "--start", "--noheader", "--format=%i %S", "--jobs"),
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
        listing=("qstat", "-u", "*"),  # without -u only a person's own jobs
        takes_ids=False,
        states=_first_and_fifth,
        waiting=".*q.*",  # qw, hqw, Eqw, …
        end=("qdel",),
    ),
}


def job_ids(file: Path) -> list[str]:
    """Return the ids in a chain's file `jobs`. Raises KieloError for a line that looks like an option."""
    if not file.is_file():
        return []
    ids = file.read_text(encoding="utf-8", errors="replace").split()
    if odd := [word for word in ids if not _JOB.fullmatch(word)]:
        raise KieloError(
            f"{file}: {odd[0][:60]!r} is no id of a job. Fix: one id of the scheduler on each line"
        )
    return ids


class NoAnswer(KieloError):
    """A scheduler that cannot be asked just now."""


def states(scheduler: str, ids: Sequence[str]) -> dict[str, str] | None:
    """Return id → state of the jobs that the scheduler still has, in the order of `ids`.

    An array has the state of one of its jobs. None without the scheduler's command. Raises NoAnswer if the
    command fails, because that does not mean that there are no jobs.
    """
    asked = SCHEDULERS[scheduler]
    if not ids:
        return {}
    if shutil.which(asked.listing[0]) is None:
        return None
    command = [*asked.listing, ",".join(ids)] if asked.takes_ids else asked.listing
    found = asked.states(_answer(command, _OVER if asked.takes_ids else None))
    return {job: found[job] for job in ids if job in found}


def states_or_reason(scheduler: str, ids: Sequence[str]) -> tuple[dict[str, str] | None, str]:
    """Return the states, or None and the reason why they are unknown."""
    try:
        found = states(scheduler, ids)
    except NoAnswer as error:
        return None, str(error)
    return found, "" if found is not None else f"{scheduler}'s commands are not on this machine"


def hides_jobs(scheduler: str) -> bool:
    """Return True if the scheduler shows only a person's own jobs. Raises NoAnswer if it fails."""
    command, line = SCHEDULERS[scheduler].settings or (("",), "")
    if shutil.which(command[0]) is None:
        return False
    return re.search(line, _answer(command), re.MULTILINE) is not None


def ends(scheduler: str, ids: Sequence[str]) -> dict[str, str]:
    """Return id → how the job ended, in the scheduler's words, if it still knows."""
    found = SCHEDULERS[scheduler].ends(ids) if ids else {}
    return {job: found[job] for job in ids if job in found}


def end_jobs(scheduler: str, found: dict[str, str], at_once: bool) -> None:
    """Cancel waiting jobs, and ask running jobs to save and stop, or end them `at_once`.

    found: id → state. The chain's file `stopped` must be written. Raises KieloError if the scheduler refuses.
    """
    asked = SCHEDULERS[scheduler]
    waiting = [job for job, state in found.items() if re.fullmatch(asked.waiting, state.split()[0])]
    running = [job for job in found if job not in waiting]
    for command, ids in ((asked.end, waiting), (asked.end if at_once else asked.ask_to_save, running)):
        done = _run([*command, *ids]) if command and ids else None
        if command and done is not None and done.returncode:
            raise KieloError(f"{' '.join([*command, *ids])}: {' '.join(done.stderr.split())}")


def _answer(command: Sequence[str], answers: re.Pattern[str] | None = None) -> str:
    """Return the command's output. Raises NoAnswer if it fails, except for errors that are `answers`."""
    done = _run(command)
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    if done.returncode and not (answers and answers.search(said)):
        raise NoAnswer(
            f"{command[0]} failed, so it is not known which jobs wait or run ({said}). Fix: the same command "
            "when the scheduler answers"
        )
    return done.stdout


def would_start(plan: JobPlan) -> tuple[str, str]:
    """Ask when such a job would start: (time as the scheduler prints it, or "", its words if it refuses).

    Nothing is submitted. Raises NoAnswer if the scheduler cannot say, or not within `ESTIMATE_SECONDS`.
    """
    asked = SCHEDULERS[plan.site.scheduler]
    _refuse_without(asked.test, plan.site.scheduler)
    words = [word for word in asked.request(plan, Path()) if word and not word.startswith("--output")]
    done = _run([*asked.test, *words, "--wrap=true"], ESTIMATE_SECONDS)
    said = " ".join((done.stdout + done.stderr).split())
    if found := _START.search(said):
        return found[1], ""
    if refused := _REFUSED.search(said):
        return "", refused[1]
    raise NoAnswer(f"{asked.test[0]} failed ({said[:200] or f'exit code {done.returncode}'})")


def starts(scheduler: str, ids: Sequence[str]) -> dict[str, str]:
    """Ask when waiting jobs start: id → time as the scheduler prints it, only if it knows one.

    Raises NoAnswer if the scheduler cannot say, or not within `ESTIMATE_SECONDS`.
    """
    asked = SCHEDULERS[scheduler]
    _refuse_without(asked.starts, scheduler)
    done = _run([*asked.starts, ",".join(ids)], ESTIMATE_SECONDS)
    if done.returncode:
        raise NoAnswer(f"{asked.starts[0]} failed ({' '.join(done.stderr.split())[:200]})")
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2 and _TIME.fullmatch(row[1])}


def _refuse_without(command: Sequence[str], scheduler: str) -> None:
    if not command:
        raise NoAnswer(f"{scheduler} does not say when a job starts")
    if shutil.which(command[0]) is None:
        raise NoAnswer(f"{scheduler}'s commands are not on this machine")


def _run(command: Sequence[str], limit: float | None = None) -> subprocess.CompletedProcess[str]:
    limit = limit or LIMIT_SECONDS
    # SQUEUE_PARTITION and others would hide jobs. Answers are parsed, so they must not be translated.
    own = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    own["LC_ALL"] = "C"
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=own, check=False)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {limit:g} s. Fix: try again") from None
