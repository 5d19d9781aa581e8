"""A run small enough for a test: random tokens in a packed folder, a two-layer model,
a resolved plan for any ranks.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.manifest import hash_manifest, write_stage
from kielo.artifact.token_shards import TokenShardWriter
from kielo.dataset.batches import Batches
from kielo.models.families import complete
from kielo.recipe.sections import Checkpoint, DatasetIdentity, Layout, Model, TrainIdentity, TrainPlacement
from kielo.resolve.resolved import (
    Identity,
    LearningRateSegment,
    PhasePlacement,
    Placement,
    PlannedPhase,
    Resolved,
)

# 67 tokens in 70 rows; 35 rows of each tensor rank do not divide by 2 shards.
VOCABULARY, LENGTH, SEQUENCES = 67, 16, 8


def write_tokens(folder: Path, spoilt_steps: Collection[int] = ()) -> None:
    """Two sources whose last sequence is short, so that ranks count different numbers of tokens,
    and held-out text.

    spoilt_steps: of the twenty steps of `resolve`'s run, those whose loss is infinite, on the data rank that
    reads the spoilt sequence: one of its labels is a row of the head that only pads the vocabulary.
    """
    _write_tokens(folder, [])
    if spoilt_steps:
        _write_tokens(folder, _tokens_of_steps(folder, spoilt_steps))


def _write_tokens(folder: Path, spoilt: list[int]) -> None:
    """spoilt: the tokens of "books", by number, that are no words of the vocabulary."""
    generator = np.random.default_rng(7)
    with write_stage(folder, "tokens", 1, {}, {"spoilt": spoilt}) as stage:
        counts = {}
        for name, documents in (("books", 30), ("news", 4), ("heldout", 5)):
            with TokenShardWriter(stage.folder / name, VOCABULARY + 1) as writer:
                lengths = generator.integers(5, 60, documents)
                # sorted: there is something to learn
                rows = [
                    np.append(np.sort(generator.integers(1, VOCABULARY, length)), 0) for length in lengths
                ]
                if name == "books":
                    np.put(stream := np.concatenate(rows), spoilt, VOCABULARY)
                    rows = np.split(stream, np.cumsum([len(row) for row in rows])[:-1])
                for row in rows:
                    writer.add(row)
            counts[name] = {"tokens": int(lengths.sum()) + documents, "documents": documents, "bytes": 1}
        stage.counts.update({"heldout": counts.pop("heldout"), "sources": counts})


def _tokens_of_steps(folder: Path, steps: Collection[int]) -> list[int]:
    """One token of "books" for each of the steps, inside a sequence that no sound step reads."""
    identity = resolve(folder.parent).identity
    batches = Batches(folder, identity.seed, identity.phases[0], LENGTH, 0, identity.dataset.mask_documents)
    sequences: dict[int, set[int]] = {}
    for step in range(1, identity.total_steps + 1):
        located = batches.order.locate(batches.samples(step))
        sequences[step] = set(located.sequence[located.source == batches.names.index("books")].tolist())
    sound = set().union(*(found for step, found in sequences.items() if step not in steps))
    return [min(sequences[step] - sound) * LENGTH + LENGTH // 2 for step in sorted(steps)]


def resolve(
    folder: Path,
    shard: int = 1,
    replicate: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    micro_batch: int = 4,
    **changes: Any,
) -> Resolved:
    """The same run for any layout, of one phase; `changes` are to a section, the phase or the rates, by key.

    warmup_steps and decay_steps are counted in steps.
    """
    ranks = shard * replicate
    identity: dict[str, Any] = {
        "name": "tiny", "language": "et", "seed": 3, "model": complete(Model(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4, vocab_size=VOCABULARY, vocab_multiple=10, max_position_embeddings=LENGTH,
            initializer_range=0.2,
        ), LENGTH),
        "tokens_hash": hash_manifest(folder / "tokens"),
    }  # fmt: skip
    dataset: dict[str, Any] = {"mask_documents": True}
    trained: dict[str, Any] = {
        "max_gradient_norm": 0.5,
        "z_loss": 1e-4,
        "precision": "fp32",
        "heldout_sequences": 7,
    }
    phase: dict[str, Any] = {
        "total_steps": 20, "mixture": {"books": 3.0, "news": 2.0}, "learning_rate": 5e-3,
        "final_learning_rate": 5e-4,
        "schedule": "cosine", "warmup_steps": 4, "decay_steps": 4, "flops_per_token": 1000,
    }  # fmt: skip
    layout: dict[str, Any] = {
        "replicate": replicate, "shard": shard, "context": context, "tensor": tensor, "pipeline": pipeline,
        "compile": False,
    }  # fmt: skip
    running: dict[str, Any] = {
        "loss_chunk_tokens": 24, "log_every_steps": 1, "heldout_every_steps": 10, "tensorboard": False,
        "start_timeout_seconds": 120.0,
    }  # fmt: skip
    checkpoint: dict[str, Any] = {"every_steps": 100, "keep_newest": 2, "keep_every_steps": 0}
    placement: dict[str, Any] = {
        "world_size": ranks * context * tensor * pipeline,
        "device": "cpu", "accelerator": "test", "peak_tflops": {"fp32": 1.0}, "parameters": 5000,
        "end_of_text_id": 0,
        "tokens_folder": str(folder / "tokens"), "tokenizer_folder": "",
        "train_folder": str(folder / "train"),
    }  # fmt: skip
    sections = {
        TrainIdentity: trained, DatasetIdentity: dataset, Layout: layout, TrainPlacement: running,
        Checkpoint: checkpoint,
    }  # fmt: skip
    for key, value in changes.items():
        given = next((given for section, given in sections.items() if key in section.model_fields), None)
        if given is None:
            given = next((part for part in (identity, phase) if key in part), placement)
        given[key] = value
    identity |= {"dataset": dataset, "train": trained}
    placement |= {"layout": layout, "train": running, "checkpoint": checkpoint}
    steps, step = phase["total_steps"], SEQUENCES * LENGTH
    identity["phases"] = [PlannedPhase(
        number=1, first_step=1, steps=steps, first_sample=0, sequence_length=LENGTH,
        sequences_per_step=SEQUENCES,
        tokens_per_step=step, mixture=phase["mixture"], order_first_sample=0, offsets={},
    )]  # fmt: skip
    identity["learning_rates"] = [LearningRateSegment(
        first_token=0, tokens=steps * step, peak=phase["learning_rate"], final=phase["final_learning_rate"],
        schedule=phase["schedule"], warmup_tokens=phase["warmup_steps"] * step,
        decay_tokens=phase["decay_steps"] * step,
    )]  # fmt: skip
    placement["phases"] = [PhasePlacement(
        micro_batch_sequences=micro_batch, micro_batches_per_step=-(-SEQUENCES // (ranks * micro_batch)),
        flops_per_token=phase["flops_per_token"],
    )]  # fmt: skip
    return Resolved(identity=Identity(**identity), placement=Placement(**placement))
