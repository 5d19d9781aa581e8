"""Tables that families share: parts of a layer, tensor-parallel styles, names of weights; torch-free."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel


@dataclass(frozen=True)
class LayerParts:
    """The parts of a family's model, from which its checks and sizes and the planner's numbers follow.

    mlp_matrices: 3 for a gated MLP, else 2. norms: the number of norms of whole hidden states. norms_inputs:
    attention and MLP read the output of a norm. is_parallel: attention and MLP read the same hidden states.
    relative_rows: number of relative positions with a term in the scores. mlp_ratio: intermediate_size /
    hidden_size, if it is fixed. The model may be incomplete.
    """

    mlp_matrices: Literal[2, 3]
    norms: int = 2
    norms_inputs: bool = True
    has_head_norms: bool = False
    is_rotary: bool = True
    has_groups: bool = True
    has_alibi: bool = False
    has_mlp_norm: bool = False
    is_parallel: bool = False
    relative_rows: int = 0
    mlp_ratio: int | None = None


class OtherParameters(NamedTuple):
    """Numbers of parameters of a complete model besides the matrices of layers and vocabulary.

    `norms` are in all norms of a layer. `output` multiply a token after the layers, `input` multiply no
    token. has_output_bias: attention's output has a bias. None: as `attention_bias`.
    """

    norms: int
    output: int
    input: int = 0
    has_output_bias: bool | None = None


TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")

# Families whose every n-th layer, from the first on, has no window by default.
FULL_EVERY = {"modernbert": 3}


def layer_types(config: CompleteModel) -> tuple[str, ...]:
    """Return each layer's kind; without model.layer_types the window is all layers', or by `FULL_EVERY`."""
    if config.layer_types:
        return config.layer_types
    full_every = FULL_EVERY.get(config.model_type, 0 if config.sliding_window else 1)
    return tuple(
        "sliding_attention" if not full_every or number % full_every else "full_attention"
        for number in range(config.num_hidden_layers)
    )


# Tensor-parallel plans: module name → style (`parameter_shapes.STYLES`). `*` stands for a layer's number.
# Entries for modules that a family lacks are skipped.


def of_layers(style: str, *modules: str) -> dict[str, str]:
    return {f"layers.*.{module}": style for module in modules}


MATRICES = (
    {"embed": "vocabulary", "head": "column"}
    | of_layers("gather", "attention.project", "mlp.project")
    | of_layers("column", "attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    | of_layers("row", "attention.o", "mlp.down")
)
PRE_NORM_PLAN = MATRICES | of_layers("sequence", "attention_norm", "mlp_norm") | {"norm": "sequence"}
OUTPUT_NORMS = of_layers("residual", "attention_post_norm", "mlp_post_norm")
HEAD_NORMS = of_layers("each_head", "attention.q_norm", "attention.k_norm")

# Names of Hugging Face's decoders that follow Llama.
FIRST_NAMES = {"embed.weight": "model.embed_tokens.weight"}
LAST_NAMES = {"norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}


def model_pieces(
    config: CompleteModel,
    modules: Mapping[str, str],
    biased: Collection[str],
    layers: str = "model.layers",
    ends: tuple[Mapping[str, str], Mapping[str, str]] = (FIRST_NAMES, LAST_NAMES),
    piece: Callable[[str, str], Piece] = lambda ours, stored: Piece(stored),
) -> dict[str, Piece]:
    """Return our name → the piece of Hugging Face's files, in the model's order, without a tied head.

    modules: our module of a layer → theirs. biased: our modules with a bias. layers: their prefix of a layer.
    ends: names of parameters before and after the layers. piece: makes the piece of (our module, tensor).
    """
    first, last = ends
    pieces = {ours: Piece(stored) for ours, stored in first.items()}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in modules.items():
            for kind in ("weight", "bias") if ours in biased else ("weight",):
                stored = f"{layers}.{layer}.{theirs}.{kind}"
                pieces[f"layers.{layer}.{ours}.{kind}"] = piece(ours, stored)
    pieces |= {ours: Piece(stored) for ours, stored in last.items()}
    for ours in ("embed.weight", "head.weight", "head.bias"):
        if ours in pieces:
            pieces[ours] = replace(pieces[ours], rows=config.vocab_size)
    if config.tie_word_embeddings:
        del pieces["head.weight"]
    return pieces
