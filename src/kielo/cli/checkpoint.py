"""`kielo checkpoint`: what lies in a run's checkpoints, whether it is whole, and several of them averaged.

Only `average` needs torch, and only it writes.
"""

import argparse
import re
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kielo.artifact import whole_checkpoints
from kielo.artifact.checkpoint_faults import Fault, FaultyCheckpoint, find_fault
from kielo.artifact.checkpoint_folder import INDEX_NAME, step_folders, step_of
from kielo.artifact.checkpoint_index import CheckpointIndex, TensorEntry, read_index
from kielo.artifact.checkpoint_manifest import listed_files
from kielo.artifact.manifest import read_manifest
from kielo.artifact.whole_checkpoints import check_checkpoint, list_checkpoints
from kielo.cli.flags import VerbParser, add_verb, examples
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table
from kielo.recipe.errors import KieloError
from kielo.report.units import format_bytes

_ONE_OR_ALL = "a checkpoint, or the folder of a run"


def checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, "kielo checkpoint list runs/demo_estonian")
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True, parser_class=VerbParser)
    add_verb(
        words,
        "list",
        "checkpoint:list_",
        "a run's checkpoints: step, tokens, loss, size, complete or damaged",
    )
    add_verb(words, "show", "checkpoint:show", "what a checkpoint holds; of a run, the newest")
    add_verb(
        words,
        "verify",
        "checkpoint:verify",
        "read every byte and compare it with its checksum; changes nothing",
    )
    add_verb(
        words, "average", "checkpoint:average", "the mean of the weights of several checkpoints of one run"
    )


def list__flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser,
        "kielo checkpoint list runs/demo_estonian",
        "kielo checkpoint list runs/demo_estonian --verify",
    )
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--verify", action="store_true", help="read every byte, not only sizes")
    parser.add_argument("--json", action="store_true")


def list_(options: argparse.Namespace) -> None:
    folder = _checkpoints_folder(Path(options.run))
    if folder is None:
        raise KieloError(
            f"{options.run}: no checkpoints there; RUN is a run folder such as runs/demo_estonian"
        )
    rows = list_checkpoints(folder)
    if options.verify:
        faults = _faults([folder / row["name"] for row in rows])
        for row in rows:
            row["state"] = _state(faults[folder / row["name"]])
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
        parser, "kielo checkpoint show runs/demo_estonian",
        "kielo checkpoint show runs/demo_estonian/train/checkpoints/newest --tensors",
    )  # fmt: skip
    parser.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help=_ONE_OR_ALL)
    parser.add_argument(
        "--tensors", action="store_true", help="every tensor with its dtype, shape and number of pieces"
    )
    parser.add_argument("--json", action="store_true")


def show(options: argparse.Namespace) -> None:
    path = _newest(_checkpoints(options.checkpoint))
    index = read_index(path)
    if options.tensors:
        return _show_tensors(index, options.json)
    files = {name: record["bytes"] for name, record in listed_files(path).items()}
    manifest = read_manifest(path)
    # The index is what is shown: it is read whole, of the rest only sizes and save ids.
    fault = find_fault(path, [INDEX_NAME], listed_files(path)) or check_checkpoint(path, checksums=False)
    facts = {
        "checkpoint": str(path),
        "state": str(fault) if fault else "complete",
        "step": index.step,
        **{key: index.plain.get(key) for key in ("tokens", "samples", "loss")},
        "save_id": index.save_id,
        "written_at": manifest.written_at,
        "written_by": f"kielo {manifest.versions['kielo']}",
        "recipe": index.plain.get("identity", {}).get("name"),
        "model": index.plain.get("identity", {}).get("model"),
        "averaged_from": index.plain.get("averaged_from"),
        "parts": _parts(index),
        "files": files,
    }
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
    print_table(["file", "size"], [(name, format_bytes(size)) for name, size in files.items()])


def verify_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser, "kielo checkpoint verify runs/demo_estonian",
        "kielo checkpoint verify runs/demo_estonian/train/checkpoints/step_00000500",
    )  # fmt: skip
    parser.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help=_ONE_OR_ALL)
    parser.add_argument("--json", action="store_true")


def verify(options: argparse.Namespace) -> int:
    with keep_stdout_for_json(options.json):
        faults = _faults(_checkpoints(options.checkpoint))
    if options.json:
        print_json(
            [
                {"checkpoint": str(path), "state": _state(found), "damage": [fault.reason for fault in found]}
                for path, found in faults.items()
            ]
        )
    else:
        for path, found in faults.items():
            print(f"{path}\t{_state(found)}")
    return 1 if any(faults.values()) else 0


def average_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser,
        "cd runs/demo_estonian/train && kielo checkpoint average checkpoints/step_* --to averages/last",
    )
    parser.add_argument(
        "checkpoints", metavar="CHECKPOINT", nargs="+", help="folder of a checkpoint; at least two"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="DIR",
        help="folder to make; inside the run's, `kielo export` finds the tokenizer",
    )


def average(options: argparse.Namespace) -> None:
    from kielo.checkpoint.average import average

    sources = [_one_checkpoint(Path(name)) for name in options.checkpoints]
    if Path(options.to).name in ("", ".."):
        raise KieloError(f"--to {options.to}: give the name of a folder to make")
    to = average(sources, Path(options.to))
    print(
        f"wrote {to}, the mean of {len(sources)} checkpoints; `kielo export {to} --to DIR` makes a model of "
        "it"
    )


def newest_checkpoint(run_folder: Path) -> Path:
    """The newest whole checkpoint of the run; prints a warning for each newer one that is damaged. KieloError
    if none is whole.
    """
    return whole_checkpoints.newest_checkpoint(run_folder, warn=lambda warning: print(f"warning: {warning}"))


def _checkpoints_folder(run: Path) -> Path | None:
    """The folder of checkpoints of a run folder, of its train folder, or that folder itself; None where there
    is none.
    """
    for folder in (run / "train" / "checkpoints", run / "checkpoints", run):
        if step_folders(folder):
            return folder
    return None


def _is_checkpoint(path: Path) -> bool:
    """A damaged one too, which its name tells; `newest` is a symbolic link."""
    return (path / INDEX_NAME).is_file() or (path.is_dir() and step_of(path.resolve()) is not None)


def _checkpoints(name: str) -> list[Path]:
    """One checkpoint, or all of a run, newest first."""
    path = Path(name)
    if _is_checkpoint(path):
        return [path.parent.resolve() / path.resolve().name if path.is_symlink() else path]
    folder = _checkpoints_folder(path)
    if folder is None:
        raise KieloError(
            f"{path}: neither a checkpoint nor a run folder with checkpoints; give a folder such as "
            "runs/demo_estonian or runs/demo_estonian/train/checkpoints/newest"
        )
    return step_folders(folder)


def _one_checkpoint(path: Path) -> Path:
    if not _is_checkpoint(path):
        raise KieloError(
            f"{path}: not the folder of a checkpoint; `kielo checkpoint list RUN` names those of a run"
        )
    return path


def _newest(paths: list[Path]) -> Path:
    """The newest that is whole by its sizes; where none is, the newest, so that its damage is shown."""
    return next((path for path in paths if check_checkpoint(path, checksums=False) is None), paths[0])


def _faults(paths: Iterable[Path]) -> dict[Path, list[Fault]]:
    """What is wrong with each checkpoint, file by file; every byte is read."""
    files, faults = {}, {}
    for path in paths:
        faults[path] = []
        try:
            files[path] = listed_files(path)
        except FaultyCheckpoint as error:
            faults[path] = [error.fault]
    total = sum(record["bytes"] for listed in files.values() for record in listed.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None) as bar:
        for path, listed in files.items():
            for name in sorted(listed):
                fault = find_fault(path, [name], listed)
                faults[path] += [fault] if fault else []
                bar.update(listed[name]["bytes"])
    return faults


def _state(faults: list[Fault]) -> str:
    """Choose the fault to show: a file that is known to be damaged tells more than one that could not be
    read.
    """
    faults = sorted(faults, key=lambda fault: fault.kind != "damaged")
    return f"{faults[0].kind}: {'; '.join(fault.reason for fault in faults)}" if faults else "verified"


def _parts(index: CheckpointIndex) -> list[dict[str, Any]]:
    """Tensors, elements and bytes by part (`model`, `optimiser`) and dtype; a tied tensor counts once."""
    groups: dict[tuple[str, str], list[TensorEntry]] = {}
    for name, entry in index.tensors.items():
        groups.setdefault((name.partition("/")[0], entry.dtype), []).append(entry)
    return [
        {
            "part": part,
            "dtype": dtype,
            "tensors": len(entries),
            "elements": (elements := sum(prod(entry.shape) for entry in entries)),
            "bytes": elements * _element_bytes(dtype),
        }
        for (part, dtype), entries in sorted(groups.items())
    ]


def _element_bytes(dtype: str) -> int:
    """Of a safetensors dtype: its name begins with its bits (F32, BF16, F8_E4M3, I64); BOOL takes a byte."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _show_tensors(index: CheckpointIndex, is_json: bool) -> None:
    rows = [
        {
            "name": name,
            "dtype": index.entry(name).dtype,
            "shape": list(index.entry(name).shape),
            "pieces": len(index.entry(name).chunks),
            "tied_to": index.aliases.get(name),
        }
        for name in index.names()
    ]
    if is_json:
        return print_json(rows)
    print_table(
        ["tensor", "dtype", "shape", "pieces"],
        [
            (
                row["name"],
                row["dtype"],
                "×".join(map(str, row["shape"])) or "scalar",
                f"tied to {row['tied_to']}" if row["tied_to"] else row["pieces"],
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
    """2026-11-21T19:55:23+00:00, as manifests say it, for people."""
    return written_at and written_at.replace("T", " ").replace("+00:00", " UTC")
