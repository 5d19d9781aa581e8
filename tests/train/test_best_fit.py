"""A run on packed documents: its loss is that of the documents themselves."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.artifact.token_shards import TokenShard
from kielo.dataset.batches import Batches
from kielo.dataset.pack_sequences import pack_sequences
from kielo.models.families import hf_config
from kielo.recipe.sections import Recipe
from kielo.train.run import train
from tests.train.tiny_run import LENGTH, resolve, write_tokens


@pytest.mark.parametrize("packing", ["best_fit", "one_a_sequence"])
def test_the_loss_is_that_of_each_piece_alone(tmp_path, packing):
    """The first step's loss is the mean over the tokens of each piece of a document, given to transformers'
    model alone: with documents masked nothing else is seen. A piece's last token counts the next token where
    the document goes on, and the first of the next document in the sequence.
    """
    write_tokens(tmp_path / "tokens")
    recipe = Recipe(
        name="tiny", language="et", corpus={"sources": ["books.txt", "news.txt"]},
        dataset={"packing": packing, "sequence_length": LENGTH},
    )  # fmt: skip
    pack_sequences(recipe, tmp_path / "tokens")
    resolved = resolve(tmp_path, z_loss=0.0)
    identity, placement = resolved.identity, resolved.placement
    torch.manual_seed(0)
    config = LlamaConfig(**hf_config(identity.model) | {"initializer_range": 0.5})
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    (phase,) = identity.phases
    identity = identity.model_copy(
        update={
            "phases": (phase.model_copy(update={"packing": packing}),),
            "model": identity.model.model_copy(update={"weights": f"hf:{tmp_path / 'hf'}"}),
        }
    )
    train(resolved.model_copy(update={"identity": identity}), max_steps=2)
    rows = of_kind(read_metrics(tmp_path / "train" / "metrics.jsonl"), TrainingStep)
    (phase,) = identity.phases
    batches = Batches(tmp_path / "tokens", identity.seed, phase, LENGTH, placement.end_of_text_id, True)
    located = batches.order.locate(batches.samples(1))
    losses, pieces_in_all = [], 0
    for source, pieces in zip(located.source, batches.ranges(located)):
        shard: TokenShard = batches.shards[source]
        begins = [start in shard.document_offsets for start, _ in pieces]
        for number, (start, count) in enumerate(pieces):
            pieces_in_all += 1
            piece = shard.read(start, count).astype(np.int64)
            labels = piece[1:].tolist()
            if start + count not in shard.document_offsets:
                labels.append(int(shard.read(start + count, 1)[0]))
            elif number + 1 < len(pieces) and begins[number + 1]:
                labels.append(int(shard.read(pieces[number + 1][0], 1)[0]))
            with torch.no_grad():
                logits = theirs(torch.from_numpy(piece)[None]).logits[0]
            losses.append(cross_entropy(logits[: len(labels)], torch.tensor(labels), reduction="none"))
    if packing == "one_a_sequence":  # as a batch of rows that are padded, for Hugging Face's Trainer
        assert pieces_in_all == phase.sequences_per_step
    else:
        assert pieces_in_all > phase.sequences_per_step
    # fp32, and sums in another order: 1e-6 of the loss was measured
    assert rows[0].loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
