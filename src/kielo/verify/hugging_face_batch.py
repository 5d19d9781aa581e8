"""A micro-batch as transformers' models take it, who sees whom in their own words.

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
    """is_token [n, longest]: of documents each in a row of its own, which columns are not filling; None: rows
    as given.
    """

    arguments: dict[str, Any]
    labels: Tensor
    sequences: int
    is_token: Tensor | None = None

    def as_given(self, x: Tensor) -> Tensor:
        """What came out of the model, in the sequences of the micro-batch again: [b, s, ...]."""
        return x if self.is_token is None else x[self.is_token].unflatten(0, (self.sequences, -1))


def hugging_face_batch(micro_batch: MicroBatch, model: PreTrainedModel, has_alibi: bool) -> HuggingFaceBatch:
    """`micro_batch` as `model` takes it. With ALiBi, transformers takes a mask of tokens and none of pairs."""
    sequences, length = micro_batch.inputs_bs.shape
    if micro_batch.documents_bs is not None and has_alibi:
        return _documents_apart(micro_batch)
    arguments: dict[str, Any] = {"input_ids": micro_batch.inputs_bs}
    if micro_batch.documents_bs is not None:
        arguments["attention_mask"] = _masks(micro_batch.documents_bs, model.config)
    # OPT would count places off the mask.
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        arguments["position_ids"] = torch.arange(length, device=micro_batch.inputs_bs.device)[None]
    return HuggingFaceBatch(arguments, micro_batch.labels_bs, sequences)


def _masks(documents_bs: Tensor, config: PretrainedConfig) -> Tensor | dict[str, Tensor]:
    """[b, 1, s, s] to add to scores; where layers differ in how far they see, one for each kind. A model
    takes such a mask as it is, so that windows must be in it.
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


def _documents_apart(micro_batch: MicroBatch) -> HuggingFaceBatch:
    """Each document in a row of its own, filled up at its end, which what comes before does not see.
    Distances are all that such a model knows of places.
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
    return HuggingFaceBatch(arguments, labels, documents_bs.shape[0], is_token)
