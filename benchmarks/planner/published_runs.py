"""Published training runs, read from a table: what was trained, on what, how fast; no torch.

The table's columns are those of published_runs.csv. A missing value is the engine's
default. A row is marked if a value is missing that cannot be guessed.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from published_memory import formula_memory_bytes

from kielo.plan.efficiency import ENGINES
from kielo.plan.workload import ATTENTION_KERNELS, RECIPES, Workload, machine_columns
from kielo.recipe.cards import Accelerator, accelerator, accelerators
from kielo.recipe.errors import KieloError
from kielo.resolve.memory import usable_bytes

# The table's word for a GPU → a card, where they differ.
_CARDS = {"gh200": "gh200_96", "a800_80": "a100_80"}
_USUAL_ZERO = {"megatron_te": "zero1", "megatron_deepspeed": "zero1", "fsdp": "fsdp", "unfused": "0"}
# Which of the four engine profiles a framework's name stands for: the first that it contains.
_ENGINE_WORDS = (
    ("Megatron-LM (2020", "unfused"), ("Megatron-LM (2021", "unfused"), ("Megatron-LM (2022", "unfused"),
    ("Megatron-LM (2023", "megatron_te"), ("Megatron-LM (core", "megatron_te"),
    ("Megatron-LM (ROCm", "megatron_te"),
    ("Megatron-LM (swiss", "megatron_te"), ("ZeRO-3", "fsdp"), ("Megatron-DeepSpeed", "megatron_deepspeed"),
    ("Megatron + DeepSpeed", "megatron_deepspeed"), ("AA-Scaling", "megatron_deepspeed"),
    ("NeoX", "megatron_deepspeed"),
    ("Megatron-LM +", "megatron_te"), ("Automodel", "fsdp"), ("NeMo", "megatron_te"),
    ("Megatron-Bridge", "megatron_te"),
    ("Megatron-Core", "megatron_te"), ("MegaScale", "megatron_te"), ("Primus", "megatron_te"),
    ("Megatron-LM", "unfused"),
)  # fmt: skip
_NETWORK_GBIT = (
    (r"Omni-Path 100 x4", 400), (r"4x200|HDR200 per node|4x ?NDR200|4x HDR200", 800), (r"4 x 100 Gb", 400),
    (r"8x ?HDR200|HDR200 x8|8x200", 1600),
    (r"400 ?Gb/s per GPU|NDR400 per GPU|NDR InfiniBand|Grand Teton", 3200),
    (r"EFA 400 Gb/s per node", 400), (r"EFA", 3200),
)  # fmt: skip
# Of a network's bandwidth, what rings were measured to reach, by others and apart from any step time:
# BigScience's all-reduce over 4 nodes with Omni-Path took 42 Gb/s of the tensor at best, 79 over the wire (×
# 2 × 15 / 16), of 400; the second all-reduce of gradients in LUMI's logs of a 175B, which waits for nobody,
# 4.8 to 5.0 GB/s of a GCD's 12.5 on 2 to 32 ranks, and the gathers of parameters 4.9
# (spyysalo/lumi-llm-scaling).
# Elsewhere it is `network`.
_RING_SHARES = (("Omni-Path", 0.2), ("Slingshot", 0.39))
# Of layers, where some are recomputed and a page does not say how many.
_BLOCKS_AGAIN = 0.4
_GBIT_OF_NODE = {"volta": 400, "ampere": 1600, "hopper": 3200, "blackwell": 3200, "cdna2": 800, "cdna3": 3200}
# Mixtures of experts by the model's name, from the config.json of their public repositories (Hugging Face:
# deepseek-ai, moonshotai, Qwen, openai, mistralai, xai-org, meta-llama): experts, experts a token, their
# width, all shared experts' width, share of layers that have experts, width of the dense layers' MLP; where
# they differ from what the table says, heads, heads of keys and their size; and for low-rank projections
# (DeepSeek-V2, arXiv:2405.04434) their weights by those of full rank with as many heads of (192 + 128) / 2.
# Sliding windows (GPT-OSS, every second layer) are counted as full attention.
_MIXTURES: tuple[tuple[str, dict[str, float]], ...] = (
    ("DeepSeek-V3", {
        "experts": 256, "experts_each": 8, "expert_ffn": 2048, "shared_ffn": 2048, "expert_layers": 58 / 61,
        "ffn": 18432,
        "heads": 128, "kv_heads": 128, "head_dim": 160, "projection_share": 0.319,
    }),
    ("Kimi-K2", {
        "experts": 384, "experts_each": 8, "expert_ffn": 2048, "shared_ffn": 2048, "expert_layers": 60 / 61,
        "ffn": 18432,
        "heads": 64, "kv_heads": 64, "head_dim": 160, "projection_share": 0.344,
    }),
    ("Qwen3-30B-A3B", {
        "experts": 128, "experts_each": 8, "expert_ffn": 768, "expert_layers": 1, "head_dim": 128,
    }),
    ("Qwen3-235B-A22B", {
        "experts": 128, "experts_each": 8, "expert_ffn": 1536, "expert_layers": 1, "head_dim": 128,
    }),
    ("GPT-OSS-120B", {
        "experts": 128, "experts_each": 4, "expert_ffn": 2880, "expert_layers": 1, "head_dim": 64,
    }),
    ("Mixtral-8x7B", {"experts": 8, "experts_each": 2, "expert_ffn": 14336, "expert_layers": 1}),
    ("Mixtral-8x22B", {"experts": 8, "experts_each": 2, "expert_ffn": 16384, "expert_layers": 1}),
    ("Grok-1", {"experts": 8, "experts_each": 2, "expert_ffn": 32768, "expert_layers": 1}),
    ("Llama-4-Maverick", {
        "experts": 128, "experts_each": 1, "expert_ffn": 8192, "shared_ffn": 8192, "expert_layers": 0.5,
        "ffn": 16384,
        "hidden": 5120, "heads": 40, "kv_heads": 8, "head_dim": 128, "vocabulary": 202048,
    }),
)  # fmt: skip


@dataclass(frozen=True)
class PublishedRun:
    """One figure of one run.

    `seconds` is of an optimiser step, if the figure is a time; `missing` names what the table lacks of the
    layout; `columns` are a row of `Workload.of`.
    """

    name: str
    family: str
    trust: str
    metric: str
    value: float
    notes: str
    is_moe: bool
    columns: dict[str, Any] | None
    missing: tuple[str, ...] = ()
    converted: bool = field(default=False)
    card: Accelerator | None = None

    @property
    def tokens_per_device(self) -> float:
        work = Workload.of([self.columns])
        return float(work.tokens_per_step[0] / work.devices[0])

    @property
    def seconds(self) -> float | None:
        if self.columns is None:
            return None
        if self.metric == "sec_per_step":
            return self.value
        return self.tokens_per_device / self.value if self.metric == "tokens_per_s_per_gpu" else None


def read_published_runs(path: str | Path) -> list[PublishedRun]:
    """Reads every figure of a table. Raises KieloError if the file or a column is missing."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except OSError as error:
        raise KieloError(
            f"{path}: cannot be read ({error.strerror}); expected a CSV of published runs"
        ) from None
    try:
        shares = _recomputed_shares(rows)
        return [_run(row, shares.get(_run_name(row), _BLOCKS_AGAIN)) for row in rows]
    except KeyError as error:
        raise KieloError(f"{path}: has no column {error.args[0]!r}") from None


def engine_of(framework: str) -> str:
    """Returns the profile of a framework by its name; those in plain PyTorch or JAX count as FSDP."""
    return next((engine for word, engine in _ENGINE_WORDS if word in framework), "fsdp")


def _number(row: dict[str, str], key: str, default: float | None = None) -> float | None:
    return float(row[key]) if row[key] else default


def _run_name(row: dict[str, str]) -> str:
    return row["id"].split("#")[0]


def _recomputed_shares(rows: list[dict[str, str]]) -> dict[str, float]:
    """Returns run → share of layers that its backward pass recomputes, where two of its figures tell.

    With all layers recomputed hardware FLOPs are 4/3 of the model's.
    """
    figures: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["metric_kind"] == "mfu" and float(row["metric_value"]) > 0:
            kind = row["flops_convention"].split(" ")[0]
            figures.setdefault(_run_name(row), {}).setdefault(kind, float(row["metric_value"]))
    both = {name: found for name, found in figures.items() if {"model", "hardware"} <= found.keys()}
    return {
        name: min(1.0, max(0.0, 3 * (found["hardware"] / found["model"] - 1))) for name, found in both.items()
    }


def _run(row: dict[str, str], blocks_again: float) -> PublishedRun:
    is_moe = row["moe"] == "1"
    mixture = next((shape for word, shape in _MIXTURES if word in row["model"]), None) if is_moe else {}
    row = row | {key: str(mixture[key]) for key in ("hidden", "heads") if mixture and key in mixture}
    missing = tuple(_missing(row))
    columns, card = None, _card(row)
    is_known = mixture is not None and card is not None
    if is_known and not set(missing) & {"n_layers", "hidden", "heads", "seq_len", "n_gpus"}:
        columns = _columns(row, card) | _expert_columns(row, mixture)
        columns |= _recompute_columns(row, engine_of(row["framework"]), blocks_again)
        is_open = not (row["recompute"] or is_moe or "torchtitan" in row["framework"])
        if is_open and not _can_fit(columns, card):
            columns |= {"layers_again": 1.0}
    metric, value, converted = row["metric_kind"], float(row["metric_value"]), False
    if metric == "tflops_per_gpu" and columns is not None:
        tokens = _tokens_per_second(row, value, columns)
        if tokens is not None:
            metric, value, converted = "tokens_per_s_per_gpu", tokens, True
    return PublishedRun(
        row["id"],
        row["family"],
        row["trust"],
        metric,
        value,
        row["notes"],
        is_moe,
        columns,
        missing,
        converted,
        card,
    )


def _missing(row: dict[str, str]) -> Iterator[str]:
    for key in (
        "n_layers",
        "hidden",
        "heads",
        "seq_len",
        "gpu",
        "n_gpus",
        "tp",
        "pp",
        "dp",
        "micro_batch",
        "global_batch",
    ):
        if not row[key] and not (key == "heads" and row["hidden"]):
            yield key
    if re.search(r"GBS\d+ assumed", row["notes"]):
        yield "layout"  # its reader's guess
    if "offload" in row["notes"]:
        yield "offload"


def _card(row: dict[str, str]) -> Accelerator | None:
    name = _CARDS.get(row["gpu"], row["gpu"])
    return accelerator(name) if name in accelerators() else None


def _columns(row: dict[str, str], card: Accelerator) -> dict[str, Any]:
    tensor, pipeline = _number(row, "tp", 1), _number(row, "pp", 1)
    context = _number(row, "cp", 1)
    devices = _number(row, "n_gpus")
    data = _number(row, "dp") or max(1, devices // (tensor * pipeline * context))
    micro_batch = _number(row, "micro_batch", 1)
    batch = _number(row, "global_batch") or data * micro_batch * 8
    engine = engine_of(row["framework"])
    recipe = _recipe(row["precision"])
    return (
        _model_columns(row)
        | {
            "tensor": tensor, "pipeline": pipeline, "context": context, "data": data,
            "chunks": _chunks(row) if pipeline > 1 else 1,
            "micro_batch": micro_batch, "micro_batches": max(1, math.ceil(batch / (data * micro_batch))),
            "sequence_parallel": float(row["sequence_parallel"] == "1" and tensor > 1),
            "recipe": RECIPES.index(recipe),
            "kernel": ATTENTION_KERNELS.index(_kernel(row, engine, card)),
            "engine": ENGINES.index(engine),
            "splits_backward": 0.0,
            "dropout": float(
                engine in ("unfused", "megatron_deepspeed") and recipe == "bf16" and row["gated_mlp"] != "1"
            ),
            "tied": float(row["gated_mlp"] != "1"),
            "ring_share": next((share for word, share in _RING_SHARES if word in row["interconnect"]), 0.0),
            "unfused_norms": _unfused_norms(row),
            "whole_gradients": float("BF16Optimizer" in row["zero_stage/fsdp"]),
            "apart_accumulation": float("no fused gradient accumulation" in row["notes"]),
            # Inferred from its rows too: some with long micro-batches and little else do not fit.
            "deterministic": float("deterministic-mode" in row["notes"]),
            "whole_logits": float("AA-Scaling" in row["framework"]),
            # Megatron-LM's and Megatron-DeepSpeed's default; NeMo and Megatron-Bridge ask for one kernel.
            "unfused_loss": float(
                "Megatron-LM" in row["framework"] or engine in ("unfused", "megatron_deepspeed")
            ),
        }
        | _state_columns(row, engine)
        | _zero_columns(row["zero_stage/fsdp"] or _USUAL_ZERO[engine], data * context, _node_devices(row))
        | {"layers_again": 0.0, "attention_again": 0.0, "operators_again": 0.0}
        | machine_columns(card, _network_bytes_per_second(row, card), _node_devices(row), recipe)
    )  # fmt: skip


def _chunks(row: dict[str, str]) -> float:
    """Returns stages a rank; where a page leaves them out for once, those of its other releases."""
    others = re.search(r"releases use VP (\d+)", row["notes"])
    return float(others.group(1)) if others else max(1, _number(row, "vp", 1))


def _model_columns(row: dict[str, str]) -> dict[str, Any]:
    hidden, layers, gated = _number(row, "hidden"), _number(row, "n_layers"), row["gated_mlp"] == "1"
    heads = _number(row, "heads") or hidden / 128
    kv_heads = _number(row, "kv_heads", heads)
    ffn = _number(row, "ffn_hidden") or (round(hidden * 8 / 3) if gated else 4 * hidden)
    stated = re.search(r"head_dim (\d+)", row["notes"])
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
        "head_dim": float(stated.group(1)) if stated else hidden / heads,
        "ffn": ffn, "mlp_matrices": 3 if gated else 2,
        "vocabulary": _number(row, "vocab", 51200), "sequence": _number(row, "seq_len"),
    }  # fmt: skip


def _expert_columns(row: dict[str, str], mixture: dict[str, float]) -> dict[str, Any]:
    return mixture | {"expert_ranks": _number(row, "ep", 1), "mlp_matrices": 3} if mixture else {}


def _zero_columns(word: str, ranks: float, node_devices: float) -> dict[str, Any]:
    is_full = word.startswith(("fsdp", "hsdp", "zero3")) and "zero2" not in word
    zero = 3 if is_full else 2 if "zero2" in word else 0 if word in ("0", "zero0") else 1
    group = re.search(r"(?:hsdp|shard group|within|fsdp) (\d+)", word)
    # HSDP without a number shards within a node.
    shard = min(ranks, float(group.group(1)) if group else node_devices if word == "hsdp" else ranks)
    return {"zero": zero, "shard": shard if zero else 1}


def _unfused_norms(row: dict[str, str]) -> float:
    """Returns the share of a norm's steps that are eager.

    All of torchtitan's RMS norm where a page does not name torch.compile. Aleph Alpha's layers are eager too;
    with its RMS kernel a fifth of that is kept, as rows that do not fit tell.
    """
    notes = row["notes"]
    if "torchtitan" in row["framework"]:
        return float("compile" not in notes.replace("no torch.compile", ""))
    return float("kernel:" in notes) * (0.2 if "RMS" in notes else 1.0)


def _state_columns(row: dict[str, str], engine: str) -> dict[str, Any]:
    """Returns bytes of a parameter by engine.

    Half-precision weights with fp32 gradients and 12 bytes of the optimiser (Megatron), gradients of two
    bytes in NeMo and Megatron-Bridge, and fp32 weights that are their own master copy where FSDP casts when
    it gathers.
    """
    if "nanotron" in row["framework"]:
        return {"weight_bytes": 2, "gradient_bytes": 6, "optimiser_bytes": 12}
    if engine == "fsdp":
        return {"weight_bytes": 4, "gradient_bytes": 4, "optimiser_bytes": 8}
    # DeepSpeed adds gradients up where they are, unless its optimiser for bf16 or ZeRO copies them to fp32.
    is_half = (
        engine == "megatron_deepspeed"
        and row["precision"] != "bf16"
        and row["zero_stage/fsdp"].startswith("0")
    )
    halved = is_half or any(word in row["framework"] for word in ("NeMo", "Bridge", "AA-Scaling"))
    return {"weight_bytes": 2, "gradient_bytes": 2 if halved else 4, "optimiser_bytes": 12}


def _recompute_columns(row: dict[str, str], engine: str, blocks_again: float) -> dict[str, Any]:
    """Returns the shares that the backward pass recomputes; torchtitan's default saves some operators'."""
    word = row["recompute"] or ("selective" if "torchtitan" in row["framework"] else "")
    operators = word == "selective" and engine == "fsdp"  # FSDP engines save some operators' results
    blocks = 0.5 if "selective layer" in row["notes"] else blocks_again  # torchtitan's: every second
    is_cheap = "minimal" in row["notes"]  # MaxText's policies that save every product
    modules = re.search(r"recompute modules: (\S+?);", row["notes"])  # Megatron-Core's
    named = set(modules.group(1).split("+")) if modules else set()
    return {
        "layers_again": {"full": 1.0, "blocks": blocks}.get(word, 0.0),
        "attention_again": float("core_attn" in named if named else word == "selective" and not operators),
        "operators_again": float(operators and not is_cheap or "mlp" in named),
        "norms_again": float(is_cheap or "layernorm" in named),
        "activations_again": float(is_cheap),
    }


def _can_fit(columns: dict[str, Any], card: Accelerator) -> bool:
    """Returns False for a run that needs much more memory than there is; the formula errs by a tenth."""
    peak = formula_memory_bytes(Workload.of([columns])).peak("reserved")
    return bool(peak[0] < 1.25 * usable_bytes(card)) if card.memory_bytes else True


def _recipe(precision: str) -> str:
    if precision.startswith(("fp8_rowwise", "fp8_blockwise")):
        return "fp8_rowwise"
    if precision.startswith("mxfp8"):
        return "mxfp8"
    return "fp8" if precision.startswith("fp8") else "nvfp4" if precision.startswith("nvfp4") else "bf16"


def _kernel(row: dict[str, str], engine: str, card: Accelerator) -> str:
    """Returns the attention kernel that a page states, or that its framework takes on such a device.

    Transformer Engine and XLA take cuDNN's from Hopper on. llm-foundry's tables are of its Triton kernel of
    2022, which is FlashAttention 1's method; InternEvo's, of FlashAttention 1.0.5, as its image's name has it
    (doc/install.md: torch1.13.1-cuda11.7.1-flashatten1.0.5).
    """
    notes = row["notes"]
    stated = re.search(r"kernel: (\w+)", notes)
    if stated:
        word = stated.group(1)
        return {"torch": "unfused", "fused": "fused_softmax", "flash_attentionv1": "flash_1"}.get(
            word, "flash"
        )
    if engine == "unfused" or (engine == "megatron_deepspeed" and "flash" not in notes.lower()):
        return "fused_softmax"
    if "llm-foundry" in row["framework"] or row["framework"] == "InternEvo":
        return "flash_1"
    has_cudnn = engine == "megatron_te" or "JAX" in row["framework"]
    return "cudnn" if has_cudnn and card.architecture in ("hopper", "blackwell") else "flash"


def _network_bytes_per_second(row: dict[str, str], card: Accelerator) -> float:
    """Returns the network bandwidth of a node, one way."""
    text = row["interconnect"]
    stated = re.search(r"(\d+) ?Gbps (?:RoCE )?(?:node-node|per node|\(4x)", text) or re.search(
        r"RoCE (\d+) Gbps", text
    )
    times = re.search(r"(\d+) ?x ?\d+ ?Gbps per node", text)
    gbit = next((g for w, g in _NETWORK_GBIT if re.search(w, text)), None)
    if stated:
        gbit = float(stated.group(1)) * (float(times.group(1)) if times else 1)
    return (gbit or _GBIT_OF_NODE[card.architecture] * _node_devices(row) / 8) * 1e9 / 8


def _node_devices(row: dict[str, str]) -> float:
    """Returns the devices that fast links join: a rack of NVLink 5 counts as a node."""
    if "NVL72" in row["interconnect"] or row["gpu"].startswith("gb"):
        return 64.0
    return _number(row, "gpus_per_node", 8)


def _tokens_per_second(row: dict[str, str], tflops: float, columns: dict[str, Any]) -> float | None:
    """Returns tokens a second of a device, if the page says what its FLOPs count.

    Conventions are those of Narayanan et al. 2021, equation 2, and its parts.
    """
    work = Workload.of([columns])
    weights = float((work.layers * work.active_layer_parameters)[0])
    head = columns["vocabulary"] * columns["hidden"]
    scores = columns["layers"] * columns["heads"] * columns["head_dim"] * columns["sequence"]
    convention = row["flops_convention"]
    if "full attention" in convention:
        flops = 6 * (weights + head) + 12 * scores
    elif "causal attention" in convention:
        flops = 6 * (weights + head) + 6 * scores
    elif "factor 96" in convention:
        flops = 8 * weights + 16 * scores + 6 * head
    else:
        return None
    return tflops * 1e12 / flops
