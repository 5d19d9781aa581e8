"""`kielo status` and `kielo cancel`: a launched run on one screen, and its end."""

import argparse
import sys
from datetime import datetime, timedelta
from pathlib import Path

from kielo.artifact.launch_files import Ladder
from kielo.artifact.manifest import write_text_atomically
from kielo.cli.flags import takes
from kielo.cli.run_languages import chosen_in, folders_of, print_states
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.launch.bash import start_of
from kielo.launch.evaluation_jobs import scored_in_words
from kielo.launch.ladder import read_ladder
from kielo.launch.launch_folder import shared_stage_of
from kielo.launch.schedulers import end_jobs
from kielo.launch.share_jobs import share_status
from kielo.launch.status import Status, evaluations_of, launches_of
from kielo.launch.status import status as status_of
from kielo.recipe.errors import KieloError
from kielo.recipe.read import is_shipped, recipe_choices
from kielo.stages import late


@takes("""
    $ kielo status runs/poro_34b
    $ kielo status runs/poro_34b/launch/ladder_lumi_g
    $ kielo status runs/poro_34b/launch/corpus_0001
    $ kielo status runs/poro_34b/launch/pack_0001
    $ kielo status runs/poro_34b/launch/evaluate_0001
    $ kielo status seventy_five_berts
    RUN     folder of a run, a launch, a ladder or jobs that share a stage; or a recipe of several languages
            or variants
    --json  print JSON
""")
def status(options: argparse.Namespace) -> None:
    if (Path(options.run) / Ladder.FILE_NAME).is_file():
        return _ladder(Path(options.run), options.json)
    if shared_stage_of(Path(options.run)) is not None:
        return _shared(Path(options.run), options.json)
    if _is_of_several(options.run):
        return print_states(options.run, options.json)
    found = status_of(Path(options.run))
    rows, (file, lines) = _rows(found), found.last_words or (None, [])
    if options.json:
        told = {name.replace(" ", "_"): value for name, value in rows}
        print_json(told | {"folder": str(found.folder), "log": file and str(file), "log_lines": lines})
        return
    print_table(("", ""), rows)
    if file is not None:
        print("\n".join([f"the end of {file}:", *(f"  {line}" for line in lines)]))


def _is_of_several(reference: str) -> bool:
    is_recipe = Path(reference).is_file() or is_shipped(reference)
    return is_recipe and bool(recipe_choices(reference))


def _ladder(folder: Path, is_json: bool) -> None:
    ladder = read_ladder(folder)
    written = late.write_ladder_report(folder, ladder)
    if is_json:
        return print_json(ladder.content())
    titles, rows = late.ladder_table(ladder)
    print_table(titles, rows)
    for line in late.ladder_notes(ladder):
        print_text(line)
    print_text(f"wrote {', '.join(map(str, written))}")


def _shared(folder: Path, is_json: bool) -> None:
    found = share_status(folder)
    made = found.progress
    if is_json:
        return print_json({"jobs": found.jobs, "submitted": found.ids} | made._asdict())
    told = [f"{job} {state}" for job, state in (found.jobs or {}).items()]
    jobs = found.no_answer if found.jobs is None else "; ".join(told)
    joined = "joined" if made.is_joined else "not joined yet"
    rows = [
        ("text", f"of {found.name}, on {found.site}"),
        ("jobs", f"{jobs or 'none left'} ({len(found.ids)} submitted)"),
        ("parts", f"{made.finished:,} of {made.parts:,}, {joined}" if made.parts else joined),
    ]
    for name, (finished, tasks) in getattr(made, "rounds", {}).items():
        rows.append((f"  {name}", f"{finished:,} of {tasks:,} tasks"))
    if not told and not made.is_joined and found.ids and found.jobs is not None:
        rows.append(("next", f"{start_of(folder / 'submit.sh')} makes the missing parts"))
    print_table(("", ""), rows)


@takes("""
    $ kielo cancel runs/poro_34b
    $ kielo cancel runs/poro_34b/launch/watch_0001
    $ kielo cancel seventy_five_berts
    RUN    the run's folder, a launch's folder, or a recipe of several languages or variants
    --now  end the running job at once, without a save
""")
def cancel(options: argparse.Namespace) -> int:
    """Cancel one run, or each launched run of several. Return 1 if one of several fails, else 0."""
    if not _is_of_several(options.run):
        _cancel(Path(options.run), options.now)
        return 0
    folders = folders_of(options.run, (), recipe_choices(options.run))
    launched = {choice: folder for choice, folder in folders.items() if launches_of(folder)}
    if not launched:
        raise KieloError(f"{options.run}: none of its {len(folders)} runs was launched")
    code = 0
    for choice, folder in launched.items():
        print_text(f"{chosen_in(choice)}:")
        try:
            _cancel(folder, options.now)
        except KieloError as error:
            print_text(str(error), sys.stderr)
            code = 1
    return code


def _cancel(run: Path, is_now: bool) -> None:
    found = status_of(run)
    if found.jobs is None:
        raise KieloError(
            f"nothing is cancelled: {found.no_answer.partition('. Fix: ')[0]}. Fix: touch "
            f"{found.folder.parents[1] / 'triggers' / 'stop'}, so that the run saves and stops"
        )
    stopped = found.folder / "chain" / "stopped"
    if not stopped.exists():
        write_text_atomically(stopped, "cancelled by kielo cancel\n")
    end_jobs(found.launch.scheduler, found.jobs, is_now)
    if not found.jobs:
        print_text("no job of this run is waiting or running")
        return
    saving = "" if is_now or not found.is_running else "; the running job saves and stops"
    print_text(f"cancelled {', '.join(found.jobs)}{saving}; to continue the chain, remove {stopped}")


def _rows(found: Status) -> list[tuple[str, str]]:
    launch, forecast, last = found.launch, found.launch.forecast, found.last_step
    rows = [
        ("run", f"{launch.job_name}, on {launch.nodes} nodes of {launch.cluster}, {launch.devices} ranks"),
        ("jobs", _jobs(found)),
    ]
    if found.starts or found.no_start:
        told = [f"{job} about {at.replace('T', ' ')}" for job, at in found.starts.items()]
        rows.append(("starts", "; ".join(told) or f"not known: {found.no_start}"))
    if launch.work != "train":
        rows.append(("scored", scored_in_words(found.folder, launch.work)))
        last = None
    if last is not None:
        of_all = f" of {found.total_steps:,}" if found.total_steps else ""
        without = "none: no label counts" if last.has_no_label else "not finite"
        loss = without if last.loss is None else f"{last.loss:.4f}"
        rows.append(("step", f"{last.step:,}{of_all}, loss {loss}"))
        planned = last.planned_tokens_per_second or (forecast and forecast.tokens_per_second)
        beside = f"; planned {planned:,.0f}, so {last.tokens_per_second / planned:.0%}" if planned else ""
        rows.append(("speed", f"{last.tokens_per_second:,.0f} tokens/s{beside}"))
        if last.seconds_left:
            left = timedelta(seconds=round(last.seconds_left))
            ready = f", {datetime.now() + left:%Y-%m-%d %H:%M} without a wait" if found.is_running else ""
            rows.append(("left", f"{left} of training{ready}"))
    spent = f"{found.device_hours:,.1f} device-hours in {len(found.attempts)} attempts"
    rows.append(("spent", spent + (f"; forecast {forecast.device_hours:,.0f}" if forecast else "")))
    ended = [attempt for attempt in found.attempts if attempt.outcome]
    for last_end in ended[-1:]:
        stop = f"job {last_end.job}: {last_end.outcome}. {last_end.message}"
        rows.append(("last stop", stop.rstrip(". ")))
    rows += [("ended", f"job {job}: {end}, before its first line") for job, end in found.ends.items()]
    if not (found.folder / "logs").is_dir():
        rows.append(("logs", f"{found.folder / 'logs'} is gone, and jobs fail without it. Fix: mkdir -p"))
    if found.stopped:
        rows.append(("chain", f"ended: {found.stopped}"))
    if found.left_out:
        rows.append(("left out", ", ".join(found.left_out)))
    if launch.work == "train":
        rows += [_evaluation_row(folder) for folder in evaluations_of(found.folder.parents[1])]
    return rows


def _evaluation_row(folder: Path) -> tuple[str, str]:
    found = status_of(folder)
    ended = f"; ended: {found.stopped}" if found.stopped else ""
    said = scored_in_words(folder, found.launch.work)
    return folder.name.replace("_", " "), f"{_jobs(found)}; {said}{ended}"


def _jobs(found: Status) -> str:
    if not found.ids:
        return f"none submitted; {start_of(found.folder / 'submit.sh')}"
    if found.jobs is None:
        return f"{len(found.ids)} submitted; {found.no_answer}"
    told = [f"{job} {state}" for job, state in found.jobs.items()]
    return f"{'; '.join(told) or 'none left'} ({len(found.ids)} submitted)"
