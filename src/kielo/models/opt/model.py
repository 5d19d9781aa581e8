"""OPT (Zhang et al. 2022, arXiv:2205.01068) on one device: a GPT-2 with ReLU and positions from row 2 on."""

from functools import partial

from kielo.models.blocks.decoder import Decoder, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule, depth_scaled
from kielo.models.blocks.norm import LayerNorm
from kielo.models.gpt2.model import Layer
from kielo.models.opt.tables import FIRST_POSITION
from kielo.recipe.sections import CompleteModel


class OPT(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        options = DecoderOptions(
            learned_positions=FIRST_POSITION + config.max_position_embeddings, first_position=FIRST_POSITION
        )
        super().__init__(config, partial(Layer, config), norm, options)


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Scale by depth: the paper (section 2.2) follows Megatron-LM, with range 0.006."""
    return Normal(depth_scaled(name, config))
