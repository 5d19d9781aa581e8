"""A run small enough for a test: random tokens in a packed folder, a two-layer model, a resolved plan for any ranks."""

from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.manifest import hash_manifest, write_stage
from kielo.artifact.token_shards import TokenShardWriter
from kielo.plan.resolved import Identity, Placement, Resolved
from kielo.recipe.sections import Model

VOCABULARY, LENGTH, SEQUENCES = 70, 16, 8  # 35 rows of each tensor rank do not divide by 2 shards


def write_tokens(folder: Path) -> None:
    """Two sources whose last sequence is short, so that ranks count different numbers of tokens, and held-out text."""
    generator = np.random.default_rng(7)
    with write_stage(folder, "tokens", 1, {}, {}) as stage:
        counts = {}
        for name, documents in (("books", 30), ("news", 4), ("heldout", 5)):
            with TokenShardWriter(stage.folder / name, VOCABULARY) as writer:
                lengths = generator.integers(5, 60, documents)
                for length in lengths:
                    row = np.sort(generator.integers(1, VOCABULARY, length))  # sorted: there is something to learn
                    writer.add(np.append(row, 0))
            counts[name] = {"tokens": int(lengths.sum()) + documents, "documents": documents, "bytes": 1}
        stage.counts.update({"heldout": counts.pop("heldout"), "sources": counts})


def resolve(
    folder: Path, shard: int = 1, replicate: int = 1, context: int = 1, tensor: int = 1, micro_batch: int = 2, **changes: Any
) -> Resolved:
    """The same run for any layout; `changes` are to identity or placement by key."""
    ranks = shard * replicate
    identity: dict[str, Any] = {
        "name": "tiny", "language": "et", "seed": 3, "model": Model(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, initializer_range=0.2,
        ),
        "sequence_length": LENGTH, "mixture": {"books": 3.0, "news": 2.0}, "mask_documents": True,
        "tokens_hash": hash_manifest(folder / "tokens"), "total_steps": 20, "tokens_per_step": SEQUENCES * LENGTH,
        "sequences_per_step": SEQUENCES, "learning_rate": 5e-3, "final_learning_rate": 5e-4, "schedule": "cosine",
        "warmup_steps": 4, "decay_steps": 4, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95,
        "adam_epsilon": 1e-8, "max_gradient_norm": 0.5, "z_loss": 1e-4, "precision": "fp32",
        "max_skipped_steps_in_a_row": 3, "heldout_sequences": 7, "max_epochs": 50.0,
    }  # fmt: skip
    placement: dict[str, Any] = {
        "world_size": ranks * context * tensor, "replicate": replicate, "shard": shard, "context": context,
        "tensor": tensor, "zero": 1,
        "micro_batch_sequences": micro_batch, "micro_batches_per_step": SEQUENCES // ranks // micro_batch,
        "device": "cpu", "accelerator": "test", "peak_tflops": 1.0, "flops_per_token": 1000, "parameters": 5000,
        "end_of_text_id": 0, "loss_chunk_tokens": 24, "log_every_steps": 1, "heldout_every_steps": 10,
        "checkpoint_every_steps": 100, "keep_newest": 2, "tensorboard": False, "start_timeout_seconds": 60.0,
        "tokens_folder": str(folder / "tokens"), "tokenizer_folder": "", "train_folder": str(folder / "train"),
    }  # fmt: skip
    for key, value in changes.items():
        (identity if key in identity else placement)[key] = value
    return Resolved(identity=Identity(**identity), placement=Placement(**placement))
