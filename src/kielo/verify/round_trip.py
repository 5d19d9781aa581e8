"""The round trip of Hugging Face weights: import, save, export, and compare every tensor.

Nothing is trained in between, so names, dtypes, shapes and bytes must be the source's own. Weights that are
not finite are refused, as by training. The code is training's and the export's own. The host holds one rank's
fp32 weights, and a copy of them while the checkpoint is written.
"""

import hashlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

import torch

from kielo.artifact.megatron_folder import FORM, TRACKER, is_checkpoint
from kielo.artifact.run_format import with_version
from kielo.artifact.weights_folder import CONFIG_FILE, resolve_weights
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.export_stage import ExportOptions
from kielo.checkpoint.export_tensors import row_boxes
from kielo.checkpoint.hugging_face_export import export
from kielo.checkpoint.hugging_face_import import load_model_weights, read_tables
from kielo.checkpoint.source_settings import read_settings
from kielo.checkpoint.split_tensor import SplitTensor, read_parts
from kielo.checkpoint.tensor_file import ReadBuffers
from kielo.checkpoint.tensor_table import DTYPES, nbytes
from kielo.models import families
from kielo.models.families import read_hf_config
from kielo.parallel.materialise import materialise
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel


class StoredFacts(TypedDict):
    dtype: str
    shape: list[int]
    bytes: int
    sha256: str


class RoundTrip(TypedDict):
    """The result of a round trip: the source's tensors by name, and the export's differences."""

    source: str
    passed: bool
    tensors: dict[str, StoredFacts]
    bytes: int
    differences: dict[str, StoredFacts | None]
    left_out: list[str]
    export: str | None


def verify_round_trip(reference: str, keep: Path | None = None) -> RoundTrip:
    """Import the folder `reference` (a path, hf:FOLDER or hf:OWNER/NAME) on one rank and export it again.

    keep: the folder for the export. Everything else is in a temporary folder (set by TMPDIR). `differences`
    of the result has the tensors of the export that differ (None: missing), `left_out` the source's tensors
    that are no weights. Raise KieloError for weights that cannot be imported.
    """
    if not reference.startswith(("hf:", FORM)) and not Path(reference).expanduser().is_dir():
        raise KieloError(
            f"{reference}: no such folder. Fix: an existing folder, or hf:OWNER/NAME to fetch it from the hub"
        )
    if keep is not None and os.path.lexists(keep):
        raise KieloError(f"--keep {keep}: exists already. Fix: --keep with a new folder")
    source = resolve_weights(reference)
    if not is_checkpoint(source) and not (source / CONFIG_FILE).is_file():
        inside = source / "hf" / CONFIG_FILE  # of a run folder
        fix = f". Fix: {inside.parent}" if inside.is_file() else ""
        if (source / TRACKER).is_file():
            fix = f". Fix: {FORM}{source}"
        raise KieloError(f"{source}: no {CONFIG_FILE} there, so it is no Hugging Face folder{fix}")
    with TemporaryDirectory(prefix="kielo_round_trip_") as temporary:
        again = Path(keep) if keep is not None else Path(temporary) / "hf"
        weights = _in_and_out(source, Path(temporary) / "checkpoints", again)
        stored = read_tables(source)
        tensors = {name: _description(found) for name, found in stored.items() if name in weights}
        exported = {name: _description(found) for name, found in read_tables(again).items()}
    different: dict[str, StoredFacts | None]
    different = {name: exported.get(name) for name, what in tensors.items() if exported.get(name) != what}
    # An export has an embedding of which the source holds only the tied head.
    contents = [what for name, what in tensors.items() if name in exported]
    different |= {
        name: what for name, what in exported.items() if name not in tensors and what not in contents
    }
    return {
        "source": str(source),
        "passed": not different,
        "tensors": tensors,
        "bytes": sum(what["bytes"] for what in tensors.values()),
        "differences": different,
        "left_out": sorted(stored.keys() - weights.keys()),
        "export": None if keep is None else str(keep),
    }


def table(result: RoundTrip) -> tuple[list[str], list[tuple[str, int, str, int]]]:
    tensors, rows = result["tensors"], []
    for dtype in sorted({what["dtype"] for what in tensors.values()}):
        sizes = {name: what["bytes"] for name, what in tensors.items() if what["dtype"] == dtype}
        different = len(sizes.keys() & result["differences"].keys())
        rows.append((dtype, len(sizes), f"{sum(sizes.values()):,}", different))
    return ["dtype", "tensors", "bytes", "different"], rows


def verdict(result: RoundTrip) -> str:
    tensors, different = result["tensors"], result["differences"]
    if result["passed"]:
        same = f"name, dtype, shape and bytes of all {len(tensors)} tensors equal {result['source']}"
        return f"Round trip holds: {same}."
    first = next(iter(different))
    return (
        f"NO round trip: {len(different)} of {len(tensors)} tensors differ; first {first}: "
        f"{_in_words(tensors.get(first))} in the source, {_in_words(different[first])} in the export."
    )


def _in_words(what: StoredFacts | None) -> str:
    return "missing" if what is None else f"{what['dtype']} {what['shape']} sha256 {what['sha256'][:16]}…"


def _in_and_out(source: Path, checkpoints: Path, to: Path) -> dict[str, str]:
    """Import `source` and export it to `to`. Return the tensors taken for weights, and their dtypes."""
    model = read_hf_config(source)
    checkpointer = Checkpointer(checkpoints)
    try:
        weights = _save(checkpointer, source, model)
        if (checkpoint := checkpointer.settle()) is None:
            raise KieloError(f"{checkpoints}: no checkpoint was written")
    finally:
        checkpointer.close()
    tokenizer_folder = source if (source / "tokenizer.json").is_file() else None
    export(checkpoint, to, model, tokenizer_folder, ExportOptions(is_replacing=False))
    return weights


def _save(checkpointer: Checkpointer, source: Path, config: CompleteModel) -> dict[str, str]:
    """Save the weights of `source` as a checkpoint of step 0. The model's memory is freed on return."""
    with torch.device("meta"):
        model = families.build_model(config)
    materialise(model, torch.device("cpu"), None)
    parameters = dict(model.named_parameters())
    weights = load_model_weights(parameters, source, config)
    plain = {
        "identity": with_version({"name": source.name, "model": config.model_dump(mode="json")}),
        "source_tensors": weights,
        "source_settings": read_settings(source, None),
    }
    checkpointer.save(0, {f"model/{name}": parameter for name, parameter in parameters.items()}, plain)
    return weights


def _description(stored: SplitTensor) -> StoredFacts:
    dtype = DTYPES[stored.dtype]
    digest, buffers = hashlib.sha256(), ReadBuffers()
    for box in row_boxes(stored.shape):
        block = torch.empty([part.stop - part.start for part in box], dtype=dtype)
        read_parts(stored.wanted(box, block), buffers)
        digest.update(block.reshape(-1).view(torch.uint8).numpy().data)
    size = nbytes(dtype, stored.shape)
    return {"dtype": stored.dtype, "shape": list(stored.shape), "bytes": size, "sha256": digest.hexdigest()}
