"""What the checks say, and how they count: tables and verdicts of hand-made results, memory, settings."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.verify import parity, screens
from kielo.verify.certificate import ParityOptions
from kielo.verify.parity import nudge, relative_loss_difference, rounding_differences
from kielo.verify.rank_watch import MemoryLedger, Peak
from kielo.verify.trace import base_of, differing, frequencies_at_position_1

BARS = {"loss": 1e-5, "norm": 2e-5, "gradient": 3e-5, "weight": 4e-5}


def case(name: str, passed: bool | None = True, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "ranks": 2, "tied": False, "precision": "fp32", "error": None, "passed": passed,
        "max_relative_loss_difference": 1e-5, "max_relative_norm_difference": 2e-5,
        "worst_gradient": {"name": "a.weight", "relative_l2": 3e-5},
        "worst_weight": {"name": "b.weight", "relative_l2": 4e-5},
    } | changes  # fmt: skip


def certificate(*cases: dict[str, Any], left_out: dict[str, list[str]] | None = None, **changes: Any) -> dict:
    whole = {"cases": list(cases), "bars": BARS, "steps": 3, "all_cases": True, "left_out": left_out or {}}
    return whole | changes


def test_the_table_has_a_row_for_each_case_with_bf16_beside_it() -> None:
    bf16 = case("tp2-bf16", None, precision="bf16", max_relative_loss_difference=None)
    alone = case("pp2-bf16", None, precision="bf16", error="it hung", tied=True)
    titles, rows = screens.layouts_table(certificate(case("tp2"), case("dp2", passed=False), bf16, alone))
    numbers = ["1.0e-05", "2.0e-05", "3.0e-05", "4.0e-05"]
    assert rows == [
        ["tp2", "2", "no", *numbers, "not a number", "ok"],
        ["dp2", "2", "no", *numbers, "", "MISSED"],
        ["pp2", "2", "yes", "", "", "", "", "1.0e-05", "MISSED"],
    ]
    assert {len(row) for row in rows} == {len(titles)}


def test_bars_are_missed_where_a_number_is_above_them_or_none() -> None:
    """As much as a bar is no miss; all misses of all cases are told."""
    assert screens.misses(case("tp2", passed=False), BARS) == []
    off = case(
        "tp2", False, max_relative_loss_difference=1.1e-5, max_relative_norm_difference=None,
        worst_gradient={"name": "a.weight", "relative_l2": 3.1e-5},
        worst_weight={"name": "b.weight", "relative_l2": 5e-5},
    )  # fmt: skip
    lines = [
        "the loss is off by 1.1e-05 (bar 1e-05)",
        "the gradient norm is off by not a number (bar 2e-05)",
        "the gradient of a.weight is off by 3.1e-05 (bar 3e-05)",
        "the weight b.weight is off by 5.0e-05 (bar 4e-05)",
    ]
    assert screens.misses(off, BARS) == lines
    for passed in (True, None):
        assert screens.misses(off | {"passed": passed}, BARS) == []
    assert screens.misses(off | {"passed": None, "error": "it hung"}, BARS) == ["it hung"]
    asked = (
        "bars in fp32: loss 1e-05 and gradient norm 2e-05 at each of 3 steps, each tensor's gradient 3e-05 "
        "and final weights 4e-05"
    )
    assert screens.layouts_verdict(certificate(case("dp2"), off)) == "\n".join(
        [*(f"MISSED by tp2: {line}" for line in lines), f"Layouts change the model ({asked})."]
    )
    whole = certificate(case("dp2"), case("tp2"), case("tp2-bf16", None, precision="bf16"))
    passed = f"2 cases in fp32 train the same model as one process ({asked})."
    assert screens.layouts_verdict(whole) == f"All {passed}"
    chosen = whole | {"all_cases": False, "left_out": {"torch 2.10 lacks zbv": ["zbv", "zbv-bf16"]}}
    assert screens.layouts_verdict(chosen) == (
        f"The {passed.replace('2 cases', '2 chosen cases')}\n2 cases left out: torch 2.10 lacks zbv"
    )


def rehearsal(**changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny", "rank": 3, "world_size": 1024, "coordinates": {"tensor": 1, "shard": 0},
        "axes": {"shard": 512, "tensor": 2}, "stages": {"0": [0, 3], "1": None}, "micro_batches_per_step": 8,
        "rehearsed_micro_batches": 2, "micro_batch_sequences": 4, "sequence_length": 128, "recompute": "none",
        "zero": 1, "torch": "2.13", "seconds": 4.4, "state_bytes": {"weights": 2000, "gradients": 4000},
        "computed_state_bytes": {"weights": 2000, "gradients": 4000}, "flops": {"layers": 3e9, "head": 1e9},
        "peaks": {
            "forward": {
                "bytes": 3_500_000_000, "kinds": {"weights": 2_000_000_000, "buffers": 1_500_000_000},
            },
            "update": {"bytes": 2_000_999_999, "kinds": {"weights": 2_000_000_000, "small": 999_999}},
        },
        "collectives": [{"axis": "tensor", "operation": "all-gather", "count": 1200, "bytes": 2_500_000_000}],
        "needed_bytes": 5_000_000_000, "usable_bytes": 8_000_000_000, "peak_bytes": 3_500_000_000,
        "peak_phase": "forward", "fits": True, "accelerator": "H100", "host_bytes_per_node": 3_000_000_000,
        "usable_host_bytes_per_node": 3_000_000_000,
    } | changes  # fmt: skip


def test_a_rehearsal_in_sentences() -> None:
    headline = screens.headline(rehearsal())
    assert headline == (
        "tiny: rank 3 of 1,024 (tensor 1, shard 0) of shard 512 × tensor 2; stage 0: layers 0 to 3; stage 1: "
        "no layers\n8 micro-batches of 4 × 128 tokens a step, 2 of them run; recompute none, zero 1; torch "
        "2.13, 4 s"
    )
    alone = {"axes": {}, "coordinates": {}, "micro_batches_per_step": 1, "rehearsed_micro_batches": 1}
    headline = screens.headline(rehearsal(**alone))
    assert "(alone) of one rank;" in headline and "\n1 micro-batch of 4 × 128 tokens a step; rec" in headline
    assert screens.summary(rehearsal()) == (
        "bytes between steps: weights 2,000, gradients 4,000; computed from the tensor-parallel plan: the "
        "same\nFLOPs of a step: 4e+09 (3e+09 of layers, 1e+09 of head)"
    )
    other = screens.summary(rehearsal(computed_state_bytes={"weights": 2001}))
    assert "plan: weights 2,001\n" in other
    titles, rows = screens.collectives(rehearsal())
    assert rows == [("tensor", "all-gather", "1,200", "2.500")] and len(titles) == 4


def test_kinds_of_memory_are_shown_from_a_megabyte_on_the_largest_first() -> None:
    titles, rows = screens.memory(rehearsal())
    assert titles == ("GB at the peak of", "forward", "update")
    assert rows == [
        ("weights", "2.000", "2.000"),
        ("buffers", "1.500", "0.000"),
        ("peak", "3.500", "2.001"),
    ]
    peaks = {"update": {"bytes": 1_000_000, "kinds": {"weights": 1_000_000}}}
    assert screens.memory(rehearsal(peaks=peaks))[1][0] == ("weights", "0.001")
    peaks = {"update": {"bytes": 9, "kinds": {"weights": 9}}}  # nothing is large: all is shown
    assert screens.memory(rehearsal(peaks=peaks))[1] == [("weights", "0.000"), ("peak", "0.000")]


def test_the_rank_that_needs_most_decides_whether_it_fits() -> None:
    worst = rehearsal(rank=7, needed_bytes=9_000_000_000, fits=False)
    said = (
        "most memory: 3.500 GB of tensors on rank 7 (stage 0, 1), in the forward phase; 9.000 GB with the "
        "allocator's share and workspaces"
    )
    assert screens.rehearsal_verdict([rehearsal(), worst, rehearsal()]) == (
        f"{said}, of 8.000 usable on H100: it does not fit, 1.000 GB too much"
    )
    assert screens.rehearsal_verdict([rehearsal()]).endswith(
        "8.000 usable on H100: it fits, 3.000 GB are left"
    )
    unknown = screens.rehearsal_verdict([worst | {"usable_bytes": None}])
    assert unknown == f"{said}; the card of H100 does not give its memory"
    assert screens.host_verdict([rehearsal()]) == (
        "host memory: 3.000 GB a node, if all its ranks are as rank 3, for the copies that a save makes (on "
        "CPUs for all of the above too); a node has 3.000 GB: it fits, 0.000 GB are left"
    )
    over = rehearsal(rank=5, host_bytes_per_node=3_500_000_000)
    told = screens.host_verdict([rehearsal(), over])
    assert "as rank 5," in told and told.endswith("3.000 GB: it does not fit, 0.500 GB too much")


def test_peaks_of_memory_are_of_each_phase_and_by_kind() -> None:
    """Bytes by hand: 40 + 80 + 4 in the forward; in the backward 80 are freed before 120 are made."""
    phase = ["forward"]
    ledger = MemoryLedger(lambda: phase[0])
    weights = torch.zeros(10)
    ledger.see(weights, "weights")
    ledger.begin()
    hidden = torch.zeros(20)
    ledger.see(hidden, "activations")
    ledger.see(hidden[3:], "views are the same storage")
    ledger.see(torch.zeros(9, device="meta"), "nothing")
    assert ledger.kind_of(hidden[1:]) == "activations" and ledger.kind_of(torch.zeros(1)) is None
    assert (ledger.held_bytes("weights"), ledger.held_bytes("activations")) == (40, 80)
    workspace = torch.zeros(1)
    ledger.see(workspace, "workspace")
    del workspace
    phase[0] = "backward"
    del hidden
    assert ledger.held_bytes("activations") == 0
    gradient = torch.zeros(30)
    ledger.see(gradient, "activations")
    ledger.name([gradient], "gradients")
    assert ledger.bytes_of([gradient, gradient[1:], weights]) == 160
    phase[0] = "update"
    gradient.untyped_storage().resize_(8)
    ledger.resized(gradient.untyped_storage())
    ledger.resized(torch.zeros(1).untyped_storage())
    assert ledger.peaks() == {
        "forward": Peak(124, {"weights": 40, "activations": 80, "workspace": 4}),
        "backward": Peak(160, {"weights": 40, "gradients": 120}),
        "update": Peak(48, {"weights": 40, "gradients": 8}),
    }
    ledger.begin()
    assert ledger.peaks() == {"update": Peak(48, {"weights": 40, "gradients": 8})}


def test_settings_differ_by_more_than_rounding() -> None:
    ours = {"a": 1.0, "b": {"x": [1.0, 2]}, "c": "word", "d": (1, 2), "e": None, "f": 3}
    assert differing(ours, ours | {"a": 1 + 0.9e-5, "d": [1, 2]}) == []
    assert differing(ours, {"a": 1 + 1.2e-5, "b": {"x": [1.0, 3]}, "c": "other", "d": (1,), "e": None}) == [
        "a", "b", "c", "d", "f",
    ]  # fmt: skip
    assert differing({"b": {"x": 1}}, {"b": {"x": 1, "y": 2}}) == ["b"]
    angles = torch.outer(torch.arange(3.0), 100.0 ** -torch.tensor([0.0, 0.25, 0.5, 0.75]))
    frequencies = frequencies_at_position_1(angles.cos(), -angles.sin())
    assert frequencies == pytest.approx([1.0, 100**-0.25, 0.1, 100**-0.75])
    assert base_of(frequencies) == pytest.approx(100.0)
    assert base_of([1.0]) is None and base_of([1.0, 0.0]) is None and base_of([4.0, 2.0]) == 4.0


def test_rounding_moves_each_weight_by_one_unit_and_the_largest_difference_stays(monkeypatch) -> None:
    """Of three trainings, up to each step: by hand, from the losses that they give."""
    weights = [torch.ones(4000), torch.full((9,), 2.0, dtype=torch.bfloat16)]
    nudge(weights, 1)
    steps = ((weights[0] - 1) / torch.finfo(torch.float32).eps).tolist()
    assert set(steps) == {1.0, -1.0} and abs(sum(steps)) < 5 * math.sqrt(4000)
    assert set((weights[1].float() / 2 - 1).tolist()) <= {2.0**-7, -(2.0**-7)}
    again = [torch.ones(4000)]
    nudge(again, 1)
    assert torch.equal(again[0], weights[0])

    trained = iter([[2.0, 4.2, 8.0], [2.2, 4.0, 8.0], [1.9, 4.0, 9.6]])
    events: list[Any] = []

    def begin() -> tuple[Any, Any]:
        losses = iter(next(trained))
        side = SimpleNamespace(
            model=SimpleNamespace(parameters=lambda: "weights"),
            backward=lambda batch: events.append(batch) or next(losses),
            update=lambda: events.append("update"),
        )
        return side, SimpleNamespace(take=lambda step: step, close=lambda: events.append("close"))

    monkeypatch.setattr(parity, "nudge", lambda given, seed: events.append((given, seed)))
    assert rounding_differences(begin, [2.0, 4.0, 8.0]) == pytest.approx([0.1, 0.1, 0.2])
    one = [1, "update", 2, "update", 3, "update", "close"]
    assert events == [event for seed in range(3) for event in [("weights", seed), *one]]
    assert relative_loss_difference(3.0, -2.0) == 2.5 and relative_loss_difference(1.0, 0.0) > 1e29
    assert ParityOptions(sequence_length=128).fitting(64).sequence_length == 64
    assert ParityOptions(sequence_length=128).fitting(129).sequence_length == 128
