"""Watches of a rank and a node by hand: memory, streams, and steps that were not finite."""

import os
import threading
from pathlib import Path
from typing import TextIO

import pytest
import torch
from torch import nn

from kielo.train.failsafe_stream import FailsafeStream
from kielo.train.feed import Reader
from kielo.train.watch.checks import LocalFinite, described
from kielo.train.watch.resources import HostMemory, host_memory

GROUPS = "3:cpu:/other\n0::/job/step\n"
NAMES = {2: ("memory.max", "memory.current", "file", "shmem"),
         1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")}  # fmt: skip


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, version: int, limit: object, used: int, cache: int, shared: int) -> dict[str, str]:
    limit_name, used_name, cache_name, shared_name = NAMES[version]
    stat = f"anon 5\n{cache_name} {cache}\n{shared_name} {shared}\n"
    return {f"{folder}/{limit_name}": f"{limit}\n", f"{folder}/{used_name}": f"{used}\n",
            f"{folder}/memory.stat": stat}  # fmt: skip


NODE = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 7 kB\nMemAvailable: 300 kB\n"}
OF_JOB = "the job's limit (cgroup)"


def test_the_memory_of_a_node(tmp_path: Path) -> None:
    memory = host_memory(write(tmp_path, NODE))
    assert memory == HostMemory(300 * 1024, 1000 * 1024, "the node")
    assert memory.taken_share == pytest.approx(0.7)


@pytest.mark.parametrize("version", (1, 2))
def test_the_memory_of_a_group(tmp_path: Path, version: int) -> None:
    """Page cache is given back, but for what is shared; the limits around it count up to the top."""
    top = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    line = GROUPS if version == 2 else "3:cpu,memory:/job/step\n0:cpuset,name=memory:/none\n"
    beyond = os.path.dirname(top)
    files = (
        NODE | {"proc/self/cgroup": line} | group(f"{top}/job/step", version, 250_000, 90_000, 30_000, 20_000)
    )
    files |= group(f"{top}/job", version, 500_000, 400_000, 70_000, 30_000) | group(
        beyond, version, 9, 8, 0, 0
    )
    files |= group(f"{top}/other", version, 9, 8, 0, 0) | group(f"{top}/none", version, 9, 8, 0, 0)
    assert host_memory(write(tmp_path, files)) == HostMemory(500_000 - 360_000, 500_000, OF_JOB)
    write(tmp_path, group(f"{top}/job", version, 500_000, 100_000, 0, 0))
    assert host_memory(tmp_path) == HostMemory(250_000 - 80_000, 250_000, OF_JOB)
    write(tmp_path, group(f"{top}/job", version, 500_000, 600_000, 0, 0))
    assert host_memory(tmp_path) == HostMemory(0, 500_000, OF_JOB)
    write(tmp_path, group(f"{top}/job", version, "max", 600_000, 0, 0))
    write(tmp_path, group(f"{top}/job/step", version, 900_000, 200_000, 0, 0))
    assert host_memory(tmp_path).owner == "the node"


@pytest.mark.parametrize(("bad", "more"), [(8, ""), (9, " and 1 more"), (11, " and 3 more")])
def test_eight_ranks_are_named(bad: int, more: str) -> None:
    seen = [("a", False, False)] + [("b", rank % 2 == 0, True) for rank in range(bad)]
    named = [f"rank {rank + 1} (b): its {'loss and ' * (rank % 2 == 0)}gradients" for rank in range(8)]
    assert described(seen) == ", ".join(named) + more


def test_one_rank_alone_and_all_ranks() -> None:
    assert described([("a", True, False)]) == "rank 0 (a): its loss"
    all_of = "ranks: the weights may be spoilt, or ranks that share a sequence passed it on"
    assert described([("a", True, False), ("b", False, True)]) == f"all 2 {all_of}"


def test_the_first_layer_of_each_stage_is_watched() -> None:
    """A stage without layers is none; a part of a gradient that is not finite is enough."""
    parts = [nn.Module(), nn.Module(), nn.Module()]
    for part, layers in zip(parts, ((), (nn.Identity(), nn.Identity()), (nn.Identity(),))):
        part.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
    model = nn.Module()
    model.parts = parts
    watch = LocalFinite(model, torch.device("cpu"))
    sound, bad = torch.ones(2), torch.tensor([1.0, torch.inf])
    found = []
    for number, (stage, layer, gradient, loss) in enumerate(
        [(1, 0, bad, 1.0), (1, 1, bad, 1.0), (2, 0, bad, torch.nan), (2, 0, sound, 1.0)], start=1
    ):
        hidden = torch.ones(2, requires_grad=True)
        parts[stage].layers[str(layer)](hidden).backward(gradient)
        parts[stage].layers[str(layer)](torch.ones(2))
        watch.note(number, torch.tensor(loss))
        step, said = watch.seen(0)
        found.append((step, said.partition("its ")[2]))
        if number > 1:
            assert watch.seen(1)[0] == number - 1
    assert found == [(1, "gradients"), (2, ""), (3, "loss and gradients"), (4, "")]


class Broken:
    """A stream into a file that takes nothing any more."""

    def __init__(self, file: TextIO):
        self.fileno = file.fileno

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise ValueError("closed")


@pytest.mark.parametrize(
    ("call", "given", "error"), [("write", ["four"], OSError), ("flush", [], ValueError)]
)
def test_a_stream_that_failed_takes_nothing_and_raises_nothing(
    tmp_path: Path, call: str, given: list[str], error: type[Exception]
) -> None:
    """Its descriptor leads nowhere from then on, so that what waits in it cannot fail again."""
    file = (tmp_path / "out").open("w")
    sound = FailsafeStream(file)
    assert sound.write("abc") == 3 and sound.failure is None and sound.name == file.name
    sound.flush()
    assert (tmp_path / "out").read_text() == "abc"
    open_before = len(os.listdir("/proc/self/fd"))
    broken = FailsafeStream(Broken(file))
    getattr(broken, call)(*given)
    first = broken.failure
    assert isinstance(first, error) and broken.write("ninechars") == 9 and broken.failure is first
    file.write("lost")
    file.flush()
    assert (tmp_path / "out").read_text() == "abc" and len(os.listdir("/proc/self/fd")) == open_before
    file.close()


def test_a_reader_begins_once_and_ends_when_it_is_closed() -> None:
    """An error at the beginning is told by the call, and the next call begins again."""
    begun: list[int] = []

    def begin() -> None:
        begun.append(threading.get_ident())
        if len(begun) == 1:
            raise OSError("not yet")

    reader = Reader(begin)
    with pytest.raises(OSError, match="not yet"):
        reader.submit(max, 3, 5).result(10)
    assert [reader.submit(max, 3, number).result(10) for number in (5, 7)] == [5, 7]
    assert begun == [reader.thread] * 2 and reader.thread != threading.get_ident()
    thread = next(one for one in threading.enumerate() if one.ident == reader.thread)
    assert thread.daemon and thread.name == "feed"
    reader.close()
    assert not thread.is_alive()
