"""LTG-BERT's attention, forward and backward: Kielo's form and the published one, side by side.

    python benchmarks/training/ltg_bert_attention.py --lengths 128 256 512 --batch 4 --rounds 20

published   the queries and keys of the relative positions are looked up for each pair of tokens, [s, s, 2d],
            and multiplied with each query and key (written here from the equations: Samuel et al. 2023,
            arXiv:2303.09859; He et al. 2021, arXiv:2006.03654, equation 4)
kielo       two tables of 63 columns a head, looked up block by block, on a GPU inside FlexAttention's kernel
            (`models/blocks/relative_attention.py`)

What is measured is inner attention, from queries, keys, values and the projected positions to the outputs,
and back to the gradients of all four; projections are the same in both. The two take turns in each round, in
another order every time. A ratio above 1 means that Kielo's form has more tokens/s; it is the median over
rounds, with a 95 % bootstrap interval. CPU seconds are the process's own (OMP_NUM_THREADS=1), so that other
work on the machine counts less. Peak bytes are those of tensors made from the first line of the forward to
the end of the backward, inputs left out; on a CPU counted by a dispatch mode. Before anything is timed both
must give the same numbers. Writes results/ltg_bert_attention_<device>.json.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
import weakref
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kielo.models.blocks.relative_attention import PositionHeads, RelativeInnerAttention, RelativeMaskMaker

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from ratios import interval

RESULTS = Path(__file__).parents[1] / "results"
_SEED = 1
BUCKET, LONGEST = 32, 512

# q, k, v [b, h, s, k] and the projected positions [63, 2d] to outputs [b, h, s, k].
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def published(length: int, heads: int, device: torch.device) -> Way:
    rows_qn = RelativeMaskMaker(BUCKET, LONGEST).dense(None, length).rows_qn.to(device)

    def attend(q_bhsk: Tensor, k_bhsk: Tensor, v_bhsk: Tensor, positions_r2d: Tensor) -> Tensor:
        pairs_qn2hk = positions_r2d[rows_qn].unflatten(-1, (2, heads, -1))
        qpos_qnhk, kpos_qnhk = pairs_qn2hk.unbind(2)
        scale = (3 * q_bhsk.shape[-1]) ** -0.5
        scores = torch.matmul(q_bhsk, k_bhsk.mT * scale)
        scores = scores + torch.einsum("bhqk,qnhk->bhqn", q_bhsk, kpos_qnhk * scale)
        scores = scores + torch.einsum("bhnk,qnhk->bhqn", k_bhsk * scale, qpos_qnhk)
        return torch.matmul(scores.softmax(-1), v_bhsk)

    return attend


def kielo(length: int, heads: int, device: torch.device) -> Way:
    maker, inner = RelativeMaskMaker(BUCKET, LONGEST), RelativeInnerAttention()
    maker.reset_buffers(device)

    def attend(q_bhsk: Tensor, k_bhsk: Tensor, v_bhsk: Tensor, positions_r2d: Tensor) -> Tensor:
        head_dim = q_bhsk.shape[-1]
        positions = PositionHeads(head_dim, False)(*positions_r2d.chunk(2, dim=-1))
        return inner(q_bhsk, k_bhsk, v_bhsk, positions, maker(None, length, device))

    return attend


WAYS = {"published": published, "kielo": kielo}


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is on; `most`: the most that lived at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)}
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._seen or key in given:
                continue
            self._seen.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())
        return made

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class Work:
    """Inputs of one length, and the two ways on them."""

    def __init__(self, length: int, options: argparse.Namespace, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        heads, size = options.heads, options.hidden // options.heads
        shape = options.batch, heads, length, size

        def normal(*shape: int) -> Tensor:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

        self.inputs = [
            normal(*shape),
            normal(*shape),
            normal(*shape),
            normal(2 * BUCKET - 1, 2 * options.hidden),
        ]
        self.gradient = normal(*shape).detach()
        self.ways = {name: way(length, heads, device) for name, way in WAYS.items()}
        self.tokens, self.device = options.batch * length, device

    def step(self, name: str) -> list[Tensor]:
        """The output, and the gradients of all inputs."""
        out = self.ways[name](*self.inputs)
        return [out, *torch.autograd.grad(out, self.inputs, self.gradient)]

    def difference(self) -> float:
        """The largest difference of the two ways, relative in L2."""
        pairs = zip(self.step("published"), self.step("kielo"), strict=True)
        return max(((one - other).norm() / one.norm()).item() for one, other in pairs)

    def seconds(self, name: str) -> float:
        clock = time.process_time
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            clock = time.perf_counter
        begun = clock()
        self.step(name)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - begun

    def peak_bytes(self, name: str) -> int:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step(name)
            return torch.cuda.max_memory_allocated() - before
        with PeakBytes() as counted:
            self.step(name)
        return counted.most


def measure(work: Work, rounds: int) -> dict[str, list[float]]:
    """Returns way → seconds of each round, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    order, chance = list(WAYS), random.Random(_SEED)
    for _ in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            seconds[name].append(work.seconds(name))
    return {name: of_way[1:] for name, of_way in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for length in options.lengths:
        work = Work(length, options, device)
        difference = work.difference()
        limit = 2e-2 if device.type == "cuda" else 1e-5
        if difference > limit:
            raise SystemExit(f"the two ways differ by {difference:.1e}, more than {limit:.0e}")
        peaks = {name: work.peak_bytes(name) for name in WAYS}
        seconds = {name: np.array(found) for name, found in measure(work, options.rounds).items()}
        ratios = seconds["published"] / seconds["kielo"]
        rows.append(
            {
                "length": length, "batch": options.batch, "difference": difference,
                "ratio": float(np.median(ratios)), "interval": interval(ratios),
                "tokens_per_second": {name: work.tokens / float(np.median(s)) for name, s in seconds.items()},
                "peak_bytes": peaks, "seconds": {name: found.tolist() for name, found in seconds.items()},
            }
        )  # fmt: skip
        row = rows[-1]
        print(
            f"{length:5} tokens: {row['ratio']:.2f} × the published form's tokens/s "
            f"({row['interval'][0]:.2f} to {row['interval'][1]:.2f}), "
            f"{row['tokens_per_second']['kielo']:,.0f} beside {row['tokens_per_second']['published']:,.0f}; "
            f"peak {peaks['kielo'] / 1e6:,.1f} beside {peaks['published'] / 1e6:,.1f} MB",
            flush=True,
        )
    result = {
        "date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(), "load": os.getloadavg()[0], "hidden": options.hidden,
        "heads": options.heads, "rows": rows,
    }  # fmt: skip
    path = RESULTS / f"ltg_bert_attention_{device.type}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
