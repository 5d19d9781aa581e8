"""Every layout drops the same elements as one process: losses and weights are equal but for rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.recipe.sections import Model
from kielo.resolve.resolved import Resolved
from kielo.train.run import train
from tests.ranks import run_ranks
from tests.train.tiny_run import LENGTH, VOCABULARY, resolve, write_tokens

STEPS = 6
GPT2 = Model(
    model_type="gpt2", hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=4, vocab_size=VOCABULARY, vocab_multiple=10,
    max_position_embeddings=LENGTH, initializer_range=0.2, tie_word_embeddings=True, attention_bias=True,
    mlp_bias=True, hidden_act="gelu_new",
)  # fmt: skip
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
        {"recompute": "full", "micro_batch": 3},
        {"shard": 2, "tensor": 2},
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
    alone, found = losses(folder / "alone"), losses(folder / tmp_path.name)
    assert found == pytest.approx(alone, rel=1e-5)
    assert any(abs(one / other - 1) > 1e-3 for one, other in zip(alone, losses(folder / "without")))
    one, other = weights(folder / "alone"), weights(folder / tmp_path.name)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if name.endswith("attention.k.bias"):
            continue  # its gradient is zero but for rounding, which Adam makes steps of: softmax subtracts it
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-5, msg=name)
