"""A micro-batch in the form that transformers' models take, with their attention masks.

Data in: token ids, labels and document numbers, each [b, s]; data out: arguments of a model's forward, and
the labels that belong to its logits. Shape letters: b = sequences, s = tokens of one, n = documents.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kielo.train.feed import MicroBatch


@dataclass(frozen=True)
class HuggingFaceBatch:
    """The arguments of one forward of transformers' model, and its labels.

    is_token [n, longest]: with one document a row, the columns that are no padding; None: rows as given.
    """

    arguments: dict[str, Any]
    labels: Tensor
    sequences: int
    is_token: Tensor | None = None

    def as_given(self, x: Tensor) -> Tensor:
        """Returns the model's output `x` in the sequences of the micro-batch: [b, s, ...]."""
        if self.is_token is None:
            return x
        if x.shape[:2] != self.is_token.shape:  # OPT's MLP has all rows one after another
            x = x.unflatten(0, self.is_token.shape)
        return x[self.is_token].unflatten(0, (self.sequences, -1))


def hugging_face_batch(
    micro_batch: MicroBatch, model: PreTrainedModel, takes_documents_alone: bool
) -> HuggingFaceBatch:
    """Converts a micro-batch.

    takes_documents_alone: one document a row. With ALiBi, transformers takes a mask of tokens and none of
    pairs of tokens, and learned positions begin anew in each document.
    """
    sequences, length = micro_batch.inputs_bs.shape
    # OPT would count positions from the mask.
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if micro_batch.documents_bs is not None and takes_documents_alone:
        return _documents_apart(micro_batch, takes_positions)
    arguments: dict[str, Any] = {"input_ids": micro_batch.inputs_bs}
    if micro_batch.documents_bs is not None:
        arguments["attention_mask"] = _masks(micro_batch.documents_bs, model.config)
    if takes_positions:
        arguments["position_ids"] = torch.arange(length, device=micro_batch.inputs_bs.device)[None]
    return HuggingFaceBatch(arguments, micro_batch.labels_bs, sequences)


def _masks(documents_bs: Tensor, config: PretrainedConfig) -> Tensor | dict[str, Tensor]:
    """Makes the mask [b, 1, s, s] that is added to scores; one for each kind of layer, where windows differ.

    A model uses such a mask unchanged, so windows must be in it.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [
        "full_attention" if window is None else "sliding_attention"
    ]
    places_s = torch.arange(documents_bs.shape[1], device=documents_bs.device)
    distance_ss = places_s[:, None] - places_s
    seen = (documents_bs[:, None, :, None] == documents_bs[:, None, None, :]) & (distance_ss >= 0)
    masks = {}
    for kind in set(kinds):
        within = seen if kind == "full_attention" else seen & (distance_ss < window)
        masks[kind] = torch.zeros(within.shape, device=within.device).masked_fill(~within, torch.finfo().min)
    return masks if len(masks) > 1 else masks.popitem()[1]


def _documents_apart(micro_batch: MicroBatch, takes_positions: bool) -> HuggingFaceBatch:
    """Puts each document in a row of its own, padded at its end; the tokens before do not see the padding.

    A model computes the same if it knows only distances between tokens, or positions in the document.
    """
    documents_bs = micro_batch.documents_bs
    begins = torch.ones_like(documents_bs, dtype=torch.bool)
    begins[:, 1:] = documents_bs[:, 1:] != documents_bs[:, :-1]
    first_n = begins.flatten().nonzero().squeeze(1)
    length_n = torch.diff(first_n, append=first_n.new_tensor([begins.numel()]))
    columns = torch.arange(int(length_n.max()), device=first_n.device)
    is_token = columns < length_n[:, None]
    places = (first_n[:, None] + columns).where(is_token, first_n[:, None])
    labels = micro_batch.labels_bs.flatten()[places].masked_fill(~is_token, -100)
    arguments = {"input_ids": micro_batch.inputs_bs.flatten()[places]}
    if takes_positions:
        arguments["position_ids"] = columns.expand(len(first_n), -1)
    return HuggingFaceBatch(arguments, labels, documents_bs.shape[0], is_token)
