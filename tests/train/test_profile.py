"""The parts of a step: exact on a trace made by hand, and adding up on one that torch recorded."""

import gzip
import json

import pytest
import torch
from step_parts import step_parts

from kielo.train import profile
from kielo.train.profile import HEAD_AND_LOSS, OPTIMISER, PARTS, Profile, parts_of

CPU = torch.device("cpu")
MAIN, AUTOGRAD = 1, 2


def event(category: str, name: str, start: float, end: float, thread: int = MAIN, **args) -> dict:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "pid": 7,
        "tid": thread,
        "args": args,
    }


def launched(
    number: int,
    launch: float,
    name: str,
    start: float,
    end: float,
    thread: int = MAIN,
    category: str = "kernel",
) -> list:
    """A launch on the host at `launch` and what it started on the GPU."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, thread, correlation=number),
        event(category, name, start, end, thread=20, correlation=number),
    ]


def gpu_trace() -> dict:
    """Two steps of 1000 µs on the device, from 500 to 2500, the host ahead of it."""
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 600),
        event("user_annotation", "ProfilerStep#2", 600, 1200),
        event("gpu_user_annotation", "ProfilerStep#1", 400, 1500),
        event("user_annotation", HEAD_AND_LOSS, 100, 200),
        event("user_annotation", OPTIMISER, 300, 400),
        event("user_annotation", "FSDP::all_gather", 0, 1200),
        event("cpu_op", "aten::mm", 0, 1200),  # what the host did is of no account here
        # Under way when the first step began: only its end lies in the window, and nothing launched it.
        event("kernel", "vectorized_elementwise_kernel", 300, 520, thread=20, correlation=99),
        *launched(1, 10, "nvjet_tst_128x256_64x4_h_bz_NNT", 500, 700),
        *launched(2, 20, "ncclDevKernel_AllGather_RING_LL", 600, 800),  # 100 of it beside the product
        *launched(3, 30, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 800, 950),
        *launched(4, 40, "triton_poi_fused__scaled_dot_product_flash_attention_mm_3", 950, 1000),
        # 1000 to 1050: nothing.
        *launched(5, 150, "cutlass_80_tensorop_bf16_s16816gemm", 1050, 1150),  # the head
        *launched(6, 160, "softmax_warp_forward", 1100, 1250),  # two streams: 50 of it at the same time
        # The autograd thread is in no range, though the time is that of one.
        *launched(7, 170, "void cutlass::device_kernel<Sm90ScaledMm>", 1250, 1350, AUTOGRAD),
        *launched(8, 310, "multi_tensor_apply_kernel", 1350, 1400),  # the optimiser
        # launched there, but no work of its own
        *launched(9, 320, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1400, 1450),
        *launched(10, 700, "Memcpy DtoD (Device -> Device)", 1450, 1475, category="gpu_memcpy"),
        *launched(11, 710, "triton_tem_fused_flex_attention_0", 2300, 2500),
    ]
    return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}


def test_the_parts_of_a_gpu_trace_are_exact():
    """Streams that overlap, launches in ranges and out of them, gaps, and a kernel from before: microseconds
    over both steps, halved.
    """
    expected = {
        HEAD_AND_LOSS: 200, OPTIMISER: 50, "attention": 150 + 200, "matrices": 200 + 100,
        "memory_bound": 50 + 25,
        "communication": 100 + 50, "idle": 50 + 825, "step": 2000,
    }  # fmt: skip
    assert parts_of(gpu_trace()) == pytest.approx({part: value / 2 / 1e6 for part, value in expected.items()})


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("attn_fwd", "attention"),  # AOTriton, on AMD
        ("Cijk_Ailk_Bljk_BBS_BH_MT256x256x64", "matrices"),  # hipBLASLt
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrices"),
        ("void cublasLt::splitKreduce_kernel", "matrices"),
        ("triton_tem_fused_mm_2", "matrices"),
        ("triton_red_fused_mm_rms_norm_1", "memory_bound"),
        ("void at::native::unrolled_elementwise_kernel", "memory_bound"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
    ],
)
def test_a_kernel_is_told_by_its_name(kernel, part):
    trace = gpu_trace()["traceEvents"][:2] + launched(1, 5, kernel, 10, 30)
    parts = parts_of({"traceEvents": trace})
    assert {name for name in PARTS if parts[name]} == {part}


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="without steps"):
        parts_of({"traceEvents": []})


def a_step():
    """A model of products, attention, a norm and an optimiser, with the loop's two ranges."""
    model = torch.nn.Linear(96, 96)
    optimiser = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(64, 96)

    def run() -> None:
        hidden = torch.nn.functional.rms_norm(model(inputs), (96,))
        heads = hidden.view(4, 16, 6, 16).transpose(1, 2)
        hidden = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        with torch.profiler.record_function(HEAD_AND_LOSS):
            loss = torch.logsumexp(hidden.reshape(64, 96) @ model.weight, -1).sum()
        loss.backward()
        with torch.profiler.record_function(OPTIMISER):
            optimiser.step()
        optimiser.zero_grad()

    return run


def test_parts_of_a_recorded_step_add_up():
    """Each kind of work is found on the CPU, and all of them with the idle time are the step."""
    parts = step_parts(a_step(), 3, CPU)
    assert sum(parts[part] for part in (*PARTS, "idle")) == pytest.approx(parts["step"])
    assert all(parts[part] > 0 for part in PARTS if part != "communication") and parts["communication"] == 0
    assert 0 <= parts["idle"] < parts["step"]


@pytest.mark.parametrize(("first_call", "first_step"), [(1, 4), (6, 8)])
def test_a_profile_is_written_when_asked_for(tmp_path, first_call, first_step):
    """Three steps from the fourth, or, where the fourth is over, from the first that can be: the trace, the
    parts and the line; nothing else is left in the folder.
    """
    told, run = [], a_step()
    profiles = Profile(tmp_path, 4, 3, CPU, told.append)
    for step in range(first_call, 12):
        run()
        profiles.step(step)
    profiles.close()
    assert {file.name for file in (tmp_path / "profile").iterdir()} == {"trace_rank0.json.gz", "profile.json"}
    with gzip.open(tmp_path / "profile" / "trace_rank0.json.gz", "rt") as stream:
        trace = json.load(stream)
    steps = [
        e
        for e in trace["traceEvents"]
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")
    ]
    written = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert len(steps) == 3 and (written["first_step"], written["steps"]) == (first_step, 3)
    assert written["seconds_per_step"] == pytest.approx(parts_of(trace))
    assert (
        len(told) == 1
        and told[0].startswith("3 steps: ")
        and "idle" in told[0]
        and "trace_rank0.json.gz" in told[0]
    )


def test_no_profile_is_no_work(tmp_path, monkeypatch):
    """The profiler is never touched when not asked for;
    asked for too late, there is no file, and a line says so.
    """
    monkeypatch.setattr(torch.profiler, "profile", None)
    nothing = Profile(tmp_path, 3, 0, CPU)
    for step in range(1, 9):
        nothing.step(step)
    nothing.close()
    monkeypatch.undo()
    told = []
    late = Profile(tmp_path, 3, 5, CPU, told.append)
    for step in range(1, 5):
        late.step(step)
    late.close()
    assert told == ["no profile: the run ended before 5 steps were recorded"] and not list(tmp_path.iterdir())


def test_the_line_names_shares_from_the_largest():
    parts = dict.fromkeys(PARTS, 0.0) | {
        "matrices": 0.75,
        "attention": 0.25,
        OPTIMISER: 0.2,
        "idle": 0.03,
        "step": 1.23,
    }
    assert (
        profile.line(parts, 10)
        == "10 steps: 1.23 s each: matrices 61 %, attention 20 %, optimiser 16 %, idle 2.4 %"
    )
