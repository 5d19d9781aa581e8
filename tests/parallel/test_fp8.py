"""FP8 products: within the formats' bounds, the same on every layout,
and gone without a trace from names and checkpoints.
"""

import os
import runpy
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.checkpoint.save_plan import tied_names
from kielo.models.families import complete
from kielo.models.llama.model import Llama, initial_value
from kielo.models.piece import Box
from kielo.parallel.compile import apply_compile
from kielo.parallel.fp8 import (
    Fp8Head,
    apply_fp8,
    float8_config,
    import_float8,
    in_bf16,
    refuse_without_fp8,
    scale_weights,
)
from kielo.parallel.fsdp import apply_fsdp, set_last_micro_batch
from kielo.parallel.gradient_clipping import clip_gradients
from kielo.parallel.materialise import local, local_slices, materialise
from kielo.parallel.mesh import AXES, build_mesh, data_rank, data_ranks, sum_over_data
from kielo.parallel.parallelise import parallelise
from kielo.parallel.pipeline_parallel import ExampleTensors, schedule_of
from kielo.parallel.pipeline_schedule import ScheduleOptions
from kielo.parallel.tensor_parallel import apply_tensor_parallel
from kielo.ranks.world import start_world
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Fp8, Layout, Model, TrainIdentity
from kielo.resolve.fp8_matrices import layer_matrices
from kielo.resolve.software import BACKEND_VARIABLE
from kielo.train.loss import LossOptions, chunked_loss
from kielo.train.optimiser import Optimiser
from tests.started_ranks import run_ranks

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs kielo[fp8]")

NUMERICS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "training" / "fp8_numerics.py"))
SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
CONFIG = complete(Model(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16,
    vocab_size=66, vocab_multiple=2, max_position_embeddings=16, tie_word_embeddings=False,
), 16)  # fmt: skip
SEQUENCES, LENGTH = 4, 16


# One product


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_errors_stay_within_the_formats_bounds(scaling, tails):
    """Each of the three products of a linear; a format of one bit less leaves the bounds."""
    rows = NUMERICS["measured"](scaling, NUMERICS["SMALL"], tails, torch.device("cpu"), torch.float32)
    assert [row["product"] for row in rows] == ["output", "input gradient", "weight gradient"]
    for row in rows:
        # Rounding errors are spread evenly at worst, so that the bound is no empty one either.
        low = (
            0
            if row["product"] == "weight gradient" and scaling == "rowwise_with_gw_hp"
            else 0.5 * row["bound"]
        )
        assert low <= row["error"] <= row["bound"], row


def test_coarser_rounding_breaks_the_bound():
    fine = import_float8().Float8LinearConfig.from_recipe_name("tensorwise")
    coarse = replace(
        fine,
        **{
            f"cast_config_{what}": replace(fine.cast_config_input, target_dtype=torch.float8_e5m2)
            for what in ("input", "input_for_grad_weight", "weight", "weight_for_grad_input")
        },
    )
    rows = NUMERICS["measured"](
        fine, NUMERICS["SMALL"], "normal", torch.device("cpu"), torch.float32, used=coarse
    )
    assert all(row["error"] > row["bound"] for row in rows if row["product"] == "output"), rows


# Layouts


def fill(name: str, shape: torch.Size, box: Box | None = None) -> torch.Tensor:
    return initial_value(name, shape, CONFIG, 3, box) * (1 if "norm" in name else 5)


def build(sizes: dict, fp8: Fp8, precision: str = "fp8", between: str | None = None, is_scaled: bool = True):
    """A filled model on its mesh. between: the dtype between products, default that of `precision`."""
    world = build.world = getattr(build, "world", None) or start_world(30, "cpu")
    stages = {"pipeline_layers": (1, 1)} if sizes.get("pipeline", 1) > 1 else {}
    layout = Layout(**(dict.fromkeys(AXES, 1) | {"compile": False} | stages | sizes))
    mesh = build_mesh(world, layout)
    with torch.device("meta"):
        model = Llama(CONFIG)
    if between is None:
        model = parallelise(model, mesh, layout, precision, fp8)
    else:
        apply_fp8(model, mesh, fp8)
        apply_tensor_parallel(model, mesh, layout)
        apply_fsdp(model, mesh, layout, between)
    materialise(model, world.device, fill)
    if is_scaled:
        scale_weights(model)
    return model, mesh


def tokens() -> torch.Tensor:
    return torch.randint(
        0, CONFIG.vocab_size, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5)
    )


def loss_of(model: nn.Module, mesh, tokens_bs: torch.Tensor) -> torch.Tensor:
    hidden = model(tokens_bs[:, :-1])
    if mesh["tensor"].size() > 1:
        hidden = hidden.full_tensor()
    # A loss of hidden states alone: the head is not multiplied in FP8, nor is it what is tested.
    weights = torch.linspace(-1, 1, hidden[0].numel()).view_as(hidden[0]).sin()
    return model.head(hidden, lambda hidden, *_: (hidden.float() * weights).sum() / SEQUENCES)


def backward(model: nn.Module, mesh, micro_batches: int) -> dict:
    """The step's loss and whole gradients; micro-batch i of rank r has the samples i × ranks + r."""
    mine = tokens()[data_rank(mesh) :: data_ranks(mesh)].chunk(micro_batches)
    loss = torch.zeros(())
    for number, part in enumerate(mine):
        set_last_micro_batch(model, number == len(mine) - 1)
        of_part = loss_of(model, mesh, part)
        of_part.backward()
        loss += of_part.detach()
    gradients = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": sum_over_data(loss, mesh).item(), "gradients": gradients}


def on_ranks(
    sizes: dict, cases: list[Fp8], micro_batches: int, between: str | None, unscaled: Sequence[Fp8] = ()
) -> list[dict]:
    """One answer for each of `cases`, and of `unscaled`, whose weights have no common scale."""
    results = [one_case(sizes, fp8, micro_batches, between, True) for fp8 in cases]
    return results + [one_case(sizes, fp8, micro_batches, between, False) for fp8 in unscaled]


def one_case(sizes: dict, fp8: Fp8, micro_batches: int, between: str | None, is_scaled: bool) -> dict:
    model, mesh = build(sizes, fp8, between=between, is_scaled=is_scaled)
    scales = {
        name: scale.item()
        for name, parameter in model.named_parameters()
        if (scale := getattr(parameter._local_tensor, "_precomputed_scale", None)) is not None
    }
    return backward(model, mesh, micro_batches) | {"scales": scales}


def difference(ours: dict, theirs: dict) -> float:
    """The largest ‖ours - theirs‖ / ‖theirs‖ of any gradient."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in ours)


CASES = [Fp8(emulate=True, scaling=scaling) for scaling in SCALINGS] + [
    Fp8(emulate=True, gathered_in_fp8=False)
]


@pytest.mark.full
def test_sharded_ranks_equal_one():
    """Scales are each micro-batch's own. So one rank that takes for micro-batches what two ranks take side by
    side rounds the same numbers in the same way, and only fp32 sums of gradients may differ: 1e-6.
    """
    (alone,) = run_ranks(on_ranks, 1, {}, CASES, SEQUENCES, None)
    for rank in run_ranks(on_ranks, 2, {"shard": 2}, CASES, SEQUENCES // 2, None):
        for fp8, one, two in zip(CASES, alone, rank, strict=True):
            assert difference(two["gradients"], one["gradients"]) < 1e-6, fp8
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-6) and two["scales"] == one["scales"]
            assert bool(one["scales"]) == (fp8.gathered_in_fp8 and fp8.scaling == "tensorwise")


def test_tensor_ranks_equal_one():
    """A scale is that of the whole tensor, over the tensor axis.

    Split sums differ in their last bits, by δ ≈ 2⁻²³, and where such a number lies near the middle of two FP8
    numbers (one in Δ / δ, with Δ = 2⁻³ between e4m3 numbers) it is rounded to the other: an RMS of √(δ Δ),
    which is the δ of the next rounding: 1.2e-4, 3.9e-3, 2.2e-2, towards FP8's own error of some 5 % in a deep
    model. Here two layers stay below 2 %, and scales of each rank by itself, which round differently
    everywhere, do not.
    """
    (alone,) = run_ranks(on_ranks, 1, {}, CASES, 1, "fp32")
    for rank in run_ranks(on_ranks, 2, {"tensor": 2}, CASES, 1, "fp32", CASES[:1]):
        for fp8, one, two in zip(CASES, alone, rank):
            assert difference(two["gradients"], one["gradients"]) < 2e-2, fp8
            assert two["loss"] == pytest.approx(one["loss"], rel=2e-2) and two["scales"] == one["scales"]
        assert difference(rank[-1]["gradients"], alone[0]["gradients"]) > 2e-2


def in_stages(schedule: str, fp8: Fp8) -> dict:
    model, mesh = build({"pipeline": 2, "pipeline_schedule": schedule}, fp8)
    tokens_bs = tokens()[:, :-1]
    hidden = torch.empty(
        1, LENGTH, CONFIG.hidden_size, device="meta", dtype=torch.bfloat16, requires_grad=True
    )
    weights = torch.linspace(-1, 1, LENGTH * CONFIG.hidden_size).view(LENGTH, -1).sin()
    options = ScheduleOptions(
        schedule,
        SEQUENCES,
        lambda output, _: model.last.head(
            output, lambda hidden, *_: (hidden.float() * weights).sum() / SEQUENCES
        ),
        torch.device("cpu"),
    )
    run = schedule_of(model, options, ExampleTensors(tokens_bs[:1].to("meta"), hidden, hidden))
    losses = []
    run.step(*[tokens_bs] * (model.first is not None), target=tokens_bs, losses=losses, return_outputs=False)
    gradients = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.grad is not None}
    with_fp8 = [
        name for name, module in model.parts.named_modules() if type(module).__name__ == "Float8Linear"
    ]
    return {"loss": sum(losses).item() if losses else None, "gradients": gradients, "linears": with_fp8}


def test_pipeline_stages_equal_one_rank():
    """The same micro-batches in the same order on both stages, which have the layers' own numbers:
    fp32 sums, 1e-6.
    """
    fp8 = Fp8(emulate=True, kept_in_bf16=("layers.1.mlp",))
    ((one,),) = run_ranks(on_ranks, 1, {}, [fp8], SEQUENCES, None)
    stages = run_ranks(in_stages, 2, "1f1b", fp8)
    assert difference(stages[0]["gradients"] | stages[1]["gradients"], one["gradients"]) < 1e-6
    assert stages[1]["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert [len(stage["linears"]) for stage in stages] == [7, 4]


# Names, bf16 passes, checkpoints


def test_names_are_those_of_bf16_and_what_is_kept_is_kept():
    (names,) = run_ranks(swapped, 1, Fp8(emulate=True, kept_in_bf16=("layers.0", "*.attention.[qk]")))
    assert names["parameters"] == names["in bf16"] and names["state"] == names["in bf16"]
    kept = {
        name for name in layer_matrices(CONFIG) if name.startswith("layers.0.") or name.endswith((".q", ".k"))
    }
    assert set(names["swapped"]) == set(layer_matrices(CONFIG)) - kept


def swapped(fp8: Fp8) -> dict[str, list[str]]:
    model, _ = build({}, fp8)
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "state": list(model.state_dict()),
        "in bf16": [name for name, _ in Llama(CONFIG).named_parameters()],
        "swapped": [
            name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
        ],
    }


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_heads_products_are_those_of_a_float8_linear(scaling):
    """Bit by bit, of one chunk; its weight's gradient is that of bf16 products with the same gradient."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(48, 32, generator=generator).bfloat16().requires_grad_()
    weight = (0.2 * torch.randn(80, 32, generator=generator)).bfloat16().requires_grad_()
    labels, fp8 = torch.arange(48) % 80, Fp8(scaling=scaling, head=True, emulate=True)
    linear = nn.Sequential(nn.Linear(32, 80, bias=False, device="meta"))
    linear[0].weight = nn.Parameter(weight.detach())
    logits = import_float8().convert_to_float8_training(linear, config=float8_config(fp8))(hidden)
    truth = nn.functional.cross_entropy(logits.float(), labels)
    logits.retain_grad()
    truth.backward()
    expected, hidden.grad = hidden.grad, None
    loss = chunked_loss(hidden, weight, labels, torch.tensor(48.0), LossOptions(chunk_tokens=64, fp8=fp8))
    loss.backward()
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(
        hidden.grad, expected, rtol=2e-2, atol=1e-5
    )  # one rounding of a logit's gradient
    torch.testing.assert_close(weight.grad, logits.grad.t() @ hidden, rtol=2e-2, atol=1e-4)
    head = Fp8Head(weight.detach(), fp8)
    with torch.no_grad():
        assert torch.equal(head.logits(hidden), logits)
        assert torch.equal(head.hidden_gradient(logits.grad), expected)


@pytest.mark.full
def test_in_bf16_is_bf16_and_leaves_no_trace():
    """`in_bf16` computes like a model laid out in bf16, also from FP8 gathers, and leaves no trace.

    A model laid out in bf16 adds up the gradient of a shared input inside its products, so the two differ
    by roundings to bf16 (0.4 %). FP8's gradient of the same batch points the same way: a cosine of 0.99 at
    least.
    """
    fp8 = Fp8(emulate=True, head=True)
    for rank in sum(run_ranks(both_ways, 2, [{"shard": 2}, {"tensor": 2}], fp8), []):
        assert rank["from bf16"] < 0.01 < rank["from fp8"] and rank["is fp8 again"]
        assert rank["cosine"] >= 0.99


def both_ways(layouts: list[dict], fp8: Fp8) -> list[dict]:
    return [fp8_and_bf16(sizes, fp8) for sizes in layouts]


def fp8_and_bf16(sizes: dict, fp8: Fp8) -> dict:
    model, mesh = build(sizes, fp8)
    is_compiled = mesh["tensor"].size() == 1
    if is_compiled:
        os.environ[BACKEND_VARIABLE] = "aot_eager"  # of this rank's process only
        apply_compile(model)
    in_fp8 = backward(model, mesh, 1)["gradients"]
    assert model.fp8_head == (fp8 if fp8.head else None)
    with in_bf16(model, mesh):
        assert model.fp8_head is None
        wide = backward(model, mesh, 1)["gradients"]
    with torch.compiler.set_stance("fail_on_recompile" if is_compiled else "default"):
        again = backward(model, mesh, 1)["gradients"]
    plain = backward(*build(sizes, fp8, "bf16"), 1)["gradients"]
    ours, theirs = (torch.cat([gradient.flatten() for gradient in side.values()]) for side in (in_fp8, wide))
    return {
        "from bf16": difference(wide, plain),
        "is fp8 again": all(torch.equal(again[name], in_fp8[name]) for name in in_fp8),
        "from fp8": difference(in_fp8, wide),
        "cosine": nn.functional.cosine_similarity(ours, theirs, dim=0).item(),
    }


def test_checkpoints_know_nothing_of_fp8(tmp_path):
    """bf16 on two ranks → FP8, weights gathered so, on two tensor ranks → bf16 on one:
    every weight bit for bit.
    """
    run_ranks(saved, 2, {"shard": 2}, "bf16", None, tmp_path / "a")
    run_ranks(saved, 2, {"tensor": 2}, "fp8", tmp_path / "a", tmp_path / "b")
    run_ranks(saved, 1, {}, "bf16", tmp_path / "b", tmp_path / "c")
    first, last = (read_tensors(next((tmp_path / folder).glob("step_*"))) for folder in "ac")
    assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
    assert all(tensor.dtype == torch.float32 for tensor in last.values())


def saved(sizes: dict, precision: str, source: Path | None, target: Path) -> None:
    """Restores `source` or trains one step, and saves to `target`."""
    model, mesh = build(sizes, Fp8(emulate=True), precision)
    parameters = dict(model.named_parameters())
    optimiser = Optimiser(model.named_parameters(), TrainIdentity())
    tensors = parameters | optimiser.moments()
    assert {type(local(tensor)) for tensor in tensors.values()} <= {torch.Tensor, nn.Parameter}
    assert tied_names(tensors) == {}
    if source is not None:
        Checkpointer(source).restore(next(source.glob("step_*")), tensors)
        scale_weights(model)
    else:
        step_of_adamw(model, mesh, optimiser)
    checkpointer = Checkpointer(target)
    checkpointer.save(1, tensors, {})
    checkpointer.settle()
    checkpointer.close()


def step_of_adamw(model: nn.Module, mesh, optimiser) -> None:
    loss_of(model, mesh, tokens()).backward()
    clip_gradients(model, mesh, 1.0)
    optimiser.step(1e-3, skip=torch.zeros(()))
    scale_weights(model)


def test_a_step_moves_weights_that_are_gathered_in_fp8():
    """AdamW's fused step and clipping see plain fp32, and the next scale is that of the moved weights."""
    assert (
        run_ranks(moved, 2, {"shard": 2}, Fp8(emulate=True))
        == [{"moved": True, "scales": True, "filled": True}] * 2
    )


def moved(sizes: dict, fp8: Fp8) -> dict[str, bool]:
    model, mesh = build(sizes, fp8)
    before = {name: local(parameter).clone() for name, parameter in model.named_parameters()}
    filled = all(
        torch.equal(before[n], fill(n, p.shape)[local_slices(p)]) for n, p in model.named_parameters()
    )
    step_of_adamw(model, mesh, Optimiser(model.named_parameters(), TrainIdentity()))
    weights = {
        name: p
        for name, p in model.named_parameters()
        if name.removesuffix(".weight") in layer_matrices(CONFIG)
    }
    whole = {name: parameter.full_tensor() for name, parameter in weights.items()}
    scales = {name: p._local_tensor._precomputed_scale for name, p in weights.items()}
    return {
        "moved": all(not torch.equal(local(p), before[name]) for name, p in weights.items()),
        "scales": all(
            torch.isclose(scales[name] * whole[name].abs().max(), torch.tensor(448.0)) for name in whole
        ),
        "filled": filled,
    }


# Refusals


def test_devices_without_fp8_are_refused(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    refuse_without_fp8(cpu, Fp8(emulate=True))
    with pytest.raises(
        KieloError, match=r"the CPU does not .*8\.9 on \(H100\).*gfx942.*train.fp8.emulate = true"
    ):
        refuse_without_fp8(cpu, Fp8())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert refused(gpu) == is_refused
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for architecture, is_refused in (
        ("gfx90a:sramecc+", True),
        ("gfx1030", True),
        ("gfx942", False),
        ("gfx950", False),
    ):
        properties = SimpleNamespace(gcnArchName=architecture)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert refused(gpu) == is_refused


def refused(device: torch.device) -> bool:
    try:
        refuse_without_fp8(device, Fp8())
    except KieloError:
        return True
    return False


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    with pytest.raises(KieloError, match=r"needs torchao .*pip install 'kielo\[fp8\]'"):
        apply_fp8(nn.Module(), None, Fp8())
