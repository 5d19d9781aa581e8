"""Every layout drops the same elements as one process: losses and weights are equal but for rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.models.families import complete
from kielo.recipe.sections import Model
from kielo.resolve.resolved import Resolved
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.test_masked_tokens import LTG_BERT, plan, write_tokenizer
from tests.train.tiny_run import LENGTH, VOCABULARY, resolve, write_tokens

STEPS = 4
GPT2 = complete(Model(
    model_type="gpt2", hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=4, vocab_size=VOCABULARY, vocab_multiple=10,
    max_position_embeddings=LENGTH, initializer_range=0.2, tie_word_embeddings=True, attention_bias=True,
    mlp_bias=True, hidden_act="gelu_new",
), LENGTH)  # fmt: skip
full = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokens, and the runs "alone" and "without" dropout on one process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("dropout")
    write_tokens(folder / "tokens")
    train(planned(folder, "alone"))
    train(planned(folder, "without", hidden_dropout=0.0))
    return folder


def planned(folder: Path, name: str, **changes: Any) -> Resolved:
    run = folder / name
    run.mkdir()
    (run / "tokens").symlink_to(folder / "tokens")
    settings = {"model": GPT2, "hidden_dropout": 0.3, "total_steps": STEPS, "heldout_every_steps": 100}
    return resolve(run, **(settings | changes))


def losses(run: Path) -> list[float]:
    return [row.loss for row in of_kind(read_metrics(run / "train" / "metrics.jsonl"), TrainingStep)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_tensors(run / "train" / "checkpoints" / f"step_{STEPS:08d}")


@pytest.mark.parametrize(
    "layout",
    [
        {"shard": 2, "tensor": 2, "recompute": "full"},
        pytest.param({"recompute": "full", "micro_batch": 3}, marks=full),
        pytest.param({"shard": 2, "tensor": 2}, marks=full),
        pytest.param({"shard": 2, "zero": 3, "recompute": "operators"}, marks=full),
        pytest.param({"tensor": 2, "sequence_parallel": False, "recompute": "full"}, marks=full),
        pytest.param({"context": 2, "tensor": 2}, marks=full),
        pytest.param({"pipeline": 2, "pipeline_layers": (1, 1), "recompute": "full"}, marks=full),
        pytest.param({"pipeline": 2, "pipeline_layers": (1, 1), "tensor": 2}, marks=full),
        pytest.param({"replicate": 2, "compile": True}, marks=full),
    ],
    ids=lambda layout: "-".join(f"{key}_{value}" for key, value in layout.items()),
)
def test_layouts_drop_the_same(folder: Path, layout: dict[str, Any], tmp_path: Path) -> None:
    """Losses within 1e-5, the order of sums in fp32; dropping others changes them by far more."""
    resolved = planned(folder, tmp_path.name, **layout)
    run_ranks(train, resolved.placement.world_size, resolved)
    assert_alike(folder / "alone", folder / tmp_path.name, folder / "without")


def assert_alike(alone: Path, other_layout: Path, without: Path) -> None:
    """Losses and weights of two runs are equal but for rounding; those of one without dropout are others."""
    found = losses(other_layout)
    assert found == pytest.approx(losses(alone), rel=1e-5)
    assert any(abs(one / other - 1) > 1e-3 for one, other in zip(found, losses(without)))
    one, other = weights(alone), weights(other_layout)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if name.endswith("attention.k.bias"):
            continue  # its gradient is zero but for rounding, which Adam makes steps of: softmax subtracts it
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


ENCODERS = {
    "ltg_bert": LTG_BERT,
    "modernbert": LTG_BERT.model_copy(
        update={
            "model_type": "modernbert", "sliding_window": 5, "attention_bias": False, "hidden_act": "gelu",
            "initializer_range": 0.3, "position_bucket_size": 32,
        }
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tokens and tokenizer."""
    folder = tmp_path_factory.mktemp("encoders")
    write_tokens(folder / "tokens")
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture
def alone(encoders: Path, model_type: str) -> Path:
    """The run of an encoder on one process, made once, and beside it one without dropout."""
    torch.set_num_threads(1)
    if not (encoders / model_type).exists():
        train(planned_encoder(encoders, model_type, model_type))
        train(planned_encoder(encoders, f"{model_type} without", model_type, attention_dropout=0.0))
    return encoders / model_type


def planned_encoder(folder: Path, name: str, model_type: str, **changes: Any) -> Resolved:
    run = folder / name
    run.mkdir()
    for stage in ("tokens", "tokenizer"):
        (run / stage).symlink_to(folder / stage)
    settings = {"attention_dropout": 0.4, "total_steps": STEPS, "heldout_every_steps": 100}
    return plan(run, **({"model": ENCODERS[model_type]} | settings | changes))


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        pytest.param("ltg_bert", {"tensor": 2}, marks=full),
        ("modernbert", {"context": 2}),
        pytest.param("ltg_bert", {"tensor": 2, "sequence_parallel": False, "recompute": "full"}, marks=full),
        pytest.param(
            "ltg_bert",
            {
                "pipeline": 2,
                "pipeline_layers": (1, 1),
            },
            marks=full,
        ),
        pytest.param("ltg_bert", {"shard": 2, "zero": 3, "micro_batch": 3, "compile": True}, marks=full),
        pytest.param("modernbert", {"context": 2, "context_attention": "ulysses", "tensor": 2}, marks=full),
        pytest.param("modernbert", {"pipeline": 2, "pipeline_layers": (1, 1), "tensor": 2}, marks=full),
        pytest.param("modernbert", {"recompute": "operators", "micro_batch": 1, "compile": True}, marks=full),
    ],
    ids=str,
)
def test_layouts_drop_the_same_weights_of_attention(
    encoders: Path, alone: Path, model_type: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Of an encoder; the same bars as above."""
    resolved = planned_encoder(encoders, tmp_path.name, model_type, **layout)
    run_ranks(train, resolved.placement.world_size, resolved, timeout_seconds=280)
    assert_alike(alone, encoders / tmp_path.name, encoders / f"{model_type} without")
