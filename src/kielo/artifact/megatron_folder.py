"""A checkpoint of Megatron-LM or Megatron-DeepSpeed, without torch: its format, files and arguments.

In: `megatron:DIR`, the folder of `--save`, or the folder of one iteration in it. Five formats are known:

legacy     mp_rank_TT[_PPP]/model_optim_rng.pt, one for each tensor and pipeline rank
torch_dist .metadata, common.pt and __*_*.distcp, of `megatron.core.dist_checkpointing`
layers     layer_NN-model_TT-model_states.pt, of DeepSpeed's pipeline
whole      mp_rank_TT_model_states.pt with all layers, of DeepSpeed without a pipeline
universal  zero/PARAMETER/fp32.pt, a whole tensor in each file, of DeepSpeed's ds_to_universal.py
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from kielo.artifact.inert_data import Made
from kielo.artifact.torch_archive import TorchArchive, read_archive
from kielo.recipe.errors import KieloError

FORM = "megatron:"
TRACKER = "latest_checkpointed_iteration.txt"
_DEEPSPEED_TRACKERS = ("latest", "latest_universal")
_RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
# Key of the vocabulary without padding, which DeepSpeed notes. A universal checkpoint has only its rows.
UNPADDED_VOCABULARY = "original_vocab_size"
_PARAMETERS = "zero"  # the folder of a universal checkpoint with a folder for each parameter
_RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_STATES_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_PARTITIONED_FILE = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_ITERATION = re.compile(r"(?:iter_|global_step)(\d+)(?:_universal)?")

Format = Literal["legacy", "torch_dist", "layers", "whole", "universal"]


@dataclass(frozen=True)
class Arguments:
    """The settings of a training, as Megatron's `args`, and what else its file says beside the weights."""

    path: Path  # the file that they are in
    values: Mapping[str, Any]
    checkpoint_version: float | None
    # (name of a degree, its value) for each that the arguments have
    degrees: Mapping[str, int] = field(default_factory=dict)


def resolve_megatron(reference: str) -> Path:
    """Return the folder of the iteration that `megatron:DIR` means. KieloError if there is none."""
    folder = Path(reference.removeprefix(FORM)).expanduser()
    if not folder.is_dir():
        raise KieloError(f"model.weights = {reference!r}: no such folder, {folder}")
    if _format(folder) is not None:
        _refuse_unfinished(folder)
        return folder
    return _newest(folder)


def is_checkpoint(folder: Path) -> bool:
    """Return True for the folder of an iteration, in any of the formats, without Hugging Face's files."""
    return not (folder / "config.json").is_file() and _format(folder) is not None


def format_of(folder: Path) -> Format:
    found = _format(folder)
    if found is None:
        raise KieloError(f"{folder}: no checkpoint of Megatron-LM or Megatron-DeepSpeed")
    return found


def _format(folder: Path) -> Format | None:
    if not folder.is_dir():
        return None
    names = [path.name for path in folder.iterdir()]
    if ".metadata" in names or "metadata.json" in names:
        return "torch_dist" if _is_torch_dist(folder) else None
    if any((folder / _PARAMETERS).glob("*/fp32.pt")):
        return _universal(folder, names)
    if any(_LAYER_FILE.fullmatch(name) for name in names):
        return "layers"
    if any(_STATES_FILE.fullmatch(name) for name in names):
        return "whole"
    if partitioned := [name for name in names if _PARTITIONED_FILE.fullmatch(name)]:
        raise KieloError(
            f"{folder / min(partitioned)}: a part of weights that ZeRO stage 3 divides among all ranks. Fix: "
            "DeepSpeed's zero_to_fp32.py beside it, and an export to Hugging Face's format"
        )
    return "legacy" if any(_RANK_FOLDER.fullmatch(name) for name in names) else None


def _universal(folder: Path, names: list[str]) -> Format:
    if any(_STATES_FILE.fullmatch(name) for name in names):
        return "universal"
    if any(_PARTITIONED_FILE.fullmatch(name) for name in names):
        raise KieloError(
            f"{folder}: a universal checkpoint of ZeRO stage 3, whose tensors have no shapes. Fix: "
            "DeepSpeed's zero_to_fp32.py, and an export to Hugging Face's format"
        )
    raise KieloError(
        f"{folder}: has no mp_rank_00_model_states.pt, which ds_to_universal.py copies last: the conversion "
        "is not finished. Fix: wait for it, or convert again"
    )


def _is_torch_dist(folder: Path) -> bool:
    path = folder / "metadata.json"
    if not path.is_file():
        return (folder / "common.pt").is_file()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        backend = content.get("sharded_backend")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    if backend is not None and backend != "torch_dist":
        raise KieloError(
            f"{path}: sharded_backend = {backend!r}, and Kielo reads torch_dist. Fix: save it again in "
            "Megatron-LM with --ckpt-convert-format torch_dist"
        )
    return backend == "torch_dist"


def _newest(folder: Path) -> Path:
    """Return the iteration that the tracker names; it is written when all ranks have finished."""
    for name in (TRACKER, *_DEEPSPEED_TRACKERS):
        if not (path := folder / name).is_file():
            continue
        try:
            said = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise KieloError(f"{path}: cannot be read ({error})") from None
        names = [said]
        if said.isdecimal():
            names = [f"iter_{int(said):07d}", f"global_step{int(said)}"]
        if not all(re.fullmatch(r"[\w.-]+", one) for one in names) or said in ("", ".", ".."):
            raise KieloError(
                f"{path}: says {said!r}, which is no iteration. Fix: megatron:{folder}/iter_NNNNNNN"
            )
        for one in names:
            if _format(folder / one) is not None:
                return folder / one
        raise KieloError(
            f"{path}: says {said}, but {folder / names[0]} has no checkpoint. Fix: copy that folder too, or "
            f"megatron:{folder}/iter_NNNNNNN"
        )
    inside = sorted(path.name for path in folder.iterdir() if _ITERATION.fullmatch(path.name))
    fix = f"megatron:{folder / inside[-1]}" if inside else "the folder of --save"
    raise KieloError(
        f"{folder}: no checkpoint of Megatron: no {TRACKER}, no mp_rank_00, no .metadata, no layer_*-model_* "
        f"there. Fix: {fix}"
    )


def _refuse_unfinished(folder: Path) -> None:
    """Refuse an iteration that is newer than the tracker, which is written last."""
    tracker, named = folder.absolute().parent / TRACKER, _ITERATION.fullmatch(folder.name)
    if named is None or not tracker.is_file():
        return
    said = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if said.isdecimal() and int(said) < int(named[1]):
        raise KieloError(
            f"{folder}: is not finished: {tracker} says {said}, and Megatron writes that file when all ranks "
            f"have saved. It is being written, or its job ended. Fix: megatron:{folder.parent}"
        )


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return (tensor rank, pipeline rank) → file, of the legacy format. KieloError if one is missing."""
    files = dict[tuple[int, int], Path]()
    for path in sorted(folder.iterdir()):
        if (found := _RANK_FOLDER.fullmatch(path.name)) is None:
            continue
        if found[3] is not None:
            raise KieloError(f"{path}: a rank of experts, and Kielo has no models of experts")
        file = next((path / name for name in _RANK_FILES if (path / name).is_file()), None)
        if file is None:
            raise KieloError(
                f"{path}: has no {_RANK_FILES[0]}: it is being written, or was not copied whole. Fix: copy "
                "it again, or take an older iteration"
            )
        files[int(found[1]), int(found[2] or 0)] = file
    _refuse_gaps(folder, files, "mp_rank_{:02d}_{:03d}")
    return files


def layer_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return (tensor rank, layer) → file, of DeepSpeed's pipeline. KieloError if one is missing."""
    files = dict[tuple[int, int], Path]()
    for path in folder.iterdir():
        if (found := _LAYER_FILE.fullmatch(path.name)) is not None:
            files[int(found[2]), int(found[1])] = path
    _refuse_gaps(folder, files, "layer_{1:02d}-model_{0:02d}-model_states.pt")
    return files


def states_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return (tensor rank, 0) → file, of DeepSpeed. KieloError if one is missing."""
    files = dict[tuple[int, int], Path]()
    for path in folder.iterdir():
        if (found := _STATES_FILE.fullmatch(path.name)) is not None:
            files[int(found[1]), 0] = path
    _refuse_gaps(folder, files, "mp_rank_{:02d}_model_states.pt")
    return files


def parameter_files(folder: Path, state: str) -> dict[str, Path]:
    """Return parameter → its file of `state` ("fp32", "exp_avg"), of a universal checkpoint.

    Raise KieloError if a file is missing.
    """
    inside = sorted(path for path in (folder / _PARAMETERS).iterdir() if path.is_dir())
    files = {path.name: path / f"{state}.pt" for path in inside}
    if absent := [path for path in files.values() if not path.is_file()]:
        raise KieloError(
            f"{absent[0]}: missing, as are {len(absent) - 1} more of {len(files)} files. Fix: copy the "
            "iteration again, or run ds_to_universal.py again"
        )
    return files


def _refuse_gaps(folder: Path, files: Mapping[tuple[int, int], Path], name: str) -> None:
    tensor = range(1 + max(one for one, _ in files))
    others = sorted({other for _, other in files})
    if "layer" not in name:
        others = list(range(1 + max(others)))
    if absent := [
        name.format(rank, other) for rank in tensor for other in others if (rank, other) not in files
    ]:
        raise KieloError(
            f"{folder}: {len(absent)} of {len(tensor) * len(others)} files are missing, such as {absent[0]}: "
            "the checkpoint is being written, or was not copied whole. Fix: copy it again, or take an older "
            "iteration"
        )


def read_arguments(folder: Path) -> Arguments:
    """Read the settings of the training from a file of the checkpoint, without running its pickle."""
    kind = format_of(folder)
    if kind == "legacy":
        path = rank_files(folder)[0, 0]
    elif kind == "torch_dist":
        path = folder / "common.pt"
    else:
        path = folder / "mp_rank_00_model_states.pt"
    if not path.is_file():
        raise KieloError(f"{path}: missing, and it has the settings of the model. Fix: copy it too")
    archive = read_file(path)
    found = arguments_of(archive)
    noted = archive.content.get("universal_checkpoint_info")
    tokens = noted.get(UNPADDED_VOCABULARY) if isinstance(noted, dict) else None
    if kind == "universal" and tokens is not None:
        return replace(found, values={**found.values, UNPADDED_VOCABULARY: tokens})
    return found


def optimiser_obstacle(folder: Path) -> str | None:
    """Return why Adam's state cannot be taken from the checkpoint, or None if its files can have it whole."""
    kind, values = format_of(folder), read_arguments(folder).values
    name = values.get("optimizer") or "adam"
    if name != "adam":
        return f"it is of the optimiser {name}, and not of Adam"
    if kind == "universal":
        has_moments = any((folder / _PARAMETERS).glob("*/exp_avg.pt"))
        return None if has_moments else f"{folder / _PARAMETERS} has no exp_avg.pt"
    if kind == "torch_dist":
        return "Kielo does not read it from the format torch_dist"
    if kind != "legacy":
        return "ZeRO divides it among all ranks. DeepSpeed's ds_to_universal.py joins it"
    if values.get("use_distributed_optimizer"):
        return "--use-distributed-optimizer divides it among the data-parallel ranks"
    path = rank_files(folder)[0, 0]
    if not read_file(path).content.get("optimizer"):
        return f"{path} has no optimizer, as with --no-save-optim"
    return None


def arguments_of(archive: TorchArchive) -> Arguments:
    content, path = archive.content, archive.path
    if not isinstance(content, dict):
        raise KieloError(f"{path}: has a {type(content).__name__} and no checkpoint of Megatron")
    found = content.get("args")
    values = found.state if isinstance(found, Made) else found
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise KieloError(
            f"{path}: has no args, the settings of the training that Megatron saves. Fix: save it again by "
            "Megatron-LM, or export it there to Hugging Face's format"
        )
    version = content.get("checkpoint_version")
    degrees = {}
    for key, names in _DEGREES.items():
        value = next((values[name] for name in names if values.get(name) is not None), None)
        if isinstance(value, int):
            degrees[key] = value
    return Arguments(path, values, version if isinstance(version, (int, float)) else None, degrees)


# Names in newer and older versions.
_DEGREES = {
    "tensor": ("tensor_model_parallel_size", "model_parallel_size"),
    "pipeline": ("pipeline_model_parallel_size", "transformer_pipeline_model_parallel_size"),
}


def read_file(path: Path) -> TorchArchive:
    """Read a file of a rank as plain data. It is read once as long as it does not change."""
    try:
        status = path.stat()
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror})") from None
    return _read_file(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _read_file(path: Path, changed: int, size: int) -> TorchArchive:
    return read_archive(path, plain_under="args")
