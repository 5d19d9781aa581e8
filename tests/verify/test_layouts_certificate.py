"""The certificate of layouts from results of ranks that are written by hand; no rank is started."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kielo.ranks import objects
from kielo.ranks.local_ranks import Failure
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.verify import layouts
from kielo.verify.layouts import BARS, verify_layouts
from kielo.verify.layouts_cases import all_cases

AT_THE_BARS = {
    "loss": (1e-5, "step 2"),
    "norm": (1e-5, "step 1"),
    "gradient": (2e-5, "a"),
    "weight": (2e-5, "b"),
}


def row(name: str, **values: tuple[float, str]) -> dict[str, Any]:
    numbers = {what: {"value": value, "at": at} for what, (value, at) in (AT_THE_BARS | values).items()}
    return {"name": name, "compile_backend": "eager"} | numbers


class Launcher:
    """Stands for `Ranks`. results: case → its row, or how its ranks fail: (rank, exit code, what it said)."""

    def __init__(self, results: dict[str, Any]):
        self.results, self.launched, self.is_ended = results, [], False

    def __call__(self, arguments: list[str], number: int, *given: Any) -> "Launcher":
        self.folder, self.given = Path(arguments[2]), given
        return self

    def start(self, number: int) -> None:
        asked = objects.from_json((self.folder / "asked.json").read_text())
        made = () if asked.results is None else (asked.mutation,)
        self.launched.append((number, list(asked.cases), asked.steps, *made))
        self.failure = None
        for name in asked.cases if made else ():
            found = self.results[name]
            if isinstance(found, tuple):
                rank, code, said = found
                self.failure = Failure(rank, code)
                (self.folder / f"error_{rank}").write_text(said)
                return
            with open(self.folder / asked.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")

    def wait(self, seconds: int) -> Failure | None:
        return self.failure

    def kill(self) -> None:
        self.is_ended = True


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """Returns a function that verifies the cases of these results, in the folder."""

    def verify(results: dict[str, Any], *sets: str, **options: Any) -> tuple[dict[str, Any], Launcher]:
        launcher = Launcher(results)
        monkeypatch.setattr(layouts, "Ranks", launcher)
        recipe = read_recipe("demo_estonian", list(sets)).recipe
        certificate = verify_layouts(recipe, tmp_path, list(results), **options)
        assert launcher.is_ended
        return certificate, launcher

    return verify


def passed(certificate: dict[str, Any]) -> dict[str, bool | None]:
    return {entry["name"]: entry["passed"] for entry in certificate["cases"]}


def test_an_entry_by_hand(launch, tmp_path) -> None:
    """Settings of the case, or those of the recipe; numbers at the bars pass."""
    names = ("tensor2-z_loss", "tensor2-compiled-micro4")
    sets = ("train.z_loss=3e-4", "dataset.mask_documents=true", "model.tie_word_embeddings=false")
    certificate, _ = launch({name: row(name) for name in names}, *sets)
    assert json.loads((tmp_path / "layouts.json").read_text()) == certificate
    numbers = {
        "max_relative_loss_difference": 1e-5, "max_relative_norm_difference": 1e-5,
        "worst_gradient": {"name": "a", "relative_l2": 2e-5},
        "worst_weight": {"name": "b", "relative_l2": 2e-5}, "passed": True, "error": None,
    }  # fmt: skip
    usual = {"ranks": 2, "tied": False, "documents": True, "causal_sequences": False, "precision": "fp32"}
    assert certificate["cases"] == [
        {"name": names[0], "layout": {"tensor": 2}, "compile_backend": None, "z_loss": 1e-3,
         "micro_batches": 1} | usual | numbers,
        {"name": names[1], "layout": {"tensor": 2, "compile": True}, "compile_backend": "eager",
         "z_loss": 3e-4, "micro_batches": 4} | usual | numbers,
    ]  # fmt: skip
    rest = {key: value for key, value in certificate.items() if key not in ("cases", "versions")}
    bars = {"loss": 1e-5, "norm": 1e-5, "gradient": 2e-5, "weight": 2e-5}
    assert rest == {
        "passed": True, "all_cases": False, "bars": bars, "steps": 10, "mutation": None, "left_out": {},
    }  # fmt: skip
    assert bars == BARS and "torch" in certificate["versions"]


@pytest.mark.parametrize(
    ("what", "value", "kept"),
    [("loss", 1.1e-5, 1.1e-5), ("norm", 1.1e-5, 1.1e-5), ("gradient", 2.1e-5, 2.1e-5),
     ("weight", 2.1e-5, 2.1e-5), ("loss", math.inf, None), ("weight", math.inf, None)],
)  # fmt: skip
def test_a_number_above_its_bar(launch, what: str, value: float, kept: float | None) -> None:
    """One number of one case is enough; infinite ones are null, which JSON has."""
    name = "shard2"
    certificate, _ = launch({"replicate2": row("replicate2"), name: row(name, **{what: (value, "x")})})
    assert passed(certificate) == {"replicate2": True, name: False} and certificate["passed"] is False
    entry = certificate["cases"][1]
    found = {
        "loss": entry["max_relative_loss_difference"], "norm": entry["max_relative_norm_difference"],
        "gradient": entry["worst_gradient"]["relative_l2"], "weight": entry["worst_weight"]["relative_l2"],
    }  # fmt: skip
    assert found[what] == kept and entry["error"] is None


def test_bf16_has_no_bar(launch) -> None:
    far = row("tensor2-bf16", loss=(0.5, "step 1"))
    certificate, _ = launch({"tensor2-bf16": far})
    assert passed(certificate) == {"tensor2-bf16": None} and certificate["passed"] is True


def test_ranks_are_started_again_after_a_case_that_raises(launch, capsys) -> None:
    """Cases of one number of ranks share a start; what a rank said is noted, or how it ended."""
    results = {
        "one_rank-micro4": row("one_rank-micro4"), "replicate2": row("replicate2"),
        "shard2": (3, 1, "ValueError: it broke"), "tensor2": row("tensor2"), "tensor2-bf16": (1, -9, ""),
    }  # fmt: skip
    certificate, launcher = launch(results, steps=1, mutation="some.function")
    one, two = ["one_rank-micro4"], ["replicate2", "shard2", "tensor2", "tensor2-bf16"]
    assert launcher.launched == [
        (1, [*one, *two], 1), (1, one, 1, "some.function"), (2, two, 1, "some.function"),
        (2, two[2:], 1, "some.function"),
    ]  # fmt: skip
    assert [entry["error"] for entry in certificate["cases"]] == [
        None, None, "rank 3: ValueError: it broke", None, "rank 1 ended with SIGKILL (out of memory?)",
    ]  # fmt: skip
    assert passed(certificate) == dict(zip([*one, *two], (True, True, False, True, False)))
    assert certificate["passed"] is False and certificate["mutation"] == "some.function"
    entry = certificate["cases"][2]
    assert entry["max_relative_loss_difference"] is None and entry["worst_weight"]["relative_l2"] is None
    assert capsys.readouterr().err == (
        "layouts: 5 cases; first the reference, on one process\n"
        "layouts: shard2: rank 3: ValueError: it broke\n"
        "layouts: tensor2-bf16: rank 1 ended with SIGKILL (out of memory?)\n"
    )


def test_no_step_shows_nothing(launch) -> None:
    with pytest.raises(KieloError, match="0 steps show nothing. Fix: 1 or more"):
        launch({"shard2": row("shard2")}, steps=0)


def test_cases_that_torch_does_not_run_are_told_and_left_out(launch, monkeypatch, capsys) -> None:
    """By torch 2.11, which lacks zbv; if no other case is chosen, nothing is started."""
    monkeypatch.setattr(layouts, "installed_torch", lambda: "2.11.0")
    without = "pipeline2-zbv-micro4"
    certificate, launcher = launch({"shard2": row("shard2"), without: row(without)})
    assert passed(certificate) == {"shard2": True} and certificate["all_cases"] is False
    (reason,) = certificate["left_out"]
    assert certificate["left_out"] == {reason: [without]} and "zbv" in reason and "2.11" in reason
    assert [names for _, names, *_ in launcher.launched] == [["shard2"]] * 2
    assert capsys.readouterr().err.startswith(f"layouts: 1 cases left out: {reason}\nlayouts: 1 cases; first")
    with pytest.raises(KieloError) as caught:
        launch({without: row(without)})
    assert str(caught.value) == f"no case is left to run: 1 cases left out: {reason}"


def test_the_certificate_says_whether_all_cases_ran(launch, monkeypatch) -> None:
    monkeypatch.setattr(layouts, "installed_torch", lambda: "2.13.0")
    certificate, _ = launch({case.name: row(case.name) for case in all_cases()})
    assert certificate["all_cases"] is True and certificate["passed"] is True


def test_a_file_of_somebody_else_is_not_replaced(launch, tmp_path) -> None:
    """Nothing is started; a certificate of before is replaced."""
    (tmp_path / "layouts.json").write_text('{"mine": 1}')
    with pytest.raises(KieloError, match="layouts.json: exists, and Kielo did not write it"):
        launch({"shard2": row("shard2")})
    assert json.loads((tmp_path / "layouts.json").read_text()) == {"mine": 1}
    (tmp_path / "layouts.json").write_text('{"bars": 1}')
    launch({"shard2": row("shard2")})
    assert json.loads((tmp_path / "layouts.json").read_text())["bars"] == BARS
