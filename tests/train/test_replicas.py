"""Replicas that must be equal are compared: a flipped bit is found, its tensor and rank are named, and the
run ends with the weights of an undisturbed one.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.parallel import replicas
from kielo.parallel.materialise import local
from kielo.parallel.replicas import Difference, Holders, blamed, checksum
from kielo.train import loop
from kielo.train.run import train
from tests.alerts import alerts
from tests.fault_times import FaultTimes
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_a_checksum_is_a_weighted_sum_of_the_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own integers say the same, over several chunks; every single bit changes it."""
    monkeypatch.setattr(replicas, "CHUNK_ELEMENTS", 7)
    tensor = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    size = tensor.element_size()
    bits = np.frombuffer(tensor.view(torch.uint8).numpy().tobytes(), dtype=f"<i{size}").tolist()
    expected = sum((2 * i + 1) * value for i, value in enumerate(bits)) % 2**64
    assert checksum(tensor).item() % 2**64 == expected
    flat = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).view(-1)
    found = {expected}
    for element in (0, 6, 7, 19):
        for bit in range(8 * size):
            flip(flat, element, bit)
            found.add(checksum(tensor).item() % 2**64)
            flip(flat, element, bit)
    assert len(found) == 1 + 4 * 8 * size
    assert checksum(torch.empty(0, dtype=dtype)).item() == 0


def flip(integers: Tensor, element: int, bit: int) -> None:
    width = 8 * integers.element_size()
    integers[element] ^= -(2 ** (width - 1)) if bit == width - 1 else 2**bit


def test_who_is_blamed() -> None:
    """The rank that the others outvote; of two, both; in a grid, the one that two pairs have in common."""
    three, two = Holders("replicate", (0, 1, 2), "a"), Holders("replicate", (0, 1), "a")
    assert blamed([[(three, 7)], [(three, 8)], [(three, 7)]]) == [Difference("a", (1,))]
    assert blamed([[(two, 7)], [(two, 8)]]) == [Difference("a", (0, 1))]
    assert blamed([[(two, 7)], [(two, 7)]]) == []
    rows = [Holders("tensor", ranks, "a") for ranks in ((0, 1), (2, 3))]
    columns = [Holders("replicate", ranks, "a") for ranks in ((0, 2), (1, 3))]
    grid = [[(rows[rank // 2], rank == 2), (columns[rank % 2], rank == 2)] for rank in range(4)]
    assert blamed(grid) == [Difference("a", (2,))]


FAULTY_STEP = 8


@dataclass(frozen=True)
class Flip:
    """A bit of a weight, a moment or a reduced gradient that flips on one rank in step 8, the first `times`
    times that this step is taken; or ("sum") one that its all-reduce of gradients gives it.
    """

    kind: str
    name: str
    rank: int
    times: int = 1


def train_with_a_flip(resolved: Any, flip: Flip, fault_times: FaultTimes) -> str:
    fault_times.watch_training()
    kind, name, taken = flip.kind, flip.name, 0

    def faulty_step(parts: Any, batch: Any, learning_rate: float) -> Any:
        nonlocal taken
        is_faulty = batch.step == FAULTY_STEP and torch.distributed.get_rank() == flip.rank
        taken += is_faulty
        is_faulty = is_faulty and taken <= flip.times
        if is_faulty:
            fault_times.note("planted")
        if is_faulty and kind == "gradient":
            parts = replace(parts, on_gradients=(lambda _: flip_in(parts.optimiser.parameters[name].grad),))
        with wrong_sum() if is_faulty and kind == "sum" else nullcontext():
            outcome = optimiser_step(parts, batch, learning_rate)
        if is_faulty and kind == "weight":
            flip_in(parts.optimiser.parameters[name])
        if is_faulty and kind in ("exp_avg", "exp_avg_sq"):
            flip_in(parts.optimiser.moments()[f"{name}/{kind}"])
        return outcome

    optimiser_step = loop.optimiser_step
    loop.optimiser_step = faulty_step
    try:
        return train(resolved).outcome
    finally:
        loop.optimiser_step = optimiser_step


@contextmanager
def wrong_sum() -> Iterator[None]:
    """Flips a bit in what the first all-reduce of more than one fp32 number gives to this rank alone."""
    all_reduce, has_flipped = torch.distributed.all_reduce, False

    def all_reduce_wrongly(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        nonlocal has_flipped
        work = all_reduce(tensor, *arguments, **named)
        if not has_flipped and tensor.dtype == torch.float32 and tensor.numel() > 1:
            assert work is None
            has_flipped = True
            flip_in(tensor)
        return work

    torch.distributed.all_reduce = all_reduce_wrongly
    try:
        yield
    finally:
        torch.distributed.all_reduce = all_reduce
    assert has_flipped


def flip_in(tensor: Tensor) -> None:
    flip(local(tensor.detach()).view(-1).view(torch.int32), 3, 12)


def run_with_a_flip(folder: Path, flip: Flip, times: FaultTimes, **layout: int) -> str:
    """Trains twenty steps on the layout's ranks, with a flip; returns the alert."""
    resolved = resolve(folder, every_steps=5, compare_replicas_every_steps=3, **layout)
    ranks = resolved.placement.world_size
    ends = run_ranks(train_with_a_flip, ranks, resolved, flip, times, timeout_seconds=300)
    assert set(ends) == {"finished"}
    (alert,) = alerts(folder / "train")
    assert alert["step"] == 9
    return alert["message"]


def same_end(one: Path, other: Path) -> bool:
    name = Path("train/checkpoints/step_00000020")
    tensors = [read_tensors(folder / name) for folder in (one, other)]
    return all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def test_a_flipped_bit_is_found_and_undone(tmp_path: Path, fault_times: FaultTimes) -> None:
    """Planted in step 8, found at the comparison of step 9; step 5 was saved."""
    for name in ("faulty", "sound"):
        write_tokens(tmp_path / name / "tokens")
    flip = Flip("weight", "head.weight", 1)
    alert = run_with_a_flip(tmp_path / "faulty", flip, fault_times, replicate=2)
    assert alert.startswith("replicas differ: model/head.weight on rank 0 (")
    assert ") or rank 1 (" in alert and alert.endswith("went back to step 5")
    run_ranks(train, 2, resolve(tmp_path / "sound", replicate=2))
    assert same_end(tmp_path / "faulty", tmp_path / "sound")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("weight", {"model/norm.weight"}),
        ("exp_avg", {"model/norm.weight", "optimiser/norm.weight/exp_avg"}),
        ("exp_avg_sq", {"model/norm.weight", "optimiser/norm.weight/exp_avg_sq"}),
        (
            "gradient",
            {"model/norm.weight", "optimiser/norm.weight/exp_avg", "optimiser/norm.weight/exp_avg_sq"},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", [{"replicate": 2, "tensor": 2}, {"replicate": 3}], ids=("2 x 2", "three"))
def test_every_kind_of_flip_names_its_rank(
    tmp_path: Path, kind: str, changed: set[str], layout: dict[str, int], fault_times: FaultTimes
) -> None:
    write_tokens(tmp_path / "tokens")
    alert = run_with_a_flip(tmp_path, Flip(kind, "norm.weight", 2), fault_times, **layout)
    where = alert.removeprefix("replicas differ: ").partition(" on rank ")
    assert set(where[0].split(", ")) == changed
    assert where[2].startswith("2 (") and " or rank" not in alert


@pytest.mark.full
def test_a_wrong_sum_is_found_and_undone(tmp_path: Path, fault_times: FaultTimes) -> None:
    """One element of one all-reduce of gradients is wrong on one of three ranks, which is named."""
    for name in ("faulty", "sound"):
        write_tokens(tmp_path / name / "tokens")
    alert = run_with_a_flip(tmp_path / "faulty", Flip("sum", "", 1), fault_times, replicate=3)
    assert alert.startswith("replicas differ: ") and "/exp_avg" in alert
    assert " on rank 1 (" in alert and " or rank" not in alert and alert.endswith("went back to step 5")
    run_ranks(train, 3, resolve(tmp_path / "sound", replicate=3))
    assert same_end(tmp_path / "faulty", tmp_path / "sound")


@pytest.mark.full
def test_a_rank_that_is_wrong_again_ends_the_run(tmp_path: Path, fault_times: FaultTimes) -> None:
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path, every_steps=5, compare_replicas_every_steps=3, replicate=2)
    with pytest.raises(RuntimeError, match=r"step 9: replicas differ.*not the first time in this job"):
        run_ranks(
            train_with_a_flip, 2, resolved, Flip("weight", "head.weight", 1, 2), fault_times,
            timeout_seconds=300,
        )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline": 2, "pipeline_layers": (1, 1), "replicate": 2, "micro_batch": 2},
        {"replicate": 2, "shard": 2},
        {"tensor": 2, "shard": 2},
    ],
    ids=("pipeline", "hybrid", "tensor"),
)
def test_undisturbed_runs_have_equal_replicas(tmp_path: Path, layout: dict[str, int]) -> None:
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path, compare_replicas_every_steps=1, **layout)
    run_ranks(train, resolved.placement.world_size, resolved, timeout_seconds=300)
    assert alerts(tmp_path / "train") == []
