"""OLMo 2 (OLMo Team 2025, arXiv:2501.00656) and OLMo 3 (OLMo Team 2025, arXiv:2512.13961) on one device.

Outputs of attention and MLP are normed; queries, and keys, all heads together. OLMo 3 has windows.
"""

from functools import partial

from torch import Tensor, nn

from kielo.models.blocks.attention import Attention, Mask
from kielo.models.blocks.decoder import Decoder, DecoderOptions, LayerKind
from kielo.models.blocks.dropout import ATTENTION, MLP, Noise, drop
from kielo.models.blocks.init import Normal, by_rule
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import RMSNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.models.family_tables import layer_types
from kielo.recipe.sections import CompleteModel


class Layer(nn.Module):
    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__()
        self.kind = layer_types(config)[number]
        make_norm = partial(RMSNorm, epsilon=config.rms_norm_eps)
        self.attention = Attention(config, norms="width", make_norm=make_norm)
        self.attention_post_norm = make_norm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=False)
        self.mlp_post_norm = make_norm(config.hidden_size)

    def forward(
        self, x_bsd: Tensor, cos: Tensor, sin: Tensor, mask: Mask, noise: Noise | None = None
    ) -> Tensor:
        attended_bsd = self.attention_post_norm(self.attention(x_bsd, cos, sin, mask))
        x_bsd = x_bsd + drop(attended_bsd, noise, ATTENTION)
        return x_bsd + drop(self.mlp_post_norm(self.mlp(x_bsd)), noise, MLP)


class Olmo(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        rope, local_rope = (
            RotaryEmbedding(config.rope_theta, config.head_dim, scaling, config.max_position_embeddings)
            for scaling in (config.rope_scaling, None)
        )
        kinds = {
            "full_attention": LayerKind(),
            "sliding_attention": LayerKind(config.sliding_window, "local_rope"),
        }
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        super().__init__(config, partial(Layer, config), norm, kinds, DecoderOptions(rope, local_rope))


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Draw within 3 deviations (OLMo 2's paper; `init_cutoff_factor` of github.com/allenai/OLMo)."""
    return Normal(config.initializer_range, cutoff=3.0)
