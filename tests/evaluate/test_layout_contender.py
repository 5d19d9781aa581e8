"""Scores of a model over several ranks: the nats and logits that transformers and one process have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kielo.checkpoint.checkpointer import Checkpointer
from kielo.evaluate.contender import Contender, load_checkpoint, load_hugging_face, token_stream_bits
from kielo.evaluate.layout_contender import load_checkpoint_on_ranks, load_hugging_face_on_ranks
from kielo.ranks.world import world_of_job
from kielo.resolve.resolved import Resolved
from tests.evaluate.test_bits_per_byte import byte_tokenizer
from tests.models.equality import pair
from tests.models.tiny_configs import TINY
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

VOCABULARY = 257
TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, 90)
ROW = torch.from_numpy(TOKENS[:11])[None]  # of a length that no axis divides


def of_run(folder: Path, config: dict[str, Any]) -> Resolved:
    """A Hugging Face folder, its tokenizer and a checkpoint of its weights, in the run of `tiny_run`."""
    hf = folder / "hf"
    ours, _ = pair(config | {"vocab_size": VOCABULARY}, hf)
    byte_tokenizer().whole.save(str(hf / "tokenizer.json"))
    checkpointer = Checkpointer(folder / "checkpoints")
    checkpointer.save(5, {f"model/{name}": one.detach() for name, one in ours.named_parameters()}, {})
    checkpointer.settle()
    write_tokens(folder / "tokens")
    return with_model(resolve(folder), ours.config)


def with_model(resolved: Resolved, model: Any) -> Resolved:
    return resolved.model_copy(update={"identity": resolved.identity.model_copy(update={"model": model})})


def measured(contender: Contender) -> tuple[float, torch.Tensor]:
    """Bits of the tokens, and logits of a short row."""
    return token_stream_bits(contender, TOKENS), contender.logits(ROW, contender.documents(ROW)).detach()


def measured_on_a_rank(folder: Path, resolved: Resolved, precision: str) -> list[tuple[float, Any]]:
    checkpoint, hf, found = folder / "checkpoints" / "step_00000005", folder / "hf", []
    with world_of_job(60, "cpu") as world:
        for contender in (
            load_checkpoint_on_ranks(checkpoint, resolved, hf, world, precision),
            load_hugging_face_on_ranks(hf, resolved, world, precision),
        ):
            bits, logits = measured(contender)
            found.append((bits, logits.numpy()))
    return found


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        *(
            pytest.param("llama", {axis: 2}, marks=FULL)
            for axis in ("tensor", "shard", "pipeline", "context")
        ),
        *(
            pytest.param(variant, sizes, marks=FULL)
            for variant in ("llama", "gemma2", "gpt2")
            for sizes in (
                {"tensor": 2, "pipeline": 2}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2},
                {"context": 2, "pipeline": 2},
            )
        ),
    ],
)  # fmt: skip
def test_scores_do_not_depend_on_the_layout(variant: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """In fp32 within 1e-6 of transformers' model (without masks) and of one process (with masks)."""
    alone = of_run(tmp_path, TINY[variant])
    stages = {"pipeline_layers": (1, 1), "pipeline_stages_per_rank": 1} if "pipeline" in sizes else {}
    placed = with_model(resolve(tmp_path, **sizes, **stages), alone.identity.model)
    here = load_checkpoint(tmp_path / "checkpoints" / "step_00000005", alone, tmp_path / "hf")
    expected = measured(here), measured(load_hugging_face(tmp_path / "hf", 16))
    ranks = placed.placement.world_size
    for found in run_ranks(measured_on_a_rank, ranks, tmp_path, placed, "fp32"):
        for (bits, logits), (their_bits, their_logits) in zip(found, expected, strict=True):
            assert bits == pytest.approx(their_bits, rel=1e-6)
            np.testing.assert_allclose(logits, their_logits.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_bf16_differs_by_its_rounding_alone(tmp_path: Path) -> None:
    """By some of its steps of 2^-8, but not by none, and not by more."""
    alone = of_run(tmp_path, TINY["llama"])
    placed = with_model(resolve(tmp_path, tensor=2), alone.identity.model)
    expected, _ = measured(load_hugging_face(tmp_path / "hf", 16))
    for _, (bits, _) in run_ranks(measured_on_a_rank, 2, tmp_path, placed, "bf16"):
        assert 1e-7 < abs(bits / expected - 1) < 2**-8
