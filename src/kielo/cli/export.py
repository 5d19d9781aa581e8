"""`kielo export`: a checkpoint → a folder that `transformers` loads."""

import argparse
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kielo.cli.terminal import keep_stdout_for_json, print_json
from kielo.recipe.errors import KieloError


def export(options: argparse.Namespace) -> None:
    to = Path(options.to)
    if to.name in ("", ".."):
        raise KieloError(f"--to {options.to}: give the name of a folder to make")
    with keep_stdout_for_json(options.json):
        checkpoint = _checkpoint(Path(options.checkpoint))
        tokenizer_folder = _tokenizer_folder(checkpoint, options.tokenizer)
        if not 0 < options.max_shard_gb < math.inf:
            raise KieloError(f"--max-shard-gb {options.max_shard_gb:g}: give a number above 0; 5 is usual")
        max_shard_bytes = int(options.max_shard_gb * 1e9)
        export_checkpoint(
            checkpoint,
            to,
            tokenizer_folder,
            dtype=options.dtype,
            max_shard_bytes=max_shard_bytes,
            is_replacing=False,
        )
    if options.json:
        return print_json(_summary(checkpoint, to))
    print(
        f"wrote {to}; load it with "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(to)!r}, dtype='auto')"
    )


def export_checkpoint(checkpoint: Path, to: Path, tokenizer_folder: Path, **how: Any) -> None:
    """The model's settings come from the checkpoint itself. Does nothing when `to` holds just that already.

    how: as in `hugging_face_export.export`.
    """
    from kielo.checkpoint.hugging_face_export import export
    from kielo.checkpoint.store import read_plain
    from kielo.recipe.sections import Model

    identity = read_plain(checkpoint).get("identity")
    if not identity:
        raise KieloError(f"{checkpoint}: does not say of which model it is, so it cannot be exported")
    try:
        model = Model.model_validate(identity["model"])
    except (KeyError, TypeError, ValidationError) as error:
        raise KieloError(f"{checkpoint}: what it says of its model is none that this kielo knows ({error})") from None
    export(checkpoint, to, model, tokenizer_folder, **how)


def _checkpoint(path: Path) -> Path:
    """The checkpoint folder itself, or the newest whole one of a run folder."""
    from kielo.artifact.checkpoint_index import INDEX_NAME
    from kielo.cli.run import newest_checkpoint

    if (path / INDEX_NAME).is_file():
        return path
    if (path / "train" / "checkpoints").is_dir():
        return newest_checkpoint(path)
    raise KieloError(
        f"{path}: neither a checkpoint (no {INDEX_NAME} there) nor a run folder (no train/checkpoints); see "
        "`kielo checkpoint list RUN`"
    )


def _tokenizer_folder(checkpoint: Path, given: str | None) -> Path:
    """The one that is named, or that of the run in whose folder the checkpoint lies."""
    if given is not None:
        folder, hint = Path(given), "name a folder that has one"
    else:
        runs = (
            parent for parent in checkpoint.resolve().parents if (parent / "train" / "checkpoints").is_dir()
        )
        folder, hint = next(runs, checkpoint.parent) / "tokenizer", "give --tokenizer DIR"
    if not (folder / "tokenizer.json").is_file():
        raise KieloError(f"{checkpoint}: there is no tokenizer.json in {folder} to export with it; {hint}")
    return folder


def _summary(checkpoint: Path, to: Path) -> dict[str, Any]:
    from kielo.artifact.manifest import read_manifest

    manifest = read_manifest(to)
    return {
        "folder": str(to),
        "checkpoint": str(checkpoint),
        "dtype": manifest.section["dtype"],
        "wall_seconds": manifest.wall_seconds,
        **manifest.counts,
        "bytes": {name: record["bytes"] for name, record in manifest.files.items()},
    }
