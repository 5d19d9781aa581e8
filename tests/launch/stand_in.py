"""A stand-in for a site's Slurm: sbatch, squeue, scontrol, srun and others that answer as sites do.

As a module it has `Site`, which puts the commands on PATH. As a program it is each of these commands; what it
knows of jobs is in files beside them. It takes options as sbatch's man page says: the command line before the
environment, and that before the lines of the script.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "sacct", "srun")
# Option → (key of a job, variable of the environment).
OPTIONS = {
    "account": ("Account", "SBATCH_ACCOUNT"), "partition": ("Partition", "SBATCH_PARTITION"),
    "qos": ("QOS", "SBATCH_QOS"), "time": ("TimeLimit", "SBATCH_TIMELIMIT"), "nodes": ("NumNodes", ""),
    "array": ("Array", "SBATCH_ARRAY_INX"), "signal": ("Signal", "SBATCH_SIGNAL"),
    "export": ("Export", "SBATCH_EXPORT"), "dependency": ("Dependency", ""),
}  # fmt: skip
# How sites differ: the id with the cluster's name, a site's own lines around each answer, answers that take a
# while, and another language where none was asked for.
MANNERS = ("plain", "federated", "verbose", "slow", "not_english")


@dataclass(frozen=True)
class Site:
    """Its folder. A job runs at once, if `runs`, on two names of this machine; tasks of an array in `lost` do
    not. first: the number of the first job, of which the ports of its ranks are made.
    """

    folder: Path

    @classmethod
    def make(
        cls,
        folder: Path,
        manner: str = "plain",
        runs: bool = False,
        lost: tuple[str, ...] = (),
        first: int = 101,
        starts: dict[str, str] | None = None,
        **facts: str,
    ) -> "Site":
        """starts: queue → time at which a job would start there, or "never" for no answer.

        facts: what the site's own rules make of each job, whatever was asked for.
        """
        folder.mkdir()
        for name in COMMANDS:
            (folder / name).write_text(f'#!/bin/bash\nexec "{sys.executable}" "{__file__}" "$0" "$@"\n')
            (folder / name).chmod(0o755)
        site = {"manner": manner, "runs": runs, "lost": lost, "first": first, "facts": facts}
        site["starts"] = starts or {}
        (folder / "site.json").write_text(json.dumps(site))
        return cls(folder)

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Returns id → what the scheduler made of the job; `command`: the words of its submission."""
        files = sorted(self.folder.glob("job_*.json"))
        return {file.stem.removeprefix("job_"): json.loads(file.read_text()) for file in files}

    def set(self, job: str, **facts: str) -> None:
        """Changes what is known of a job."""
        file = self.folder / f"job_{job}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def _test_only(site: dict[str, Any], words: list[str]) -> int:
    """Answer as sbatch 23.11 does, on the error output, with a job's number that is never given out."""
    asked = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
    queue = asked.get("qos") or asked.get("partition")
    if queue not in site["starts"]:
        print("allocation failure: Invalid partition name specified", file=sys.stderr)
        return 1
    start = site["starts"][queue]
    if start == "never":
        time.sleep(60)
    told = f"to start at {start} using 8 processors on nodes n1 in partition {queue}"
    print(f"sbatch: Job 999 {told}", file=sys.stderr)
    return 0


def _main(command: Path, words: list[str]) -> int:
    site = json.loads((command.parent / "site.json").read_text())
    if site["manner"] == "slow":
        time.sleep(0.1)
    if site["manner"] == "verbose" and command.name in ("sbatch", "squeue"):
        print(f"{command.name}: lua: your project has 12 % of its hours left", file=sys.stderr)
        print("-" * 20, "Welcome to the site; 3 nodes are down", "-" * 20, sep="\n")
    if site["manner"] == "not_english" and os.environ.get("LC_ALL") != "C" and command.name == "scontrol":
        print("TyöId=", " ".join(f"Tila{number}=KÄYNNISSÄ" for number in range(3)))
        return 0
    jobs = Site(command.parent).jobs()
    if command.name == "sbatch" and "--test-only" in words:
        return _test_only(site, words)
    if command.name == "squeue" and "--start" in words:
        for job, facts in jobs.items():
            if facts["JobState"] == "PENDING":
                print(job, site["starts"].get(facts["Partition"], "N/A"))
        return 0
    if command.name == "sbatch":
        return _submit(command.parent, site, words)
    if command.name == "squeue":
        return _queue(jobs, words)
    if command.name == "scontrol":
        return _control(command.parent, jobs, words)
    if command.name == "srun":
        return _step(words)
    if command.name == "scancel":
        for job in set(words) & set(jobs):
            Site(command.parent).set(job, JobState="CANCELLED")
    if command.name == "sacct":
        for job, facts in jobs.items():
            print("|".join([job, facts["JobState"], facts["ExitCode"], facts["Reason"]]))
    return 0


def _submit(folder: Path, site: dict[str, Any], words: list[str]) -> int:
    if words == ["--version"]:
        print("slurm 22.05.8")
        return 0
    if {"SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"} & set(os.environ):
        print(
            "sbatch: fatal: SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive", file=sys.stderr
        )
        return 1
    script = Path(words[-1])
    lines = [line[8:] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    facts = {"JobState": "PENDING", "ExitCode": "0:0", "Reason": "None", "command": words}
    facts |= {"TimeLimit": "01:00:00", "Partition": "first_of_the_site", "Account": "first_of_the_person"}
    for option, (key, variable) in OPTIONS.items():
        for given in (lines, [f"--{option}={os.environ[variable]}"] if variable in os.environ else [], words):
            for word in given:
                if word.startswith(f"--{option}="):
                    facts[key] = word.partition("=")[2]
    facts |= site["facts"]
    number = str(len(list(folder.glob("job_*.json"))) + site.get("first", 101))
    # What the job would find in its environment, less what is in every one.
    facts["environment"] = {name: os.environ[name] for name in os.environ if name.startswith(("S", "PYTHON"))}
    (folder / f"job_{number}.json").write_text(json.dumps(facts))
    if site["runs"]:
        _run(folder, site, number, script, facts)
    print(f"{number};here" if site["manner"] == "federated" else number)
    return 0


def _run(folder: Path, site: dict[str, Any], number: str, script: Path, facts: dict[str, Any]) -> None:
    first, _, last = facts.get("Array", "").partition("-")
    tasks = [str(task) for task in range(int(first), int(last) + 1)] if last else [""]
    for task in tasks:
        if task in site["lost"]:
            continue
        own = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": facts["NumNodes"]}
        with open(f"{script}.log", "ab") as log:
            subprocess.run(
                ["bash", script], env=os.environ | own | ({"SLURM_ARRAY_TASK_ID": task} if task else {}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
    Site(folder).set(number, JobState="COMPLETED")


def _step(words: list[str]) -> int:
    """Starts the tasks of a step that trains, each as on a node of its own; of other steps none."""
    first = next(number for number, word in enumerate(words) if not word.startswith("--"))
    if "--rank" not in words[first:]:
        return 0
    tasks = next(int(word.partition("=")[2]) for word in words if word.startswith("--ntasks="))
    environments = [os.environ | {"SLURM_PROCID": str(task), "SLURM_LOCALID": "0"} for task in range(tasks)]
    ranks = [subprocess.Popen(["timeout", "250", *words[first:]], env=own) for own in environments]
    return max(rank.wait() for rank in ranks)


def _queue(jobs: dict[str, Any], words: list[str]) -> int:
    if any(name.startswith("SQUEUE_") for name in os.environ):
        return 0  # another partition's jobs
    for job, facts in jobs.items():
        if facts["JobState"] in ("PENDING", "RUNNING"):
            print(job, facts["JobState"], facts["Reason"])
    return 0


def _control(folder: Path, jobs: dict[str, Any], words: list[str]) -> int:
    if "hostnames" in words:
        print("\n".join(["localhost", "127.0.0.1"][: int(words[-1])]))
    elif "requeue" in words:
        Site(folder).set(words[-1], JobState="PENDING")
    elif words[-1] in jobs:
        own = {key: value for key, value in jobs[words[-1]].items() if isinstance(value, str)}
        print(
            " ".join(f"{key}={value}" for key, value in ({"JobId": words[-1], "QOS": "(null)"} | own).items())
        )
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2:]))
