"""Ranks that resolved the recipe differently are refused before anything is trained or written."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.manifest import hash_json
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved
from kielo.train import start_checks
from kielo.train.run import train
from kielo.train.start_checks import refuse_unlike_ranks
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens


def on_rank_of_its_own(first: Resolved, others: Resolved) -> str:
    try:
        return train(first if os.environ["RANK"] == "0" else others, max_steps=1).outcome
    except KieloError as error:
        return str(error)


def test_ranks_that_chose_unlike_precisions_are_refused_by_name(tmp_path: Path) -> None:
    """Both ranks say the same: the keys with the ranks that have each value, and the fix.

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


def test_eight_keys_are_named_with_the_first_rank_of_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the first rank's keys, those that it lacks last; equal ranks send only a hash."""
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path)
    own: dict = {}
    monkeypatch.setattr(start_checks, "flat", lambda content: own)

    def refused(*everyone: dict) -> str:
        own.clear()
        own.update(everyone[0])
        answers = iter([[hash_json(one) for one in everyone], list(everyone)])
        given = []
        ranks = SimpleNamespace(gather=lambda value: given.append(value) or next(answers))
        try:
            refuse_unlike_ranks(resolved, ranks)
        except KieloError as error:
            assert given == [hash_json(own), own]
            return str(error)
        assert given == [hash_json(own)]
        return ""

    assert refused({"a": 1}, {"a": 1}, {"a": 1}) == ""
    ways = "Fix: the same recipe and run folder on all nodes, or nodes of one kind. Nothing was"
    assert refused({"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 1, "b": 2, "c": 0}, {"a": 3, "b": 2}) == (
        "the ranks would not train the same:\n"
        "  - a: 1 on rank 0 and 1 more, 3 on rank 1 and 1 more\n"
        f"  - c: None on rank 0 and 2 more, 0 on rank 2\n{ways} changed"
    )
    eight = {f"key{number}": 1 for number in range(8)}
    told = refused(eight, dict.fromkeys(eight, 2))
    assert told.count("\n  - key") == 8 and "more" not in told
    ten = eight | {"x": 1, "train.precision": "bf16"}
    told = refused(ten, dict.fromkeys(ten, 2))
    assert told.count("\n  - key") == 8 and "\n  - and 2 keys more\n" in told
    assert "Fix: --set train.precision=bf16. Or the same" in told


def test_what_a_rank_alone_has_may_differ(tmp_path: Path) -> None:
    """Where its files are, its device, whether layers are compiled, and the speed that is planned for it."""
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path)

    def sent(**changes: Any) -> str:
        (phase,) = resolved.placement.phases
        phases = (phase.model_copy(update=changes.pop("phase", {})),)
        layout = resolved.placement.layout.model_copy(update=changes.pop("layout", {}))
        placement = resolved.placement.model_copy(update={"phases": phases, "layout": layout} | changes)
        found: list[str] = []
        ranks = SimpleNamespace(gather=lambda value: found.append(value) or [value])
        refuse_unlike_ranks(Resolved(identity=resolved.identity, placement=placement), ranks)
        return found[0]

    same = sent()
    for name in ("tokens_folder", "tokenizer_folder", "train_folder", "device", "accelerator"):
        assert sent(**{name: "other"}) == same, name
    assert sent(peak_tflops={"fp32": 9.0}) == sent(layout={"compile": True}) == same
    assert sent(phase={"planned_tokens_per_second": 5.0}) == same
    assert len({same, sent(world_size=2), sent(layout={"zero": 2}), sent(phase={"flops_per_token": 7})}) == 4
