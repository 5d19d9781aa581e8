"""Many trainings at once, as columns of numbers: shapes of models, layouts and machines; no torch.

The planner's formulas take and return columns (one entry for each training), so that ten thousand layouts
take as long as one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kielo.plan.efficiency import ARCHITECTURES, ENGINES
from kielo.recipe.cards import Accelerator, Cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.phases import steps_of_run
from kielo.recipe.sections import CompleteModel, Fp8, Layout, Precision, Recipe
from kielo.resolve.fp8_matrices import fp8_share
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.stages import chunks_of


def steps_by_precision(recipe: Recipe) -> dict[Precision, int]:
    """Return precision → steps that the recipe asks for in it, skipped ones included."""
    after = 1 + (steps_of_run(recipe) or 1)  # of a run whose length is not known yet, one step
    first_precision = recipe.train.precision
    if first_precision is None:
        raise KieloError('train.precision is not resolved. Fix: train.precision = "bf16"')
    begins = [(1, first_precision), *sorted(recipe.train.precision_changes), (after, first_precision)]
    steps: dict[Precision, int] = {}
    for (first, precision), (following, _) in zip(begins, begins[1:]):
        steps[precision] = steps.get(precision, 0) + max(0, min(following, after) - first)
    return steps


def main_precision(recipe: Recipe) -> Precision:
    """Return the precision of most steps; of two with equally many, the earlier one."""
    steps = steps_by_precision(recipe)
    return max(steps, key=lambda precision: steps[precision])


def matrix_recipe(precision: Precision, fp8: Fp8) -> str:
    """Return the entry of `workload.RECIPES` for the layers' matrix products."""
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
    """n trainings as columns [n]: those that bytes depend on, and those that only seconds do.

    Layout: `shard` is at most `data`.
    Recomputation: `layers_again` and `attention_again` are the shares of layers, and of attention alone, that
    the backward pass recomputes; `operators_again` that of the matrix products by op-wise checkpointing;
    `norms_again` and `activations_again` those of a layer's norms and of its MLP's activation.
    Mixtures of experts: a token goes to `experts_each` of `experts` routed ones; `shared_ffn` is the width of
    all shared ones; `expert_layers` is the share of layers that have experts, the others have a dense MLP of
    width `ffn`.
    """

    layers: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    data: Column
    layers_again: Column
    attention_again: Column
    operators_again: Column
    # bytes of a parameter between steps: its weight, and its gradient
    weight_bytes: Column
    gradient_bytes: Column
    dropout: Column  # 1 where masks are kept
    unfused_norms: Column  # share of a norm's steps that are not fused: 1 in eager PyTorch, else 0
    whole_logits: Column  # 1 where each tensor rank has those of the whole vocabulary
    recipe: Column  # index in RECIPES
    kernel: Column  # index in ATTENTION_KERNELS
    engine: Column  # index in efficiency.ENGINES
    architecture: Column  # index in efficiency.ARCHITECTURES
    peak: Column  # FLOP/s of bf16 (fp16)
    peak_recipe: Column  # FLOP/s of the recipe's precision
    power_share: Column  # watts of this device by those of its architecture's largest
    memory_bandwidth: Column  # bytes/s
    node_bandwidth: Column  # bytes/s of a device to others in its node, one way
    network_bandwidth: Column  # bytes/s of a device's share of its node's network, one way
    node_devices: Column  # devices that node_bandwidth reaches
    unfused_loss: Column = _ZERO  # 1 where each step of the loss goes through memory
    norms_again: Column = _ZERO
    activations_again: Column = _ZERO
    deterministic: Column = _ZERO  # 1 where no kernel adds in an order that varies
    causal: Column = _ONE  # 1 where a token sees none after it, 0 in encoders
    overlap_chunks: Column = _ONE  # of collectives of tensor ranks that run beside products; 1: at once
    # Defaults: a dense model on a network that nobody measured.
    experts: Column = _ZERO
    experts_each: Column = _ZERO
    expert_ffn: Column = _ZERO
    shared_ffn: Column = _ZERO
    expert_layers: Column = _ZERO
    expert_ranks: Column = _ONE  # ranks that share the experts of a layer
    # weights of attention's projections by those of full rank; below 1 where low-rank
    projection_share: Column = _ONE
    recipe_share: Column = _ONE  # share of the layers' matrices that are in the recipe's precision
    # 1 where the products for weights' gradients are in bf16 whatever the recipe
    wide_weight_gradients: Column = _ZERO
    # share of the network's bandwidth that rings reached in a measurement; 0 where nobody measured it
    ring_share: Column = _ZERO

    @property
    def devices(self) -> Column:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def tokens_per_step(self) -> Column:
        return self.micro_batch * self.micro_batches * self.data * self.sequence

    @property
    def layer_parameters(self) -> Column:
        """Weights of one whole layer, mean over layers.

        Norms and biases are left out: below 0.1 % from hidden 1,024 on.
        """
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
        """Ranks that share what ZeRO divides of an expert: those of its replicas that `shard` reaches."""
        return np.maximum(self.shard * self.tensor / (self.expert_ranks * self.expert_tensor), 1)

    @property
    def layer_parameters_of_rank(self) -> Column:
        """Weights of one layer on one tensor and expert rank."""
        return self.shared_layer_parameters / self.tensor + self.routed_layer_parameters_of_rank

    @property
    def layers_of_heaviest_rank(self) -> Column:
        """Layers of the heaviest rank; uneven stages leave room for embedding and head, as in Megatron."""
        stages = self.pipeline * self.chunks
        return np.minimum(np.ceil(self.layers / stages) * self.chunks, self.layers)

    @property
    def parameters_of_heaviest_rank(self) -> Column:
        """Parameters of the first pipeline rank, which has the embedding, and if it is alone the head."""
        ends = self.vocabulary * self.hidden * np.where((self.pipeline > 1) | (self.tied > 0), 1, 2)
        return self.layers_of_heaviest_rank * self.layer_parameters_of_rank + ends / self.tensor


def machine_columns(
    card: Accelerator, network_bytes_per_second: float, node_devices: float, recipe: str
) -> dict[str, Any]:
    """Return the machine's fields of a row for `Workload.of`, from an accelerator's card and its network.

    Raises KieloError for a card that has no bf16 peak or no memory bandwidth.
    """
    if "bf16" not in card.peak_tflops or card.memory_bandwidth_tb_per_second is None:
        raise KieloError(
            f"the card of {card.name!r} has no bf16 peak or no memory bandwidth, so nothing can be planned "
            "for it. Fix: a card with both, measured or from the maker"
        )
    bf16 = card.peak_tflops["bf16"]
    eight = card.peak_tflops.get("fp8") or bf16
    peak = {"bf16": bf16, "nvfp4": card.peak_tflops.get("fp4") or eight}.get(recipe, eight)
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


# What `layout.recompute` names → the column with the share of it that is recomputed, less "_again".
_COLUMNS = {
    "full": "layers", "operators": "operators", "attention": "attention", "norms": "norms",
    "activations": "activations",
}  # fmt: skip


def workload_row(
    model: CompleteModel,
    layout: Layout,
    card: Accelerator,
    cluster: Cluster,
    step: StepSize,
    train: TrainOptions,
    on_processor: bool = False,
) -> dict[str, Any]:
    """Return a row for `Workload.of`: a complete `model` trained by Kielo (FSDP2, fp32 weights).

    `stage_complaints` has found nothing wrong with `layout`, and `layout.shard` is a number, not 0. The
    card's bf16 peak must be that of `train.precision`: fp32 changes only bytes here. on_processor: counts
    bytes as a rehearsal does.
    """
    again = {
        f"{name}_again": float(part in layout.recomputed) / layout.recompute_every_layers
        for part, name in _COLUMNS.items()
    }
    fp8, is_fp8 = train.fp8, train.precision == "fp8"
    recipe, share = matrix_recipe(train.precision, fp8), fp8_share(model, fp8) if is_fp8 else 1.0
    return memory_row(model, layout, step, train, card, on_processor) | again | {
        "layers": model.num_hidden_layers, "heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads, "head_dim": model.head_dim,
        "data": layout.replicate * layout.shard, "ring_share": cluster.ring_share or 0.0,
        "weight_bytes": 4, "gradient_bytes": 4,
        "dropout": float(train.hidden_dropout > 0), "unfused_norms": 0.0, "whole_logits": 0.0,
        "deterministic": float(train.deterministic),
        "causal": float(not FAMILIES[model.model_type].is_encoder),
        "recipe": RECIPES.index(recipe), "kernel": ATTENTION_KERNELS.index("flash"),
        "engine": ENGINES.index("fsdp"), "overlap_chunks": 1 if is_fp8 else chunks_of(layout),
        "recipe_share": share, "wide_weight_gradients": float(fp8.scaling == "rowwise_with_gw_hp"),
    } | machine_columns(
        card, cluster.network_gbit_per_second_per_node * 1e9 / 8, cluster.devices_per_node, recipe
    )  # fmt: skip
