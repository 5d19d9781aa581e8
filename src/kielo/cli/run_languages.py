"""`kielo run` of a recipe of several languages or variants: one run after another, and a table at the end.

Each run is a process of its own, so that the end of one process does not end the others. Finished stages are
skipped, so the same command makes the missing runs. `kielo status` prints the table at any time.
"""

import argparse
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, read_metrics
from kielo.artifact.scores import STAGE_FOLDERS, Summary
from kielo.artifact.stage_json import read_json
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.launch.runs_in_queue import jobs_of_runs
from kielo.recipe.read import read_recipe, recipe_choices, run_folder
from kielo.report.make_summary import language_row
from kielo.train.signals import INTERRUPTED, REQUEUE, give_signals_back, take_over_signals

_PASSED_ON = {"first": "--from", "last": "--to", "only": "--only", "again": "--again", "share": "--share"}
_SAID = "kielo: "  # begins the line of a failure
_MOST_SECONDS_OF_OUTPUT = 10.0  # for the last lines of a process that has ended


@dataclass(frozen=True)
class Outcome:
    """The end of one run. `exit_code` is None before the run, `said` the reason of a failure."""

    folder: Path
    exit_code: int | None = None
    said: str | None = None

    @property
    def state(self) -> str:
        if self.exit_code is None:
            return "not begun"
        return {0: "done", REQUEUE: "stopped", INTERRUPTED: "stopped"}.get(self.exit_code, "failed")


class _LanguageRuns:
    """The runs, each in its own process. A stop signal goes once to the process at work."""

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._process: subprocess.Popen | None = None
        self.stopped_by: int | None = None

    def stop(self, number: int, _: Any) -> None:
        self.stopped_by = number
        if self._process is not None:
            self._process.send_signal(number)

    def make(self, arguments: Sequence[str], folder: Path) -> Outcome:
        """Run `kielo run` with the arguments; pass its output on, and return its end."""
        # A session of its own: Ctrl-C at a terminal reaches it once, through this process.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kielo", "run", *arguments],
            stdout=2 if self._is_json else None,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        said: list[str] = []
        reader = threading.Thread(target=_pass_on, args=(process.stderr, said), daemon=True)
        reader.start()
        self._process = process
        if self.stopped_by is not None:  # since the last process
            process.send_signal(self.stopped_by)
        try:
            code = process.wait()
        finally:
            self._process = None
            if process.poll() is None:
                process.kill()
        reader.join(_MOST_SECONDS_OF_OUTPUT)
        return Outcome(folder, code, said[-1] if said and code else None)


def _pass_on(stream: IO[str], said: list[str]) -> None:
    for line in stream:
        print(line, end="", file=sys.stderr)
        if line.startswith(_SAID):
            said.append(line.removeprefix(_SAID).strip())


def run_languages(options: argparse.Namespace, choices: Sequence[str]) -> int:
    """Run the recipe of each choice (`recipe_choices`). Return 0 if all are done, 1 if one failed, else the
    code of the stop.

    A stop ends the loop, a failure does not. Raise KieloError before the first run if a recipe is wrong.
    """
    folders = folders_of(options.recipe, options.sets, choices)
    outcomes = {choice: Outcome(folder) for choice, folder in folders.items()}
    runs = _LanguageRuns(options.json)
    handlers = take_over_signals(runs.stop)
    try:
        for number, choice in enumerate(choices, start=1):
            stream = sys.stderr if options.json else sys.stdout
            print_text(f"════ {chosen_in(choice)} ({number} of {len(choices)})", stream)
            outcomes[choice] = runs.make(_arguments(options, choice), folders[choice])
            if runs.stopped_by is not None or outcomes[choice].state == "stopped":
                break
    finally:
        give_signals_back(handlers)
    _print(outcomes, options.json)
    states = {outcome.state for outcome in outcomes.values()}
    if runs.stopped_by is not None or "stopped" in states:
        interrupted = any(outcome.exit_code == INTERRUPTED for outcome in outcomes.values())
        return INTERRUPTED if interrupted else REQUEUE
    return int("failed" in states)


def print_states(reference: str, is_json: bool) -> None:
    """Print the progress of each language's or variant's run, as its folder shows it."""
    folders = folders_of(reference, (), recipe_choices(reference))
    states = {choice: _state_of(folder) for choice, folder in folders.items()}
    summaries = {choice: read_json(folder, Summary) for choice, folder in folders.items()}
    jobs = jobs_of_runs(folders.values())
    if is_json:
        runs = {
            chosen_in(choice): {
                "state": states[choice],
                "folder": str(folder),
                "jobs": jobs.get(folder),
                "summary": _content(summaries[choice]),
            }
            for choice, folder in folders.items()
        }
        return print_json({kind_of(folders): runs})
    if jobs:
        states = {choice: f"{states[choice]}; {jobs.get(folders[choice], 'no jobs')}" for choice in states}
    _print_table(states, summaries)


def _content(summary: Summary | None) -> dict[str, Any] | None:
    return summary.content() if summary else None


def _state_of(folder: Path) -> str:
    made = [stage for stage, name in STAGE_FOLDERS.items() if read_manifest(folder / name) is not None]
    steps = of_kind(read_metrics(folder / "train" / METRICS_NAME), TrainingStep)
    if steps and "train" not in made:
        return f"trained to step {steps[-1].step:,}"
    if "export" in made and read_json(folder, Summary) is not None:
        return "done"
    return f"{made[-1]} done" if made else "not begun"


def folders_of(reference: str, sets: Sequence[str], choices: Sequence[str]) -> dict[str, Path]:
    return {choice: run_folder(read_recipe(reference, [*sets, choice]).recipe) for choice in choices}


def chosen_in(choice: str) -> str:
    """Return the language or variant of a choice."""
    return choice.partition("=")[2]


def kind_of(choices: Iterable[str]) -> str:
    """Return "languages" or "variants"."""
    return f"{next(iter(choices)).partition('=')[0]}s"


def _arguments(options: argparse.Namespace, choice: str) -> list[str]:
    words = [options.recipe]
    for text in [*options.sets, choice]:
        words += ["--set", text]
    for name, flag in _PASSED_ON.items():
        if value := getattr(options, name):
            words += [flag, value]
    return [*words, "--ranks", str(options.ranks)]


def _print(outcomes: dict[str, Outcome], is_json: bool) -> None:
    summaries = {choice: read_json(outcome.folder, Summary) for choice, outcome in outcomes.items()}
    if is_json:
        runs = {
            chosen_in(choice): {
                "state": of.state,
                "exit_code": of.exit_code,
                "said": of.said,
                "folder": str(of.folder),
                "summary": None if of.exit_code else _content(summaries[choice]),
            }
            for choice, of in outcomes.items()
        }
        return print_json({kind_of(outcomes): runs})
    made = {choice: summary for choice, summary in summaries.items() if outcomes[choice].state == "done"}
    _print_table({choice: outcome.state for choice, outcome in outcomes.items()}, made)
    for choice, outcome in outcomes.items():
        if outcome.said:
            print_text(f"{chosen_in(choice)}: {outcome.said}")
    if any(outcome.state != "done" for outcome in outcomes.values()):
        print_text("The same command makes the missing runs.")
    elif kind_of(outcomes) == "variants" and all(summaries.values()):
        folders = " ".join(shlex.quote(str(outcome.folder)) for outcome in outcomes.values())
        print_text(f"To compare them: kielo report {folders}")


def _print_table(states: Mapping[str, str], summaries: Mapping[str, Summary | None]) -> None:
    rows = [
        (chosen_in(choice), state, *language_row(summaries.get(choice))) for choice, state in states.items()
    ]
    print_table((kind_of(states).removesuffix("s"), "run", "text kept", "score", "time"), rows)
