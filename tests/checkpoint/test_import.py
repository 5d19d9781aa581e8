"""Hugging Face weights are imported by slices: any file and layout, read once, bounded memory, never run."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.weights_folder import pinned, resolve_weights
from kielo.checkpoint import tensor_file
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.hugging_face_import import load_model_weights, load_weights
from kielo.checkpoint.tensor_file import ReadBuffers, TensorFile, Wanted
from kielo.checkpoint.tensor_table import join, read_table
from kielo.models.llama.model import Llama
from kielo.models.llama.tables import to_hugging_face
from kielo.models.piece import Piece, by_stored_name
from kielo.parallel.materialise import local, local_slices
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model
from kielo.train.run import train
from tests.checkpoint.layouts import config, model_on_ranks, values
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

Tensors = dict[str, torch.Tensor]


def padded() -> Model:
    """A model with as many key heads as query heads (can be fused), biases, 67 tokens in 72 rows."""
    return config().model_copy(update={"num_key_value_heads": 4, "attention_bias": True, "vocab_multiple": 8})


def made_up_pieces(model: Model) -> dict[str, Piece]:
    """Names of no family: queries, keys and values fused head by head, the MLP's last matrix transposed."""
    pieces = to_hugging_face(model)
    for ours, piece in pieces.items():
        module, _, kind = ours.rpartition(".")
        if module.endswith((".q", ".k", ".v")):
            first_row = "qkv".index(module[-1]) * model.head_dim
            name = f"{module[:-1]}qkv.{kind}"
            pieces[ours] = Piece(name, first_row, model.head_dim, 3 * model.head_dim)
        elif module.endswith(".mlp.down"):
            pieces[ours] = replace(piece, transposed=True)
    return pieces


def weights(model: Model) -> Tensors:
    """Returns our name → the whole parameter after loading: padding rows zero, numbers that fp16 has."""
    named = {name: values(model, 5)(name, p.shape) for name, p in Llama(model).named_parameters()}
    for name, piece in to_hugging_face(model).items():
        named[name] = named[name].bfloat16().half().float()
        named[name][piece.rows :] = 0
    return named


def stored(model: Model, pieces: dict[str, Piece], dtype: torch.dtype) -> Tensors:
    named = weights(model)
    groups = by_stored_name(pieces).items()
    return {theirs: join(group, {ours: named[ours] for ours in group}).to(dtype) for theirs, group in groups}


def write(folder: Path, tensors: Tensors, save: Callable[..., Any] = save_file, shards: int = 1) -> Path:
    """One file, or shards with an index, of safetensors or (`torch.save`) of pickled tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, ending = ("model", "safetensors") if save is save_file else ("pytorch_model", "bin")
    if shards == 1:
        save(tensors, folder / f"{stem}.{ending}")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        of_shard = {name: tensors[name] for name in names[shard::shards]}
        save(of_shard, folder / f"{stem}-{shard}.{ending}")
        weight_map |= dict.fromkeys(of_shard, f"{stem}-{shard}.{ending}")
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_sources(root: Path) -> dict[str, str]:
    """Folder → the pieces' word, for every kind of file."""
    plain = to_hugging_face(padded())
    bare = {ours: replace(piece, name=piece.name.removeprefix("model.")) for ours, piece in plain.items()}
    write(root / "bf16 shards", stored(padded(), plain, torch.bfloat16), shards=3)
    write(root / "fp16", stored(padded(), plain, torch.float16))
    write(root / "fp64 bare", stored(padded(), bare, torch.float64))
    write(root / "fp32 bin shards", stored(padded(), plain, torch.float32), torch.save, shards=2)
    views = stored(padded(), plain, torch.bfloat16)
    views = {name: value.mT.contiguous().mT if value.dim() == 2 else value for name, value in views.items()}
    write(root / "bf16 bin of views", views, torch.save)
    write(root / "fused", stored(padded(), made_up_pieces(padded()), torch.bfloat16), shards=2)
    return {
        folder.name: "made up" if folder.name == "fused" else "plain" for folder in sorted(root.iterdir())
    }


def load_on_ranks(root: Path, sources: dict[str, str], shard: int, tensor: int) -> dict[str, Any]:
    """Source → this rank's part of each parameter, and the bytes that were read for it."""
    model, _ = model_on_ranks(padded(), 1, shard, tensor=tensor)
    parameters = dict(model.named_parameters())
    tensor_file.READ_THROUGH_BYTES = 0  # then what is read is what is wanted
    original, read = os.preadv, []
    os.preadv = lambda *args: read.append(original(*args)) or read[-1]
    result = {}
    for source, word in sources.items():
        for parameter in parameters.values():
            local(parameter).detach().fill_(torch.nan)
        read.clear()
        if word == "made up":
            load_weights(parameters, root / source, made_up_pieces(padded()))
        else:
            load_model_weights(parameters, root / source, padded())
        shards = {name: (local_slices(p), local(p).detach().numpy().copy()) for name, p in parameters.items()}
        result[source] = (shards, sum(read))
    os.preadv = original
    return result


@pytest.mark.parametrize(("shard", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_each_rank_gets_its_slices_of_any_source(tmp_path, shard, tensor):
    """Every dtype and kind of file, fused, transposed and padded: bitwise the whole's slices.

    No rank reads a byte that is not of its shards.
    """
    sources = write_sources(tmp_path)
    item_bytes = {"fp16": 2, "fp64 bare": 8, "fp32 bin shards": 4}
    whole = weights(padded())
    for of_rank in run_ranks(load_on_ranks, shard * tensor, tmp_path, sources, shard, tensor):
        for source, (shards, bytes_read) in of_rank.items():
            assert set(shards) == set(whole)
            numbers = 0
            for name, (box, found) in shards.items():
                assert np.array_equal(found, whole[name][box].numpy()), (source, name)
                rows = to_hugging_face(padded())[name].rows or whole[name].shape[0]
                numbers += whole[name][:rows][box].numel()
            assert bytes_read == numbers * item_bytes.get(source, 2), source


def load_on_stages(root: Path, tied: bool) -> dict[str, np.ndarray]:
    """Our name → what this rank of two with a stage each has read."""
    model, _ = model_on_ranks(config(tied), 1, 1, pipeline=2, pipeline_layers=(1, 1))
    load_model_weights(dict(model.named_parameters()), root, config(tied))
    return {name: local(parameter).detach().numpy().copy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_gets_its_tensors(tmp_path, tied):
    """Names are those of the whole model: each tensor is on one pipeline rank, bitwise its whole."""
    whole = {
        name: values(config(tied), 5)(name, p.shape) for name, p in Llama(config(tied)).named_parameters()
    }
    write(
        tmp_path, {piece.name: whole[ours] for ours, piece in to_hugging_face(config(tied)).items()}, shards=2
    )
    first, second = run_ranks(load_on_stages, 2, tmp_path, tied)
    assert not first.keys() & second.keys() and first.keys() | second.keys() == whole.keys()
    assert "embed.weight" in first and "norm.weight" in second
    for name, found in (first | second).items():
        assert np.array_equal(found, whole[name].numpy()), name


def test_the_record_gives_each_tensor_its_name_and_dtype(tmp_path):
    """Names as the source has them, a tied model's head too where it is stored all the same."""
    tied = config(tied=True)
    tensors = stored(tied, to_hugging_face(tied), torch.bfloat16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    parameters = dict(Llama(tied).named_parameters())
    record = load_model_weights(parameters, write(tmp_path / "bare", bare), tied)
    assert record == dict.fromkeys(bare, "BF16") | {"norm.weight": "F32"}
    assert torch.equal(parameters["layers.1.mlp.up.weight"], weights(tied)["layers.1.mlp.up.weight"])
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].half()}
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    source = write(tmp_path / "with head", tensors | head | buffer)
    record = load_model_weights(parameters, source, tied)
    assert set(record) == set(tensors | head) and record["lm_head.weight"] == "F16"


def refuse_on_ranks(source: Path) -> str:
    model, _ = model_on_ranks(config(), 1, 2)
    try:
        load_model_weights(dict(model.named_parameters()), source, config())
    except KieloError as error:
        return str(error)
    return "loaded"


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    """A missing, unexpected or misfitting tensor is named, nothing is loaded, and all ranks agree."""
    right = stored(config(), to_hugging_face(config()), torch.float32)
    parameters = dict(Llama(config()).named_parameters())
    before = {name: value.clone() for name, value in parameters.items()}

    def complaint(tensors: Tensors, **options: Any) -> str:
        shutil.rmtree(tmp_path / "folder", ignore_errors=True)
        with pytest.raises(KieloError) as caught:
            load_model_weights(parameters, write(tmp_path / "folder", tensors, **options), config())
        return str(caught.value)

    with pytest.raises(KieloError, match="no weights; looked for model.safetensors"):
        load_model_weights(parameters, tmp_path, config())
    headless = {name: value for name, value in right.items() if name != "lm_head.weight"}
    assert "missing: lm_head.weight" in complaint(headless, shards=2)
    assert "does not have: model.layers.9.x" in complaint(right | {"model.layers.9.x": torch.zeros(1)})
    assert "[70, 16], but head.weight here is [67, 16]" in complaint(
        right | {"lm_head.weight": torch.zeros(70, 16)}
    )
    integers = {"model.norm.weight": torch.zeros(16, dtype=torch.int8)}
    assert "model.norm.weight is stored as I8" in complaint(right | integers, save=torch.save)
    assert all(torch.equal(parameters[name], value) for name, value in before.items())

    path = write(tmp_path / "cut", right) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    first, second = run_ranks(refuse_on_ranks, 2, tmp_path / "cut", timeout_seconds=60)
    assert first == second and "model.safetensors: cut short or damaged" in first


def test_fused_weights_of_another_size_are_refused_by_name(tmp_path):
    """A tensor made of several parameters names them all."""
    pieces = made_up_pieces(padded())
    tensors = stored(padded(), pieces, torch.float32)
    name = pieces["layers.0.attention.k.bias"].name
    tensors[name] = torch.zeros(40)
    with pytest.raises(KieloError, match=r"attention\.k\.bias here is \[16\].*should be \[48\]"):
        load_weights(dict(Llama(padded()).named_parameters()), write(tmp_path, tensors), pieces)


def with_header(content: bytes, change: Callable[[dict], None]) -> bytes:
    """The same safetensors file with its header changed, as long as before or longer."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def set_offsets(name: str, begin: int, end: int) -> Callable[[dict], None]:
    return lambda header: header[name].update(data_offsets=[begin, end])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda c: c[:5], "has 5 bytes"),
        (lambda c: (10**15).to_bytes(8, "little") + c[8:], "cannot be read as safetensors"),
        (lambda c: (len(c)).to_bytes(8, "little") + c[8:], "cannot be read as safetensors"),
        (lambda c: c[:8] + b"[" + c[9:], "its header is damaged"),
        (lambda c: with_header(c, lambda header: header["b"].pop("shape")), "its header is damaged"),
        (lambda c: with_header(c, lambda header: header["b"].update(shape=[3, -2])), "damaged: b"),
        (lambda c: with_header(c, lambda header: header["b"].update(dtype="F99")), "b is stored as F99"),
        (lambda c: with_header(c, set_offsets("b", 0, 24)), "damaged: b overlaps a"),
        (
            lambda c: with_header(c, set_offsets("b", 16, 36)),
            "b has 20 bytes, which is not the size of F32 [2, 3]",
        ),
        (
            lambda c: with_header(c, set_offsets("b", 10**9, 10**9 + 24)),
            "cut short or damaged: b ends at byte",
        ),
        (lambda c: c[:-1], "cut short or damaged: b ends at byte"),
    ],
)
def test_a_damaged_header_is_refused_by_name(tmp_path, damage, expected):
    """Lengths, offsets, shapes and overlaps are checked against the file before anything is read by them."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2, 3)}, path)
    assert set(read_table(path)) == {"a", "b"}
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(KieloError) as caught:
        read_table(path)
    assert str(path) in str(caught.value) and expected in str(caught.value)


class Evil:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.mark),))


def test_a_pickle_is_never_run(tmp_path):
    """A .bin with code in it, zipped or not, and one cut short: refused by name, and the code has not run."""
    path, mark = tmp_path / "pytorch_model.bin", tmp_path / "mark"
    torch.save({"a": torch.ones(2), "b": Evil(mark)}, path)
    with pytest.raises(KieloError, match=r"pytorch_model\.bin: refused: it contains more than tensors"):
        read_table(path)
    path.write_bytes(pickle.dumps({"b": Evil(mark)}))
    with pytest.raises(KieloError, match=r"pytorch_model\.bin: not a zip.*save_pretrained"):
        read_table(path)
    torch.save({"a": torch.ones(2), "b": Evil(mark)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(KieloError, match=r"pytorch_model\.bin: not a zip"):
        read_table(path)
    torch.save({"a": torch.ones(1000), "b": 3}, path)
    with pytest.raises(KieloError, match="b is a int"):
        read_table(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(KieloError, match=r"pytorch_model\.bin: not a zip: cut short"):
        read_table(path)
    assert not mark.exists()


def test_little_is_read_and_little_is_held(tmp_path, monkeypatch):
    """Columns of a matrix cost their own bytes, not the rows between; small gaps are read along.

    No call reads more than the buffer holds, or need read all that it was asked for.
    """
    matrix = torch.randn(40, 30_000)
    save_file({"m": matrix, "n": torch.randn(7)}, tmp_path / "x.safetensors")
    calls: list[tuple[int, int]] = []
    original = os.preadv

    def preadv(descriptor: int, parts: list[memoryview], offset: int) -> int:
        got = original(descriptor, parts, offset)
        calls.append((offset, got))
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    columns = (slice(0, 40), slice(500, 700))
    target = torch.empty(40, 200, dtype=torch.float64)
    with TensorFile(tmp_path / "x.safetensors") as file:
        file.read([Wanted(file.tensors["m"], columns, target)])
    assert torch.equal(target, matrix[columns].double())
    assert sum(got for _, got in calls) == 40 * 200 * 4

    calls.clear()
    halves = [torch.empty(40, 15_000), torch.empty(40, 15_000)]
    with TensorFile(tmp_path / "x.safetensors", buffers=ReadBuffers(buffer_bytes=4096)) as file:
        stored = file.tensors["m"]
        boxes = [(slice(0, 40), slice(0, 15_000)), (slice(0, 40), slice(15_000, 30_000))]
        file.read(Wanted(stored, box, half) for box, half in zip(boxes[::-1], halves[::-1]))
    assert torch.equal(torch.cat(halves, 1), matrix)
    assert max(got for _, got in calls) <= 4096 and sum(got for _, got in calls) == matrix.numel() * 4
    assert calls == sorted(calls)

    def stingy(descriptor: int, parts: list[memoryview], offset: int) -> int:
        return original(descriptor, [parts[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    target.fill_(0)
    with TensorFile(tmp_path / "x.safetensors") as file:
        file.read([Wanted(file.tensors["m"], columns, target)])
    assert torch.equal(target, matrix[columns].double())

    monkeypatch.setattr(os, "preadv", preadv)
    calls.clear()
    evens = torch.empty(40, 15_000)
    save_file({"e": matrix.view(40, 15_000, 2)}, tmp_path / "y.safetensors")
    with TensorFile(tmp_path / "y.safetensors") as file:
        box = (slice(0, 40), slice(0, 15_000), slice(1, 2))
        file.read([Wanted(file.tensors["e"], box, evens[:, :, None])])
    assert torch.equal(evens, matrix[:, 1::2]) and len(calls) < 40 * 15_000 // 500


def test_weights_are_found_by_folder_or_by_name(tmp_path, monkeypatch):
    """hf:FOLDER needs no network; the hub is asked once, its commit is kept, later ranks use the cache."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert (
        resolve_weights(f"hf:{tmp_path}") == tmp_path
        and pinned(f"hf:{tmp_path}", tmp_path) == f"hf:{tmp_path}"
    )
    with pytest.raises(KieloError, match="there is no folder ./nothing"):
        resolve_weights("hf:./nothing")
    asked: list[tuple[Any, ...]] = []
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "snapshots" / commit

    def fetch(name, revision, local_files_only=False, allow_patterns=(), ignore_patterns=(), cache_dir=None):
        if local_files_only:
            if name != "org/model" or not snapshot.is_dir() or revision not in (None, "main", commit):
                raise LocalEntryNotFoundError("not cached")
            return str(snapshot)
        if "*.json" not in allow_patterns:
            return str(snapshot)
        asked.append((name, revision, "*.bin" in allow_patterns))
        if name == "org/none":
            raise OSError("no network\nmore")
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text("{}")
        if "*.bin" in allow_patterns:
            (snapshot / "pytorch_model.bin").touch()
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_weights("hf:org/model@main") == snapshot
    assert asked == [("org/model", "main", False), ("org/model", "main", True)]
    kept = pinned("hf:org/model@main", snapshot)
    assert kept == f"hf:org/model@{commit}" and resolve_weights(kept) == snapshot and len(asked) == 2
    (snapshot / "pytorch_model.bin").unlink()  # a fetch that was cut short: asked again
    assert resolve_weights("hf:org/model") == snapshot and len(asked) == 4
    with pytest.raises(KieloError, match="the folder org/none does not exist, and .*no network"):
        resolve_weights("hf:org/none")


def train_on_rank(resolved: Any, max_steps: int | None) -> str:
    return train(resolved, max_steps).outcome


def test_a_run_starts_from_weights_and_keeps_their_record(tmp_path):
    """The first loss is that of the weights; each checkpoint has the record, also without the source."""
    write_tokens(tmp_path / "tokens")
    model = resolve(tmp_path).identity.model
    tensors = stored(model, to_hugging_face(model), torch.bfloat16)
    source = write(tmp_path / "source", tensors, shards=2)
    generation = {"eos_token_id": [1, 3], "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(generation))
    resolved = resolve(
        tmp_path, shard=2, micro_batch=1, model=model.model_copy(update={"weights": f"hf:{source}"})
    )
    assert run_ranks(train_on_rank, 2, resolved, 1) == ["requeue", "requeue"]
    record = dict.fromkeys(tensors, "BF16")
    settings = {"generation": generation, "config": {}, "left_out": []}
    checkpoints = Checkpointer(tmp_path / "train" / "checkpoints")
    plain = read_plain(checkpoints.newest())
    assert plain["source_tensors"] == record and plain["source_settings"] == settings
    shutil.rmtree(source)
    assert run_ranks(train_on_rank, 2, resolved, None) == ["finished", "finished"]
    plain = read_plain(checkpoints.newest())
    assert plain["source_tensors"] == record and plain["source_settings"] == settings
