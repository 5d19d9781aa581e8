"""A model to be scored, of a checkpoint or a Hugging Face folder, and its bits for each byte of text.

Losses per token cannot be compared across tokenizers, bits per byte can. The convention: the held-out
documents form one stream, each closed by the end-of-text token, as in training. Every token's bits are
counted exactly once, end-of-text included, but not the tokens that the tokenizer puts before each text. They
are divided by the documents' UTF-8 bytes plus one byte for each border, for every kind of contender
(`baselines.py`).

Windows overlap by default: they are one training sequence long and advance by half of it. A token counts in
the first window that has it, so all but the first tokens have at least half a sequence of context.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kielo.artifact.special_files import refuse_special_file
from kielo.checkpoint.load_model import load_model
from kielo.dataset.batches import causal_documents
from kielo.dataset.document_packer import begins_with_cls, packed_begin_of_documents
from kielo.models.parameter_shapes import parameters
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.memory_row import MOST_LOGITS_PER_FORWARD as MOST_LOGITS_PER_FORWARD
from kielo.resolve.memory_row import MOST_TOKENS_PER_FORWARD as MOST_TOKENS_PER_FORWARD
from kielo.resolve.resolved import Resolved
from kielo.tokenizer.chat_template import has_chat_template
from kielo.tokenizer.load import (
    TextTokenizer,
    encode,
    end_of_text_id,
    load_tokenizer,
    role_id,
    vocabulary_size,
)
from kielo.tokenizer.text_frame import ids_before_texts
from kielo.train.forward_backward import NextToken
from kielo.train.watch.resources import host_memory

# A Kielo checkpoint (with the run's resolved.toml and tokenizer) or a Hugging Face folder → a `Contender`,
# which turns token ids into logits, in fp32, on the GPU if this machine has one.
Logits = Callable[[Tensor, Tensor | None], Tensor]
# (tokens_bs, documents_bs or None, labels_bs) → the nats of each label [b, s], in fp32.
Losses = Callable[[Tensor, Tensor | None, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """A model with its tokenizer, and `logits(tokens_bs, documents_bs or None)` → logits_bsv."""

    name: str
    logits: Logits
    tokenizer: TextTokenizer
    start_id: int  # the token that precedes the first document
    end_of_text_id: int
    sequence_length: int
    mask_documents: bool
    device: torch.device
    module: Any = None  # Kielo's model, whose attributes torch types as Tensor | Module; None: transformers'
    # The first tokens of each document, as in training or by the post-processor of a Hugging Face folder;
    # `[CLS]` in the causal use of an encoder. They are given: their bits do not count.
    first_ids: tuple[int, ...] = ()
    losses: Losses | None = None  # without whole logits; None: computed from `logits`
    # Ranks that share the rows of a batch. All ranks of a job call `logits` and `losses` with the same batch.
    data_ranks: int = 1

    def target_log_probabilities(self, tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        """Return the log-probability [b, s] of each label after the tokens up to its position, in fp32.

        Without `losses` all logits exist at one time.
        """
        documents_bs = self.documents(tokens_bs)
        if self.losses is not None:
            return -self.losses(tokens_bs, documents_bs, labels_bs)
        logits_bsv = self.logits(tokens_bs, documents_bs).float()
        losses_n = cross_entropy(logits_bsv.flatten(0, 1), labels_bs.flatten(), reduction="none")
        return -losses_n.view(labels_bs.shape)

    def rows_of(self, length: int) -> int:
        """Return the number of rows of `length` tokens in a forward pass."""
        most_tokens = MOST_TOKENS_PER_FORWARD
        if self.losses is None:
            most_tokens = min(most_tokens, MOST_LOGITS_PER_FORWARD // vocabulary_size(self.tokenizer))
        return self.data_ranks * max(1, most_tokens // length)

    @property
    def has_chat_template(self) -> bool:
        return has_chat_template(self.tokenizer.folder)

    def encode_documents(
        self, texts: Sequence[str], stored: Sequence[Sequence[int] | None] = ()
    ) -> np.ndarray:
        """Return the token ids of all documents in one int64 stream, end-of-text after each.

        stored: ids of some documents, by this tokenizer, which are used unchanged.
        """
        return document_tokens(self.tokenizer, self.end_of_text_id, texts, self.first_ids, stored)

    def counted(self, tokens: np.ndarray) -> np.ndarray:
        """Return for each token of `encode_documents` if its bits count, bool [n]: all but the first ids."""
        is_counted = np.ones(len(tokens), bool)
        if self.first_ids:
            begins = np.flatnonzero(np.concatenate([[True], tokens[:-1] == self.end_of_text_id]))
            is_counted[begins[:, None] + np.arange(len(self.first_ids))] = False
        return is_counted

    def documents(self, tokens_bs: Tensor) -> Tensor | None:
        """Return the number of each token's document in its row, or None if the model was trained without
        masks.

        The end-of-text token belongs to the document that it ends, as in training.
        """
        if not self.mask_documents:
            return None
        ends = (tokens_bs == self.end_of_text_id).to(torch.int32)
        return ends.cumsum(dim=1, dtype=torch.int32) - ends


def document_tokens(
    tokenizer: TextTokenizer,
    end_of_text: int,
    texts: Sequence[str],
    first_ids: Sequence[int] = (),
    stored: Sequence[Sequence[int] | None] = (),
) -> np.ndarray:
    first, rows = list(first_ids), encode(tokenizer, list(texts))
    for number, ids in enumerate(stored):
        if ids is not None:  # they may have what begins a document
            rows[number] = list(ids)[len(first) :] if list(ids[: len(first)]) == first else list(ids)
    return np.concatenate([np.asarray([*first, *row, end_of_text], dtype=np.int64) for row in rows])


def load_checkpoint(checkpoint: Path, resolved: Resolved, tokenizer_folder: Path) -> Contender:
    """Load the model of a Kielo checkpoint, as it was trained, onto one device.

    An encoder's logits at a position are about the token there. `causal_use` has the logits of next tokens.
    """
    config, device = resolved.identity.model, _device()
    refuse_without_room(str(checkpoint), parameters(config), device)
    model = load_model(checkpoint, config, device)
    model.restarts_positions = bool(resolved.identity.dataset.restart_positions)
    model.make_masks.is_dense = resolved.placement.layout.alibi_kernel == "bias"
    tokenizer = load_tokenizer(tokenizer_folder)
    # In the hybrid objective the output at a position is about the next token: nothing is about the first.
    shift = int(resolved.identity.train.causal_share > 0)
    head = NextToken(z_loss=0.0, chunk_tokens=max(1, MOST_LOGITS_PER_FORWARD // config.vocab_rows))

    def losses(tokens_bs: Tensor, documents_bs: Tensor | None, labels_bs: Tensor) -> Tensor:
        return head.token_losses(model, model(tokens_bs, documents_bs).roll(shift, 1), labels_bs)

    return Contender(
        name=str(checkpoint),
        logits=lambda tokens_bs, documents_bs: model.logits(model(tokens_bs, documents_bs).roll(shift, 1)),
        tokenizer=tokenizer,
        start_id=end_of_text_id(tokenizer),
        end_of_text_id=end_of_text_id(tokenizer),
        sequence_length=resolved.identity.longest_sequence_length,
        mask_documents=resolved.identity.dataset.mask_documents,
        device=device,
        module=model,
        first_ids=packed_begin_of_documents(Path(tokenizer_folder).parent / "tokens", Path(tokenizer_folder)),
        losses=losses,
    )


def refuse_without_room(name: str, num_parameters: int, device: torch.device) -> None:
    """Raise KieloError if weights in fp32 do not fit the free memory of one device, before they are read."""
    host = host_memory()
    room = host.available if host is not None else math.inf
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    needed = 4 * num_parameters
    if needed > room:
        ranks = 2 ** math.ceil(math.log2(2 * needed / max(room, 1)))
        raise KieloError(
            f"{name}: its weights are {needed / 1e9:.1f} GB in fp32, and {room / 1e9:.1f} GB are free here. "
            f"Fix: --ranks {ranks} on devices of this size"
        )


def causal_use(contender: Contender, recipe: Recipe) -> Contender:
    model, cls_id = contender.module, None
    if begins_with_cls(recipe):
        cls_id = role_id(contender.tokenizer, "cls_token")

    def logits(tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
        documents_bs = torch.zeros_like(tokens_bs) if documents_bs is None else documents_bs
        return model.logits(model(tokens_bs, causal_documents(documents_bs)))

    first_ids = () if cls_id is None else (cls_id,)
    return replace(contender, logits=logits, first_ids=first_ids, losses=None)


def load_hugging_face(folder: Path, sequence_length: int | None = None) -> Contender:
    """Load any causal language model in a Hugging Face folder with a `tokenizer.json`.

    `sequence_length` defaults to the model's own, at most 2,048. Documents are not masked, because
    transformers' models are trained without masks.
    """
    device = _device()
    tokenizer = load_tokenizer(folder)
    end_id = end_of_text_id(tokenizer)
    model = load_hugging_face_model(folder, vocabulary_size(tokenizer), torch.float32)
    first_ids = ids_before_texts(tokenizer)
    longest = getattr(model.config, "max_position_embeddings", None) or 2048
    return Contender(
        name=str(folder),
        logits=lambda tokens_bs, _: model(input_ids=tokens_bs, use_cache=False).logits,
        tokenizer=tokenizer,
        start_id=end_id if first_ids else start_of_text_id(model, end_id),
        end_of_text_id=end_id,
        sequence_length=min(longest, sequence_length or 2048),
        mask_documents=False,
        device=device,
        first_ids=first_ids,
    )


def load_hugging_face_model(folder: Path, num_tokens: int, dtype: torch.dtype | str) -> Any:
    """Load transformers' model from the folder alone, onto the GPU if this machine has one.

    `num_tokens` is the tokenizer's size. Raise KieloError if transformers cannot load the model, if tensors
    are missing, or if the model's vocabulary is smaller than the tokenizer's.
    """
    from transformers import AutoModelForCausalLM  # seconds to import; a Kielo checkpoint does without

    for file in folder.glob("*"):
        refuse_special_file(file)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, trust_remote_code=False
        )
        model, loading = loaded  # a pair, with output_loading_info
        model = model.to(_device()).eval()
    # transformers has a dozen kinds of error for files that do not fit
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise KieloError(
            f"{folder}: not a causal language model that transformers can load ({type(error).__name__}: "
            f"{reason})"
        ) from error
    if loading["missing_keys"]:  # transformers would fill them with random numbers
        missing = ", ".join(sorted(loading["missing_keys"])[:8])
        raise KieloError(f"{folder}: tensors of the model are missing: {missing}")
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < num_tokens:
        raise KieloError(
            f"{folder}: the tokenizer has {num_tokens} tokens, and the model's vocabulary {rows} rows, so "
            "they do not belong together"
        )
    return model


def start_of_text_id(model: Any, end_of_text: int) -> int:
    """Return the token that precedes the first document: the model's own, else the end of text."""
    start_id, rows = model.config.bos_token_id, model.get_input_embeddings().weight.shape[0]
    return start_id if isinstance(start_id, int) and 0 <= start_id < rows else end_of_text


def refuse_odd_loss(contender: Contender, loss: float) -> None:
    if not math.isfinite(loss):
        raise KieloError(
            f"{contender.name}: the model's loss is {loss}: its weights are damaged, or overflow"
        )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def counted_bytes(texts: Sequence[str]) -> int:
    """Return the divisor of bits: the UTF-8 bytes of the documents, and one for each document's border."""
    return sum(len(text.encode("utf-8")) + 1 for text in texts)


def windows(num_tokens: int, length: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield windows of one length (at most num_tokens) that count each prediction exactly once.

    A window is its first input in the stream, and the offset from which on its predictions are counted.
    """
    if not 1 <= stride <= length:
        raise KieloError(f"stride = {stride}. Fix: 1 to the sequence length, {length}")
    length = min(length, num_tokens)
    counted = 0
    while counted < num_tokens:
        end = length if counted == 0 else min(counted + stride, num_tokens)
        yield end - length, counted - (end - length)
        counted = end


@torch.inference_mode()
def token_stream_bits(
    contender: Contender, tokens: np.ndarray, stride: int | None = None, counted: np.ndarray | None = None
) -> float:
    """Return the total bits of the stream of tokens [n], which starts a document.

    `stride` defaults to half a sequence. `counted` (bool [n]) has the tokens whose bits count, None for all.
    """
    length = min(contender.sequence_length, len(tokens))
    stream = torch.from_numpy(np.concatenate([[contender.start_id], tokens])).to(torch.int64)
    weights = torch.ones(len(tokens)) if counted is None else torch.from_numpy(counted).float()
    stride = max(1, length // 2) if stride is None else min(stride, length)
    nats, rows = 0.0, contender.rows_of(length)
    for first, group in groupby(windows(len(tokens), length, stride), key=itemgetter(1)):
        while batch := list(islice(group, rows)):
            spans = torch.stack([stream[start : start + length + 1] for start, _ in batch])
            spans = spans.to(contender.device)
            inputs, labels = spans[:, :-1], spans[:, 1:]
            losses = -contender.target_log_probabilities(inputs, labels)[:, first:].flatten()
            counts = torch.stack([weights[start + first : start + length] for start, _ in batch])
            nats += (losses.double() * counts.flatten().to(losses.device)).sum().item()
    return nats / np.log(2)
