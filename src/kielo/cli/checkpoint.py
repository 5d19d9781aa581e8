"""`kielo checkpoint`: list, show, verify and average the checkpoints of a run.

Only `average` needs torch, and only it writes.
"""

import argparse
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kielo.artifact.checkpoint_folder import run_around
from kielo.artifact.checkpoint_inspection import (
    checkpoints_folder,
    describe_checkpoint,
    describe_tensors,
    find_checkpoints,
    find_faults,
    list_checkpoints,
    newest_whole,
    refuse_no_checkpoint,
    state_after_verification,
)
from kielo.cli.flags import VerbParser, examples
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.recipe.errors import KieloError
from kielo.recipe.places import place
from kielo.report.units import format_bytes
from kielo.stages import late

_ONE_OR_ALL = "checkpoint, or run folder"


SUBVERBS = {
    "list": ("checkpoint:list_", "a run's checkpoints: step, tokens, loss, size, complete or damaged"),
    "show": ("checkpoint:show", "the content of a checkpoint; of a run, of the newest"),
    "verify": ("checkpoint:verify", "read every byte and compare it with its checksum"),
    "average": ("checkpoint:average", "the mean of the weights of several checkpoints of one run"),
}


def checkpoint_flags(parser: VerbParser) -> None:
    examples(parser, "kielo checkpoint list runs/demo_estonian")
    parser.has_subverbs("subverb", SUBVERBS)


def list__flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser,
        "kielo checkpoint list runs/demo_estonian",
        "kielo checkpoint list runs/demo_estonian --verify",
    )
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--verify", action="store_true", help="read every byte, not sizes alone")
    parser.add_argument("--json", action="store_true")


def list_(options: argparse.Namespace) -> None:
    folder = checkpoints_folder(Path(options.run))
    if folder is None:
        raise KieloError(f"{options.run}: no checkpoints there. Fix: a run folder such as runs/demo_estonian")
    rows = list_checkpoints(folder)
    if options.verify:
        faults = find_faults([folder / row["name"] for row in rows])
        for row in rows:
            row["state"] = state_after_verification(faults[folder / row["name"]])
    whole = [row for row in rows if row["state"] in ("complete", "verified")]
    for row in rows:
        row["newest"] = row in whole[:1]
    if options.json:
        return print_json(rows)
    print_table(
        ["checkpoint", "step", "tokens", "loss", "size", "written", "state"],
        [
            (
                row["name"],
                row["step"],
                _count(row["tokens"]),
                _loss(row["loss"]),
                _size(row["bytes"]),
                _time(row["written_at"]),
                row["state"] + (", newest" if row["newest"] else ""),
            )
            for row in rows
        ],
    )


def show_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser,
        "kielo checkpoint show runs/demo_estonian",
        "kielo checkpoint show runs/demo_estonian/train/checkpoints/newest --tensors",
    )
    parser.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help=_ONE_OR_ALL)
    parser.add_argument(
        "--tensors", action="store_true", help="every tensor with its dtype, shape and number of chunks"
    )
    parser.add_argument("--json", action="store_true")


def show(options: argparse.Namespace) -> None:
    path = newest_whole(find_checkpoints(Path(options.checkpoint)))
    if options.tensors:
        rows = describe_tensors(path)
        return print_json(rows) if options.json else _print_tensors(rows)
    facts = describe_checkpoint(path)
    if options.json:
        return print_json(facts)
    print_table(["what", "value"], [(key, value) for key, value in _for_people(facts) if value is not None])
    print()
    print_table(
        ["part", "dtype", "tensors", "elements", "size"],
        [
            (
                part["part"],
                part["dtype"],
                part["tensors"],
                _count(part["elements"]),
                format_bytes(part["bytes"]),
            )
            for part in facts["parts"]
        ],
    )
    print()
    print_table(["file", "size"], [(name, format_bytes(size)) for name, size in facts["files"].items()])


def verify_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser,
        "kielo checkpoint verify runs/demo_estonian",
        "kielo checkpoint verify runs/demo_estonian/train/checkpoints/newest",
    )
    parser.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help=_ONE_OR_ALL)
    parser.add_argument("--json", action="store_true")


def verify(options: argparse.Namespace) -> int:
    with keep_stdout_for_json(options.json):
        faults = find_faults(find_checkpoints(Path(options.checkpoint)))
    if options.json:
        print_json(
            [
                {
                    "checkpoint": str(path),
                    "state": state_after_verification(found),
                    "damage": [fault.reason for fault in found],
                }
                for path, found in faults.items()
            ]
        )
    else:
        for path, found in faults.items():
            print(f"{path}\t{state_after_verification(found)}")
    return 1 if any(faults.values()) else 0


def average_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser,
        "cd runs/demo_estonian/train && kielo checkpoint average checkpoints/step_* --to averages/last",
    )
    parser.add_argument(
        "checkpoints", metavar="CHECKPOINT", nargs="+", help="folders of two or more checkpoints"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="DIR",
        help="folder to make; inside the run folder, `kielo export` finds the tokenizer",
    )


def average(options: argparse.Namespace) -> None:
    sources = [Path(name) for name in options.checkpoints]
    for source in sources:
        refuse_no_checkpoint(source)
    if Path(options.to).name in ("", ".."):
        raise KieloError(f"--to {options.to}: no name of a folder. Fix: --to averages/last")
    to = late.average(sources, place(options.to))
    command = shlex.join(["kielo", "export", str(to), *_tokenizer_flag(to, sources[0]), "--to", f"{to}_hf"])
    print_text(f"wrote {to}, the mean of {len(sources)} checkpoints; `{command}` makes a model of it")


def _tokenizer_flag(average: Path, source: Path) -> list[str]:
    """Return the flag of `kielo export` for an average outside of its run folder."""
    run = run_around(source)
    if run is not None and run == run_around(average):
        return []
    folder = run / "tokenizer" if run is not None else Path("DIR")
    here = Path.cwd()
    return ["--tokenizer", str(folder.relative_to(here) if folder.is_relative_to(here) else folder)]


def _print_tensors(rows: list[dict[str, Any]]) -> None:
    print_table(
        ["tensor", "dtype", "shape", "chunks"],
        [
            (
                row["name"],
                row["dtype"],
                "×".join(map(str, row["shape"])) or "scalar",
                f"tied to {row['tied_to']}" if row["tied_to"] else row["chunks"],
            )
            for row in rows
        ],
    )


def _for_people(facts: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key in ("checkpoint", "state", "step"):
        yield key, facts[key]
    yield "tokens", _count(facts["tokens"])
    yield "samples", _count(facts["samples"])
    yield "loss", _loss(facts["loss"])
    yield "save id", facts["save_id"]
    yield "written", f"{_time(facts['written_at'])} by {facts['written_by']}"
    yield "recipe", facts["recipe"]
    yield "model", _in_a_line(facts["model"])
    sources = facts["averaged_from"]
    yield "averaged from", ", ".join(source["name"] for source in sources) if sources else None


def _in_a_line(model: dict[str, Any] | None) -> str | None:
    if model is None:
        return None
    return (
        f"{model['model_type']}, {model['num_hidden_layers']} layers, hidden {model['hidden_size']}, "
        f"heads {model['num_attention_heads']}, vocabulary {model['vocab_size']:,}"
    )


def _count(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"


def _size(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else format_bytes(num_bytes)


def _loss(loss: float | None) -> str | None:
    return None if loss is None else f"{loss:.4f}"


def _time(written_at: str | None) -> str | None:
    """Return a manifest's time (2026-11-21T19:55:23+00:00) for people: 2026-11-21 19:55:23 UTC."""
    return written_at and written_at.replace("T", " ").replace("+00:00", " UTC")
