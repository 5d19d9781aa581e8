"""An export to a Hugging Face folder as a stage: its inputs, and whether it is done; torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kielo.artifact.checkpoint_index import CheckpointIndex, read_index
from kielo.artifact.manifest import hash_file, hash_json, hash_manifest
from kielo.artifact.resumable_stage import ResumableStage
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel
from kielo.tokenizer.load import main_files, side_files

KIND, VERSION = "export", 3
GGUF_KIND, GGUF_VERSION = "gguf", 1
CARD_FILE = "README.md"
# Values of `kielo export --dtype`: the dtypes of the weights that training began from, or one of all tensors.
SOURCE, DTYPE_NAMES = "source", ("fp32", "bf16", "fp16")
GGUF_DTYPE_NAMES = (*DTYPE_NAMES, "q8_0")


@dataclass(frozen=True)
class ExportOptions:
    # "fp32", "bf16", "fp16", or "source" for names and dtypes of the weights that training began from. A GGUF
    # file can be "q8_0" too, and is never "source".
    dtype: str | None = None  # None: "source" if the checkpoint knows them, else "fp32"
    max_shard_bytes: int = 5_000_000_000
    is_replacing: bool = True  # replace another export
    is_gguf: bool = False
    # Of a GGUF file: "name", and "license" and "languages" if they are known.
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WantedExport:
    checkpoint: Path
    index: CheckpointIndex
    model: CompleteModel
    tokenizer_folder: Path | None
    options: ExportOptions
    dtype: str
    stage: ResumableStage


class IdsProof(NamedTuple):
    """llama.cpp's ids of documents beside Kielo's.

    program: llama.cpp's Python package with its version, or None if it is not installed. documents: compared
    ones. difference: the first with other ids, in words, or None.
    """

    program: str | None
    documents: int
    difference: str | None


def wanted_export(
    checkpoint: Path, to: Path, model: CompleteModel, tokenizer_folder: Path | None, options: ExportOptions
) -> WantedExport:
    checkpoint, index = Path(checkpoint), read_index(checkpoint)
    dtype = _chosen_dtype(checkpoint, index, options)
    if options.max_shard_bytes < 1:
        raise KieloError(
            f"export: no tensor fits a shard of {options.max_shard_bytes} bytes. Fix: 5,000,000,000 bytes"
        )
    tokenizer = {name: hash_file(path) for name, path in tokenizer_files(tokenizer_folder).items()}
    inputs = {"checkpoint": hash_manifest(checkpoint), "tokenizer": hash_json(tokenizer)}
    section = {
        "dtype": dtype,
        "max_shard_bytes": options.max_shard_bytes,
        "model": model.model_dump(mode="json"),
    }
    if options.is_gguf:
        section["about"] = dict(options.about)
    kind = (GGUF_KIND, GGUF_VERSION) if options.is_gguf else (KIND, VERSION)
    stage = ResumableStage(to, *kind, inputs, section)
    return WantedExport(checkpoint, index, model, tokenizer_folder, options, dtype, stage)


def published(wanted: WantedExport, write: Callable[[ResumableStage], None]) -> Path:
    """Make an export with `write`, whole or not at all, unless it is there; return its folder.

    Replace another export there, or refuse it without `is_replacing`. Refuse anything else. Raise KieloError.
    """
    stage = wanted.stage
    if stage.is_done():
        return stage.folder
    stage.refuse()
    if not wanted.options.is_replacing and stage.folder.exists() and any(stage.folder.iterdir()):
        raise KieloError(
            f"{stage.folder}: exists already and is not this export. Nothing was written. Fix: name a new "
            "folder"
        )
    try:
        if not stage.is_written():
            write(stage)
        stage.publish()
    except OSError as error:
        raise stage.stopped(error) from error
    finally:
        stage.close()
    return stage.folder


def _chosen_dtype(checkpoint: Path, index: CheckpointIndex, options: ExportOptions) -> str:
    dtype, is_known = options.dtype, bool(index.plain.source_tensors) and not options.is_gguf
    if dtype is None:
        return SOURCE if is_known else "fp32"
    known = GGUF_DTYPE_NAMES if options.is_gguf else (SOURCE, *DTYPE_NAMES)
    if dtype not in known:
        of = " of a GGUF file" if options.is_gguf else ""
        raise KieloError(f"export: dtype {dtype!r}{of} is not known. Fix: one of {', '.join(known)}")
    if dtype == SOURCE and not is_known:
        raise KieloError(
            f"{checkpoint}: dtype {SOURCE!r} is the dtype of the weights that training began from, and this "
            f"run began without weights. Fix: one of {', '.join(DTYPE_NAMES)}"
        )
    return dtype


def tokenizer_files(folder: Path | None) -> dict[str, Path]:
    """Return name → path of the files of a tokenizer to export. Raise KieloError for a folder without any."""
    if folder is None:
        return {}
    folder = Path(folder)
    found = {name: folder / name for name in (*main_files(folder), *side_files(folder))}
    if not found:
        raise KieloError(f"{folder}: no tokenizer.json there to export with the model")
    return found
