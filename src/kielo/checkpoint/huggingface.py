"""Hugging Face folders, both ways: weights by slices into each rank's shard, and a checkpoint out as a model folder.

In: `model.safetensors` (or its shards with an index) → parameters, whatever their layout; a rank reads only the
bytes of its own shard, so there is no conversion step to run out of memory.
Out: a checkpoint → safetensors shards, index, config, generation config and tokenizer, one tensor in memory at a time.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kielo.artifact.checkpoint_index import CheckpointIndex, read_index
from kielo.artifact.manifest import hash_file, hash_json, hash_manifest, is_current, write_stage
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.storage import assemble, read_box
from kielo.checkpoint.store import some_names, tied_names, verify
from kielo.checkpoint.stream import SafetensorsStream, nbytes
from kielo.models import families
from kielo.parallel.materialise import local, local_slices
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXPORT_VERSION = 1
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FLOAT_NAMES = {"F64", "F32", "F16", "BF16"}
# Buffers that older transformers saved among the weights; they are computed here.
_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def resolve_weights(reference: str) -> Path:
    """`hf:FOLDER`, or `hf:OWNER/NAME[@REVISION]` on the hub (fetched into the Hugging Face cache) → local folder."""
    where = reference.removeprefix("hf:")
    folder = Path(where).expanduser()
    if folder.is_dir():
        return folder
    if where.startswith(("/", ".", "~")) or where.count("/") != 1:
        raise KieloError(f"model.weights: there is no folder {where}")
    from huggingface_hub import snapshot_download

    name, _, revision = where.partition("@")
    try:
        patterns = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt"]
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub's client has a dozen kinds of error for "not there" and "no network"
        raise KieloError(
            f"model.weights: no folder {where}, and it could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def load_weights(
    parameters: Mapping[str, torch.Tensor], source: Path, names: Mapping[str, str], group: Any = None
) -> None:
    """Fill `parameters` (our name → Tensor or DTensor, any layout and device) in place from the folder `source`.

    names: our name → the file's name (a family's `to_hugging_face`). Values are cast to the parameter's dtype.
    A tied parameter needs no tensor of its own. Called by all ranks of `group`; raises KieloError on all of them,
    naming tensors that are missing, not expected, or of another shape.
    """
    ranks = Agreement(group)
    location, complaint = {}, None
    try:
        location = _locate(Path(source))
    except KieloError as error:
        complaint = str(error)
    ranks.refuse_together(complaint)
    tied = tied_names(parameters)
    wanted = {ours: names.get(ours, ours) for ours in parameters}
    wanted = {ours: theirs for ours, theirs in wanted.items() if theirs in location or ours not in tied}
    ranks.refuse_together(_disagreement(source, wanted, location, names))
    try:
        _fill(parameters, wanted, location)
    except KieloError as error:
        complaint = str(error)
    ranks.refuse_together(complaint)


def export(
    checkpoint: Path,
    to: Path,
    model: Model,
    tokenizer_folder: Path,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = 2_000_000_000,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model of a checkpoint as the Hugging Face folder `to`, whole or not at all; returns `to`.

    model: complete (as resolved). dtype: "fp32" or "bf16". generation: further keys of generation_config.json.
    `manifest.json` holds each file's xxh3_128, and its sha256 in `counts`. An older folder `to` is replaced.
    """
    checkpoint, tokenizer_folder = Path(checkpoint), Path(tokenizer_folder)
    family = families.module(model.model_type, "names")
    names = family.to_hugging_face(model)
    index = read_index(checkpoint)
    verify(checkpoint, index, [f"model/{ours}" for ours in names])
    inputs, section = _identity(checkpoint, model, tokenizer_folder, dtype, max_shard_bytes, generation)
    with write_stage(to, "export", EXPORT_VERSION, inputs, section) as stage:
        sha256 = _write_shards(checkpoint, index, names, stage.folder, _DTYPES[dtype], max_shard_bytes)
        for path in _tokenizer_files(tokenizer_folder):
            shutil.copyfile(path, stage.folder / path.name)
        tokens = _special_token_ids(tokenizer_folder)
        config = family.hf_config(model, **tokens, dtype=str(_DTYPES[dtype]).removeprefix("torch."))
        _write_json(stage.folder / "config.json", config)
        _write_json(stage.folder / "generation_config.json", tokens | dict(generation or {}))
        for path in stage.folder.iterdir():
            sha256.setdefault(path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        stage.counts |= {"tensors": len(names), "sha256": dict(sorted(sha256.items()))}
    return Path(to)


def is_exported(
    checkpoint: Path,
    to: Path,
    model: Model,
    tokenizer_folder: Path,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = 2_000_000_000,
    generation: Mapping[str, Any] | None = None,
) -> bool:
    """Whether `export` with the same arguments would make again what lies in `to`."""
    inputs, section = _identity(
        Path(checkpoint), model, Path(tokenizer_folder), dtype, max_shard_bytes, generation
    )
    return is_current(to, "export", EXPORT_VERSION, inputs, section)


def _locate(source: Path) -> dict[str, Path]:
    """Tensor name in the folder → the file that holds it."""
    if (source / INDEX_FILE).is_file():
        try:
            weight_map = json.loads((source / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, OSError) as error:
            raise KieloError(f"{source / INDEX_FILE}: not a weight index ({error!r})") from error
        absent = sorted({name for name in weight_map.values() if not (source / name).is_file()})
        if absent:
            raise KieloError(f"{source}: {INDEX_FILE} names files that are not there: {some_names(absent)}")
        return {name: source / file for name, file in weight_map.items()}
    path = source / SINGLE_FILE
    if not path.is_file():
        raise KieloError(
            f"{source}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; weights are read from safetensors only "
            "(transformers' save_pretrained writes them)"
        )
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _disagreement(
    source: Path, wanted: Mapping[str, str], location: Mapping[str, Path], names: Mapping[str, str]
) -> str | None:
    missing = [theirs for theirs in wanted.values() if theirs not in location]
    if missing:
        return f"{source}: tensors of the model are missing: {some_names(missing)}"
    known = set(names.values())
    if "head.weight" not in names:
        known.add("lm_head.weight")  # a tied model saved with its head all the same
    extra = [name for name in location if name not in known and not name.endswith(_IGNORED_ENDINGS)]
    if extra:
        return f"{source}: tensors that the model does not have: {some_names(extra)}"
    return None


def _fill(
    parameters: Mapping[str, torch.Tensor], wanted: Mapping[str, str], location: Mapping[str, Path]
) -> None:
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for ours, theirs in wanted.items():
        by_file.setdefault(location[theirs], []).append((ours, theirs))
    for path, pairs in by_file.items():
        with _open(path) as file, torch.no_grad():
            for ours, theirs in pairs:
                _fill_one(parameters[ours], file, ours, theirs, path)


def _fill_one(parameter: torch.Tensor, file: Any, ours: str, theirs: str, path: Path) -> None:
    stored = file.get_slice(theirs)
    if tuple(stored.get_shape()) != tuple(parameter.shape):
        raise KieloError(
            f"{path}: {theirs} has the shape {stored.get_shape()}, but {ours} here is {list(parameter.shape)}; "
            "is the [model] section that of this folder's config.json?"
        )
    if stored.get_dtype() not in _FLOAT_NAMES:
        raise KieloError(
            f"{path}: {theirs} is stored as {stored.get_dtype()}; known: {', '.join(_FLOAT_NAMES)}"
        )
    shard = local(parameter)
    if shard.numel():
        shard.copy_(read_box(file, theirs, local_slices(parameter)))


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise KieloError(f"{path}: cannot be read as safetensors, cut short or damaged ({error})") from error


def _write_shards(
    checkpoint: Path,
    index: CheckpointIndex,
    names: Mapping[str, str],
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> dict[str, str]:
    """Shards and their index; file name → sha256. A shard is closed before the tensor that would overfill it."""
    shards: list[list[str]] = [[]]
    filled = 0
    for ours in names:
        size = nbytes(dtype, index.entry(f"model/{ours}").shape)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(ours)
        filled += size
    weight_map, sha256, total = {}, {}, 0
    for number, shard in enumerate(shards, start=1):
        single = len(shards) == 1
        file_name = SINGLE_FILE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [(names[ours], dtype, index.entry(f"model/{ours}").shape) for ours in shard]
        stream = SafetensorsStream(folder / file_name, entries, {"format": "pt"}, sha256=True)
        try:
            for ours in shard:
                stream.write(assemble(checkpoint, index.entry(f"model/{ours}")).to(dtype))
            sha256[file_name] = stream.close()["sha256"]
        except BaseException:
            stream.abandon()
            raise
        weight_map |= {names[ours]: file_name for ours in shard}
        total += sum(nbytes(dtype, shape) for _, _, shape in entries)
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return sha256


def _identity(
    checkpoint: Path,
    model: Model,
    tokenizer_folder: Path,
    dtype: str,
    max_shard_bytes: int,
    generation: Mapping[str, Any] | None,
) -> tuple[dict[str, str], dict[str, Any]]:
    if dtype not in _DTYPES:
        raise KieloError(f"export: dtype {dtype!r} is not known; choose one of {', '.join(_DTYPES)}")
    tokenizer = {path.name: hash_file(path) for path in _tokenizer_files(tokenizer_folder)}
    inputs = {"checkpoint": hash_manifest(checkpoint), "tokenizer": hash_json(tokenizer)}
    section = {
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
        "generation": dict(generation or {}),
        "model": model.model_dump(mode="json"),
    }
    return inputs, section


def _tokenizer_files(folder: Path) -> list[Path]:
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise KieloError(f"{folder}: no tokenizer.json there to export with the model")
    return found


def _special_token_ids(folder: Path) -> dict[str, int | None]:
    """bos, eos and pad of a Hugging Face tokenizer folder as ids; None for one that it does not name."""
    named: dict[str, Any] = {}
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file_name).is_file():
            named |= {
                k: v for k, v in json.loads((folder / file_name).read_text(encoding="utf-8")).items() if v
            }
    ids = {}
    if (folder / "tokenizer.json").is_file():
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
        ids = {token["content"]: token["id"] for token in added}
    found = {}
    for role in ("bos", "eos", "pad"):
        token = named.get(f"{role}_token")
        found[f"{role}_token_id"] = ids.get(token["content"] if isinstance(token, dict) else token)
    return found


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
