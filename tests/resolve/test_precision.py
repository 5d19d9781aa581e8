"""The precision of a recipe that names none: by the device, or as the run began."""

from dataclasses import replace
from pathlib import Path

import pytest

from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import write
from kielo.resolve.software import Software, chosen_precision, usual_precision
from kielo.resolve.text import imagined_text

PLAIN, WITH_AMX = Software("2.13.0"), Software("2.13.0", has_amx=True)


def resolved(device: str, software: Software, folder: Path, *sets: str, tokens: int = 10**6):
    recipe = read_recipe("own_text", [f"train.tokens={tokens}", *sets]).recipe
    name = "h100_80" if device == "cuda" else None
    return resolve(recipe, folder, 1, device, name, text=imagined_text(recipe), software=software)


@pytest.mark.parametrize(
    ("device", "software", "precision"),
    [("cpu", PLAIN, "fp32"), ("cpu", WITH_AMX, "bf16"), ("cuda", PLAIN, "bf16")],
)
def test_the_device_chooses(device, software, precision, tmp_path) -> None:
    """And the choice is written down; a recipe that names one is obeyed."""
    assert resolved(device, software, tmp_path).identity.train.precision == precision
    assert resolved(device, software, tmp_path, "train.precision=fp32").identity.train.precision == "fp32"
    assert usual_precision(device, software.has_amx)[0] == precision


def test_only_long_runs_are_compiled_on_a_processor(tmp_path) -> None:
    """Compiling takes half a minute; without AMX, in fp32 and without a compiler it is not done."""
    assert not resolved("cpu", WITH_AMX, tmp_path).placement.layout.compile
    long = 10**9
    assert resolved("cpu", WITH_AMX, tmp_path, tokens=long).placement.layout.compile
    assert not resolved("cpu", PLAIN, tmp_path, tokens=long).placement.layout.compile
    without = replace(WITH_AMX, missing_compiler="no compiler")
    assert not resolved("cpu", without, tmp_path, tokens=long).placement.layout.compile
    in_fp32 = resolved("cpu", WITH_AMX, tmp_path, "train.precision=fp32", tokens=long)
    assert not in_fp32.placement.layout.compile


def test_a_run_goes_on_in_the_precision_in_which_it_began(tmp_path) -> None:
    """On another machine too, once it has a checkpoint; a plan alone binds nothing."""
    write(resolved("cuda", PLAIN, tmp_path), tmp_path / "resolved.toml")
    recipe = read_recipe("own_text").recipe
    assert chosen_precision(recipe, "cpu", False, tmp_path)[0] == "fp32"
    (tmp_path / "train" / "checkpoints" / "step_00000100").mkdir(parents=True)
    assert chosen_precision(recipe, "cpu", False, tmp_path) == ("bf16", "the run began in it")
    assert resolved("cpu", PLAIN, tmp_path).identity.train.precision == "bf16"


def test_compiling_is_worth_it_from_a_hundred_trillion_flops_on(tmp_path) -> None:
    """Six a parameter and token: a step less and a step more than that."""
    step = 2048
    parameters = resolved("cpu", WITH_AMX, tmp_path).placement.parameters
    tokens = int(1e14 / (6 * parameters)) // step * step
    compiles = [
        resolved("cpu", WITH_AMX, tmp_path, f"train.tokens_per_step={step}", tokens=number)
        for number in (tokens, tokens + step)
    ]
    assert [run.identity.total_tokens for run in compiles] == [tokens, tokens + step]
    assert [run.placement.layout.compile for run in compiles] == [False, True]
