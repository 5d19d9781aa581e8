"""A model to be scored over the ranks of a job, in the run's own layout: sharded weights, never whole logits.

A Kielo checkpoint or a Hugging Face folder of a family that Kielo imports → a `Contender`. All ranks call its
`logits` and `losses` with the same batch and get the same result. Ranks along `replicate` and `shard` take
turns with the rows.
"""

from pathlib import Path

import torch
from torch import Tensor

from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.checkpoint.read_checkpoint import Verification, fill
from kielo.dataset.document_packer import packed_begin_of_documents
from kielo.evaluate.contender import Contender
from kielo.parallel.mesh import data_ranks
from kielo.ranks.world import World
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Precision
from kielo.resolve.resolved import Resolved
from kielo.tokenizer.load import end_of_text_id, load_tokenizer, vocabulary_size
from kielo.tokenizer.text_frame import ids_before_texts
from kielo.train.laid_out_model import LaidOutModel


def load_checkpoint_on_ranks(
    checkpoint: Path,
    resolved: Resolved,
    tokenizer_folder: Path,
    world: World,
    precision: Precision,
    laid: LaidOutModel | None = None,
) -> Contender:
    """Load a checkpoint in the placement of `resolved`. Each rank reads only its own shards.

    laid: the run's model to fill; by default a new model is built.
    """
    laid = LaidOutModel.of(resolved, world, precision) if laid is None else laid
    agreement = Agreement()
    Verification(agreement).require(checkpoint)
    parameters: dict[str, Tensor] = {f"model/{name}": one for name, one in laid.model.named_parameters()}
    fill(checkpoint, parameters, agreement)
    return contender_of_run(str(checkpoint), laid, resolved, tokenizer_folder, world.device)


def contender_of_run(
    name: str, laid: LaidOutModel, resolved: Resolved, tokenizer_folder: Path, device: torch.device
) -> Contender:
    """Return the contender of a run's model, which has values."""
    identity, tokenizer = resolved.identity, load_tokenizer(tokenizer_folder)
    end_id = end_of_text_id(tokenizer)
    return Contender(
        name=name,
        logits=laid.logits,
        tokenizer=tokenizer,
        start_id=end_id,
        end_of_text_id=end_id,
        sequence_length=identity.longest_sequence_length,
        mask_documents=identity.dataset.mask_documents,
        device=device,
        first_ids=packed_begin_of_documents(Path(tokenizer_folder).parent / "tokens", Path(tokenizer_folder)),
        losses=laid.losses,
        data_ranks=data_ranks(laid.mesh),
    )


def load_hugging_face_on_ranks(
    folder: Path, resolved: Resolved, world: World, precision: Precision
) -> Contender:
    """Load a Hugging Face folder by Kielo's import, in the placement of `resolved`, whose model it has.

    Texts and windows are as in `load_hugging_face`.
    """
    model = resolved.identity.model
    tokenizer = load_tokenizer(folder)
    if model.vocab_size < vocabulary_size(tokenizer):
        raise KieloError(
            f"{folder}: the tokenizer has {vocabulary_size(tokenizer)} tokens, and the model's vocabulary "
            f"{model.vocab_size} rows, so they do not belong together"
        )
    laid = LaidOutModel.of(resolved, world, precision)
    load_model_weights(dict(laid.model.named_parameters()), folder, model)
    end_id, first_ids = end_of_text_id(tokenizer), ids_before_texts(tokenizer)
    return Contender(
        name=str(folder),
        logits=laid.logits,
        tokenizer=tokenizer,
        start_id=end_id if first_ids else _start_id(folder, model.vocab_size, end_id),
        end_of_text_id=end_id,
        sequence_length=min(model.max_position_embeddings, resolved.identity.longest_sequence_length),
        mask_documents=False,
        device=world.device,
        first_ids=first_ids,
        losses=laid.losses,
        data_ranks=data_ranks(laid.mesh),
    )


def _start_id(folder: Path, rows: int, end_of_text: int) -> int:
    from transformers import AutoConfig  # seconds to import

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    start_id = config.bos_token_id
    return start_id if isinstance(start_id, int) and 0 <= start_id < rows else end_of_text
