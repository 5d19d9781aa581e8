"""What a dry run says of a run of known sizes, with the planner's bytes replaced by known ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kielo.dataset.batches import NOT_COUNTED, Batches
from kielo.train import dry_run as module
from kielo.train.dry_run import dry_run
from tests.train.tiny_run import resolve, write_tokens


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What bytes were asked for; rows need 3000 bytes, and 500 more for each question before."""
    found: list[Any] = []

    def row(model: Any, layout: Any, step: Any, options: Any, card: Any) -> int:
        found.append((options.precision, step.sequence_length, step.micro_batch,
                      step.micro_batches, card and card.name))  # fmt: skip
        return 3000 - 500 * len(found)

    def peak(rows: list[int]) -> Any:
        return SimpleNamespace(peak=lambda kind: found.append(kind) or np.array(rows))

    monkeypatch.setattr(module, "memory_row", row)
    monkeypatch.setattr(module, "MemoryColumns", SimpleNamespace(of=lambda rows: rows))
    monkeypatch.setattr(module, "memory_bytes", peak)
    monkeypatch.setattr(module, "accelerators", lambda: ["a card", "a bare card"])
    monkeypatch.setattr(module, "accelerator", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(
        module, "usable_bytes", lambda card: 7000.9 if card.name == "a card" else None
    )  # fmt: skip
    return found


def test_a_dry_run_says_what_a_rank_would_read_and_need(tmp_path: Path, asked: list[Any]) -> None:
    """The first of two shards reads half of the eight sequences; the precision that needs most counts."""
    write_tokens(tmp_path / "tokens")
    resolved = resolve(
        tmp_path, shard=2, micro_batch=2, accelerator="a card", precision="fp32",
        precision_changes=((5, "bf16"), (9, "fp32")),
    )  # fmt: skip
    identity = resolved.identity
    batch = Batches(tmp_path / "tokens", identity.seed, identity.phases[0], 16, 0, True).step(
        1, data_rank=0, data_ranks=2
    )
    counted = sum(label != NOT_COUNTED for row in batch.labels.tolist() for label in row)
    expected = {
        "device": "cpu", "accelerator": "a card", "ranks": 2, "precision": "fp32", "compile": False,
        "steps": 20, "tokens": 2560, "goes_on_after_step": 0, "micro_batch_sequences": 2,
        "micro_batches_per_step": 2, "peak_bytes": 2500, "usable_bytes": 7000,
        "first_batch": {
            "sequences": 4, "sequence_length": 16, "counted_tokens": counted,
            "largest_token": max(max(row) for row in batch.inputs.tolist()), "vocabulary": 67,
        },
    }  # fmt: skip
    assert dry_run(resolved) == expected and 0 < counted <= 64
    assert asked == [("fp32", 16, 2, 2, "a card"), ("bf16", 16, 2, 2, "a card"), "rehearsed"]
    for step in (9, 12):
        (tmp_path / "train" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    assert dry_run(resolved)["goes_on_after_step"] == 12


@pytest.mark.parametrize("name", ("a bare card", "no card"))
def test_a_device_that_no_card_knows(tmp_path: Path, asked: list[Any], name: str) -> None:
    """On a GPU the bytes are those that torch would reserve; nobody knows how many it has."""
    write_tokens(tmp_path / "tokens")
    found = dry_run(resolve(tmp_path, replicate=2, shard=2, accelerator=name, device="cuda"))
    assert found["usable_bytes"] is None and asked[-1] == "reserved"
    assert found["first_batch"]["sequences"] == 2
    assert asked[0][-1] == (None if name == "no card" else name)
