"""Many trainings at once, as columns of numbers: shapes of models, layouts and machines; arithmetic, no
torch.

The planner's formulas take and give columns (one entry a training), so that ten thousand layouts cost what
one does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from kielo.plan.efficiency import ARCHITECTURES
from kielo.recipe.cards import Accelerator
from kielo.recipe.errors import KieloError

Column = np.ndarray
ATTENTION_KERNELS = ("unfused", "fused_softmax", "flash_1", "flash")
RECIPES = ("bf16", "fp8", "fp8_rowwise", "mxfp8", "nvfp4")  # of the matrix products: fp16 counts as bf16
_ZERO: Column = np.float64(0)
_ONE: Column = np.float64(1)


@dataclass(frozen=True)
class Workload:
    """n trainings. Every field is a column [n]; sizes are whole numbers in floats, so that products cannot
    overflow.

    Sizes of the model: `mlp_matrices` is 3 for a gated MLP, else 2. `sequence` is tokens a sample. Layout:
    `chunks` are pipeline stages a rank, `shard` the ranks that ZeRO splits over (at most `data`), `zero` 0 to
    3. `layers_again` and `attention_again` are the shares of layers, and of attention alone, that the
    backward pass computes anew; `operators_again` of the matrix products by op-wise checkpointing. Mixtures
    of experts: of `experts` routed ones a token goes to `experts_each`; `shared_ffn` is the width of all
    shared ones; `expert_layers` is the share of layers that have experts, the others have the dense MLP of
    width `ffn`.
    """

    layers: Column
    hidden: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    ffn: Column
    mlp_matrices: Column
    vocabulary: Column
    sequence: Column
    tensor: Column
    pipeline: Column
    chunks: Column
    context: Column
    data: Column
    shard: Column
    zero: Column
    sequence_parallel: Column
    micro_batch: Column
    micro_batches: Column
    layers_again: Column
    attention_again: Column
    operators_again: Column
    splits_backward: Column  # 1 for the schedules that do
    # a parameter's, as held between steps; likewise gradients, and the optimiser with master weights
    weight_bytes: Column
    gradient_bytes: Column
    optimiser_bytes: Column
    dropout: Column  # 1 where masks are kept
    unfused_norms: Column  # share of a norm's steps that are kept apart: 1 in eager PyTorch, else 0
    whole_logits: Column  # 1 where each tensor rank has those of the whole vocabulary
    tied: Column  # 1 where the head is the embedding
    recipe: Column  # number in RECIPES
    kernel: Column  # number in ATTENTION_KERNELS
    engine: Column  # number in efficiency.ENGINES
    architecture: Column  # number in efficiency.ARCHITECTURES
    peak: Column  # FLOP/s of bf16 (fp16)
    peak_recipe: Column  # FLOP/s of the recipe's precision
    power_share: Column  # watts of this part by those of its architecture's full one
    memory_bandwidth: Column  # bytes/s
    node_bandwidth: Column  # bytes/s of a device to others in its node, one way
    network_bandwidth: Column  # bytes/s of a device's share of its node's network, one way
    node_devices: Column  # devices that node_bandwidth reaches
    # A dense model on a network that nobody measured, where a row does not say otherwise.
    experts: Column = _ZERO
    experts_each: Column = _ZERO
    expert_ffn: Column = _ZERO
    shared_ffn: Column = _ZERO
    expert_layers: Column = _ZERO
    expert_ranks: Column = _ONE  # that share out the experts of a layer
    # weights of attention's projections by those of full rank; below 1 where low-rank
    projection_share: Column = _ONE
    recipe_share: Column = _ONE  # of the layers' matrices that are in the recipe's precision
    # 1 where the products for weights' gradients are in bf16 whatever the recipe
    wide_weight_gradients: Column = _ZERO
    # of the network's bandwidth that rings were measured to reach; 0 where nobody measured it
    ring_share: Column = _ZERO
    # Counted for training as Kielo does it (`bytes.own_columns`), 0 where `memory` goes by formulas.
    # of a parameter in the precision that is computed in, gathered from fp32 shards
    compute_bytes: Column = _ZERO
    gathered_bytes: Column = _ZERO  # the same of a layer's parameter; 1 where matrices are sent in 8 bits
    # of the first pipeline rank, and of the last where that is another with the head
    first_parameters: Column = _ZERO
    last_parameters: Column = _ZERO
    first_layers: Column = _ZERO
    last_layers: Column = _ZERO
    # of chunks under way at once on these ranks, where there are micro-batches enough
    first_passes: Column = _ZERO
    last_passes: Column = _ZERO
    # a token and layer, forward to backward; and what stands beside while one is made anew
    kept_bytes: Column = _ZERO
    again_bytes: Column = _ZERO
    logit_bytes: Column = _ZERO
    loss_tokens: Column = _ZERO  # whose logits exist at one time

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> "Workload":
        """From rows that have a number for each field without a default."""
        rows = list(rows)
        return Workload(
            **{
                field.name: np.array(
                    [
                        row[field.name] if field.default is MISSING else row.get(field.name, field.default)
                        for row in rows
                    ],
                    dtype=float,
                )
                for field in fields(Workload)
            }
        )

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, index: Column) -> "Workload":
        """The trainings at `index` (numbers or a mask)."""
        return Workload(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def devices(self) -> Column:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def tokens(self) -> Column:
        """Of a micro-batch on a device: all hidden columns of them, or 1 / tensor where they are split."""
        return self.micro_batch * self.sequence / self.context

    @property
    def tokens_per_step(self) -> Column:
        return self.micro_batch * self.micro_batches * self.data * self.sequence

    @property
    def layer_parameters(self) -> Column:
        """Weights of one layer, whole, mean over layers; without norms and biases (below 0.1 % from hidden
        1,024 on).
        """
        return self.shared_layer_parameters + self.experts * self.expert_parameters

    @property
    def active_layer_parameters(self) -> Column:
        """The weights that a token meets."""
        return self.shared_layer_parameters + self.experts_each * self.expert_parameters

    @property
    def shared_layer_parameters(self) -> Column:
        """The weights that every token meets: of projections, of the dense MLP, of shared experts and of the
        router.
        """
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
        """Ranks that split one expert: tensor ranks, where there are as many replicas as expert ranks; else
        none.
        """
        return np.where(self.expert_ranks <= self.data * self.context, self.tensor, 1)

    @property
    def layer_parameters_of_rank(self) -> Column:
        """Weights of one layer on one tensor and expert rank."""
        routed = self.experts * self.expert_parameters / (self.expert_ranks * self.expert_tensor)
        return self.shared_layer_parameters / self.tensor + routed

    @property
    def layers_of_heaviest_rank(self) -> Column:
        """Layers that do not make equal stages leave room for embedding and head, as Megatron's users lay
        them.
        """
        stages = self.pipeline * self.chunks
        return np.minimum(np.ceil(self.layers / stages) * self.chunks, self.layers)

    @property
    def parameters_of_heaviest_rank(self) -> Column:
        """On the first rank of the pipeline, which has the embedding; with one rank the head too."""
        tables = self.vocabulary * self.hidden * np.where((self.pipeline > 1) | (self.tied > 0), 1, 2)
        return self.layers_of_heaviest_rank * self.layer_parameters_of_rank + tables / self.tensor


def machine_columns(
    card: Accelerator, network_bytes_per_second: float, node_devices: float, recipe: str
) -> dict[str, Any]:
    """The machine's fields of a row of `Workload.of`: of an accelerator's card and its node's network.

    Raises KieloError for a card that has no bf16 peak or no memory bandwidth.
    """
    if "bf16" not in card.peak_tflops or card.memory_bandwidth_tb_per_second is None:
        raise KieloError(
            f"the card of {card.name!r} has no bf16 peak or no memory bandwidth, so nothing can be planned "
            "for it; what would work: a card with both, measured or from the maker"
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
