"""Hugging Face weights into memory: peak resident memory and speed, each case in a process of its own.

    python benchmarks/checkpoints/import_weights.py --cases 3b 8b 70b 70b_vocabulary transformers

3b            the shape of Llama 3.2 3B, bf16 in shards, onto one rank in fp32
8b            Llama 3.1 8B onto each rank of tensor 2 in turn
70b           Llama 3.1 70B onto four ranks of tensor 8 x pipeline 4: 141 GB of sparse files, with numbers
              only at the edges of every slice; after loading each number of the rank is compared
70b_vocabulary  the same with a vocabulary of 65,536 tokens of other text, means of four old rows: onto the
              ranks of the embedding and of the head, with one layer each; their old rows are written whole
transformers  the 3b files through from_pretrained, for comparison

The files are made here, of random numbers, and removed. Other ranks are played by a fake process group; the
layout and its memory are those of training. Speed is compared with a bare loop that reads the same bytes into
a buffer of 64 MiB and casts them into tensors, in turn with ours, both with a cold page cache; where others
use the machine, trust the ratio and not the seconds. Writes results/import_weights_cpu.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from kielo.artifact.stage_counts import RowMap
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.checkpoint.safetensors_storage import SafetensorsStream
from kielo.checkpoint.transplant import Transplant
from kielo.models.families import complete, hf_config
from kielo.models.llama.model import Llama
from kielo.models.llama.tables import to_hugging_face
from kielo.parallel.materialise import local, local_slices, materialise
from kielo.parallel.mesh import AXES, Mesh
from kielo.parallel.parallelise import parallelise
from kielo.recipe.sections import Layout, Model

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import machine, peak_bytes

SHARD_BYTES = 5_000_000_000
EDGE_NUMBERS = 2048  # 4 KiB of bf16
PEAK_RATIO, PEAK_EXTRA_BYTES, SPEED_RATIO, STAGE_BYTES = 1.1, 1_000_000_000, 0.8, 11_000_000_000
_POOL_NUMBERS = 2**24 - 3
# Of a transplant: tokens of the new vocabulary, bytes that may be held beside the shards, tensors to read.
NEW_TOKENS, TRANSPLANT_BYTES = 65_536, 400_000_000
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, tied: bool = False
) -> Model:
    return complete(
        Model(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads,
            vocab_size=128256,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=500_000.0,
            tie_word_embeddings=tied,
            attention_bias=False,
            mlp_bias=False,
        ),
        8192,
    )


SHAPES = {
    "3b": _llama(3072, 28, 24, 8, 8192, tied=True),
    "8b": _llama(4096, 32, 32, 8, 14336),
    "70b": _llama(8192, 80, 64, 8, 28672),
}
SMALL = {
    "3b": _llama(768, 4, 6, 2, 2048, tied=True),
    "8b": _llama(1024, 4, 8, 4, 3584),
    "70b": _llama(1024, 8, 16, 8, 3584),
}


@dataclass(frozen=True)
class Rank:
    """One rank to play: it runs stage number `stage` of `stages`, with its share of the layers."""

    tensor: int = 1
    tensor_rank: int = 0
    stages: int = 1
    stage: int = 0


@dataclass(frozen=True)
class Task:
    """The task of a child process: "load", "transplant" or "bare" with the rank's shards; "transformers"."""

    what: str
    shape: str
    folder: str
    is_small: bool
    rank: Rank = field(default_factory=Rank)
    has_edges_only: bool = False

    @property
    def model(self) -> Model:
        old = (SMALL if self.is_small else SHAPES)[self.shape]
        return old.model_copy(update={"vocab_size": NEW_TOKENS}) if self.what == "transplant" else old


def main() -> None:
    options = _options()
    if options.child:
        task = json.loads(options.child)
        print(json.dumps(_do(Task(**task | {"rank": Rank(**task["rank"])}))))
        return
    cases = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="import_weights_") as folder:
        for case in options.cases:
            cases[case] = _case(case, Path(folder), options)
    result = {
        "date": date.today().isoformat(),
        "machine": {
            **machine(),
            "torch_threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "versions": {name: version(name) for name in ("kielo", "torch", "transformers", "safetensors")},
        "small": options.small,
        "cases": cases,
    }
    if not options.small:
        path = Path(options.to) / "import_weights_cpu.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():  # cases that were not run now stay as they were
            result["cases"] = json.loads(path.read_text(encoding="utf-8"))["cases"] | cases
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1) if options.json else _table(result))


def _case(case: str, folder: Path, options: argparse.Namespace) -> dict:
    shape = "3b" if case == "transformers" else case.partition("_")[0]
    model = (SMALL if options.small else SHAPES)[shape]
    source = folder / case.replace("transformers", "3b")
    if not source.exists():
        for other in folder.iterdir():  # one set of files at a time
            _remove(other)
        if shape == "70b":
            _write_edges(source, model, _VOCABULARY if case == "70b_vocabulary" else ())
        else:
            _write_weights(source, model)
    if case == "transformers":
        return _run(Task("transformers", shape, str(source), options.small))
    if case == "70b_vocabulary":
        stages = model.num_hidden_layers
        ends = [Rank(8, 0, stages, 0), Rank(8, 7, stages, stages - 1)]
        rows = [
            _run(Task("transplant", shape, str(source), options.small, rank, has_edges_only=True))
            for rank in ends
        ]
        for row in rows:
            row["bar_peak_bytes"] = row["baseline_bytes"] + row["shard_bytes"] + TRANSPLANT_BYTES
        return {"ranks": rows, "holds": all(row["peak_bytes"] <= row["bar_peak_bytes"] for row in rows)}
    if case == "70b":
        ranks = [Rank(8, tensor_rank, 4, stage) for tensor_rank, stage in ((0, 0), (3, 1), (5, 2), (7, 3))]
        rows = [
            _run(Task("load", shape, str(source), options.small, rank, has_edges_only=True)) for rank in ranks
        ]
        return {
            "bar_peak_bytes": STAGE_BYTES,
            "ranks": rows,
            "holds": all(r["peak_bytes"] <= STAGE_BYTES for r in rows),
        }
    ranks = [Rank()] if case == "3b" else [Rank(2, 0), Rank(2, 1)]
    return {"ranks": [_beside_the_bare_loop(shape, source, rank, options) for rank in ranks]}


def _beside_the_bare_loop(shape: str, source: Path, rank: Rank, options: argparse.Namespace) -> dict:
    ours, bare = [], []
    for _ in range(options.rounds):
        ours.append(_run(Task("load", shape, str(source), options.small, rank)))
        bare.append(_run(Task("bare", shape, str(source), options.small, rank)))
    bytes_read = bare[0]["bytes_read"]
    seconds, bare_seconds = ([row["seconds"] for row in rows] for rows in (ours, bare))
    peak_bytes = max(row["peak_bytes"] for row in ours)
    bar_bytes = int(PEAK_RATIO * ours[0]["shard_bytes"] + PEAK_EXTRA_BYTES)
    ratio = statistics.median(bare_seconds) / statistics.median(seconds)
    return {
        "rank": asdict(rank),
        "shard_bytes": ours[0]["shard_bytes"],
        "bytes_read": bytes_read,
        "baseline_bytes": ours[0]["baseline_bytes"],
        "peak_bytes": peak_bytes,
        "bar_peak_bytes": bar_bytes,
        "peak_holds": peak_bytes <= bar_bytes,
        "seconds": seconds,
        "bare_loop_seconds": bare_seconds,
        "processor_seconds": [row["processor_seconds"] for row in ours],
        "bare_loop_processor_seconds": [row["processor_seconds"] for row in bare],
        "gigabytes_per_second": round(bytes_read / statistics.median(seconds) / 1e9, 3),
        "speed_beside_bare_loop": round(ratio, 3),
        "bar_speed": SPEED_RATIO,
        "speed_holds": ratio >= SPEED_RATIO,
    }


def _run(task: Task) -> dict:
    command = [sys.executable, __file__, "--child", json.dumps(asdict(task))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


# In the child.


def _do(task: Task) -> dict:
    if task.what == "transformers":
        return _transformers(task)
    model = laid_out(task)
    baseline_bytes = peak_bytes()
    materialise(model, torch.device("cpu"), None)
    parameters = dict(model.named_parameters())
    _forget_cached(Path(task.folder))
    start, processor_start = time.perf_counter(), time.process_time()
    bytes_read = 0
    if task.what != "bare":
        alone = torch.distributed.new_group([task.rank.tensor_rank])  # the fake ranks have nothing to say
        load_model_weights(parameters, Path(task.folder), task.model, alone, _transplant(task))
    else:
        bytes_read = _bare_loop(parameters, Path(task.folder), task.model)
    seconds, processor_seconds = time.perf_counter() - start, round(time.process_time() - processor_start, 3)
    row = {
        "rank": asdict(task.rank),
        "shard_bytes": sum(local(p).numel() * 4 for p in parameters.values()),
        "bytes_read": bytes_read,
        "baseline_bytes": baseline_bytes,
        "peak_bytes": peak_bytes(),
        "seconds": round(seconds, 3),
        "processor_seconds": processor_seconds,
    }
    return row | {"numbers_compared": _compare(task, parameters)}


def _transplant(task: Task) -> Transplant | None:
    """Returns means of four old rows, one of them of the first 256, as bytes and frequent letters are."""
    if task.what != "transplant":
        return None
    old_tokens, random = SHAPES[task.shape].vocab_size, np.random.default_rng(1)
    rows = np.concatenate(
        [random.integers(0, 256, (NEW_TOKENS, 1)), random.integers(0, old_tokens, (NEW_TOKENS, 3))], axis=1
    )
    row_map = RowMap(
        method="mean", old_tokenizer="", old_vocabulary_size=old_tokens, rows=np.sort(rows).tolist(),
        control_tokens={},
    )  # fmt: skip
    return Transplant(row_map, lambda name, shape, box: torch.zeros(()))


def laid_out(task: Task) -> nn.Module:
    """Returns the rank's part of the model on meta, laid over a world whose other ranks are fake."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = task.rank
    torch.distributed.init_process_group(
        "fake", rank=rank.tensor_rank, world_size=rank.tensor, store=FakeStore()
    )
    sizes = dict.fromkeys(AXES, 1) | {"tensor": rank.tensor}
    device_mesh = torch.distributed.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=AXES)
    layout = Layout(tensor=rank.tensor, shard=1, compile=False)
    with torch.device("meta"):
        model = Llama(task.model)
    each = task.model.num_hidden_layers // rank.stages
    for layer in range(task.model.num_hidden_layers):
        if layer // each != rank.stage:
            del model.layers[str(layer)]
    if rank.stage > 0:
        model.embed = None
    if rank.stage < rank.stages - 1:
        model.norm = model.head = None
    return parallelise(model, Mesh(device_mesh, device_mesh), layout, "fp32")


def _bare_loop(parameters: dict[str, Tensor], folder: Path, model: Model) -> int:
    """Reads the same bytes in the shortest possible loop and returns how many.

    It reads into the buffer until it is full, casts, and continues.
    """
    places = _places(folder)
    pieces = to_hugging_face(model)
    buffer = torch.empty(64 * 2**20, dtype=torch.uint8)
    memory = memoryview(buffer.numpy())
    files = {path: os.open(path, os.O_RDONLY) for path in sorted(folder.glob("*.safetensors"))}
    bytes_read = 0
    for ours, parameter in parameters.items():
        path, begin, shape = places[pieces[ours].name]
        target = local(parameter).detach()
        first, *others = local_slices(parameter)
        row_bytes = 2 * (shape[1] if others else 1)
        columns = others[0] if others else slice(0, 1)
        run_bytes, rows = 2 * (columns.stop - columns.start), first.stop - first.start
        rows_each = min(rows, len(memory) // run_bytes)
        for row in range(0, rows, rows_each):
            count = min(rows_each, rows - row)
            offset = begin + (first.start + row) * row_bytes + columns.start * 2
            if run_bytes == row_bytes:
                bytes_read += os.preadv(files[path], [memory[: count * row_bytes]], offset)
            else:
                for n in range(count):
                    part = memory[n * run_bytes : (n + 1) * run_bytes]
                    bytes_read += os.preadv(files[path], [part], offset + n * row_bytes)
            values = buffer[: count * run_bytes].view(torch.bfloat16)
            target[row : row + count].copy_(values.view(target[row : row + count].shape))
    for descriptor in files.values():
        os.close(descriptor)
    return bytes_read


def _transformers(task: Task) -> dict:
    from transformers import LlamaForCausalLM

    baseline_bytes = peak_bytes()
    _forget_cached(Path(task.folder))
    start = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(task.folder, dtype=torch.float32)
    # Weights that it left mapped are read when they are first used.
    total = sum(float(parameter.detach().sum()) for parameter in model.parameters())
    return {
        "baseline_bytes": baseline_bytes,
        "peak_bytes": peak_bytes(),
        "seconds": round(time.perf_counter() - start, 3),
        "sum": total,
    }


def _compare(task: Task, parameters: dict[str, Tensor]) -> int:
    """Compares the rank's numbers with those written and returns how many; AssertionError for a difference.

    Files with edges only: every number, those between the edges being zero. Else the first and last rows.
    """
    compared = 0
    for ours, piece in to_hugging_face(task.model).items():
        if ours not in parameters:
            continue
        value, box = local(parameters[ours]).detach(), local_slices(parameters[ours])
        shape = tuple(parameters[ours].shape)
        if task.what == "transplant" and piece.name in _VOCABULARY:
            compared += _compare_means(task, piece.name, value, box)
        elif task.has_edges_only:
            nonzero = 0
            for row, columns in _edges_of_slice(box):
                expected = _numbers(
                    piece.name, _index(shape, row, columns.start), columns.stop - columns.start
                )
                inside = value[row - box[0].start] if len(box) == 2 else value
                start = columns.start - box[-1].start
                found = inside[start : start + len(expected)]
                assert torch.equal(found, expected.float()), (ours, row, columns)
                nonzero += len(expected)
            assert int(value.count_nonzero()) == nonzero, ours
            compared += value.numel()
        else:
            for row in (box[0].start, box[0].stop - 1):
                columns = box[1] if len(box) == 2 else slice(row, row + 1)
                expected = _numbers(
                    piece.name, _index(shape, row, columns.start), columns.stop - columns.start
                )
                found = value[row - box[0].start].reshape(-1)
                assert torch.equal(found, expected.float()), (ours, row)
                compared += len(expected)
    return compared


def _compare_means(task: Task, name: str, value: Tensor, box: tuple[slice, ...]) -> int:
    """Compares every 61st row with the mean of its old ones, bit by bit; returns how many numbers."""
    rows, width = _transplant(task).row_map.rows, value.shape[1]
    checked = range(box[0].start, box[0].stop, 61)
    for row in checked:
        parts = [_numbers(name, old * width, width).float() for old in rows[row]]
        assert torch.equal(value[row - box[0].start], sum(parts) / len(parts)), (name, row)
    return len(checked) * width


# The files.

_pool: list[Tensor] = []


def _numbers(name: str, start: int, count: int) -> Tensor:
    """Returns bf16 [count], never zero: numbers `start` … of the tensor `name`, read along its rows."""
    if not _pool:
        numbers = torch.empty(_POOL_NUMBERS, dtype=torch.bfloat16)
        _pool.append(numbers.uniform_(0.01, 0.02, generator=torch.Generator().manual_seed(1)))
    start = (start + zlib.crc32(name.encode())) % _POOL_NUMBERS
    parts, left = [], count
    while left:
        parts.append(_pool[0][start : start + left])
        left -= len(parts[-1])
        start = 0
    return torch.cat(parts)


def _index(shape: tuple[int, ...], row: int, column: int) -> int:
    return row * shape[1] + column if len(shape) == 2 else column


def _tensor_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Returns the file's tensors in its order."""
    with torch.device("meta"):
        named = dict(Llama(model).named_parameters())
    return {piece.name: tuple(named[ours].shape) for ours, piece in to_hugging_face(model).items()}


def _shards(model: Model) -> Iterator[dict[str, tuple[int, ...]]]:
    shard, filled = {}, 0
    for name, shape in _tensor_shapes(model).items():
        size = 2 * torch.Size(shape).numel()
        if shard and filled + size > SHARD_BYTES:
            yield shard
            shard, filled = {}, 0
        shard[name] = shape
        filled += size
    yield shard


def _write_weights(folder: Path, model: Model) -> None:
    """Writes every number, 64 MiB at a time and flushed, so that the cache can be dropped later."""
    _write_configs(folder, model)
    for number, shard in enumerate(_shards(model)):
        entries = [(name, torch.bfloat16, shape) for name, shape in shard.items()]
        stream = SafetensorsStream(folder / _file_name(number), entries, {"format": "pt"})
        for name, shape in shard.items():
            stream.write(_numbers(name, 0, torch.Size(shape).numel()).view(shape))
        stream.close()


def _write_edges(folder: Path, model: Model, whole: Collection[str]) -> None:
    """Writes sparse files: numbers at the edges of every slice of tensor 8, holes between.

    The tensors `whole` have all their numbers.
    """
    _write_configs(folder, model)
    pieces = {piece.name: ours for ours, piece in to_hugging_face(model).items()}
    for number, shard in enumerate(_shards(model)):
        header, end = {}, 0
        for name, shape in shard.items():
            begin, end = end, end + 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with open(folder / _file_name(number), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
            for name, shape in shard.items():
                begin = 8 + len(text) + header[name]["data_offsets"][0]
                if name in whole:
                    file.seek(begin)
                    for row in range(0, shape[0], 1024):
                        numbers = _numbers(name, row * shape[1], min(1024, shape[0] - row) * shape[1])
                        file.write(numbers.view(torch.uint8).numpy().tobytes())
                    continue
                for box in _slices_of_tensor_8(pieces[name], shape):
                    for row, columns in _edges_of_slice(box):
                        index = _index(shape, row, columns.start)
                        file.seek(begin + 2 * index)
                        numbers = _numbers(name, index, columns.stop - columns.start)
                        file.write(numbers.view(torch.uint8).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())


def _slices_of_tensor_8(ours: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Lists the slices by name a second time, so that a mistake in the tensor-parallel plan would show."""
    whole = tuple(slice(0, size) for size in shape)
    if len(shape) == 1:
        yield whole
        return
    dim = 1 if ours.endswith((".o.weight", ".down.weight")) else 0
    size = shape[dim] // 8
    for rank in range(8):
        yield (*whole[:dim], slice(rank * size, (rank + 1) * size), *whole[dim + 1 :])


def _edges_of_slice(box: tuple[slice, ...]) -> Iterator[tuple[int, slice]]:
    """Returns (row, columns) of the first and last numbers of a slice, up to 4 KiB of a row each.

    Of a vector, it returns all numbers.
    """
    if len(box) == 1:
        yield 0, box[0]
        return
    rows, columns = box
    count = min(EDGE_NUMBERS, columns.stop - columns.start)
    yield rows.start, slice(columns.start, columns.start + count)
    yield rows.stop - 1, slice(columns.stop - count, columns.stop)


def _write_configs(folder: Path, model: Model) -> None:
    folder.mkdir(parents=True)
    config = hf_config(model, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight_map = {name: _file_name(number) for number, shard in enumerate(_shards(model)) for name in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _file_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _places(folder: Path) -> dict[str, tuple[Path, int, tuple[int, ...]]]:
    """Returns tensor → (file, first byte, shape)."""
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            places[name] = (path, 8 + header_bytes + entry["data_offsets"][0], tuple(entry["shape"]))
    return places


def _forget_cached(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _table(result: dict) -> str:
    lines = []
    for case, found in result["cases"].items():
        for row in found.get("ranks", [found]):
            rank = row.get("rank", {})
            where = (
                f"tensor {rank['tensor_rank']}/{rank['tensor']} stage {rank['stage']}/{rank['stages']}"
                if rank
                else ""
            )
            bar = row.get("bar_peak_bytes", found.get("bar_peak_bytes"))
            text = f"{case:<14} {where:<25} peak {row['peak_bytes'] / 1e9:6.2f} GB"
            text += f" (bar {bar / 1e9:.2f}, before {row['baseline_bytes'] / 1e9:.2f})" if bar else ""
            text += (
                f", {row['gigabytes_per_second']:.2f} GB/s, {row['speed_beside_bare_loop']:.2f} of the bare "
                f"loop's speed (bar {row['bar_speed']})"
                if "bar_speed" in row
                else f", {row['seconds']:.1f} s"
            )
            lines.append(text)
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = ["3b", "transformers", "8b", "70b", "70b_vocabulary"]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--rounds", type=int, default=3, help="ours and the bare loop in turn, this often")
    parser.add_argument(
        "--small", action="store_true", help="small shapes, to try the script; writes no result"
    )
    parser.add_argument(
        "--folder", default="runs", help="where the files are made: 17 GB for 8b, and removed"
    )
    parser.add_argument(
        "--to", default=str(Path(__file__).parents[1] / "results"), help="folder of the result"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
