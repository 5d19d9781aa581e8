"""The jobs of several launched runs, by one question to the scheduler."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kielo.artifact.launch_files import Launch
from kielo.artifact.stage_json import read_json
from kielo.launch.decide import attempts, lines_of
from kielo.launch.schedulers import job_ids, states_or_reason
from kielo.launch.status import newest_launch
from kielo.recipe.errors import KieloError


def jobs_of_runs(folders: Iterable[Path]) -> dict[Path, str]:
    """Return run folder → the state of its jobs, or how its last attempt ended, for each launched run."""
    launches: dict[Path, tuple[Path, Launch]] = {}
    for folder in folders:
        with suppress(KieloError):  # never launched
            newest = newest_launch(folder)
            if (launch := read_json(newest, Launch)) is not None:
                launches[folder] = newest, launch
    ids = {folder: job_ids(newest / "chain" / "jobs") for folder, (newest, _) in launches.items()}
    found: dict[str, str] | None = {}
    no_answer = ""
    for scheduler in {launch.scheduler for _, launch in launches.values()}:
        asked = [job for folder in ids for job in ids[folder] if launches[folder][1].scheduler == scheduler]
        answer, no_answer = states_or_reason(scheduler, asked) if asked else ({}, "")
        found = None if answer is None or found is None else found | answer
    return {
        folder: _in_words(newest, ids[folder], found, no_answer) for folder, (newest, _) in launches.items()
    }


def _in_words(launch: Path, ids: list[str], found: dict[str, str] | None, no_answer: str) -> str:
    if not ids:
        return "written, not submitted"
    made = [attempt for attempt in attempts(launch / "chain" / "attempts") if attempt.outcome]
    ended = f"{made[-1].outcome}: {made[-1].message}".rstrip(": ") if made else ""
    stopped = " ".join(lines_of(launch / "chain" / "stopped"))
    if found is None:
        return ended or stopped or no_answer
    queued = [found[job].split()[0] for job in ids if job in found]
    states = [f"{queued.count(state)} {state}" for state in dict.fromkeys(queued)]
    return ", ".join(states) or stopped or ended or "over"
