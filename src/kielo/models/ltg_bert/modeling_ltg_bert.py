# Copyright 2026 The Kielo authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""LTG-BERT (Samuel et al. 2023, arXiv:2303.09859) for transformers 4.57 and newer; `kielo export` adds it.

Tensors have the names of the published models. `position_heads` of the configuration says how projected
relative positions are cut into heads: "concatenated" (HPLT) or "interleaved" (NorBERT 3).

Attention scores are (q·k + q·kpos[r] + k·qpos[r]) / √(3 head_dim), with r the row of the distance between
query and key in a table that all layers share. Shape letters: b = batch, s = sequence, d = hidden size, h =
heads, k = head_dim, q = queries, n = keys, r = rows of the table, v = vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput

POSITION_HEADS = ("concatenated", "interleaved")
DEFAULTS = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "position_bucket_size": 32,
    "position_heads": "concatenated",
    "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": None,
}
# Rows of distances in published files, which are computed here.
_IGNORED = [r"\.attention\.position_indices$"]
OPTIONS = ("output_hidden_states", "output_attentions", "return_dict", "token_type_ids")


class LtgBertConfig(PretrainedConfig):
    """The shape of an LTG-BERT. `classifier_dropout` None is the dropout of hidden states."""

    model_type = "ltg_bert"

    def __init__(self, **options: Any) -> None:
        for key, usual in DEFAULTS.items():
            setattr(self, key, options.pop(key, usual))
        if self.position_heads not in POSITION_HEADS:
            known = ", ".join(POSITION_HEADS)
            raise ValueError(f"position_heads = {self.position_heads!r} (known: {known})")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is no multiple of num_attention_heads = "
                f"{self.num_attention_heads}"
            )
        super().__init__(**{"tie_word_embeddings": True} | options)


def plain_norm(config: LtgBertConfig, size: int) -> nn.LayerNorm:
    return nn.LayerNorm(size, eps=config.layer_norm_eps, elementwise_affine=False)


class Embedding(nn.Module):
    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__()
        hidden, rows = config.hidden_size, 2 * config.position_bucket_size - 1
        self.word_embedding: nn.Module = nn.Embedding(config.vocab_size, hidden)
        self.word_norm = plain_norm(config, hidden)
        self.relative_embedding = nn.Parameter(torch.empty(rows, hidden))
        self.relative_layer_norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states [b, s, d] and the table of relative positions [r, d]."""
        words = self.word_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        return self.dropout(self.word_norm(words)), self.relative_layer_norm(self.relative_embedding)


class Attention(nn.Module):
    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads = config.num_attention_heads
        self.is_interleaved = config.position_heads == "interleaved"
        self.scale = (3 * hidden // self.heads) ** -0.5
        self.pre_layer_norm = plain_norm(config, hidden)
        self.in_proj_qk = nn.Linear(hidden, 2 * hidden)
        self.in_proj_v = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)
        self.post_layer_norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.weight_dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self, x: Tensor, positions: Tensor, rows: Tensor, hidden_keys: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's addition [b, s, d], and attention's weights [b, h, q, n].

        `positions` is [r, d], and `rows` [q, n] has the row of each distance. `hidden_keys`, broadcast to [b,
        h, q, n], is True for pairs that are not seen.
        """
        x = self.pre_layer_norm(x)
        q, k = (self._in_heads(part) for part in self.in_proj_qk(x).chunk(2, dim=-1))
        v = self._in_heads(self.in_proj_v(x))
        q_rows, k_rows = self._positions_in_heads(self.in_proj_qk(positions))
        places = rows.expand(*q.shape[:2], -1, -1)
        scores = q @ k.mT
        scores = scores + (q @ k_rows.mT).gather(-1, places)
        scores = scores + (k @ q_rows.mT).gather(-1, places.mT).mT
        scores = _at_least_fp32(scores * self.scale)
        if hidden_keys is not None:
            scores = scores.masked_fill(hidden_keys, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).to(v.dtype)
        out = (self.weight_dropout(weights) @ v).transpose(1, 2).flatten(2)
        return self.dropout(self.post_layer_norm(self.out_proj(out))), weights

    def _in_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def _positions_in_heads(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Cut queries beside keys of the positions [r, 2d] into heads, [h, r, k] each."""
        if self.is_interleaved:  # a head has 2k columns in a row, its queries and then its keys
            q, k = self._in_heads(both).chunk(2, dim=-1)
            return q, k
        q, k = both.chunk(2, dim=-1)
        return self._in_heads(q), self._in_heads(k)


class GatedGelu(nn.Module):
    """The first half of the features times the GELU of the second."""

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate, approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__()
        hidden, inside = config.hidden_size, config.intermediate_size
        self.mlp = nn.Sequential(
            plain_norm(config, hidden),
            nn.Linear(hidden, 2 * inside, bias=False),
            GatedGelu(),
            plain_norm(config, inside),
            nn.Linear(inside, hidden, bias=False),
            nn.Dropout(config.hidden_dropout_prob),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Layer(GradientCheckpointingLayer):
    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config), FeedForward(config)

    def forward(
        self, x: Tensor, positions: Tensor, rows: Tensor, hidden_keys: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        added, weights = self.attention(x, positions, rows, hidden_keys)
        x = x + added
        return x + self.mlp(x), weights


class Encoder(nn.Module):
    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))


class Head(nn.Module):
    """Norm, matrix, GELU, norm, dropout and a matrix to `outputs` features."""

    def __init__(self, config: LtgBertConfig, outputs: int, dropout: float) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.nonlinearity = nn.Sequential(
            plain_norm(config, hidden),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            plain_norm(config, hidden),
            nn.Dropout(dropout),
            nn.Linear(hidden, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.nonlinearity(x)


class LtgBertModel(PreTrainedModel):
    """The encoder without a head. An output's attentions are weights [b, h, q, n] of each layer."""

    config: LtgBertConfig
    config_class = LtgBertConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    # A loss is a mean over its batch: Trainer divides it by the batches that it accumulates.
    accepts_loss_kwargs = False
    _no_split_modules = ["Layer"]
    # Heads, which files of other tasks have.
    _keys_to_ignore_on_load_unexpected = [*_IGNORED, r"^classifier\.", r"^head\."]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as the authors do: normal, cut off at two deviations, biases 0, norms 1."""
        deviation = math.sqrt(2 / (5 * self.config.hidden_size))
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        if isinstance(module, Embedding):
            nn.init.trunc_normal_(module.relative_embedding, std=deviation, a=-2 * deviation, b=2 * deviation)
        if isinstance(module, nn.LayerNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
        if (bias := getattr(module, "bias", None)) is not None:
            nn.init.zeros_(bias)

    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__(config)
        self.embedding, self.transformer = Embedding(config), Encoder(config)
        self._add_head()
        # Of all distances. Not a buffer, because loading of weights does not fill buffers.
        self._rows: Tensor | None = None
        self.post_init()

    def _add_head(self) -> None: ...
    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.word_embedding = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Compute the states [b, s, d].

        attention_mask: 1 for tokens that are seen and 0 for padding [b, s], or for each query [b, q, n] or
        [b, 1, q, n]; so the lower triangle of ones makes attention causal. options: `output_hidden_states`,
        `output_attentions`, `return_dict`; `token_type_ids`, which the model lacks, are ignored.
        """
        return self._returned(self._encode(input_ids, attention_mask, inputs_embeds, options), options)

    def _encode(
        self,
        input_ids: Tensor | None,
        mask: Tensor | None,
        inputs_embeds: Tensor | None,
        options: dict[str, Any],
    ) -> BaseModelOutput:
        if unknown := options.keys() - OPTIONS:
            raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))} (known: {', '.join(OPTIONS)})")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both")
        with_states, with_weights = (
            getattr(self.config, name) if options.get(name) is None else options[name]
            for name in ("output_hidden_states", "output_attentions")
        )
        x, positions = self.embedding(input_ids, inputs_embeds)
        rows, hidden_keys = self._rows_of_pairs(x.shape[1], x.device), _hidden_keys(mask)
        states, attentions = [x], []
        for layer in self.transformer.layers:
            x, weights = layer(x, positions, rows, hidden_keys)
            if with_states:
                states.append(x)
            if with_weights:
                attentions.append(weights)
        return BaseModelOutput(
            last_hidden_state=x,
            hidden_states=tuple(states) if with_states else None,
            attentions=tuple(attentions) if with_weights else None,
        )

    def _rows_of_pairs(self, length: int, device: torch.device) -> Tensor:
        """Return the row of each distance, query - key, [q, n]."""
        longest = self.config.max_position_embeddings
        if length > longest:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_position_embeddings = {longest}; shorten "
                "it: tokenizer(..., truncation=True, max_length=...)"
            )
        if self._rows is None or self._rows.device != device:
            distances = range(1 - longest, longest)
            rows = [row_of_distance(one, self.config.position_bucket_size, longest) for one in distances]
            self._rows = torch.tensor(rows, device=device)
        places = torch.arange(length, device=device)
        return self._rows[places[:, None] - places + longest - 1]

    def _returned(self, output: ModelOutput, options: dict[str, Any]) -> Any:
        is_dict = options.get("return_dict")
        is_dict = getattr(self.config, "return_dict", True) if is_dict is None else is_dict
        return output if is_dict else output.to_tuple()


def row_of_distance(distance: int, bucket_size: int, longest: int) -> int:
    """Return a distance's row: its own up to half of bucket_size, then on a logarithmic scale."""
    middle, size = bucket_size // 2, min(abs(distance), longest - 1)
    if size > middle:
        share = math.log(size / middle) / math.log((longest - 1) / middle)
        size = math.ceil(share * (middle - 1)) + middle
    return bucket_size - 1 + (size if distance > 0 else -size)


def _hidden_keys(mask: Tensor | None) -> Tensor | None:
    """Return True for pairs that are not seen, to be broadcast to [b, h, q, n]."""
    if mask is None:
        return None
    if mask.dim() == 2:
        mask = mask[:, None, None]
    elif mask.dim() == 3:
        mask = mask[:, None]
    if mask.is_floating_point() and mask.min() < 0:
        return mask < 0  # added to the scores by other models
    return mask == 0


class _WithHead(LtgBertModel):
    """A model with a head, whose forward computes logits and, of labels, a loss."""

    output_class: type[ModelOutput]
    head: Head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Compute logits and the loss of `labels`, with the same masks and options as `LtgBertModel`."""
        output = self._encode(input_ids, attention_mask, inputs_embeds, options)
        logits = self._logits(output[0])
        loss = None if labels is None else self._loss(logits, labels)
        found = self.output_class(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )
        return self._returned(found, options)

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(_at_least_fp32(logits).flatten(0, -2), labels.flatten())


class LtgBertForMaskedLM(_WithHead):
    """Logits [b, s, v] of the token at each position. The head's matrix is the embedding's.

    The loss is the mean cross-entropy of `labels` [b, s] that are not -100.
    """

    output_class = MaskedLMOutput
    # transformers 4 reads the keys alone, and ties by the two functions.
    _tied_weights_keys = {"classifier.nonlinearity.5.weight": "embedding.word_embedding.weight"}
    _keys_to_ignore_on_load_unexpected = [*_IGNORED, r"^head\."]

    def _add_head(self) -> None:
        self.classifier = Head(self.config, self.config.vocab_size, self.config.hidden_dropout_prob)

    def get_output_embeddings(self) -> nn.Module:
        return self.classifier.nonlinearity[5]

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.classifier.nonlinearity[5] = value

    def _logits(self, x: Tensor) -> Tensor:
        return self.classifier(x)


class _WithLabels(_WithHead):
    """A model with a new head of `num_labels` outputs."""

    # The head of hidden tokens, which is not used.
    _keys_to_ignore_on_load_unexpected = [*_IGNORED, r"^classifier\."]

    def _add_head(self) -> None:
        dropout = self.config.classifier_dropout
        dropout = self.config.hidden_dropout_prob if dropout is None else dropout
        labels = self.config.num_labels
        if labels is None:
            raise ValueError("config.json has no id2label, which says how many labels there are")
        self.num_labels = labels
        self.head = Head(self.config, labels, dropout)


class LtgBertForSequenceClassification(_WithLabels):
    """Logits [b, labels] of a text's label, from the state of its first token.

    The loss is a mean square with one label or `config.problem_type` "regression", a binary cross-entropy of
    each label with "multi_label_classification" (also if labels are floating), else the cross-entropy.
    """

    output_class = SequenceClassifierOutput

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0])

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem, is_floating = self.config.problem_type, labels.is_floating_point()
        if problem == "regression" or not problem and self.num_labels == 1:
            return F.mse_loss(_at_least_fp32(logits).view_as(labels), _at_least_fp32(labels))
        if problem == "multi_label_classification" or not problem and is_floating:
            return F.binary_cross_entropy_with_logits(_at_least_fp32(logits), _at_least_fp32(labels))
        return super()._loss(logits, labels)


class LtgBertForTokenClassification(_WithLabels):
    """Logits [b, s, labels] of each token's label. The loss is as `LtgBertForMaskedLM`'s."""

    output_class = TokenClassifierOutput


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
