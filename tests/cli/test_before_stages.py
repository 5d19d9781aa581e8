"""Every verb refuses a recipe for its model, layout or ranks before a stage is made, and names the key."""

from pathlib import Path

import pytest

from kielo.cli.main import main
from tests.cli.test_run import write_recipe

# What is set → ranks, and the reason.
REFUSED = {
    "model.model_type=gpt2 model.num_key_value_heads=1": (1, "a gpt2 model has as many as model.num_atten"),
    "model.model_type=opt model.rms_norm_eps=1e-3": (1, "model.rms_norm_eps"),
    "model.model_type=modernbert": (1, 'Fix: train.objective = "masked_tokens"'),
    'train.trainable=["tail"]': (1, 'train.trainable: "tail" names no parameter of the model'),
    "train.attention_dropout=0.1": (1, "only encoders have attention dropout"),
    'train.adam_beta2=0.999 train.optimiser_state="bf16"': (1, "which rounding to bf16 undoes"),
    "layout.tensor=4": (4, "layout.tensor = 4 does not divide model.num_attention_heads = 2"),
    "layout.pipeline=4": (4, "too few for 4 stages"),
    'layout.pipeline=2 layout.pipeline_schedule="zbv" layout.zero=3': (2, "gives wrong gradients"),
}
# Refused too where ranks are known.
OF_RANKS = {
    "layout.tensor=2": (3, "layout.tensor = 2 does not make up 3 ranks"),
    "train.skip_steps=[[3,900000]]": (1, "goes beyond the run's last step"),
    "train.tokens_per_step=16": (2, "each of 2 data-parallel ranks takes one or more whole sequences"),
    'train.precision="fp8" model.intermediate_size=40': (1, "FP8 kernels multiply sizes in multiples of 16"),
}


def verb(name: str, recipe: Path, sets: str, *more: str) -> int:
    return main([name, str(recipe), *more, *(flag for key in sets.split() for flag in ("--set", key))])


@pytest.mark.parametrize("sets", [*REFUSED, *OF_RANKS])
def test_nothing_is_made_of_what_cannot_be_trained(sets: str, tmp_path: Path, capsys) -> None:
    """The whole run is refused at once, and so is the part of it that another machine trains on later."""
    recipe = write_recipe(tmp_path)
    ranks, reason = (REFUSED | OF_RANKS)[sets]
    assert verb("run", recipe, sets, "--ranks", str(ranks)) == 1
    assert reason in capsys.readouterr().err
    if sets in REFUSED:
        assert verb("run", recipe, sets, "--to", "pack") == 1
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sets", REFUSED)
def test_verbs_that_make_nothing_tell_it_too(sets: str, tmp_path: Path, capsys) -> None:
    """`show` among its rows; `prefetch` before it downloads."""
    recipe, (_, reason) = write_recipe(tmp_path), REFUSED[sets]
    assert verb("show", recipe, sets) == 0
    assert reason in capsys.readouterr().out
    assert verb("prefetch", recipe, sets, "--to", str(tmp_path / "brought")) == 1
    assert reason in capsys.readouterr().err and not (tmp_path / "brought").exists()


def test_what_is_not_known_yet_is_not_refused(tmp_path: Path) -> None:
    """Ranks of another machine, and weights elsewhere."""
    recipe = write_recipe(tmp_path)
    assert verb("run", recipe, "layout.tensor=2", "--to", "corpus") == 0
    assert verb("show", recipe, 'model.weights="hf:nobody/nowhere" tokenizer.path="hf:nobody/nowhere"') == 0
