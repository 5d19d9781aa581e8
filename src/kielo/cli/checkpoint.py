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

from kielo.artifact.checkpoint_index import (
    INDEX_NAME,
    CheckpointIndex,
    TensorEntry,
    check_checkpoint,
    find_damage,
    list_checkpoints,
    listed_files,
    read_index,
    step_folders,
    step_of,
)
from kielo.artifact.manifest import read_manifest
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table
from kielo.recipe.errors import KieloError
from kielo.report.units import format_bytes


def list_(options: argparse.Namespace) -> None:
    folder = _checkpoints_folder(Path(options.run))
    if folder is None:
        raise KieloError(f"{options.run}: no checkpoints there; RUN is a run folder such as runs/demo_estonian")
    rows = list_checkpoints(folder)
    if options.verify:
        damages = _damages([folder / row["name"] for row in rows])
        for row in rows:
            row["state"] = _state(damages[folder / row["name"]])
    whole = [row for row in rows if not row["state"].startswith("damaged")]
    for row in rows:
        row["newest"] = row in whole[:1]
    if options.json:
        return print_json(rows)
    print_table(
        ["checkpoint", "step", "tokens", "loss", "size", "written", "state"],
        [
            (row["name"], row["step"], _count(row["tokens"]), _loss(row["loss"]), format_bytes(row["bytes"]),
             _time(row["written_at"]), row["state"] + (", newest" if row["newest"] else ""))
            for row in rows
        ],
    )


def show(options: argparse.Namespace) -> None:
    path = _newest(_checkpoints(options.checkpoint))
    index = read_index(path)
    if options.tensors:
        return _show_tensors(index, options.json)
    files = {name: record["bytes"] for name, record in listed_files(path).items()}
    manifest = read_manifest(path)
    # The index is what is shown: it is read whole, of the rest only sizes and save ids.
    damage = find_damage(path, [INDEX_NAME], listed_files(path)) or check_checkpoint(path, checksums=False)
    facts = {
        "checkpoint": str(path),
        "state": _state([damage] if damage else [], "complete"),
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
        [(part["part"], part["dtype"], part["tensors"], _count(part["elements"]), format_bytes(part["bytes"]))
         for part in facts["parts"]],
    )
    print()
    print_table(["file", "size"], [(name, format_bytes(size)) for name, size in files.items()])


def verify(options: argparse.Namespace) -> int:
    with keep_stdout_for_json(options.json):
        damages = _damages(_checkpoints(options.checkpoint))
    if options.json:
        print_json([{"checkpoint": str(path), "state": _state(found), "damage": found} for path, found in damages.items()])
    else:
        for path, found in damages.items():
            print(f"{path}\t{_state(found)}")
    return 1 if any(damages.values()) else 0


def average(options: argparse.Namespace) -> None:
    from kielo.checkpoint.average import average

    sources = [_one_checkpoint(Path(name)) for name in options.checkpoints]
    if Path(options.to).name in ("", ".."):
        raise KieloError(f"--to {options.to}: give the name of a folder to make")
    to = average(sources, Path(options.to))
    print(f"wrote {to}, the mean of {len(sources)} checkpoints; `kielo export {to} --to DIR` makes a model of it")


def _checkpoints_folder(run: Path) -> Path | None:
    """The folder of checkpoints of a run folder, of its train folder, or that folder itself; None where there is none."""
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
            f"{path}: neither a checkpoint nor a run folder with checkpoints; give a folder such as runs/demo_estonian or "
            "runs/demo_estonian/train/checkpoints/newest"
        )
    return step_folders(folder)


def _one_checkpoint(path: Path) -> Path:
    if not _is_checkpoint(path):
        raise KieloError(f"{path}: not the folder of a checkpoint; `kielo checkpoint list RUN` names those of a run")
    return path


def _newest(paths: list[Path]) -> Path:
    """The newest that is whole by its sizes; where none is, the newest, so that its damage is shown."""
    return next((path for path in paths if check_checkpoint(path, checksums=False) is None), paths[0])


def _damages(paths: Iterable[Path]) -> dict[Path, list[str]]:
    """What is wrong with each checkpoint, file by file; every byte is read."""
    files, damages = {}, {}
    for path in paths:
        damages[path] = []
        try:
            files[path] = listed_files(path)
        except KieloError as error:
            damages[path] = [str(error)]
    total = sum(record["bytes"] for listed in files.values() for record in listed.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None) as bar:
        for path, listed in files.items():
            for name in sorted(listed):
                damage = find_damage(path, [name], listed)
                damages[path] += [damage] if damage else []
                bar.update(listed[name]["bytes"])
    return damages


def _state(damages: list[str], whole: str = "verified") -> str:
    return "damaged: " + "; ".join(damages) if damages else whole


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
        [(row["name"], row["dtype"], "×".join(map(str, row["shape"])) or "scalar",
          f"tied to {row['tied_to']}" if row["tied_to"] else row["pieces"]) for row in rows],
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


def _loss(loss: float | None) -> str | None:
    return None if loss is None else f"{loss:.4f}"


def _time(written_at: str | None) -> str | None:
    """2026-11-21T19:55:23+00:00, as manifests say it, for people."""
    return written_at and written_at.replace("T", " ").replace("+00:00", " UTC")
