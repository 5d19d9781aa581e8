"""The layouts check: real layouts hold its bars, and faults planted in real parts do not."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor

from kielo.cli.main import main
from kielo.models.blocks.norm import RMSNorm
from kielo.parallel import gradient_clipping, parallelise
from kielo.parallel.pipeline_parallel import Stages
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Layout, Recipe
from kielo.resolve.stages import SCHEDULES
from kielo.train.feed import StepBatch
from kielo.train.forward_backward import PlainForwardBackward
from kielo.verify import layouts_rank
from kielo.verify.layouts import verify_layouts
from kielo.verify.layouts_cases import AXES, INNER_AXES, Case, all_cases, cases_that_run
from kielo.verify.layouts_subject import LENGTH, subject
from kielo.verify.screens import layouts_table, layouts_verdict, left_out_line, misses
from tests.resolve.rule_cases import layout_complaints

# A handful that touches every axis, ZeRO degree and wrapper of recomputation, tied (as the recipe is) and
# untied, on up to 4 ranks; make test-full has the rest. tests/parallel/test_recompute.py has each policy.
FEW = [
    "one_rank-micro4",
    "replicate2-micro4",
    "shard2-zero2-micro4",
    "shard2-zero3-recompute_operators",
    "tensor2-no_sequence-micro4",
    "shard2-cpu_offload",
    "tensor2-recompute_norms+activations",
    "context2-all_gather-documents",
    "context2-ulysses-no_documents",
    "tensor2-bf16",
    "pipeline2-gpipe-micro4-untied",
    "pipeline2-dualpipev-micro4-frozen",
    "pipeline2-1f1b-tensor2-micro4",
]


BIASES = ["model.attention_bias=true", "model.mlp_bias=true"]


def recipe(*sets: str) -> Recipe:
    return read_recipe("demo_estonian", [*BIASES, *sets]).recipe


def test_a_few_layouts_hold_the_bars(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each axis and ZeRO degree within the bars, with recomputation; bf16 is shown and has none.

    `kielo verify layouts` prints a table, writes the certificate and ends with 0. An unknown case is refused
    in a line with what there is.
    """
    sets = [*BIASES, "train.z_loss=1e-4", f"folder={tmp_path}"]
    flags = [word for each in sets for word in ("--set", each)]
    verb = ["verify", "layouts", "demo_estonian", "--steps", "2", *flags]
    code = main([*verb, *(word for name in FEW for word in ("--case", name))])
    printed = capsys.readouterr().out
    certificate = json.loads((tmp_path / "layouts" / "layouts.json").read_text(encoding="utf-8"))
    assert certificate["passed"] and code == 0, layouts_verdict(certificate)
    assert "one_rank-micro4\t1\tyes" in printed
    assert main([*verb, "--case", "tenser2"]) == 1
    refusal = capsys.readouterr().err
    assert "tensor2" in refusal and refusal.count("\n") == 1
    left_out = [name for names in certificate["left_out"].values() for name in names]
    assert sorted([*left_out, *(entry["name"] for entry in certificate["cases"])]) == sorted(FEW)
    titles, rows = layouts_table(certificate)
    assert {len(row) for row in rows} == {len(titles)} and len(rows) == len(certificate["cases"])
    for entry in certificate["cases"]:
        rounding = entry["max_relative_loss_difference"]
        assert (rounding > 1e-5) == (entry["precision"] == "bf16"), "bf16 rounds visibly, and fp32 does not"
        assert entry["passed"] is (None if entry["precision"] == "bf16" else True)


@pytest.mark.full
@pytest.mark.timeout(2400)  # beside two other processes on two cores
def test_every_layout_holds_the_bars(tmp_path: Path) -> None:
    """All axes, all pairs and all threes of them, two steps; benchmarks/results/layouts_cpu.json has ten, and
    bf16, which has no bars.
    """
    masked = recipe("train.z_loss=1e-4", "dataset.mask_documents=true")
    rest = [case.name for case in all_cases() if case.precision == "fp32" and case.name not in FEW]
    certificate = verify_layouts(masked, tmp_path, rest, steps=2)
    assert certificate["passed"], layouts_verdict(certificate)
    left_out = [name for names in certificate["left_out"].values() for name in names]
    assert {*left_out, *(entry["name"] for entry in certificate["cases"] if entry["passed"])} == {*rest}


def test_the_list_has_every_product() -> None:
    """Each axis, pair and three of axes has an fp32 case, and each schedule every pair that it can have;
    names are unique, as --case needs them.
    """
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    crossed = {(_axes(case), case.section.pipeline_schedule) for case in cases if case.precision == "fp32"}
    within_stages = {axes for axes, _ in crossed if "pipeline" not in axes}
    assert within_stages >= {axes for size in (1, 2, 3) for axes in combinations(INNER_AXES, size)}
    others = [(), *((axis,) for axis in INNER_AXES), ("shard", "tensor")]
    assert crossed >= {(("pipeline", *axes), schedule) for axes in others for schedule in SCHEDULES}


def test_cases_that_a_torch_does_not_run_are_left_out_with_the_reason() -> None:
    """torch 2.11 lacks three schedules: their cases are left out and counted; 2.13 runs all."""
    runs, left_out = cases_that_run(all_cases(), "2.11.0+cu130", "llama")
    assert len(runs) + sum(map(len, left_out.values())) == len(all_cases()) and len(left_out) == 3
    lacking = "interleaved_zero_bubble", "zbv", "dualpipev"
    assert not any(case.section.pipeline_schedule in lacking for case in runs if case.section.pipeline > 1)
    assert "pipeline2-zbv-micro4" in next(names for reason, names in left_out.items() if "zbv" in reason)
    assert left_out_line(left_out).count("on torch 2.11.0") == 3
    assert cases_that_run(all_cases(), "2.13.0", "llama") == (all_cases(), {})


def _axes(case: Case) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if case.layout.get(axis, 1) > 1)


# What a rank does to itself for a case. Each breaks one real part in a way that has happened.


def forget_the_reduction_over_replicas(patch: pytest.MonkeyPatch) -> None:
    """Replicas shard as if each were alone, so their gradients are never summed."""
    whole_shard = parallelise.apply_fsdp

    class OneReplica:
        def __init__(self, mesh: Any):
            self._mesh, self.parameters = mesh, mesh.parameters

        def __getitem__(self, axis: str) -> Any:
            return self._mesh["pipeline" if axis == "replicate" else axis]

        def of_parameters(self, axis: str | tuple[str, ...]) -> Any:
            return self._mesh.of_parameters(axis)

    shard = lambda model, mesh, *rest: whole_shard(model, OneReplica(mesh), *rest)  # noqa: E731
    patch.setattr(parallelise, "apply_fsdp", shard)


def divide_by_the_own_count(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by its own counted tokens times the ranks: a mean of means."""
    whole_init = PlainForwardBackward.__init__

    def init(self: Any, model: Any, objective: Any, sum_over_data: Any) -> None:
        def own_count(tensor: torch.Tensor) -> torch.Tensor:
            is_count = not tensor.is_floating_point()
            return tensor * torch.distributed.get_world_size() if is_count else sum_over_data(tensor)

        whole_init(self, model, objective, own_count)

    patch.setattr(PlainForwardBackward, "__init__", init)


def leave_norms_unsynchronised(patch: pytest.MonkeyPatch) -> None:
    """A norm's weight on a part of the sequence gets that part's gradient, taken for the whole one."""
    whole_forward = RMSNorm.forward

    def forward(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return whole_forward(self, x)
        wide = x.to_local().float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        # to_local's gradient is marked as whole on every rank, though each has only its tokens' share.
        return DTensor.from_local(self.weight.to_local() * normed, x.device_mesh, x.placements)

    patch.setattr(RMSNorm, "forward", forward)


def drop_the_last_micro_batch(patch: pytest.MonkeyPatch) -> None:
    whole_call = PlainForwardBackward.__call__

    def call(self: Any, batch: StepBatch) -> torch.Tensor:
        return whole_call(
            self, StepBatch(batch.step, batch.samples, batch.micro_batches[:-1], batch.counted_tokens)
        )

    patch.setattr(PlainForwardBackward, "__call__", call)


def scale_gradients_by_micro_batches(patch: pytest.MonkeyPatch) -> None:
    """Scales gradients as torch's schedules do by default."""
    whole_init = torch_schedules.Schedule1F1B.__init__

    def init(self: Any, *args: Any, scale_grads: bool, **options: Any) -> None:
        whole_init(self, *args, scale_grads=True, **options)

    patch.setattr(torch_schedules.Schedule1F1B, "__init__", init)


def forget_the_gradient_of_the_tied_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stages, "add_tied_gradient", lambda self: None)


def count_a_stage_for_every_pipeline_rank(patch: pytest.MonkeyPatch) -> None:
    """The norm takes the ranks of the pipeline axis for copies, or what they hold for the whole model."""
    whole_sum = gradient_clipping.sum_over
    patch.setattr(gradient_clipping, "sum_over", lambda total, axes: whole_sum(total, axes) / axes[0].size())


def split_parameters_under_zero_bubbles(patch: pytest.MonkeyPatch) -> None:
    """Allows what `plan` refuses: a schedule that takes the backward pass apart,
    over layers that give up their parameters.
    """
    whole_shard = parallelise.apply_fsdp

    def shard(model: Any, mesh: Any, layout: Layout, *rest: Any) -> None:
        whole_shard(model, mesh, layout.model_copy(update={"zero": 3}), *rest)

    patch.setattr(parallelise, "apply_fsdp", shard)


def refuse_all(patch: pytest.MonkeyPatch) -> None:
    def apply_context_parallel(*arguments: Any) -> None:
        raise KieloError("planted: it cannot be laid out")

    patch.setattr(parallelise, "apply_context_parallel", apply_context_parallel)


# Case → its fault, and where that shows.
PLANTED = {
    "replicate2": (forget_the_reduction_over_replicas, "gradient"),
    "shard2": (divide_by_the_own_count, "loss"),
    "tensor2": (leave_norms_unsynchronised, "norm.weight"),
    "shard2-micro4": (drop_the_last_micro_batch, "gradient"),
    "pipeline2-1f1b-micro4": (scale_gradients_by_micro_batches, "gradient"),
    "pipeline2-1f1b-micro4-tied": (forget_the_gradient_of_the_tied_head, "embed.weight"),
    "pipeline2-1f1b-micro8": (count_a_stage_for_every_pipeline_rank, "the gradient norm"),
}
# Case → its fault, which raises.
RAISED = {
    "replicate2-micro4": refuse_all,
    "pipeline2-zbv-shard2-micro4": split_parameters_under_zero_bubbles,
}
SOUND = "shard2-zero2"
RARELY = ("shard2-micro4", "pipeline2-1f1b-micro4", "pipeline2-1f1b-micro8")  # of PLANTED, in make test-full


def plant() -> None:
    """Breaks a rank for each case of PLANTED and RAISED while it runs."""
    faults = RAISED | {name: fault for name, (fault, _) in PLANTED.items()}
    sound_compare = layouts_rank.compare

    def compare(recipe: Recipe, case: Case, *rest: Any) -> dict[str, dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            if case.name != SOUND:
                faults[case.name](patch)
            return sound_compare(recipe, case, *rest)

    layouts_rank.compare = compare


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The certificate of cases that are broken, each in another way, and of one that is not."""
    cases = [*(case for case in PLANTED if case not in RARELY), *RAISED, SOUND]
    return certificate_of(tmp_path_factory.mktemp("broken"), cases)


@pytest.fixture(scope="module")
def broken_rarely(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return certificate_of(tmp_path_factory.mktemp("broken"), [*RARELY])


def certificate_of(folder: Path, cases: list[str]) -> dict[str, Any]:
    certificate = verify_layouts(recipe(), folder, cases, f"{__name__}.{plant.__name__}", steps=2)
    assert json.loads((folder / "layouts.json").read_text(encoding="utf-8")) == certificate
    return certificate


def entry_of(certificate: dict[str, Any], case: str) -> dict[str, Any]:
    (entry,) = (entry for entry in certificate["cases"] if entry["name"] == case)
    return entry


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case in RARELY)) for case in PLANTED]
)
def test_a_planted_fault_misses_the_bars(request: pytest.FixtureRequest, case: str) -> None:
    """A missing reduction, a wrong divisor, an unsynchronised norm, a dropped micro-batch, and in pipelines
    scaled gradients, a tied head's lost one and a wrong norm: each is caught and named.
    """
    broken = request.getfixturevalue("broken_rarely" if case in RARELY else "broken")
    entry = entry_of(broken, case)
    assert entry["error"] is None, "found by its numbers"
    found = misses(entry, broken["bars"])
    assert any(PLANTED[case][1] in miss for miss in found), found
    assert f"MISSED by {case}:" in layouts_verdict(broken)
    (row,) = (row for row in layouts_table(broken)[1] if row[0] == case)
    assert row[-1] == "MISSED" and not broken["passed"]


def test_what_torch_does_wrong_is_refused(broken: dict[str, Any]) -> None:
    """A zero bubble over split parameters loses gradients without a word from torch 2.13: of a whole layer in
    this case, so nothing is left to compare. The plan refuses it by name.
    """
    error = entry_of(broken, "pipeline2-zbv-shard2-micro4")["error"]
    assert "no gradient after the backward of a whole step: layers." in error
    layout = Layout(pipeline=2, pipeline_schedule="zbv", shard=2, zero=3)
    (complaint,) = layout_complaints(subject(recipe(), {}).model, LENGTH, layout)
    assert "'zbv' with layout.zero = 3 gives wrong gradients" in complaint


def test_a_case_that_raises_is_named_and_the_others_go_on(broken: dict[str, Any]) -> None:
    """The certificate says why; ranks are started anew for the cases after it."""
    names = [entry["name"] for entry in broken["cases"]]
    refused = entry_of(broken, "replicate2-micro4")
    assert refused["passed"] is False and "planted: it cannot be laid out" in refused["error"]
    assert names.index(SOUND) > names.index("replicate2-micro4") and entry_of(broken, SOUND)["passed"]
    assert "MISSED by replicate2-micro4: rank" in layouts_verdict(broken)
