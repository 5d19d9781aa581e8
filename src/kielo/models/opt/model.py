"""OPT (Zhang et al. 2022, arXiv:2205.01068) on one device: a GPT-2 with ReLU and positions from row 2 on.

Data in and out: as of every `blocks.decoder.Decoder`.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kielo.models.blocks.decoder import Decoder, DecoderOptions, LayerKind
from kielo.models.blocks.norm import LayerNorm
from kielo.models.gpt2 import model as gpt2
from kielo.models.gpt2.model import Layer
from kielo.models.opt.tables import FIRST_POSITION
from kielo.models.piece import Box
from kielo.recipe.sections import CompleteModel


class OPT(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        options = DecoderOptions(
            learned_positions=FIRST_POSITION + config.max_position_embeddings, first_position=FIRST_POSITION
        )
        super().__init__(config, partial(Layer, config), norm, {Layer.kind: LayerKind()}, options)


def initial_value(
    name: str, shape: Sequence[int], config: CompleteModel, seed: int, box: Box | None = None
) -> Tensor:
    """Return a GPT-2's first value: the paper (section 2.2) follows Megatron-LM, with range 0.006."""
    return gpt2.initial_value(name, shape, config, seed, box)
