"""References and cases of the layouts check on one rank, in this process."""

import io
import json
import re
import threading
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from kielo.models import families
from kielo.ranks import objects
from kielo.recipe.read import read_recipe
from kielo.resolve.software import BACKEND_VARIABLE
from kielo.verify import layouts_rank
from kielo.verify.layouts import BARS
from kielo.verify.layouts_cases import Case
from kielo.verify.layouts_rank import compare, make_references, run_cases
from kielo.verify.layouts_subject import subject, train_plainly

CALLED: list[str] = []
LEFT: list[str] = []  # names of threads that cases left behind
TRAINED: list[tuple[str, str]] = []  # how, and what a float32 product may be
WHOLE = Case({}, micro_batches=4, switches={"tied": False, "documents": True, "z_loss": 1e-2})
HALF = Case({}, precision="bf16")
FROZEN = Case({}, micro_batches=2, switches={"frozen": True})


def called() -> None:
    """Stands for a function that breaks something on purpose."""
    CALLED.append("once")


def noting(name: str) -> Any:
    train = getattr(layouts_rank, name)

    def noted(*given: Any) -> Any:
        TRAINED.append((name, torch.get_float32_matmul_precision()))
        return train(*given)

    return noted


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict], list[str], str]:
    """Returns the references' folder, the lines of the results, the references' names, and what was said."""
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    recipe, folder = read_recipe("demo_estonian").recipe, tmp_path_factory.mktemp("layouts")
    same = Case({"shard": 2}, switches=WHOLE.switches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BACKEND_VARIABLE, "")
        patch.setattr(layouts_rank, "working_backend", lambda: "a backend")
        for name in ("train_plainly", "train_laid_out"):
            patch.setattr(layouts_rank, name, noting(name))
        make_references(recipe, [WHOLE, same, HALF, FROZEN], 2, folder)
        names = sorted(path.name for path in folder.iterdir())
        of_bf16 = next(path for path in folder.iterdir() if path.name.startswith("bf16"))
        tensors = load_file(of_bf16)
        tensors["losses"][1] *= 1.5  # a third off
        save_file(tensors, of_bf16)
        results = folder / "results.jsonl"
        with redirect_stderr(io.StringIO()) as said:
            run_cases(recipe, [WHOLE, HALF], 2, folder, results, f"{__name__}.{called.__name__}")
        run_cases(recipe, [FROZEN], 2, folder, results, None)
    LEFT.extend(thread.name for thread in threading.enumerate() if thread not in before)
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return folder, rows, names, said.getvalue()


def test_cases_of_the_same_subject_share_a_reference(done) -> None:
    """That of fp32 is plain training, with 90 rows of the vocabulary in 128."""
    folder, _, names, _ = done
    assert len(names) == 3
    (path,) = (path for path in folder.glob("fp32*") if "frozen" not in path.name)
    truth = train_plainly(subject(read_recipe("demo_estonian").recipe, WHOLE.switches), 2)
    stored = load_file(path)
    assert stored.keys() == truth.keys() and all(torch.equal(stored[name], truth[name]) for name in truth)


def test_one_rank_trains_as_plain_training_does(done) -> None:
    """Each of four micro-batches has other numbers of labels; no number is far, nor exactly the same."""
    _, (whole, half, frozen), *_ = done
    assert [row.pop("name") for row in (whole, half, frozen)] == [WHOLE.name, HALF.name, FROZEN.name]
    assert {row.pop("compile_backend") for row in (whole, half, frozen)} == {"a backend"}
    for row in (whole, frozen):
        assert row.keys() == BARS.keys()
        assert all(row[what]["value"] <= bar for what, bar in BARS.items())
    assert whole["loss"]["value"] > 0 and whole["gradient"]["at"].endswith((".weight", ".bias"))
    assert CALLED == ["once"]


def test_bf16_is_compared_with_one_rank_in_bf16(done) -> None:
    """The same code on one rank gives the same numbers, but for the one that was changed."""
    _, (_, half, _), *_ = done
    assert half["loss"] == {"value": pytest.approx(1 / 3), "at": "step 2"}
    assert all(half[what]["value"] == 0 for what in ("norm", "gradient", "weight"))


def test_frozen_layers_are_not_compared(done) -> None:
    folder, *_ = done
    (path,) = (path for path in folder.glob("fp32*") if "frozen" in path.name)
    with torch.device("meta"):
        model = families.build_model(subject(read_recipe("demo_estonian").recipe, {}).model)
    ends = {name for name, _ in model.named_parameters() if not name.startswith(("layers.1.", "layers.2."))}
    stored = load_file(path)
    assert {name.partition("/")[2] for name in stored if name.startswith("weight/")} == ends
    assert {name.partition("/")[2] for name in stored if name.startswith("gradient/")} == ends
    assert stored["losses"].shape == (2,)


def test_a_subject_is_trained_once_and_by_its_precision(done) -> None:
    """Two cases of one subject share its reference; products in fp32 are exact, those beside bf16 need not.

    Nothing of the ranks is left.
    """
    assert TRAINED == [
        ("train_plainly", "highest"), ("train_laid_out", "high"), ("train_plainly", "highest"),
        ("train_laid_out", "highest"), ("train_laid_out", "high"), ("train_laid_out", "highest"),
    ]  # fmt: skip
    assert not dist.is_initialized()
    assert "feed" not in LEFT


def test_each_case_is_said_when_it_is_done(done) -> None:
    lines = done[-1].splitlines()
    number = r"\d\.\de[-+]\d\d"
    figures = ", ".join(f"{what} {number}" for what in BARS)
    for line, case in zip(lines, (WHOLE, HALF), strict=True):
        found = re.fullmatch(rf"layouts: {re.escape(case.name)}: {figures} \((\d+\.\d) s\)", line)
        assert found and float(found[1]) < 300


def test_the_largest_difference_of_all_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a tensor that no rank holds would be compared with nothing."""
    one, two = torch.ones(1), torch.ones(2)
    truth = {
        "losses": 2 * one, "norms": one, "gradient/a": two, "weight/a": two, "weight/b": two,
    }  # fmt: skip
    mine = {"losses": 2.5 * one, "norms": one, "gradient/a": two, "weight/a": 1.5 * two}
    other = {what: {"value": 0.375, "at": "elsewhere"} for what in BARS}
    said: list[Any] = []

    def gather(value: Any) -> list[Any]:
        return [value, said.pop(0)]

    def compared(of_the_other: set[str]) -> dict:
        said[:] = [of_the_other, other]
        recipe = read_recipe("demo_estonian").recipe
        return compare(recipe, Case({}), 1, None, {(1,) * 5: None}, truth)

    monkeypatch.setattr(objects, "all_gather", gather)
    monkeypatch.setattr(layouts_rank, "train_laid_out", lambda *given: mine)
    assert compared({"weight/b"}) == other | {"weight": {"value": 0.5, "at": "a"}}
    with pytest.raises(ValueError, match=r"^no rank has \['weight/b'\]$"):
        compared({"weight/a"})
