"""Parts of a step by hand where intervals touch, are cut or are of no step; and who writes a profile when."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_parts import step_parts

from kielo.train import profile
from kielo.train.profile import HEAD_AND_LOSS, OPTIMISER, PARTS, Profile, line, parts_of
from tests.train.test_profile import AUTOGRAD, CPU, a_step, event, launched


def in_microseconds(parts: dict[str, float], steps: int) -> dict[str, float]:
    return {part: pytest.approx(seconds * steps * 1e6) for part, seconds in parts.items()}


def test_the_parts_of_a_trace_without_a_gpu() -> None:
    """Two steps from 100 to 700: what is beside them or in no thread of a range is not of it."""
    work = [
        ("aten::mm", 120, 180), ("aten::add", 150, 200), ("c10d::allreduce_", 190, 230),
        ("aten::scaled_dot_product_attention", 300, 350), ("aten::copy_", 350, 350),
        ("aten::copy_", 419, 420), ("aten::mm", 420, 425), ("aten::mm", 430, 480), ("aten::mm", 500, 510),
        ("aten::_foreach_mul_", 610, 640), ("aten::copy_", 90, 110), ("aten::copy_", 690, 720),
        ("aten::copy_", 710, 730), ("ProfilerStep#3", 100, 400), ("Torch-Compiled Region: 0/1", 250, 290),
        ("TorchDynamo Cache Lookup", 260, 299),
    ]  # fmt: skip
    trace = [
        event("user_annotation", "ProfilerStep#3", 100, 400),
        event("user_annotation", "ProfilerStep#4", 400, 700),
        event("cpu_op", "ProfilerStep#5", 0, 900),
        event("user_annotation", "another range", 100, 700),
        event("user_annotation", HEAD_AND_LOSS, 420, 500),
        event("user_annotation", OPTIMISER, 600, 650),
        event("python_function", OPTIMISER, 100, 420),
        event("python_function", "aten::mm", 650, 690),
        event("cpu_op", "aten::mm", 470, 490, AUTOGRAD),
        *(event("cpu_op", *operator) for operator in work),
        event("cpu_op", "aten::mm", 520, 530) | {"ph": "B"},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 540, "pid": 7, "tid": 1},
    ]
    expected = {
        HEAD_AND_LOSS: 5 + 50 + 10, OPTIMISER: 30, "attention": 50, "matrices": 60 + 10,
        "memory_bound": 20 + 1 + 10 + 10, "communication": 30, "idle": 600 - 286, "step": 600,
    }  # fmt: skip
    assert in_microseconds(parts_of({"traceEvents": trace}), 2) == expected


def test_the_steps_of_a_gpu_are_the_kernels_that_they_launched() -> None:
    """Those of the first and last moment of the host's steps too; earlier and later ones are cut to them."""
    trace = [
        event("user_annotation", "ProfilerStep#7", 100, 300),
        event("user_annotation", "ProfilerStep#8", 300, 500),
        event("user_annotation", HEAD_AND_LOSS, 0, 10),
        event("cuda_driver", "cuLaunchKernel", 100, 101, correlation=1),
        event("kernel", "vectorized_elementwise_kernel", 600, 650, thread=20, correlation=1),
        *launched(2, 500, "cutlass_gemm", 900, 1000),
        *launched(3, 501, "vectorized_elementwise_kernel", 990, 1200),
        *launched(4, 99, "flash_fwd_kernel", 500, 620),
        *launched(5, 200, "Memset (Device)", 700, 710, category="gpu_memset"),
        event("kernel", "vectorized_elementwise_kernel", 720, 740, thread=20),
        event("cpu_op", "aten::mm", 50, 60, correlation=2),
        event("cuda_runtime", "cudaDeviceSynchronize", 400, 500),
    ]
    del trace[9]["args"]
    expected = dict.fromkeys(PARTS, 0) | {
        "attention": 20, "matrices": 100, "memory_bound": 30 + 10 + 20, "idle": 400 - 180, "step": 400,
    }  # fmt: skip
    assert in_microseconds(parts_of({"traceEvents": trace}), 2) == expected
    only_later = [*trace[:2], *launched(3, 501, "cutlass_gemm", 990, 1200)]
    with pytest.raises(ValueError, match="no kernel that a traced step launched"):
        parts_of({"traceEvents": only_later})


@pytest.mark.parametrize(
    ("operator", "part"),
    [
        ("aten::addmm", "matrices"), ("aten::bmm", "matrices"), ("aten::baddbmm", "matrices"),
        ("aten::_scaled_mm", "matrices"), ("aten::mv", "matrices"), ("aten::dot", "matrices"),
        ("mkldnn::_linear_pointwise", "matrices"), ("mkl::_mkl_linear", "matrices"),
        ("aten::mm_out", "matrices"), ("aten::mmx", "memory_bound"), ("aten::dotted", "memory_bound"),
        ("aten::flash_attention", "attention"), ("flex_attention", "attention"),
        ("gloo:all_reduce", "communication"), ("c10d::scaled_dot_product", "communication"),
    ],
)  # fmt: skip
def test_an_operator_is_told_by_its_name(operator: str, part: str) -> None:
    steps = event("user_annotation", "ProfilerStep#1", 0, 100)
    parts = parts_of({"traceEvents": [steps, event("cpu_op", operator, 20, 60)]})
    assert in_microseconds(parts, 1) == dict.fromkeys(PARTS, 0) | {part: 40, "idle": 60, "step": 100}


def test_the_line_leaves_out_what_takes_no_time() -> None:
    """Less than half a tenth of a per cent; from 10 % on without a decimal."""
    parts = dict.fromkeys(PARTS, 0.0) | {
        "matrices": 1.4, "attention": 0.2, OPTIMISER: 0.198, "memory_bound": 0.001,
        "communication": 0.000999, "idle": 0.2, "step": 2.0,
    }  # fmt: skip
    assert line(parts, 3) == (
        "3 steps: 2 s each: matrices 70 %, attention 10 %, optimiser 9.9 %, memory bound 0.1 %, idle 10 %"
    )
    assert line(dict.fromkeys((*PARTS, "idle", "step"), 0.0), 1) == "1 steps: 0 s each: idle 0.0 %"


def test_one_step_warms_up_and_so_many_are_recorded() -> None:
    """Each call takes one step; the step's time is the mean over those that count."""
    done: list[int] = []

    def run() -> None:
        done.append(len(done))
        torch.ones(8).mul_(3.0)

    parts = step_parts(run, 3, CPU)
    assert len(done) == 4 and parts["step"] > 0 and parts["matrices"] == parts["attention"] == 0


class Recorded:
    """A profile of steps four to six; `paused`: the steps at which the run's clock stood still."""

    def __init__(self, folder: Path, last_step: int, steps: int = 3):
        self.told: list[str] = []
        self.paused: list[int] = []
        of_run, run = Profile(folder, 4, steps, CPU, self.told.append, self.pause), a_step()
        for self.at in range(1, last_step + 1):
            run()
            of_run.step(self.at)
        of_run.close()

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused.append(self.at)
        yield


def test_the_clock_stands_still_while_a_profile_begins_and_is_written(tmp_path: Path) -> None:
    """It begins a step before the one that warms it up, and is written after the last of its steps."""
    recorded = Recorded(tmp_path, 9)
    assert recorded.paused == [2, 6] and len(recorded.told) == 1
    file = tmp_path / "profile" / "trace_rank0.json.gz"
    assert recorded.told[0].endswith(f". Trace: {file} (open in https://ui.perfetto.dev)")


def test_each_rank_writes_its_trace_and_the_first_the_profile(tmp_path: Path, monkeypatch) -> None:
    """The trace is brought to the disk under another name first. Another rank tells nothing."""
    done: list[Any] = []
    whole, named = profile.bring_to_disk, profile.name_durably

    def bring_to_disk(path: Path) -> None:
        done.append(path.name.partition(".trace")[2])
        whole(path)

    def name_durably(path: Path, name: Path) -> None:
        done.append(name.name)
        named(path, name)

    monkeypatch.setattr(profile, "bring_to_disk", bring_to_disk)
    monkeypatch.setattr(profile, "name_durably", name_durably)
    ranks = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 3)
    monkeypatch.setattr(profile, "dist", ranks)
    assert Recorded(tmp_path, 6).told == [] and done == ["_rank3.json.gz", "trace_rank3.json.gz"]
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["trace_rank3.json.gz"]
    assert Recorded(tmp_path / "early", 5).told == []


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    (told,) = Recorded(tmp_path, 6).told
    assert told.startswith("no profile of rank 0: ") and "xists" in told
