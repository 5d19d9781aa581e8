"""Other people's models: the same logits as in transformers, or refused by name. Never another result."""

import random
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.models import families
from kielo.recipe.errors import KieloError
from tests.border.variants import VARIANTS, Files, read
from tests.models.equality import batch, our_logits, pair
from tests.models.tiny_configs import LENGTH, TINY

# One tiny model of each family.
FAMILIES = {config["model_type"]: config for config in reversed(TINY.values())}
# Kinds that were read wrongly, each in one family.
READ_WRONGLY = {"linear rope, type": "gemma3_text", "a nested config": "gpt_neox"}
# fp32 sums in another order, and weights of 0.1; a wrong formula or weight is 1 % off and more.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """The folder of each family's model with random weights, as transformers saves it."""
    folders = {name: tmp_path_factory.mktemp("saved") / name for name in FAMILIES}
    for name, folder in folders.items():
        pair(FAMILIES[name], folder)
    return folders


def in_transformers(folder: Path, is_encoder: bool) -> torch.Tensor | None:
    """The logits; None if transformers does not open the folder, NaN if it made up missing weights."""
    load = (AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM).from_pretrained
    how = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}
    try:
        model, found = load(folder, output_loading_info=True, **how)
    except Exception:  # of any kind: each family checks its files in its own way
        return None
    if found["missing_keys"] or found["mismatched_keys"]:
        return torch.tensor(float("nan")).expand(1, 1, model.config.vocab_size)
    with torch.no_grad():
        return model.eval()(input_ids=batch()[0]).logits


def in_kielo(folder: Path) -> torch.Tensor | str:
    """The logits, or the refusal. Any other exception is a fault."""
    try:
        config = families.read_hf_config(folder)
        if config.max_position_embeddings < LENGTH:  # as a recipe with sequences of that length is
            return f"{folder}: too few positions"
        model = families.build_model(config)
        load_model_weights(dict(model.named_parameters()), folder, config)
    except KieloError as error:
        return str(error)
    model.tie()
    with torch.no_grad():
        return our_logits(model.eval(), batch()[0])


def compare(source: Path, kinds: list[str], folder: Path) -> str:
    """Make the folder with these kinds of changes, and compare what both programs make of it.

    Return "equal", "refused", or "unread" if transformers does not open it.
    """
    files: Files = read(source, random.Random(zlib.crc32(" ".join(kinds).encode())))
    is_encoder = families.FAMILIES[files.config["model_type"]].is_encoder
    for kind in kinds:
        VARIANTS[kind](files)
    files.write(folder)
    ours = in_kielo(folder)
    if isinstance(ours, str):
        assert str(folder) in ours, f"{kinds}: the refusal names no file: {ours}"
        return "refused"
    theirs = in_transformers(folder, is_encoder)
    if theirs is None:
        return "unread"
    far = (ours - theirs[..., : ours.shape[-1]]).abs().max() / theirs.abs().max()
    assert far < TOLERANCE, f"{kinds}: logits are {far:.2%} apart"
    return "equal"


@pytest.mark.parametrize("kind", VARIANTS)
def test_each_kind_of_folder_is_read_as_transformers_does_or_refused(kind, saved, tmp_path) -> None:
    """In two families, which differ from kind to kind; `make test-full` has them all."""
    names = sorted(saved)
    drawn = names[zlib.crc32(kind.encode()) % len(names)]
    for name in {"llama", READ_WRONGLY.get(kind, drawn)}:
        compare(saved[name], [kind], tmp_path / name)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_of_folder_in_each_family(name, saved, tmp_path) -> None:
    for number, kind in enumerate(VARIANTS):
        compare(saved[name], [kind], tmp_path / str(number))


@pytest.mark.full
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    kinds=st.lists(st.sampled_from(sorted(VARIANTS)), min_size=2, max_size=4),
)
def test_kinds_together(name, kinds, saved, tmp_path_factory) -> None:
    compare(saved[name], kinds, tmp_path_factory.mktemp("together") / "model")


def test_usual_folders_are_compared(saved, tmp_path) -> None:
    """Both programs open each family's own folder, its shards and half precision."""
    kinds = ("nothing", "shards", "bf16")
    found = {
        (name, kind): compare(source, [kind], tmp_path / f"{name} {kind}")
        for name, source in saved.items()
        for kind in kinds
    }
    assert set(found.values()) == {"equal"}, found
