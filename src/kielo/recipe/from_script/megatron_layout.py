"""Megatron's arguments of parallelism, recomputation and precision to [layout] and [train]."""

from typing import Any

from kielo.recipe.from_script.script_arguments import TRANSLATED, Machine, Translation


def put_layout(to: Translation, machine: Machine, settings: dict[str, Any]) -> None:
    """Set the axes, ZeRO stage and pipeline stages of [layout]."""
    layers, stages = to.value("--num-layers"), to.value("--pipeline-model-parallel-size", 1)
    tensor = to.value("--tensor-model-parallel-size", 1)
    if tensor > 1:
        to.must_divide(
            to.value("--num-attention-heads"),
            tensor,
            "--num-attention-heads",
            "--tensor-model-parallel-size",
        )
        to.put("layout.sequence_parallel", to.has("--sequence-parallel"), "--sequence-parallel")
    else:
        to.drop("--sequence-parallel", "it needs --tensor-model-parallel-size above 1")
    if stages > 1:
        _stages(to, layers, stages)
    for name in ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
                 "--pp-partition-method"):  # fmt: skip
        if stages == 1:
            to.drop(name, "it needs --pipeline-model-parallel-size above 1")
    zero = None
    if to.is_on("--use-torch-fsdp2"):
        zero = 3
    elif to.is_on("--use-megatron-fsdp"):
        strategies = {"no_shard": 1, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        zero = strategies.get(to.value("--data-parallel-sharding-strategy", "optim_grads_params"), 3)
    elif to.has("--zero-stage") or settings.get("zero") is not None:
        stage, own = to.value("--zero-stage"), settings.get("zero")
        if stage is not None and own is not None and stage != own:
            to.refuse(f"DeepSpeed's file has stage {own}. Fix: one stage", "--zero-stage")
        zero = max(1, stage if stage is not None else own or 0)
        if not stage and not own:
            to.say(
                "--zero-stage",
                TRANSLATED,
                "optimiser state is always split, as BF16Optimizer does at stage 0",
            )
    elif to.is_on("--use-distributed-optimizer"):
        zero = 1
    names = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "--zero-stage",
             "--use-distributed-optimizer")  # fmt: skip
    if zero is not None:
        to.put("layout.zero", zero, *names)
    to.drop("--data-parallel-sharding-strategy", "it needs --use-megatron-fsdp")
    to.drop("--deepspeed", "Kielo is the engine")
    if machine.nodes:
        to.add_row(
            "", "the job", TRANSLATED, f"{machine.nodes} nodes of {machine.devices_per_node or '?'} devices"
        )


def _stages(to: Translation, layers: int, stages: int) -> None:
    per_rank = to.value("--num-virtual-stages-per-pipeline-rank")
    name = "--num-virtual-stages-per-pipeline-rank"
    if to.has("--num-layers-per-virtual-pipeline-stage"):
        name = "--num-layers-per-virtual-pipeline-stage"
        to.must_divide(
            layers,
            stages * max(1, to.value(name)),
            "--num-layers",
            name,
            "--pipeline-model-parallel-size",
        )
        per_rank = max(1, layers // (stages * max(1, to.value(name))))
    if per_rank and per_rank > 1:
        to.put("layout.pipeline_schedule", "interleaved_1f1b", name)
        to.put("layout.pipeline_stages_per_rank", per_rank, name)
    elif per_rank:
        to.drop(name, "one stage a rank")
    first, last = (
        to.value("--decoder-first-pipeline-num-layers"),
        to.value("--decoder-last-pipeline-num-layers"),
    )
    ends = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    method = to.value("--pp-partition-method", "")
    if first is not None or last is not None:
        inner = stages - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        to.must_divide(rest, max(1, inner), "--num-layers", *ends)
        sizes = [first] * (first is not None) + [rest // max(1, inner)] * inner + [last] * (last is not None)
        to.put("layout.pipeline_layers", sizes, *ends)
    elif "embed" in method.lower() and (layers + 2) % stages == 0 and stages > 1:
        size = (layers + 2) // stages
        to.put(
            "layout.pipeline_layers", [size - 1, *[size] * (stages - 2), size - 1], "--pp-partition-method"
        )
    elif method:
        to.drop("--pp-partition-method", "Kielo splits layers among stages by cost")
    elif (not per_rank or per_rank == 1) and not to.is_on("--deepspeed"):
        to.must_divide(layers, stages, "--num-layers", "--pipeline-model-parallel-size")


def put_recomputation(to: Translation) -> None:
    """Set the recomputation of [layout]."""
    granularity = to.value(
        "--recompute-granularity", "selective" if to.is_on("--recompute-activations") else ""
    )
    if to.is_on("--checkpoint-activations"):
        granularity = "full"
    names = ("--recompute-activations", "--recompute-granularity", "--checkpoint-activations")
    if granularity == "selective":
        parts = {"layernorm": "norms", "mlp": "activations", "moe_act": "activations"}
        modules = to.value("--recompute-modules", ("core_attn",))
        kept = sorted({parts[one] for one in modules if one in parts}, key=("norms", "activations").index)
        to.put("layout.recompute", "+".join(kept) or "none", *names, "--recompute-modules")
        if "core_attn" in modules:
            for name in (*names, "--recompute-modules"):
                if to.has(name):
                    to.say(name, TRANSLATED, "attention stores no scores that could be recomputed")
    elif granularity == "full":
        to.put("layout.recompute", "full", *names)
        _layers_recomputed(to)
        to.drop("--recompute-modules", "they are of selective recomputation")
    for name in (
        "--recompute-method",
        "--recompute-num-layers",
        "--checkpoint-num-layers",
        "--recompute-modules",
    ):
        if granularity != "full":
            to.drop(name, "layers are recomputed only with full recomputation")


def _layers_recomputed(to: Translation) -> None:
    number = to.value("--recompute-num-layers") or to.value("--checkpoint-num-layers") or 1
    names = ("--recompute-method", "--recompute-num-layers", "--checkpoint-num-layers")
    per_stage = max(1, to.value("--num-layers") // to.value("--pipeline-model-parallel-size", 1))
    if to.value("--recompute-method") == "block" and 0 < number < per_stage:
        every = max(1, round(per_stage / number))
        to.put("layout.recompute_every_layers", every, *names)
        for name in names:
            if to.has(name):
                to.say(
                    name, TRANSLATED, f"every {every}. layer in place of the first {number} of {per_stage}"
                )
        return
    for name in names:
        to.drop(name, "all layers are recomputed, one at a time")


def put_precision(to: Translation, settings: dict[str, Any]) -> None:
    """Set the precision of [train]."""
    if (
        to.is_on("--bf16")
        and settings.get("precision") == "fp16"
        or to.is_on("--fp16")
        and settings.get("precision") == "bf16"
    ):
        to.refuse("DeepSpeed's file has another precision. Fix: one precision", "--bf16", "--fp16")
    names = ["--bf16", "--fp8-format"]
    half = to.is_on("--fp16") or settings.get("precision") == "fp16"
    if to.has("--fp8-format"):
        to.put("train.precision", "fp8", *names)
        _fp8(to)
    elif to.is_on("--bf16") or half or settings.get("precision") == "bf16":
        to.put("train.precision", "bf16", *names)
    else:
        to.put("train.precision", "fp32")
    to.drop("--fp16", "changes the run: there is no fp16; the recipe trains in bf16")
    to.drop("--fp8-recipe", "it needs --fp8-format")
    for name in ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"):
        to.drop(name, "it needs --fp8-format")
    dtype = "bf16" if to.is_on("--grad-reduce-in-bf16") else "fp32"
    to.put(
        "train.gradient_reduce_dtype", dtype, "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"
    )


def _fp8(to: Translation) -> None:
    recipe = to.value("--fp8-recipe", "delayed")
    if recipe == "tensorwise":
        to.put("train.fp8.scaling", "tensorwise", "--fp8-recipe")
    elif to.has("--fp8-recipe"):
        to.drop(
            "--fp8-recipe",
            f"changes the run: there is no {recipe} scaling; scales are of each tensor, of this step alone",
        )
    else:
        to.add_default(
            "--fp8-recipe delayed", "changes the run: scales are of each tensor, of this step alone"
        )
    if to.is_on("--first-last-layers-bf16"):
        layers = to.value("--num-layers")
        first, last = to.value("--num-layers-at-start-in-bf16", 1), to.value("--num-layers-at-end-in-bf16", 1)
        kept = [f"layers.{number}" for number in (*range(first), *range(layers - last, layers))]
        to.put("train.fp8.kept_in_bf16", kept, "--first-last-layers-bf16", "--num-layers-at-start-in-bf16",
               "--num-layers-at-end-in-bf16")  # fmt: skip
