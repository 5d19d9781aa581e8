"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") on one device.

Also the GPT of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), whose head may be a matrix of its own. If
attention stays inside documents, positions begin at 0 in each.
"""

from functools import partial

from kielo.models.blocks.attention import Attention, InnerAttention
from kielo.models.blocks.decoder import Decoder, DecoderLayer, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule, depth_scaled
from kielo.models.blocks.mlp import PlainMLP
from kielo.models.blocks.norm import LayerNorm
from kielo.recipe.sections import CompleteModel


class Layer(DecoderLayer):
    """A layer with a plain MLP, of GPT-NeoX, BLOOM and OPT too."""

    def __init__(self, config: CompleteModel, number: int, inner: InnerAttention | None = None) -> None:
        super().__init__(
            Attention(config, inner),
            PlainMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act),
            partial(LayerNorm, config.hidden_size, config.layer_norm_epsilon),
        )


class GPT2(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        options = DecoderOptions(learned_positions=config.max_position_embeddings)
        super().__init__(config, partial(Layer, config), norm, options)


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Scale by depth (the paper's section 2.3), positions too, unlike OpenAI's own code."""
    return Normal(depth_scaled(name, config))
