"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia (Biderman et al. 2023, arXiv:2304.01373)."""

import math
from functools import partial

from kielo.models.blocks.decoder import Decoder, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule
from kielo.models.blocks.norm import LayerNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.models.gpt2 import model as gpt2
from kielo.models.gpt_neox.tables import rotary_size
from kielo.recipe.sections import CompleteModel


class Layer(gpt2.Layer):
    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__(config, number)
        self.is_parallel = config.use_parallel_residual


class GPTNeoX(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        rope = RotaryEmbedding(
            config.rope_theta, rotary_size(config), config.rope_scaling, config.max_position_embeddings
        )
        norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        super().__init__(config, partial(Layer, config), norm, DecoderOptions(rope))


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Follow GPT-NeoX-20B: 2 / (layers × √d) for matrices that write to the residual stream, else √(2 / 5d).

    Black et al. 2022, section 2.3, after Wang and Komatsuzaki 2021, Nguyen and Salazar 2019
    (arXiv:1910.05895).
    """
    if name.endswith((".attention.o.weight", ".mlp.down.weight")):
        return Normal(2 / (config.num_hidden_layers * math.sqrt(config.hidden_size)))
    return Normal(math.sqrt(2 / (5 * config.hidden_size)))
