"""BLOOM (Le Scao et al. 2022, arXiv:2211.05100) with ALiBi, on one device; also FinGPT and Poro-34B."""

from functools import partial

from kielo.models.blocks.alibi import Alibi
from kielo.models.blocks.attention import InnerAttention
from kielo.models.blocks.decoder import Decoder, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule, depth_scaled
from kielo.models.blocks.norm import LayerNorm
from kielo.models.gpt2 import model as gpt2
from kielo.recipe.sections import CompleteModel


class Layer(gpt2.Layer):
    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__(config, number, InnerAttention(alibi=Alibi(config.num_attention_heads)))


class Bloom(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        norm, embed_norm = (LayerNorm(config.hidden_size, config.layer_norm_epsilon) for _ in range(2))
        options = DecoderOptions(needs_distance=True, embed_norm=embed_norm)
        super().__init__(config, partial(Layer, config), norm, options)


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Scale by depth, as Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 4) trained BLOOM."""
    return Normal(depth_scaled(name, config))
