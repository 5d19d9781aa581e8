"""Ranks that resolved the recipe differently are refused before anything is trained or written."""

import os
from pathlib import Path

from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved
from kielo.train.run import train
from tests.ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens


def on_rank_of_its_own(first: Resolved, others: Resolved) -> str:
    try:
        return train(first if os.environ["RANK"] == "0" else others, max_steps=1).outcome
    except KieloError as error:
        return str(error)


def test_ranks_that_chose_unlike_precisions_are_refused_by_name(tmp_path: Path) -> None:
    """Both ranks say the same: the keys with the ranks that have each value, and what would work.

    What a rank alone has (its device's name and speed) may differ.
    """
    write_tokens(tmp_path / "tokens")
    like = resolve(tmp_path, shard=2, accelerator="other", peak_tflops={})
    unlike = resolve(tmp_path, shard=2, precision="bf16", every_steps=7)
    told = run_ranks(on_rank_of_its_own, 2, resolve(tmp_path, shard=2), unlike)
    assert told[0] == told[1]
    assert "- checkpoint.every_steps: 100 on rank 0, 7 on rank 1\n" in told[0]
    assert "- train.precision: fp32 on rank 0, bf16 on rank 1\n" in told[0]
    assert told[0].count("\n  - ") == 2 and "--set train.precision=fp32" in told[0]
    assert not (tmp_path / "train").exists() and not (tmp_path / "resolved.toml").exists()
    assert run_ranks(on_rank_of_its_own, 2, resolve(tmp_path, shard=2), like) == ["requeue"] * 2
