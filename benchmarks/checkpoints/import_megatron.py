"""A 70B's checkpoint of Megatron-LM, TP8 x PP8, into memory: the peak of ranks of other layouts.

    python benchmarks/checkpoints/import_megatron.py --folder runs

64 sparse files model_optim_rng.pt of the shape of Llama 3.1 70B in bf16 (141 GB, of which nothing is on the
disk), onto a rank in fp32, each in a process of its own; other ranks are played by a fake process group. The
bar is 1.1 x the rank's shard + 1 GB. Numbers are zero: `tests/checkpoint/test_megatron.py` compares them.
Writes results/import_megatron_cpu.json.
"""

import argparse
import io
import json
import pickle
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kielo.artifact.weights_folder import resolve_weights
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.models.families import read_hf_config
from kielo.parallel.materialise import local, materialise

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from import_weights import Rank, Task, laid_out
from machine import machine, peak_bytes

TENSOR, PIPELINE = 8, 8
HIDDEN, INSIDE, LAYERS, HEADS, GROUPS, ROWS, WIDTH = 8192, 28672, 80, 64, 8, 128256, 128
# (tensor, tensor rank, stages, stage): other degrees than the files', and the ends of the pipeline.
RANKS = ((4, 0, 16, 0), (8, 5, 16, 7), (16, 15, 8, 7))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="runs", help="where the sparse files are made, and removed")
    parser.add_argument(
        "--to", default=str(Path(__file__).parents[1] / "results"), help="folder of the result"
    )
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        source, *rank = options.child
        print(json.dumps(_load(source, Rank(*map(int, rank)))))
        return
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="import_megatron_") as folder:
        _write(Path(folder))
        rows = []
        for rank in RANKS:
            command = [sys.executable, __file__, "--child", folder, *map(str, rank)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(_in_words(rows[-1]), flush=True)
    result = {"date": date.today().isoformat(), "machine": machine(), "ranks": rows}
    (Path(options.to) / "import_megatron_cpu.json").write_text(json.dumps(result, indent=1) + "\n")


def _in_words(row: dict) -> str:
    return (
        f"{row['rank']}: peak {row['peak_bytes'] / 1e9:.2f} GB, bar {row['bar_bytes'] / 1e9:.2f} GB "
        f"(shard {row['shard_bytes'] / 1e9:.2f} GB), tables {row['table_seconds']:.1f} s, "
        f"all {row['seconds']:.1f} s"
    )


def _load(folder: str, rank: Rank) -> dict:
    source = resolve_weights(f"megatron:{folder}")
    start = time.perf_counter()
    config = read_hf_config(source)
    table_seconds = time.perf_counter() - start
    model = laid_out(Task("load", "70b", folder, False, rank))
    materialise(model, torch.device("cpu"), None)
    parameters = dict(model.named_parameters())
    alone = torch.distributed.new_group([rank.tensor_rank])
    load_model_weights(parameters, source, config, alone)
    shard_bytes = sum(local(one).numel() * 4 for one in parameters.values())
    return {
        "rank": f"tensor {rank.tensor_rank}/{rank.tensor} stage {rank.stage}/{rank.stages}",
        "shard_bytes": shard_bytes,
        "peak_bytes": peak_bytes(),
        "bar_bytes": int(1.1 * shard_bytes + 1e9),
        "table_seconds": table_seconds,
        "seconds": round(time.perf_counter() - start, 1),
    }


# The files.


def _write(folder: Path) -> None:
    arguments = argparse.Namespace(
        tensor_model_parallel_size=TENSOR, pipeline_model_parallel_size=PIPELINE, num_layers=LAYERS,
        hidden_size=HIDDEN, ffn_hidden_size=INSIDE, num_attention_heads=HEADS, kv_channels=WIDTH,
        group_query_attention=True, num_query_groups=GROUPS, padded_vocab_size=ROWS, seq_length=8192,
        max_position_embeddings=8192, normalization="RMSNorm", swiglu=True, add_bias_linear=False,
        position_embedding_type="rope", rotary_base=500_000, untie_embeddings_and_output_weights=True,
        norm_epsilon=1e-5,
    )  # fmt: skip
    for stage in range(PIPELINE):
        for rank in range(TENSOR):
            place = folder / "iter_0000001" / f"mp_rank_{rank:02d}_{stage:03d}"
            place.mkdir(parents=True)
            state = {"args": arguments, "checkpoint_version": 3.0, "model": dict(_stand_ins(stage))}
            with open(place / "model_optim_rng.pt", "wb") as file:
                _write_sparse(file, state)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def _stand_ins(stage: int) -> Iterator[tuple[str, "_StandIn"]]:
    if stage == 0:
        yield "embedding.word_embeddings.weight", _StandIn(ROWS // TENSOR, HIDDEN)
    for layer in range(LAYERS // PIPELINE):
        name = f"decoder.layers.{layer}"
        yield f"{name}.self_attention.linear_qkv.layer_norm_weight", _StandIn(HIDDEN)
        yield (
            f"{name}.self_attention.linear_qkv.weight",
            _StandIn((HEADS + 2 * GROUPS) * WIDTH // TENSOR, HIDDEN),
        )
        yield f"{name}.self_attention.linear_proj.weight", _StandIn(HIDDEN, HIDDEN // TENSOR)
        yield f"{name}.mlp.linear_fc1.layer_norm_weight", _StandIn(HIDDEN)
        yield f"{name}.mlp.linear_fc1.weight", _StandIn(2 * INSIDE // TENSOR, HIDDEN)
        yield f"{name}.mlp.linear_fc2.weight", _StandIn(HIDDEN, INSIDE // TENSOR)
    if stage == PIPELINE - 1:
        yield "decoder.final_layernorm.weight", _StandIn(HIDDEN)
        yield "output_layer.weight", _StandIn(ROWS // TENSOR, HIDDEN)


class _Storage:
    def __init__(self, numbers: int):
        self.numbers = numbers


class _StandIn:
    """Pickled as torch pickles a contiguous bf16 tensor, without its numbers."""

    def __init__(self, *shape: int):
        self.shape = shape

    def __reduce__(self) -> Any:
        strides = torch.empty(self.shape, device="meta").stride()
        storage = _Storage(torch.Size(self.shape).numel())
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, strides, False, {})


def _write_sparse(file: BinaryIO, state: dict) -> None:
    """Write the zip of torch.save with holes in place of the numbers."""
    sizes = list[int]()

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: Any) -> Any:
            if not isinstance(one, _Storage):
                return None
            sizes.append(2 * one.numbers)
            return "storage", torch.BFloat16Storage, str(len(sizes) - 1), "cpu", one.numbers

    content = io.BytesIO()
    Pickler(content, protocol=2).dump(state)
    members = [("data.pkl", content.getvalue()), *((f"data/{n}", size) for n, size in enumerate(sizes))]
    directory = b""
    for name, data in members:
        name_bytes, begin = f"model/{name}".encode(), file.tell()
        size = data if isinstance(data, int) else len(data)
        crc = 0 if isinstance(data, int) else zlib.crc32(data)
        common = struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 0, crc, size, size, len(name_bytes), 0)
        file.write(b"PK\3\4" + common + name_bytes)
        _ = file.seek(size, 1) if isinstance(data, int) else file.write(data)
        directory += (
            b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, begin) + name_bytes
        )
    begin = file.tell()
    file.write(directory)
    file.write(
        b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), begin, 0)
    )


if __name__ == "__main__":
    main()
