"""The frame of every model: embedding, numbered layers, last norm and head. A family defines its layers.

Data in: token ids [b, s]; data out: hidden states [b, s, d]. Code that needs logits applies the head, so that
a loss can do it in chunks. Of the head's config.vocab_rows columns the first config.vocab_size are tokens.
Shape letters: b = batch, s = sequence, d = hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kielo.models import families
from kielo.models.blocks.attention import MaskMaker
from kielo.models.blocks.dropout import ATTENTION, MLP, Noise, NoiseMaker, drop
from kielo.models.blocks.rope import RotaryEmbedding, refuse_longer
from kielo.models.family_tables import layer_types
from kielo.recipe.sections import CompleteModel, Fp8


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers: window, how many tokens back they attend (None: all); rope, their table."""

    window: int | None = None
    rope: str = "rope"


@dataclass(frozen=True)
class DecoderOptions:
    """Options of a model: positions, embeddings, and the parts of encoders.

    rope, local_rope: RoPE tables, by the names in `LayerKind`. learned_positions: the number of rows of an
    embedding of positions. Row `first_position` is position 0. needs_distance: True for ALiBi. embed_scale
    multiplies embeddings, embed_norm norms them. transform: the layer of hidden states after the last norm.
    """

    rope: RotaryEmbedding | None = None
    local_rope: RotaryEmbedding | None = None
    learned_positions: int | None = None
    first_position: int = 0
    needs_distance: bool = False
    embed_scale: float | None = None
    embed_norm: nn.Module | None = None
    is_causal: bool = True
    transform: nn.Module | None = None
    has_head_bias: bool = False


class Head(nn.Linear):
    """The matrix after the last norm, which a loss multiplies by chunks.

    Without `use` the forward returns logits. Else it returns `use(hidden_bsd, weight, bias)`: FSDP2 has the
    weight whole from a module's forward to its backward, and nowhere else.
    """

    def forward(
        self, hidden_bsd: Tensor, use: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    ) -> Tensor:
        if use is None:
            return super().forward(hidden_bsd)
        return use(hidden_bsd, self.weight, self.bias)


class Decoder(nn.Module):
    """Embedding, layers, last norm and head, of encoders too. `kinds`: kind of a layer → its options.

    `make_layer(number)` makes a layer, whose forward is `layer(x_bsd, cos, sin, mask, noise)`. A pipeline
    stage keeps only its own modules, and layer 1 stays "1" without layer 0. `of_all_stages` names parameters
    that each stage needs.
    """

    of_all_stages: tuple[str, ...] = ()
    # `parallel` sets these: the ZeRO degree, the linears in FP8, and the head's settings of FP8.
    zero: Literal[1, 2, 3] = 1
    fp8_linears: tuple[nn.Module, ...] = ()
    fp8_head: Fp8 | None = None

    def __init__(
        self,
        config: CompleteModel,
        make_layer: Callable[[int], nn.Module],
        norm: nn.Module | None,
        options: DecoderOptions,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed: nn.Embedding | None = nn.Embedding(config.vocab_rows, config.hidden_size)
        rows = options.learned_positions
        self.position_table = None if rows is None else nn.Embedding(rows, config.hidden_size)
        self.first_position, self.embed_scale = options.first_position, options.embed_scale
        self.restarts_positions = True  # learned positions, in each document
        self.embed_norm = options.embed_norm
        self.layers = nn.ModuleDict(
            {str(number): make_layer(number) for number in range(config.num_hidden_layers)}
        )
        self.norm: nn.Module | None = norm
        self.transform = options.transform
        self.head: Head | None = Head(config.hidden_size, config.vocab_rows, bias=options.has_head_bias)
        self.rope, self.local_rope = options.rope, options.local_rope
        windowed = LayerKind(config.sliding_window, "rope" if options.local_rope is None else "local_rope")
        kinds = {"full_attention": LayerKind(), "sliding_attention": windowed}
        self.kinds = {kind: kinds[kind] for kind in layer_types(config)}
        layers: list[Any] = list(self.layers.values())
        for layer, kind in zip(layers, layer_types(config), strict=True):
            layer.kind = kind
        windows = [kind.window for kind in self.kinds.values()]
        is_capped = config.attn_logit_softcapping is not None
        self.make_masks = MaskMaker(windows, options.needs_distance, is_capped, options.is_causal)
        self.make_noise = NoiseMaker(config.num_hidden_layers, config.num_attention_heads)
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one tensor if the config ties them. `to_empty` unties them."""
        if self.config.tie_word_embeddings and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def reset_buffers(self, device: torch.device | str) -> None:
        """Fill the computed buffers (RoPE tables, ALiBi slopes) on `device`, after the meta device."""
        for module in self.modules():
            if module is not self and callable(reset := getattr(module, "reset_buffers", None)):
                reset(device)

    def forward(
        self,
        tokens_bs: Tensor,
        documents_bs: Tensor | None = None,
        positions_s: Tensor | None = None,
        dropout_keys_b2: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [b, s, d] that the head multiplies. `logits` computes logits from them.

        documents_bs: the number of each token's document, inside which attention and learned positions stay.
        positions_s: the position of each column in its sequence, for ranks that hold a part of it; None for 0
        … s - 1. A pipeline stage without `embed` takes hidden states in place of tokens. dropout_keys_b2: two
        int32 of each sequence, which its dropout follows from; None for no dropout.
        """
        # Not the length of hidden states: on a tensor rank these are shorter.
        length = tokens_bs.shape[1] if positions_s is None else positions_s.numel()
        masks = self.make_masks(documents_bs, positions_s, length, tokens_bs.device)
        noise = self.make_noise(dropout_keys_b2, positions_s, length)
        x_bsd = self.embedded(tokens_bs, documents_bs, positions_s, noise)
        positions = length if positions_s is None else positions_s
        ropes = {
            name: (None, None) if rope is None else rope.widened(positions, x_bsd.dtype)
            for name, rope in (("rope", self.rope), ("local_rope", self.local_rope))
        }
        for number, layer in self.layers.items():
            kind = self.kinds[str(layer.kind)]
            of_layer = None if noise is None else noise.of_layer(int(number))
            x_bsd = layer(x_bsd, *ropes[kind.rope], masks[kind.window], of_layer)
        return self.ended(x_bsd, noise)

    def logits(self, hidden_bsd: Tensor) -> Tensor:
        """Return logits [b, s, vocab_size] of `forward`'s output, capped if the config says so."""
        if self.head is None:
            raise ValueError("this pipeline stage has no head")
        logits = self.head(hidden_bsd)[..., : self.config.vocab_size]
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def embedded(
        self, tokens_bs: Tensor, documents_bs: Tensor | None, positions_s: Tensor | None, noise: Noise | None
    ) -> Tensor:
        """Return the input of the first layer [b, s, d]. A stage without `embed` was given it."""
        if self.embed is None:
            return tokens_bs
        x_bsd = self.embed(tokens_bs)
        if self.embed_scale is not None:
            # Rounded to the precision of the activations, as in Hugging Face's Gemma. Filled on the device:
            # a number from the host would make it wait.
            x_bsd = x_bsd * torch.full((), self.embed_scale, dtype=x_bsd.dtype, device=x_bsd.device)
        if self.position_table is not None:
            if positions_s is None:
                refuse_longer(tokens_bs.shape[1], self.position_table.num_embeddings - self.first_position)
            if documents_bs is not None and self.restarts_positions:
                places_bs = self.make_masks.places(documents_bs, positions_s)
            elif positions_s is None:
                places_bs = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)[None]
            else:
                places_bs = positions_s[None]
            x_bsd = x_bsd + self.position_table(places_bs + self.first_position)
        x_bsd = x_bsd if self.embed_norm is None else self.embed_norm(x_bsd)
        return x_bsd if noise is None else noise.of_embedding(x_bsd)

    def ended(self, x_bsd: Tensor, noise: Noise | None) -> Tensor:
        """Return the last layer's output after the norm and the transform, if this stage has them."""
        x_bsd = x_bsd if self.norm is None else self.norm(x_bsd)
        if self.transform is None:
            return x_bsd
        x_bsd = self.transform(x_bsd)
        return x_bsd if noise is None else noise.of_head(x_bsd)


class DecoderLayer(nn.Module):
    """A layer that adds the outputs of attention and MLP to its own input. Inputs or outputs are normed."""

    is_parallel = False  # the MLP reads the layer's input, without attention's output (GPT-NeoX)

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        make_norm: Callable[[], nn.Module] = nn.Identity,
        make_output_norm: Callable[[], nn.Module] = nn.Identity,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = make_norm(), attention
        self.attention_post_norm = make_output_norm()
        self.mlp_norm, self.mlp, self.mlp_post_norm = make_norm(), mlp, make_output_norm()

    def forward(self, x_bsd: Tensor, *inputs: Any) -> Tensor:
        """inputs: what attention takes after hidden states (cos, sin and a mask), and the `Noise` or None."""
        *places, noise = inputs
        weights = None if noise is None else noise.weights
        attended_bsd = self.attention(self.attention_norm(x_bsd), *places, weights)
        attended_bsd = x_bsd + drop(self.attention_post_norm(attended_bsd), noise, ATTENTION)
        out_bsd = self.mlp(self.mlp_norm(x_bsd if self.is_parallel else attended_bsd))
        return attended_bsd + drop(self.mlp_post_norm(out_bsd), noise, MLP)


@torch.no_grad()
def init_weights(model: Decoder, seed: int) -> None:
    """Fill a whole model on one device. `kielo.parallel` gives a sharded model the same values."""
    initial_value = families.module(model.config.model_type, "model").initial_value
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, model.config, seed))
