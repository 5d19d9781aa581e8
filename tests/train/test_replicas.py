"""Replicas that must be equal are compared: a flipped bit is found, its tensor and rank are named, and the
run ends with the weights of an undisturbed one.
"""

import json
from dataclasses import replace
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
from tests.ranks import run_ranks
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


def train_with_a_flip(resolved: Any, kind: str, name: str, faulty_rank: int, times: int = 1) -> str:
    """Trains; on one rank a bit of a weight, a moment or a reduced gradient flips in step 8, the first
    `times` times that this step is taken.
    """
    taken = 0

    def faulty_step(parts: Any, batch: Any, learning_rate: float) -> Any:
        nonlocal taken
        is_faulty = batch.step == FAULTY_STEP and torch.distributed.get_rank() == faulty_rank
        taken += is_faulty
        is_faulty = is_faulty and taken <= times
        if is_faulty and kind == "gradient":
            parts = replace(parts, on_gradients=lambda _: flip_in(parts.optimiser.parameters[name].grad))
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


def flip_in(tensor: Tensor) -> None:
    flip(local(tensor.detach()).view(-1).view(torch.int32), 3, 12)


def run_with_a_flip(folder: Path, kind: str, name: str, rank: int, **layout: int) -> str:
    """Trains twenty steps on the layout's ranks, with a flip; returns the alert."""
    resolved = resolve(folder, every_steps=5, compare_replicas_every_steps=3, **layout)
    ranks = resolved.placement.world_size
    ends = run_ranks(train_with_a_flip, ranks, resolved, kind, name, rank, timeout_seconds=300)
    assert set(ends) == {"finished"}
    (line,) = (folder / "train" / "alerts.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["step"] == 9
    return json.loads(line)["message"]


def same_end(one: Path, other: Path) -> bool:
    name = Path("train/checkpoints/step_00000020")
    tensors = [read_tensors(folder / name) for folder in (one, other)]
    return all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def test_a_flipped_bit_is_found_and_undone(tmp_path: Path) -> None:
    """Planted in step 8, found at the comparison of step 9; step 5 was saved."""
    for name in ("faulty", "sound"):
        write_tokens(tmp_path / name / "tokens")
    alert = run_with_a_flip(tmp_path / "faulty", "weight", "head.weight", 1, replicate=2)
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
    tmp_path: Path, kind: str, changed: set[str], layout: dict[str, int]
) -> None:
    write_tokens(tmp_path / "tokens")
    alert = run_with_a_flip(tmp_path, kind, "norm.weight", 2, **layout)
    where = alert.removeprefix("replicas differ: ").partition(" on rank ")
    assert set(where[0].split(", ")) == changed
    assert where[2].startswith("2 (") and " or rank" not in alert


@pytest.mark.full
def test_a_rank_that_is_wrong_again_ends_the_run(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path, every_steps=5, compare_replicas_every_steps=3, replicate=2)
    with pytest.raises(RuntimeError, match=r"step 9: replicas differ.*not the first time in this job"):
        run_ranks(train_with_a_flip, 2, resolved, "weight", "head.weight", 1, 2, timeout_seconds=300)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline": 2, "pipeline_layers": (1, 1), "replicate": 2},
        {"replicate": 2, "shard": 2},
        {"tensor": 2, "shard": 2},
    ],
    ids=("pipeline", "hybrid", "tensor"),
)
def test_undisturbed_runs_have_equal_replicas(tmp_path: Path, layout: dict[str, int]) -> None:
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path, compare_replicas_every_steps=1, **layout)
    run_ranks(train, resolved.placement.world_size, resolved, timeout_seconds=300)
    assert not (tmp_path / "train" / "alerts.jsonl").exists()
