"""The weights that a run starts from: which rows it takes, and row maps that do not belong to it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.artifact.stage_counts import RowMap
from kielo.artifact.stage_json import write_json
from kielo.checkpoint import hugging_face_import as module
from kielo.checkpoint.hugging_face_import import load_first_weights
from kielo.recipe.errors import KieloError


@pytest.fixture
def calls(monkeypatch) -> list[tuple[Any, ...]]:
    """Record the arguments of the parts that read weights and tokenizers."""
    found: list[tuple[Any, ...]] = []

    def loading(
        parameters: Any, source: Path, model: Any, group: Any, transplant: Any = None, state: Any = None
    ) -> dict[str, str]:
        found.append(("load", source, transplant))
        return {"w": "F32"}

    family = SimpleNamespace(initial_value=lambda *what: found.append(("first", *what)) or torch.zeros(1))
    monkeypatch.setattr(module, "load_model_weights", loading)
    monkeypatch.setattr(module, "resolve_weights", lambda reference: Path("weights") / reference)
    monkeypatch.setattr(module, "tokenizer_hash", lambda folder: f"hash of {folder}")
    monkeypatch.setattr(module, "refuse_other_vocabulary", lambda *what: found.append(("vocabulary", *what)))
    monkeypatch.setattr(module.families, "module", lambda model_type, part: family)
    return found


def of_run(folder: Path, transplant: str | None, vocab_size: int = 3) -> tuple[Any, Any]:
    model = SimpleNamespace(weights="w", transplant=transplant, vocab_size=vocab_size, model_type="m")
    train = SimpleNamespace(optimiser_from_weights=False)
    identity = SimpleNamespace(model=model, train=train, seed=11)
    return identity, SimpleNamespace(tokenizer_folder=str(folder))


def row_map(old: str = "hash of weights/w", method: str = "mean") -> RowMap:
    return RowMap(
        method=method, old_tokenizer=old, old_vocabulary_size=9, rows=[[1], [], [2]], control_tokens={}
    )


def test_rows_of_a_run_with_and_without_a_transplant(calls, tmp_path) -> None:
    assert load_first_weights({}, *of_run(tmp_path, None)) == {"w": "F32"}
    source = Path("weights/w")
    assert calls == [("vocabulary", tmp_path, source, str(tmp_path)), ("load", source, None)]
    calls.clear()
    write_json(tmp_path, row_map())
    identity, placement = of_run(tmp_path, "mean")
    assert load_first_weights({}, identity, placement) == {"w": "F32"}
    ((_, found, transplant),) = calls
    assert found == source and transplant.row_map == row_map()
    transplant.first_value("embed.weight", (3, 4), (slice(0, 1),))
    assert calls[-1] == ("first", "embed.weight", (3, 4), identity.model, 11, (slice(0, 1),))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (None, "{folder}: has no row_map.json, which model.transplant needs. {again}"),
        (
            row_map(method="focus"),
            "{folder}/row_map.json: is of model.transplant = 'focus', and the recipe has 'mean'. {again}",
        ),
        (
            row_map("other"),
            "{folder}/row_map.json: is of another old tokenizer than the tokenizer in weights/w. {again}",
        ),
    ],
)
def test_row_maps_of_something_else(made, told, calls, tmp_path) -> None:
    if made is not None:
        write_json(tmp_path, made)
    with pytest.raises(KieloError) as caught:
        load_first_weights({}, *of_run(tmp_path, "mean"))
    again = "Fix: `kielo run RECIPE --to pack`"
    assert str(caught.value) == told.format(folder=tmp_path, again=again) and calls == []


def test_a_row_map_of_another_size(calls, tmp_path) -> None:
    write_json(tmp_path, row_map())
    for size in (2, 4_000):
        with pytest.raises(
            KieloError, match=rf"row_map\.json: has 3 rows for a vocabulary of {size:,}\. Fix: `kielo run"
        ):
            load_first_weights({}, *of_run(tmp_path, "mean", size))
