"""The average of several checkpoints of one run: a checkpoint of its own, without optimiser state.

It often scores better than each checkpoint (Izmailov et al. 2018, arXiv:1803.05407). Read by blocks of rows.
"""

import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from kielo.artifact.checkpoint_folder import INDEX_NAME, CheckpointFile, rank_file_name, step_of
from kielo.artifact.checkpoint_index import (
    CheckpointIndex,
    Chunk,
    PlainState,
    SourceCheckpoint,
    TensorEntry,
    chunk_key,
    entry_json,
    read_index,
    write_checkpoint_manifest,
    write_index,
)
from kielo.artifact.durable import bring_to_disk, make_folder, name_durably
from kielo.checkpoint.export_tensors import CheckpointRows, FileTensor, row_blocks
from kielo.checkpoint.publish import failure, refuse_if_too_full
from kielo.checkpoint.read_checkpoint import some_names, verify
from kielo.checkpoint.safetensors_storage import SafetensorsStream
from kielo.checkpoint.tensor_table import DTYPES, nbytes
from kielo.models.piece import Piece
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import as_stored_now

_MODEL = "model/"
Indexes = Mapping[Path, CheckpointIndex]  # of checkpoints
# Plain state that belongs to one step of a run, and so not to an average.
_OF_A_MOMENT = ("loss", "guard", "optimiser_updates")
_DESCRIPTION_BYTES = 1024  # for one tensor, in the file's header and in the index together


def average(checkpoints: Sequence[Path], to: Path) -> Path:
    """Write the mean of the model weights of at least two checkpoints as the folder `to`. Return it.

    It is whole or not at all, by sums in fp64, with dtypes and plain state of the newest checkpoint. Raise
    KieloError for damage, a full disk, a `to` that exists, and checkpoints of other training or tensors.
    """
    began, to = time.monotonic(), Path(to)
    if os.path.lexists(to):
        raise KieloError(f"{to}: exists already. Nothing was written. Fix: name a new folder")
    if step_of(to) is not None:
        raise KieloError(
            f"{to}: step_… is the name of a run's own checkpoints, and training cannot resume from an "
            "average. Fix: another name"
        )
    # `checkpoints/newest`, a symbolic link, becomes the name that people want to read.
    paths = sorted((Path(one).resolve() for one in checkpoints), key=str)
    indexes = {path: read_index(path) for path in paths}
    _refuse_misfit(indexes, len(checkpoints))
    for path, index in indexes.items():
        verify(path, index, _model_names(index))
    save_id = secrets.token_hex(8)
    newest = max(indexes.values(), key=lambda index: index.step)
    index = _averaged_index(newest, indexes, save_id)
    tensor_bytes = sum(nbytes(DTYPES[entry.dtype], entry.shape) for entry in index.tensors.values())
    partial = to.parent / f".{to.name}.{save_id}.kielo-partial"
    try:
        make_folder(to.parent)
        refuse_if_too_full(to.parent, tensor_bytes + _DESCRIPTION_BYTES * len(index.tensors), num_files=4)
        partial.mkdir()
        files = {rank_file_name(0): _write_means(partial, index, indexes)}
        entries = {name: entry_json(entry) for name, entry in index.tensors.items()}
        files[INDEX_NAME] = write_index(partial, index, entries)
        write_checkpoint_manifest(partial, index, files, tensor_bytes, time.monotonic() - began)
        bring_to_disk(partial)
        name_durably(partial, to)
    except (OSError, KieloError) as error:
        raise KieloError(failure(to, tensor_bytes, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return to


def _write_means(partial: Path, index: CheckpointIndex, indexes: Indexes) -> CheckpointFile:
    sources = [CheckpointRows(path, source) for path, source in indexes.items()]
    # Wide dtypes first, so that every tensor starts aligned.
    entries = sorted(index.tensors.items(), key=lambda named: -DTYPES[named[1].dtype].itemsize)
    described = [(entry.chunks[0].key, DTYPES[entry.dtype], entry.shape) for _, entry in entries]
    total = sum(nbytes(dtype, shape) for _, dtype, shape in described)
    with (
        SafetensorsStream(partial / rank_file_name(0), described, {"save_id": index.save_id}) as stream,
        tqdm(total=total, unit="B", unit_scale=True, desc="averaging", disable=None) as bar,
    ):
        for name, entry in entries:
            ours = name.removeprefix(_MODEL)
            wide = FileTensor(name, torch.float64, entry.shape, {ours: Piece(ours)})
            for rows in row_blocks(wide):
                added = sources[0].read(wide, rows)
                for source in sources[1:]:
                    added += source.read(wide, rows)
                mean = added.div_(len(sources)).to(DTYPES[entry.dtype])
                stream.write_rows(mean)
                bar.update(mean.nbytes)
        return stream.close().of_save(index.save_id)


def _averaged_index(newest: CheckpointIndex, indexes: Indexes, save_id: str) -> CheckpointIndex:
    averaged_from = [
        SourceCheckpoint(name=path.name, step=index.step, save_id=index.save_id)
        for path, index in sorted(indexes.items(), key=lambda item: item[1].step)
    ]
    kept = {key: value for key, value in newest.plain.content().items() if key not in _OF_A_MOMENT}
    plain = PlainState(**kept | {"averaged_from": averaged_from})
    tensors = {}
    for name in filter(_is_of_model, newest.tensors):
        entry, origin = newest.tensors[name], (0,) * len(newest.tensors[name].shape)
        chunk = Chunk(origin, entry.shape, rank_file_name(0), chunk_key(name, origin))
        tensors[name] = TensorEntry(entry.dtype, entry.shape, (chunk,))
    aliases = {alias: name for alias, name in newest.aliases.items() if _is_of_model(alias)}
    return CheckpointIndex(save_id, newest.step, tensors, aliases, plain)


def _is_of_model(name: str) -> bool:
    return name.startswith(_MODEL)


def _model_names(index: CheckpointIndex) -> list[str]:
    return list(filter(_is_of_model, index.names()))


def _refuse_misfit(indexes: Indexes, num_given: int) -> None:
    if len({index.save_id for index in indexes.values()}) < num_given:
        raise KieloError("a checkpoint was given twice and would count twice. Fix: give each once")
    if num_given < 2:
        raise KieloError("an average needs at least two checkpoints")
    (first_path, first), *others = indexes.items()
    if not _model_names(first):
        raise KieloError(f"{first_path}: has no model tensors")
    for path, other in others:
        what, changed = "", _changed_keys(_identity(first_path, first), _identity(path, other))
        if changed:
            what = f"is of another run than {first_path} (the identity differs in {some_names(changed)})"
        elif differing := sorted({name for name, _ in _described(first).items() ^ _described(other).items()}):
            what = f"other names, shapes, dtypes or ties than in {first_path}: {some_names(differing)}"
        if what:
            raise KieloError(f"{path}: {what}. Fix: checkpoints of one run")
    odd = [name for name in _model_names(first) if not DTYPES[first.entry(name).dtype].is_floating_point]
    if odd:
        raise KieloError(f"{first_path}: whole numbers and switches have no useful mean: {some_names(odd)}")


def _identity(path: Path, index: CheckpointIndex) -> Mapping[str, object]:
    identity = index.plain.identity
    return as_stored_now(identity, path) if identity else {}


def _described(index: CheckpointIndex) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {
        name: (index.entry(name).dtype, index.entry(name).shape, index.aliases.get(name, name))
        for name in _model_names(index)
    }


def _changed_keys(before: object, after: object, prefix: str = "") -> list[str]:
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return [] if before == after else [prefix.rstrip(".") or "identity"]
    keys = sorted(before.keys() | after.keys())
    return [
        found for key in keys for found in _changed_keys(before.get(key), after.get(key), f"{prefix}{key}.")
    ]
