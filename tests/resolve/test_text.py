"""Facts of a text that numbers follow from: tokens of an epoch, and what a plan imagines before it."""

from pathlib import Path

import pytest

from kielo.artifact.manifest import hash_manifest, write_stage
from kielo.dataset.packed_sequences import packing_folder, packing_manifest
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.resolve.text import Text, imagined_text, packed_sequences, ready_tokens, sequences_by_length
from tests.resolve.test_resolve import finish_pack, finish_tokenizer, recipe, refusal


def test_an_epoch_has_the_tokens_that_are_predicted() -> None:
    """Of a stream all but the first; of packed documents whole sequences, by the length that they have."""
    text = Text({"a": 100, "b": 30}, 9, "hash", 50, 0, packed_sequences={64: {"a": 7, "b": 0}})
    assert [text.epoch_tokens(name, 64) for name in ("a", "b")] == [448, 0]
    assert [text.epoch_tokens(name, 32) for name in ("a", "b")] == [99, 29]


def sized(**model: object) -> int:
    """The vocabulary that a plan imagines, of a recipe whose tokenizer learns 4,096 tokens."""
    one = read_recipe("own_text", ["train.tokens=20480", "tokenizer.vocab_size=4096"]).recipe
    return imagined_text(one.model_copy(update={"model": one.model.model_copy(update=model)})).vocabulary_size


def test_a_plan_imagines_twice_the_tokens_that_it_asks_for() -> None:
    """And a sequence of the longest phase; of each source so many, and held out."""
    phases = "phases=[{tokens=20480}, {tokens=40960, sequence_length=512}]"
    sets = ["corpus.sources=a.txt,b.txt", "train.tokens_per_step=2048", "dataset.sequence_length=256", phases]
    text = imagined_text(read_recipe("own_text", sets).recipe)
    enough = 2 * (20_480 + 40_960) + 512
    assert text.tokens == {"a": enough, "b": enough} and text.heldout_tokens == enough
    assert (text.tokens_hash, text.end_of_text_id) == ("", 0)


def test_the_vocabulary_of_a_plan_is_the_one_that_is_known(tmp_path: Path) -> None:
    """The model's, at least 1 with weights, that of a ready tokenizer, or as many tokens as one learns."""
    assert sized() == 4096 and sized(vocab_size=5000) == 5000
    assert sized(weights="hf:somewhere") == 1
    assert sized(weights="hf:somewhere", vocab_size=5000) == 5000
    assert sized(weights="hf:somewhere", vocab_size=5000, transplant="mean") == 4096
    finish_tokenizer(tmp_path / "tokenizer", 321)
    ready = read_recipe("own_text", ["train.tokens=20480", f"tokenizer.path={tmp_path / 'tokenizer'}"]).recipe
    assert imagined_text(ready).vocabulary_size == 321


def test_documents_must_be_packed_into_the_lengths_of_the_recipe(tmp_path: Path) -> None:
    """One stream has none; a length that is missing is named, with the command that makes it."""
    finish_pack(tmp_path, {"a": 500, "b": 200}, heldout=100)
    packing = packing_folder(tmp_path)
    packing.parent.mkdir(parents=True, exist_ok=True)
    counts = {"a": {"64": {"sequences": 7}, "32": {"sequences": 15}}, "b": {"64": {"sequences": 2}}}
    counts["b"]["32"] = {"sequences": 5}
    others = dict.fromkeys(["documents", "cut_documents", "cut_in_one_stream", "filling"], 0)
    counts = {name: {n: one | others for n, one in of.items()} for name, of in counts.items()}
    inputs = {"tokens": hash_manifest(tmp_path)}
    with write_stage(packing, "packing", 1, inputs, {"sequence_lengths": [64, 32]}) as stage:
        stage.counts["sources"] = counts
    expected = {64: {"a": 7, "b": 2}, 32: {"a": 15, "b": 5}}
    assert sequences_by_length(packing_manifest(tmp_path)) == expected
    best = {"dataset": {"packing": "best_fit"}}
    assert (
        packed_sequences(recipe(**best), tmp_path) == expected and packed_sequences(recipe(), tmp_path) == {}
    )
    longer = recipe(dataset={"packing": "best_fit", "sequence_length": 128}, train={"tokens_per_step": 1536})
    with pytest.raises(
        KieloError, match="has no sequences of 128 tokens. Fix: `kielo run RECIPE --to pack` makes"
    ):
        packed_sequences(longer, tmp_path)


def test_no_ready_tokens_are_asked_for_where_there_are_none() -> None:
    assert ready_tokens(recipe()) == {}


def test_a_run_without_text_is_refused(tmp_path: Path) -> None:
    finish_tokenizer(tmp_path / "tokenizer", 300)
    empty = Text({"a": 1}, 640, "hash", 300, 0)
    assert f"{tmp_path / 'tokens'}: no source has text to train on" in refusal(
        recipe(dataset={"mixture": {"a": 1}}), tmp_path, 1, "cpu", text=empty
    )
