"""Parts of tensors on a rank of many, by hand: its slices, who counts in a sum, and who holds copies."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from kielo.parallel import gradient_clipping, replicas, tensor_parallel
from kielo.parallel.gradient_clipping import sum_over_parts
from kielo.parallel.materialise import local, local_slices, materialise
from kielo.parallel.mesh import Mesh, build_mesh
from kielo.parallel.projection import TensorAxis
from kielo.parallel.replicas import Difference, Holders, Replicas, axes_with_replicas, replicated_axes
from kielo.ranks import objects
from kielo.recipe.sections import Layout
from kielo.verify.torch_fakes import fake_world


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """Rank 7 of 12, or another: two replicas of three shards of two tensor ranks."""
    rank = getattr(request, "param", 7)
    with fake_world(rank, 12, has_pipeline=False) as world:
        yield build_mesh(world, Layout(replicate=2, shard=3, tensor=2))


def part(of: Mesh, axes: tuple[str, ...], placements: list[Any], *size: int) -> DTensor:
    """A DTensor of ones along these axes, of which this rank holds a part of `size`."""
    axis = of.parameters[axes if len(axes) > 1 else axes[0]]
    return DTensor.from_local(torch.ones(size), axis, placements, run_check=False)


@pytest.mark.parametrize(
    ("mesh", "rows"), [(0, (0, 3)), (2, (3, 6)), (4, (6, 7)), (7, (0, 3)), (11, (6, 7))], indirect=["mesh"]
)
def test_a_shard_is_cut_as_torch_chunks(mesh: Mesh, rows: tuple[int, int]) -> None:
    """Seven rows over three ranks are 3, 3 and 1; of four, the last has none."""
    whole = DTensor.from_local(
        torch.ones(rows[1] - rows[0], 5), mesh.parameters["shard"], [Shard(0)], run_check=False,
        shape=(7, 5), stride=(5, 1),
    )  # fmt: skip
    assert local_slices(whole) == (slice(*rows), slice(0, 5))
    four = DTensor.from_local(
        torch.ones(0, 5), mesh.parameters["shard"], [Shard(0)], run_check=False, shape=(4, 5), stride=(5, 1)
    )
    begin = {0: 0, 3: 2, 6: 4}[rows[0]]
    assert local_slices(four) == (slice(begin, min(begin + 2, 4)), slice(0, 5))
    assert local_slices(torch.ones(3, 2)) == (slice(0, 3), slice(0, 2))


def test_each_axis_cuts_its_own_dim(mesh: Mesh) -> None:
    """Rank 7 has the first of three shards and the second of two tensor ranks."""
    both = part(mesh, ("shard", "tensor"), [Shard(1), Shard(0)], 4, 2)
    assert both.shape == (8, 6) and local_slices(both) == (slice(4, 8), slice(0, 2))
    copied = part(mesh, ("shard", "tensor"), [Replicate(), Shard(1)], 4, 3)
    assert local_slices(copied) == (slice(0, 4), slice(3, 6))
    assert local(copied).shape == (4, 3)
    with pytest.raises(NotImplementedError, match="on mesh axis tensor"):
        local_slices(part(mesh, ("shard", "tensor"), [Replicate(), Partial()], 4, 3))


class Two(nn.Module):
    """A weight that two names share, one without elements, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.empty = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(0, 3))
        self.second = nn.Parameter(torch.zeros(2, 3))
        self.resets: list[str] = []

    def tie(self) -> None:
        self.second = self.first

    def reset_buffers(self, device: Any) -> None:
        self.resets.append(str(device))


def test_parameters_are_filled_once_and_buffers_set() -> None:
    """Tied ones once; nothing is asked of what has no elements; values of another shape are refused."""
    asked: list[Any] = []

    def fill(name: str, shape: torch.Size, box: Any) -> torch.Tensor:
        asked.append((name, tuple(shape), box))
        return torch.arange(6.0).view(2, 3)

    with torch.device("meta"):
        model = Two()
    made = materialise(model, torch.device("cpu"), fill)
    assert made is model and asked == [("first", (2, 3), (slice(0, 2), slice(0, 3)))]
    assert model.second is model.first and model.first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model.resets == ["cpu"]
    with pytest.raises(ValueError, match=r"first: \(2, 3\) is held here, got \(3, 2\)"):
        materialise(model, torch.device("cpu"), lambda name, shape, box: torch.zeros(3, 2))
    assert materialise(model, torch.device("cpu"), None).resets == ["cpu", "cpu"]


def test_parameters_of_an_offloaded_model_are_on_the_processor() -> None:
    """Its buffers are on the device in any case; usually all is."""
    with torch.device("meta"):
        usual = Two()
    assert materialise(usual, torch.device("meta"), None).first.device.type == "meta"
    for is_offloaded, place in ((True, "cpu"), (False, "meta")):
        with torch.device("meta"):
            model = Two()
        materialise(model, torch.device("meta"), None, is_offloaded)
        assert model.first.device.type == place and model.resets == ["meta"]


@pytest.mark.parametrize(
    ("mesh", "counted"),
    [
        (0, (True, True)), (1, (True, False)), (2, (True, True)), (3, (True, False)), (6, (False, False)),
        (7, (False, False)),
    ],
    indirect=["mesh"],
)  # fmt: skip
def test_of_ranks_with_the_same_part_the_first_counts(mesh: Mesh, counted, monkeypatch) -> None:
    """Rank 7 is in the second replica; a plain tensor's values are its own."""
    asked: list[tuple[int, ...]] = []

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        asked.append(tuple(dist.get_process_group_ranks(group)))
        tensor.add_(100)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    axes = ("replicate", "shard", "tensor")
    split = part(mesh, axes, [Replicate(), Shard(0), Shard(1)], 2, 2)
    whole = part(mesh, axes, [Replicate(), Shard(0), Replicate()], 2, 2)
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])]
    sums = sum_over_parts(values, [split, torch.ones(2), whole])
    assert [len(ranks) for ranks in asked] == [2, 3, 2]  # the last axis first, each once
    first, last = values[0] * counted[0] + 300, values[2] * counted[1] + 300
    assert torch.equal(torch.stack(sums), torch.stack([first, values[1], last]))
    assert torch.equal(sum_over_parts(values[:1], [split])[0], first)


def test_replicas_are_compared_along_the_axes_that_copy(mesh: Mesh, monkeypatch) -> None:
    """Each name with the axes along which ranks hold the same; those that differ are asked for by name."""
    axes = ("replicate", "shard", "tensor")
    split = part(mesh, axes, [Replicate(), Shard(0), Shard(1)], 2, 2)
    whole = part(mesh, axes, [Replicate(), Shard(0), Replicate()], 2, 2)
    sharded = part(mesh, axes, [Shard(0), Shard(0), Shard(1)], 2, 2)
    of_shard = part(mesh, ("shard",), [Shard(0)], 2, 2)
    assert axes_with_replicas(mesh) == ["replicate", "tensor"]
    found = [replicated_axes(one, mesh) for one in (split, whole, sharded, of_shard, torch.ones(2))]
    assert found == [["replicate"], ["replicate", "tensor"], [], *2 * [["replicate", "tensor"]]]
    maxima: list[int] = []

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        if op is not None:
            maxima.append(len(tensor) // 2)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    compared = Replicas({"split": split, "sharded": sharded, "whole": whole}, mesh)
    assert compared.exist and compared.differences() == []
    assert maxima == [2, 1]  # two tensors along replicate, one along tensor


def test_one_rank_has_no_replicas() -> None:
    with fake_world(0, 1, has_pipeline=False) as world:
        alone = build_mesh(world, Layout(shard=1))
        assert axes_with_replicas(alone) == [] and not Replicas({"a": torch.ones(2)}, alone).exist


def test_features_of_three_ranks_are_normed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose parts are equal here, so that the whole's mean and variance are those of one: torch's layer_norm
    says the same, forward and back, and sums are not scattered along the sequence.
    """
    asked: list[bool] = []
    monkeypatch.setattr(tensor_parallel, "wait", lambda coming: coming)
    monkeypatch.setattr(
        tensor_parallel, "start_sum", lambda x, axis: asked.append(axis.along_sequence) or 3 * x
    )
    generator = torch.Generator().manual_seed(2)
    given, gradient = (torch.randn(2, 4, 5, generator=generator) for _ in range(2))
    mine, plain = (given.clone().requires_grad_() for _ in range(2))
    normed = tensor_parallel.split_norm(mine, 0.3, TensorAxis("group", 3, True))
    expected = torch.nn.functional.layer_norm(plain, (5,), eps=0.3)
    assert torch.allclose(normed, expected, atol=1e-6) and asked == [False, False]
    normed.backward(gradient)
    expected.backward(gradient)
    assert torch.allclose(mine.grad, plain.grad, atol=1e-6)
    half = tensor_parallel.split_norm(given.bfloat16(), 0.3, TensorAxis("group", 3, False))
    assert half.dtype == torch.bfloat16


def test_chunks_of_a_checksum_are_32_mib() -> None:
    """Of int64; and no more than a tensor's elements are counted."""
    assert replicas.CHUNK_ELEMENTS * 8 == 32 * 2**20
    assert replicas.checksum(torch.tensor([3, 5, 7], dtype=torch.int32)).item() == 3 * 1 + 5 * 3 + 7 * 5


def test_the_square_of_a_part_counts_once(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 ranks two hold each part of what is split over shards and tensor ranks, four of shards alone."""
    monkeypatch.setattr(gradient_clipping, "sum_over", lambda total, axes: total)
    axes = ("replicate", "shard", "tensor")
    for placements, copies in (
        ([Replicate(), Shard(0), Shard(1)], 2), ([Replicate(), Shard(0), Replicate()], 4),
        ([Shard(0), Shard(0), Shard(1)], 1), (None, 12),
    ):  # fmt: skip
        model = nn.Module()
        ones = torch.ones(3, 4)
        model.weight = nn.Parameter(ones if placements is None else part(mesh, axes, placements, 3, 4))
        model.weight.grad = 2 * model.weight.detach()
        norm = gradient_clipping.gradient_norm(model, mesh).item()
        assert norm == pytest.approx((3 * 4 * 2**2 / copies) ** 0.5)


def test_ranks_that_differ_are_named_with_their_tensor(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank tells who should hold the same, and its checksum: ones are 16 times the bits of 1.0."""
    axes = ("replicate", "shard", "tensor")
    split = part(mesh, axes, [Replicate(), Shard(0), Shard(1)], 2, 2)
    whole = part(mesh, axes, [Replicate(), Shard(0), Replicate()], 2, 2)
    bits = 0x3F800000 * (1 + 3 + 5 + 7)
    told: list[Any] = []

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        tensor[-1] += op is not None  # another rank has another number

    def gather(mine: list[Any]) -> list[list[Any]]:
        told.extend(mine)
        everyone: list[list[Any]] = [[]] * 8
        everyone[7] = mine
        everyone[1] = [(holders, bits + (holders.name == "whole")) for holders, _ in mine[:2]]
        return everyone

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(objects, "all_gather", gather)
    assert Replicas({"split": split, "whole": whole}, mesh).differences() == [Difference("whole", (1, 7))]
    assert told == [
        (Holders("replicate", (1, 7), "split"), bits), (Holders("replicate", (1, 7), "whole"), bits),
        (Holders("tensor", (6, 7), "whole"), bits),
    ]  # fmt: skip
