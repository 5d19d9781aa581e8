"""`kielo run` of a recipe of several languages: one run after another, and one table at the end.

Each run is a process of its own, so that the end of one process does not end the others. Finished stages are
skipped, so the same command makes the missing runs. `kielo status` prints the table at any time.
"""

import argparse
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, read_metrics
from kielo.artifact.scores import STAGE_FOLDERS, Summary
from kielo.artifact.stage_json import read_json
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.recipe.read import read_recipe, recipe_languages, run_folder
from kielo.report.make_summary import language_row
from kielo.train.signals import INTERRUPTED, REQUEUE, give_signals_back, take_over_signals

_PASSED_ON = {"first": "--from", "last": "--to", "only": "--only", "again": "--again", "share": "--share"}
_SAID = "kielo: "  # begins the line of a failure
_MOST_SECONDS_OF_OUTPUT = 10.0  # for the last lines of a process that has ended


@dataclass(frozen=True)
class Outcome:
    """The end of one language's run. `exit_code` is None before the run, `said` the reason of a failure."""

    folder: Path
    exit_code: int | None = None
    said: str | None = None

    @property
    def state(self) -> str:
        if self.exit_code is None:
            return "not begun"
        return {0: "done", REQUEUE: "stopped", INTERRUPTED: "stopped"}.get(self.exit_code, "failed")


class _LanguageRuns:
    """One run per language, each in its own process. A stop signal goes once to the process at work."""

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


def run_languages(options: argparse.Namespace, codes: Sequence[str]) -> int:
    """Run each language's recipe. Return 0 if all are done, 1 if one failed, else the code of the stop.

    A stop ends the loop, a failure does not. Raise KieloError before the first run if a recipe is wrong.
    """
    folders = _folders(options.recipe, options.sets, codes)
    outcomes = {code: Outcome(folder) for code, folder in folders.items()}
    runs = _LanguageRuns(options.json)
    handlers = take_over_signals(runs.stop)
    try:
        for number, code in enumerate(codes, start=1):
            stream = sys.stderr if options.json else sys.stdout
            print_text(f"════ {code} ({number} of {len(codes)})", stream)
            outcomes[code] = runs.make(_arguments(options, code), folders[code])
            if runs.stopped_by is not None or outcomes[code].state == "stopped":
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
    """Print the progress of each language's run, as its folder shows it."""
    folders = _folders(reference, (), recipe_languages(reference))
    states = {code: _state_of(folder) for code, folder in folders.items()}
    summaries = {code: read_json(folder, Summary) for code, folder in folders.items()}
    if is_json:
        runs = {
            code: {"state": states[code], "folder": str(folder), "summary": _content(summaries[code])}
            for code, folder in folders.items()
        }
        return print_json({"languages": runs})
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


def _folders(reference: str, sets: Sequence[str], codes: Sequence[str]) -> dict[str, Path]:
    return {code: run_folder(read_recipe(reference, [*sets, _choice(code)]).recipe) for code in codes}


def _choice(code: str) -> str:
    return f"language={code}"


def _arguments(options: argparse.Namespace, code: str) -> list[str]:
    words = [options.recipe]
    for text in [*options.sets, _choice(code)]:
        words += ["--set", text]
    for name, flag in _PASSED_ON.items():
        if value := getattr(options, name):
            words += [flag, value]
    return [*words, "--ranks", str(options.ranks)]


def _print(outcomes: dict[str, Outcome], is_json: bool) -> None:
    summaries = {code: read_json(outcome.folder, Summary) for code, outcome in outcomes.items()}
    if is_json:
        runs = {
            code: {
                "state": of.state,
                "exit_code": of.exit_code,
                "said": of.said,
                "folder": str(of.folder),
                "summary": None if of.exit_code else _content(summaries[code]),
            }
            for code, of in outcomes.items()
        }
        return print_json({"languages": runs})
    made = {code: summary for code, summary in summaries.items() if outcomes[code].state == "done"}
    _print_table({code: outcome.state for code, outcome in outcomes.items()}, made)
    for code, outcome in outcomes.items():
        if outcome.said:
            print_text(f"{code}: {outcome.said}")
    if any(outcome.state != "done" for outcome in outcomes.values()):
        print_text("The same command makes the missing runs.")


def _print_table(states: Mapping[str, str], summaries: Mapping[str, Summary | None]) -> None:
    rows = [(code, state, *language_row(summaries.get(code))) for code, state in states.items()]
    print_table(("language", "run", "text kept", "score", "time"), rows)
