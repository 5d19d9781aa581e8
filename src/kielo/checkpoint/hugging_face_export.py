"""Export of a checkpoint to a Hugging Face folder: safetensors shards, index, configs, tokenizer, README.

It is streamed by blocks of rows and resumable: the same command writes only missing shards.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from kielo.artifact.checkpoint_folder import run_around
from kielo.artifact.durable import marked
from kielo.artifact.resumable_stage import FinishedFile, ResumableStage
from kielo.checkpoint import export_stage, export_tensors
from kielo.checkpoint.auto_tokenizer import NOT_COMPARED, agreed_files, is_installed, json_bytes, odd_sample
from kielo.checkpoint.export_stage import CARD_FILE, ExportOptions, WantedExport
from kielo.checkpoint.export_tensors import CheckpointRows, FileTensor
from kielo.checkpoint.read_checkpoint import verify
from kielo.checkpoint.safetensors_storage import SafetensorsStream
from kielo.checkpoint.source_settings import GENERATION_FILE, generation_config, settings_of_checkpoint
from kielo.dataset.query import packed_sample
from kielo.models import families
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import CompleteModel
from kielo.tokenizer.control_tokens import read_object
from kielo.tokenizer.load import CONFIG_FILE, TOKENIZER_FILE, load_tokenizer, role_id

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def export(
    checkpoint: Path,
    to: Path,
    model: CompleteModel,
    tokenizer_folder: Path | None,
    options: ExportOptions | None = None,
    card: str | None = None,
) -> Path:
    """Write the model of a checkpoint as the Hugging Face folder `to`, whole or not at all; return `to`.

    model: complete. card: the text of its README.md, which the manifest does not list, because the report
    replaces it. Do nothing if `to` is this export already. Replace another export there, or refuse it without
    `is_replacing`. Refuse anything else. After an interruption the same call writes only missing shards.
    Raise KieloError for bad input, damage, a full disk.
    """
    options = options or ExportOptions()
    wanted = export_stage.wanted_export(checkpoint, to, model, tokenizer_folder, options)
    return export_stage.published(wanted, lambda _: _write(wanted, card))


def _write(wanted: WantedExport, card: str | None) -> None:
    stage, options, index, model = wanted.stage, wanted.options, wanted.index, wanted.model
    names = families.module(model.model_type, "tables")
    verify(wanted.checkpoint, index, [f"model/{ours}" for ours in names.to_hugging_face(model)])
    tensors = export_tensors.file_tensors(index, model, wanted.dtype)
    bytes_by_dtype = Counter[torch.dtype]()
    for tensor in tensors:
        bytes_by_dtype[tensor.dtype] += tensor.bytes
    # config.json names a single dtype: of most bytes.
    stored_dtype = str(bytes_by_dtype.most_common(1)[0][0]).removeprefix("torch.")
    tokens = _special_token_ids(wanted.tokenizer_folder)
    settings = settings_of_checkpoint(index.plain, wanted.tokenizer_folder)
    config = families.hf_config(model, **tokens | settings.get("config", {}), dtype=stored_dtype)
    shards = _shards(tensors, options.max_shard_bytes)
    stage.begin()
    try:
        _write_shards(stage, shards, CheckpointRows(wanted.checkpoint, index))
    except export_tensors.NotFiniteError:
        stage.discard()  # the same call would end the same way
        raise
    total_bytes = sum(tensor.bytes for tensor in tensors)
    weight_map = {tensor.name: file for file, shard in shards.items() for tensor in shard}
    stage.write(INDEX_FILE, json_bytes({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}))
    stage.write("config.json", json_bytes(config))
    if not FAMILIES[model.model_type].is_encoder:
        generation = generation_config(settings, tokens, wanted.tokenizer_folder)
        stage.write(GENERATION_FILE, json_bytes(generation))
    for file in getattr(names, "REMOTE_CODE", ()):
        stage.write(file, (Path(str(names.__file__)).parent / file).read_bytes())
    for name, content in _tokenizer_files(wanted, config.get("model_type")).items():
        stage.write(name, content)
    if card is not None:
        stage.write(CARD_FILE, marked(card).encode(), is_listed=False)
    stage.finish({"tensors": len(tensors), "tensor_bytes": total_bytes, "step": index.step})


def _shards(tensors: Sequence[FileTensor], max_shard_bytes: int) -> dict[str, list[FileTensor]]:
    """Divide the tensors: file → its tensors. A shard ends before the tensor that would overfill it."""
    shards: list[list[FileTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    for shard in shards:  # wide dtypes first: readers map tensors in place, where fp32 needs its alignment
        shard.sort(key=lambda tensor: -tensor.dtype.itemsize)
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    of_all = f"of-{len(shards):05d}.safetensors"
    return {f"model-{number:05d}-{of_all}": shard for number, shard in enumerate(shards, start=1)}


def _write_shards(
    stage: ResumableStage, shards: Mapping[str, list[FileTensor]], rows: CheckpointRows
) -> None:
    sizes = {file: sum(tensor.bytes for tensor in shard) for file, shard in shards.items()}
    missing = sum(size for file, size in sizes.items() if file not in stage.finished)
    stage.expect(missing)
    total = sum(sizes.values())
    # disable=None: a bar on a terminal, nothing in a log
    with tqdm(
        total=total, initial=total - missing, desc="exporting", unit="B", unit_scale=True, disable=None
    ) as bar:
        for file, shard in shards.items():
            if file not in stage.finished:
                stage.add(file, _write_shard(stage.new / file, shard, rows, bar))


def _write_shard(path: Path, shard: list[FileTensor], rows: CheckpointRows, bar: tqdm) -> FinishedFile:
    entries = [(tensor.name, tensor.dtype, tensor.shape) for tensor in shard]
    try:
        with SafetensorsStream(path, entries, {"format": "pt"}, sha256=True) as stream:
            for tensor in shard:
                for block in export_tensors.row_blocks(tensor):
                    stream.write_rows(values := rows.read(tensor, block))
                    bar.update(values.nbytes)
            return FinishedFile(**asdict(stream.close()))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _tokenizer_files(wanted: WantedExport, model_type: str | None) -> dict[str, bytes]:
    folder = wanted.tokenizer_folder
    files = {
        name: _tokenizer_file(path, wanted.model)
        for name, path in export_stage.tokenizer_files(folder).items()
    }
    if folder is None or TOKENIZER_FILE not in files:
        return files
    if not is_installed():
        logger.warning(NOT_COMPARED)
        return files
    tokenizer, run = load_tokenizer(folder), run_around(wanted.checkpoint)
    real = [] if run is None else packed_sample(run)
    sample = [one._replace(ids=None) for one in real] + odd_sample(tokenizer)
    return agreed_files(files, model_type, tokenizer, sample)


def _tokenizer_file(path: Path, model: CompleteModel) -> bytes:
    """Return a file of the tokenizer as exported: truncation, if asked for, is to the model's context."""
    if path.name != CONFIG_FILE:
        return path.read_bytes()
    config = read_object(path) | {"model_max_length": model.max_position_embeddings}
    config.pop("auto_map", None)  # no code goes along
    return json_bytes(config)


def _special_token_ids(folder: Path | None) -> dict[str, int | None]:
    is_known = folder is not None and (folder / TOKENIZER_FILE).is_file()
    tokenizer = load_tokenizer(folder) if folder is not None and is_known else None
    roles = ("bos_token", "eos_token", "pad_token")
    return {f"{role}_id": None if tokenizer is None else role_id(tokenizer, role) for role in roles}
