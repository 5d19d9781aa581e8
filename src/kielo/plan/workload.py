"""Many trainings at once, as columns of numbers: shapes of models, layouts and machines; no torch.

The planner's formulas take and return columns, so that ten thousand layouts take as long as one.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kielo.plan.efficiency import ARCHITECTURES, ENGINES
from kielo.recipe.cards import Accelerator, Cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.phases import steps_of_run
from kielo.recipe.sections import CompleteModel, Fp8, Layout, Precision, Recipe
from kielo.resolve.activation_bytes import layer_parts
from kielo.resolve.fp8_matrices import fp8_share
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.stages import chunks_of


def steps_by_precision(recipe: Recipe) -> dict[Precision, int]:
    """Return precision → steps that the recipe asks for in it, with skipped steps."""
    after = 1 + (steps_of_run(recipe) or 1)  # 1 step if the length is not known yet
    initial = recipe.train.precision
    if initial is None:
        raise KieloError('train.precision is not resolved. Fix: train.precision = "bf16"')
    begins = [(1, initial), *sorted(recipe.train.precision_changes), (after, initial)]
    steps: dict[Precision, int] = {}
    for (first, precision), (following, _) in pairwise(begins):
        steps[precision] = steps.get(precision, 0) + max(0, min(following, after) - first)
    return steps


def main_precision(recipe: Recipe) -> Precision:
    """Return the precision of most steps, the earlier of two with equally many."""
    steps = steps_by_precision(recipe)
    return max(steps, key=lambda precision: steps[precision])


def matrix_recipe(precision: Precision, fp8: Fp8) -> str:
    """Return the entry of `RECIPES` for the layers' matrix products."""
    if precision != "fp8":
        return "bf16"
    return "fp8" if fp8.scaling == "tensorwise" else "fp8_rowwise"


Column = np.ndarray
ATTENTION_KERNELS = ("unfused", "fused_softmax", "flash_1", "flash", "cudnn")
RECIPES = ("bf16", "fp8", "fp8_rowwise", "mxfp8", "nvfp4")  # of the matrix products: fp16 counts as bf16
_ZERO: Any = np.float64(0)  # a number stands for a column of it
_ONE: Any = np.float64(1)


@dataclass(frozen=True, kw_only=True)
class Workload(MemoryColumns):
    """n trainings as columns [n], for bytes (the base class) and seconds. `shard` is at most `data`.

    Recomputation: `layers_again` and `attention_again` are the shares of layers, and of attention alone, that
    the backward pass recomputes; `operators_again`: the same of matrix products by op-wise checkpointing,
    `norms_again` of norms, `activations_again` of the MLP's activation.

    Mixtures of experts: a token goes to `experts_each` of `experts` routed experts. `shared_ffn` is the width
    of all shared experts. The share `expert_layers` of layers has experts, the others a dense MLP of width
    `ffn`.
    """

    layers: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    data: Column
    layers_again: Column
    attention_again: Column
    operators_again: Column
    weight_bytes: Column  # of a parameter between steps
    gradient_bytes: Column
    dropout: Column  # 1 if masks are kept
    unfused_norms: Column  # share of a norm's steps that are not fused: 1 in eager PyTorch, else 0
    whole_logits: Column  # 1 if each tensor rank has logits of the whole vocabulary
    recipe: Column  # index in RECIPES
    kernel: Column  # index in ATTENTION_KERNELS
    engine: Column  # index in efficiency.ENGINES
    architecture: Column  # index in efficiency.ARCHITECTURES
    peak: Column  # FLOP/s of bf16 (fp16)
    peak_recipe: Column  # FLOP/s of the recipe's precision
    power_share: Column  # watts of this device, by its architecture's largest device
    memory_bandwidth: Column  # bytes/s
    node_bandwidth: Column  # bytes/s of a device to others in its node, one way
    network_bandwidth: Column  # bytes/s of a device's share of its node's network, one way
    node_devices: Column  # devices that node_bandwidth reaches
    unfused_loss: Column = _ZERO  # 1 if each step of the loss goes through memory
    norms_again: Column = _ZERO
    activations_again: Column = _ZERO
    deterministic: Column = _ZERO  # 1 if no kernel adds in an order that varies
    biases: Column = _ZERO  # 1 if ALiBi's biases are a tensor
    causal: Column = _ONE  # 1 if a token sees no later token, 0 in encoders
    overlap_chunks: Column = _ONE  # of tensor ranks' collectives that run beside products; 1: at once
    # Defaults: a dense model on an unmeasured network.
    experts: Column = _ZERO
    experts_each: Column = _ZERO
    expert_ffn: Column = _ZERO
    shared_ffn: Column = _ZERO
    expert_layers: Column = _ZERO
    expert_ranks: Column = _ONE  # ranks that share the experts of a layer
    projection_share: Column = _ONE  # weights of attention's projections, by full rank's
    recipe_share: Column = _ONE  # share of the layers' matrices that are in the recipe's precision
    wide_weight_gradients: Column = _ZERO  # 1 if products for them are in bf16 whatever the recipe
    whole_gradients: Column = _ZERO  # 1 if gradients are all-reduced before parameters are gathered
    apart_accumulation: Column = _ZERO  # 1 if a kernel of its own adds a micro-batch's gradients
    ring_share: Column = _ZERO  # measured share of the network's bandwidth that rings reach; 0: not measured

    @property
    def devices(self) -> Column:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def tokens_per_step(self) -> Column:
        return self.micro_batch * self.micro_batches * self.data * self.sequence

    @property
    def layer_parameters(self) -> Column:
        """Weights of a layer, mean over layers, without norms and biases (< 0.1 % from hidden 1,024)."""
        return self.shared_layer_parameters + self.experts * self.expert_parameters

    @property
    def active_layer_parameters(self) -> Column:
        """Weights of a layer that a token uses."""
        return self.shared_layer_parameters + self.experts_each * self.expert_parameters

    @property
    def shared_layer_parameters(self) -> Column:
        """Weights of a layer that every token uses: projections, dense MLP, shared experts and router."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        dense = (1 - self.expert_layers) * self.ffn + self.expert_layers * self.shared_ffn
        router = self.expert_layers * self.experts * (self.experts > 1)
        return self.hidden * (2 * self.projection_share * (q + kv) + self.mlp_matrices * dense + router)

    @property
    def expert_parameters(self) -> Column:
        """Weights of one routed expert, times the share of layers that have experts."""
        return self.expert_layers * self.mlp_matrices * self.hidden * self.expert_ffn

    @property
    def expert_tensor(self) -> Column:
        """Ranks that split an expert: tensor ranks if there are as many replicas as expert ranks, else 1."""
        return np.where(self.expert_ranks <= self.data * self.context, self.tensor, 1)

    @property
    def mlp_width_of_token(self) -> Column:
        """Inner width of all MLPs that a token goes through in a layer, mean over layers."""
        active = self.shared_ffn + self.experts_each * self.expert_ffn
        return (1 - self.expert_layers) * self.ffn + self.expert_layers * active

    @property
    def routed_layer_parameters_of_rank(self) -> Column:
        """Weights of one layer's routed experts on one tensor and expert rank."""
        return self.experts * self.expert_parameters / (self.expert_ranks * self.expert_tensor)

    @property
    def expert_shard(self) -> Column:
        """Ranks that divide an expert's states by ZeRO: its replicas that `shard` reaches."""
        return np.maximum(self.shard * self.tensor / (self.expert_ranks * self.expert_tensor), 1)

    @property
    def layer_parameters_of_rank(self) -> Column:
        """Weights of one layer on one tensor and expert rank."""
        return self.shared_layer_parameters / self.tensor + self.routed_layer_parameters_of_rank

    @property
    def layers_of_heaviest_rank(self) -> Column:
        """Layers of the heaviest rank. Uneven stages leave room for embedding and head, as in Megatron."""
        stages = self.pipeline * self.chunks
        return np.minimum(np.ceil(self.layers / stages) * self.chunks, self.layers)

    @property
    def parameters_of_heaviest_rank(self) -> Column:
        """Parameters of the first pipeline rank, with the embedding, and if it is alone the head."""
        ends = self.vocabulary * self.hidden * np.where((self.pipeline > 1) | (self.tied > 0), 1, 2)
        return self.layers_of_heaviest_rank * self.layer_parameters_of_rank + ends / self.tensor


def machine_columns(
    card: Accelerator, network_bytes_per_second: float, node_devices: float, recipe: str
) -> dict[str, float]:
    """Return the machine's fields of a row. Raises KieloError for a card without bf16 peak or bandwidth."""
    if "bf16" not in card.peak_tflops or card.memory_bandwidth_tb_per_second is None:
        raise KieloError(
            f"the card {card.name!r} has no bf16 peak or no memory bandwidth, so nothing can be planned for "
            "it. Fix: a card with both, measured or from the maker"
        )
    bf16 = card.peak_tflops["bf16"]
    fp8 = card.peak_tflops.get("fp8") or bf16
    peak = {"bf16": bf16, "nvfp4": card.peak_tflops.get("fp4") or fp8}.get(recipe, fp8)
    return {
        "architecture": ARCHITECTURES.index(card.architecture),
        "peak": bf16 * 1e12,
        "peak_recipe": peak * 1e12,
        "power_share": card.power_share,
        "memory_bandwidth": card.memory_bandwidth_tb_per_second * 1e12,
        "node_bandwidth": card.link_gb_per_second * 1e9,
        # A machine of one node has no network: its devices talk over their links alone.
        "network_bandwidth": network_bytes_per_second / node_devices or card.link_gb_per_second * 1e9,
        "node_devices": node_devices,
    }


def workload_row(
    model: CompleteModel,
    layout: Layout,
    card: Accelerator,
    cluster: Cluster,
    step: StepSize,
    train: TrainOptions,
    on_processor: bool = False,
) -> dict[str, float]:
    """Return a row for `Workload.of`: a complete `model` trained by Kielo (FSDP2, fp32 weights).

    `layout.shard` is not 0. The card's bf16 peak must be for `train.precision`: fp32 changes only bytes here.
    on_processor: count bytes as a rehearsal does.
    """
    columns = {part: part for part in ("operators", "attention", "norms", "activations")} | {"full": "layers"}
    every = layout.recompute_every_layers
    again = {f"{name}_again": (part in layout.recomputed) / every for part, name in columns.items()}
    fp8, is_fp8 = train.fp8, train.precision == "fp8"
    recipe, network = matrix_recipe(train.precision, fp8), cluster.network_gbit_per_second_per_node * 1e9 / 8
    machine = machine_columns(card, network, cluster.devices_per_node, recipe)
    row = memory_row(model, layout, step, train, card, on_processor) | again | machine
    row |= {"layers": model.num_hidden_layers, "head_dim": model.head_dim, "heads": model.num_attention_heads}
    row |= {"kv_heads": model.num_key_value_heads, "weight_bytes": 4, "gradient_bytes": 4}
    return row | {
        "data": layout.replicate * layout.shard,
        "ring_share": cluster.ring_share or 0.0,
        "dropout": float(train.hidden_dropout > 0),
        "unfused_norms": 0.0,
        "whole_logits": 0.0,
        "deterministic": float(train.deterministic),
        "biases": float(layout.alibi_kernel == "bias" and layer_parts(model).has_alibi),
        "causal": float(not FAMILIES[model.model_type].is_encoder),
        "recipe": RECIPES.index(recipe),
        "kernel": ATTENTION_KERNELS.index("flash"),
        "engine": ENGINES.index("fsdp"),
        "overlap_chunks": 1 if is_fp8 else chunks_of(layout),
        "recipe_share": fp8_share(model, fp8) if is_fp8 else 1.0,
        "wide_weight_gradients": float(fp8.scaling == "rowwise_with_gw_hp"),
    }
