"""`kielo checkpoint`: list, show, verify, copy and average the checkpoints of a run.

Only `average` needs torch. Only `average` and `copy` write.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kielo.artifact import checkpoint_inspection as inspection
from kielo.artifact.checkpoint_folder import run_around
from kielo.artifact.folder_copies import copy_checkpoints, download_folder, upload_folder
from kielo.cli.flags import VerbParser, takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.recipe.addresses import is_address
from kielo.recipe.errors import KieloError
from kielo.recipe.places import place
from kielo.report.units import format_bytes
from kielo.stages import late

SUBVERBS = {
    "list": ("checkpoint:list_", "a run's checkpoints: step, tokens, loss, size, complete or damaged"),
    "show": ("checkpoint:show", "the content of a checkpoint; of a run, of the newest"),
    "verify": ("checkpoint:verify", "read every byte and compare it with its checksum"),
    "copy": ("checkpoint:copy", "copies at an address such as s3://bucket/run, and back"),
    "average": ("checkpoint:average", "the mean of the weights of several checkpoints of one run"),
}


def checkpoint_flags(parser: VerbParser) -> None:
    parser.takes("$ kielo checkpoint list runs/demo_estonian")
    parser.has_subverbs("subverb", SUBVERBS)


@takes("""
    $ kielo checkpoint list runs/demo_estonian
    $ kielo checkpoint list runs/demo_estonian --verify
    RUN       run folder
    --verify  read every byte, not sizes alone
    --json
""")
def list_(options: argparse.Namespace) -> None:
    folder = inspection.checkpoints_folder(Path(options.run))
    if folder is None:
        raise KieloError(f"{options.run}: no checkpoints there. Fix: a run folder such as runs/demo_estonian")
    rows = inspection.list_checkpoints(folder)
    if options.verify:
        faults = inspection.find_faults([folder / row["name"] for row in rows])
        for row in rows:
            row["state"] = inspection.state_after_verification(faults[folder / row["name"]])
    whole = [row for row in rows if row["state"] in ("complete", "verified")]
    for row in rows:
        row["newest"] = row in whole[:1]
    if options.json:
        return print_json(rows)
    for row in rows:
        row["state"] += ", newest" if row["newest"] else ""
    columns = ("name", "step", "tokens", "loss", "bytes", "written_at", "state")
    titles = ("checkpoint", "step", "tokens", "loss", "size", "written", "state")
    print_table(titles, [_cells(row, *columns) for row in rows])


@takes("""
    $ kielo checkpoint show runs/demo_estonian
    $ kielo checkpoint show runs/demo_estonian/train/checkpoints/newest --tensors
    RUN_OR_CHECKPOINT as checkpoint  checkpoint, or run folder
    --tensors                        every tensor with its dtype, shape and number of chunks
    --json
""")
def show(options: argparse.Namespace) -> None:
    path = inspection.newest_whole(inspection.find_checkpoints(Path(options.checkpoint)))
    if options.tensors:
        rows = inspection.describe_tensors(path)
        return print_json(rows) if options.json else _print_tensors(rows)
    facts = inspection.describe_checkpoint(path)
    if options.json:
        return print_json(facts)
    print_table(["what", "value"], [(key, value) for key, value in _for_people(facts) if value is not None])
    print()
    parts = [_cells(part, "part", "dtype", "tensors", "elements", "bytes") for part in facts["parts"]]
    print_table(["part", "dtype", "tensors", "elements", "size"], parts)
    print()
    print_table(["file", "size"], [(name, format_bytes(size)) for name, size in facts["files"].items()])


@takes("""
    $ kielo checkpoint verify runs/demo_estonian
    $ kielo checkpoint verify runs/demo_estonian/train/checkpoints/newest
    RUN_OR_CHECKPOINT as checkpoint  checkpoint, or run folder
    --json
""")
def verify(options: argparse.Namespace) -> int:
    with keep_stdout_for_json(options.json):
        faults = inspection.find_faults(inspection.find_checkpoints(Path(options.checkpoint)))
    states = {path: inspection.state_after_verification(found) for path, found in faults.items()}
    if options.json:
        damage = {path: [fault.reason for fault in found] for path, found in faults.items()}
        rows = [{"checkpoint": str(path), "state": states[path], "damage": damage[path]} for path in faults]
        print_json(rows)
    else:
        for path, state in states.items():
            print(f"{path}\t{state}")
    return 1 if any(faults.values()) else 0


@takes("""
    $ cd runs/demo_estonian/train && kielo checkpoint average checkpoints/step_* --to averages/last
    CHECKPOINT... as checkpoints  folders of two or more checkpoints
    --to DIR!                     folder to make; inside the run folder, `kielo export` finds the tokenizer
""")
def average(options: argparse.Namespace) -> None:
    sources = [Path(name) for name in options.checkpoints]
    for source in sources:
        inspection.refuse_no_checkpoint(source)
    if Path(options.to).name in ("", ".."):
        raise KieloError(f"--to {options.to}: no name of a folder. Fix: --to averages/last")
    to = late.average(sources, place(options.to))
    command = shlex.join(["kielo", "export", str(to), *_tokenizer_flag(to, sources[0]), "--to", f"{to}_hf"])
    print_text(f"wrote {to}, the mean of {len(sources)} checkpoints; `{command}` makes a model of it")


@takes("""
    $ kielo checkpoint copy runs/demo_estonian --to s3://my-bucket/run
    $ kielo checkpoint copy s3://my-bucket/run/step_00000088 --to checkpoints
    RUN_OR_CHECKPOINT as checkpoint  checkpoint or its address, or run folder: all of it
    --to PLACE!                      address, or, for an address, folder that gets the checkpoint
    --json                           print the names of the copies as JSON
""")
def copy(options: argparse.Namespace) -> None:
    is_back = is_address(options.checkpoint)
    if is_back == is_address(options.to):
        raise KieloError(
            f"--to {options.to}: copies go to an address, or from it. Fix: one of the two places"
        )

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    if is_back:
        made = [str(download_folder(options.checkpoint, place(options.to), say))]
    elif (folder := inspection.checkpoints_folder(Path(options.checkpoint))) is not None:
        made = [f"{options.to.rstrip('/')}/{name}" for name in copy_checkpoints(folder, options.to, say)]
    else:
        made = [upload_folder(inspection.find_checkpoints(Path(options.checkpoint))[0], options.to, say)]
    if options.json:
        return print_json(made)
    return print_text(f"copied: {', '.join(made) or 'nothing, as all copies are there'}")


def _tokenizer_flag(average: Path, source: Path) -> list[str]:
    """Return the flag of `kielo export` for an average outside of its run folder."""
    run = run_around(source)
    if run is not None and run == run_around(average):
        return []
    folder = run / "tokenizer" if run is not None else Path("DIR")
    here = Path.cwd()
    return ["--tokenizer", str(folder.relative_to(here) if folder.is_relative_to(here) else folder)]


def _print_tensors(rows: list[dict[str, Any]]) -> None:
    cells = [
        (
            *(row["name"], row["dtype"], "×".join(map(str, row["shape"])) or "scalar"),
            f"tied to {row['tied_to']}" if row["tied_to"] else row["chunks"],
        )
        for row in rows
    ]
    print_table(["tensor", "dtype", "shape", "chunks"], cells)


def _for_people(facts: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    keys = ("checkpoint", "state", "step", "tokens", "samples", "loss")
    yield from zip(keys, _cells(facts, *keys), strict=True)
    yield "save id", facts["save_id"]
    yield "written", f"{_cells(facts, 'written_at')[0]} by {facts['written_by']}"
    yield "recipe", facts["recipe"]
    if model := facts["model"]:
        yield (
            "model",
            f"{model['model_type']}, {model['num_hidden_layers']} layers, hidden {model['hidden_size']}, "
            f"heads {model['num_attention_heads']}, vocabulary {model['vocab_size']:,}",
        )
    if sources := facts["averaged_from"]:
        yield "averaged from", ", ".join(source["name"] for source in sources)


_FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("tokens", "samples", "elements"), "{:,}".format),
    "loss": "{:.4f}".format,
    "bytes": format_bytes,
    # 2026-11-21T19:55:23+00:00 in manifests
    "written_at": lambda time: time.replace("T", " ").replace("+00:00", " UTC"),
}


def _cells(facts: dict[str, Any], *keys: str) -> list[str | None]:
    return [None if facts[key] is None else _FORMATS.get(key, str)(facts[key]) for key in keys]
