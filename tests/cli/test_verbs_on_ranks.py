"""`kielo evaluate` and `kielo verify parity` with `--ranks`, as people start them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kielo.artifact.verify_results import Parity
from tests.cli.test_run import kielo, write_recipe

pytestmark = pytest.mark.full
# 8 layers of 1,024 columns, and 15,000 rows of two matrices: 130 million parameters
LARGE = [
    "model.hidden_size=1024",
    "model.intermediate_size=2816",
    "model.num_hidden_layers=8",
    "model.num_attention_heads=8",
    "model.tie_word_embeddings=false",
    "model.vocab_multiple=15000",
    "train.tokens=128",
    "train.tokens_per_step=128",
    "dataset.sequence_length=32",
    "layout.tensor=2",
    "layout.pipeline=2",
    "checkpoint.every_steps=1",
]


def said(*words: str | Path) -> str:
    process = kielo(*words)
    out, error = process.communicate(timeout=900)
    assert process.returncode == 0, error[-3000:] + out[-3000:]
    return out


def sets(values: list[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = write_recipe(tmp_path_factory.mktemp("of ranks"))
    said("run", recipe, "--to", "export")
    return recipe


@pytest.mark.parametrize(
    "layout",
    [["layout.tensor=2"], ["layout.pipeline=2"], ["layout.shard=2", "train.tokens_per_step=16"]],
    ids=str,
)
def test_scores_on_ranks_are_those_of_one_process(trained: Path, layout: list[str]) -> None:
    """Bits per byte within 1e-6, sets and samples too; of a checkpoint and of a Hugging Face folder.

    Steps of one sequence cannot be trained on two shards, and are scored on them.
    """
    run = trained.parent / "run"

    def scores(*words: str | Path) -> dict[str, Any]:
        shutil.rmtree(run / "evaluate", ignore_errors=True)  # or they are current
        found = json.loads(said("evaluate", *words, "--json"))
        if words[0] == trained:
            assert json.loads((run / "evaluate" / "scores.json").read_text()) == found
        return found

    for model in ((trained,), (run / "hf", trained)):
        alone, there = scores(*model), scores(*model, "--ranks", "2", *sets(layout))
        for name, bits in alone["bits_per_byte"].items():
            assert there["bits_per_byte"].pop(name) == pytest.approx(bits, rel=1e-6)
        assert there["samples"] == alone["samples"]
        assert there.keys() == alone.keys() and there["heldout_tokens"] == alone["heldout_tokens"]


def test_what_ranks_cannot_score_is_refused_once(trained: Path) -> None:
    process = kielo("evaluate", trained, "--ranks", "3", "--set", "layout.tensor=2")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1 and error.count("kielo: ") == 1 and "Fix: " in error


def test_a_hundred_million_parameters_in_bf16_on_four_ranks(tmp_path: Path) -> None:
    """One command: tensor 2 × pipeline 2 against transformers under accelerate on four gloo ranks."""
    recipe = write_recipe(tmp_path)
    said("run", recipe, "--to", "pack", *sets(LARGE))
    said("train", recipe, "--ranks", "4", *sets(LARGE))
    flags = ["--ranks", "4", "--precision", "bf16", "--steps", "2", "--json"]
    found = Parity.model_validate_json(said("verify", "parity", recipe, *flags, *sets(LARGE)))
    assert found.passed and found.layout == "pipeline 2 × tensor 2, in bf16"
    assert found.losses.rounding_differences is not None
    assert len(found.losses.ours) == 2 and found.gradient_max_relative_difference < 1e-4
