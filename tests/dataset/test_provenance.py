"""What the tokens of a run were made from, against what is there now: each difference is named."""

import json
import re
import shutil
from pathlib import Path

import pytest

from kielo.artifact.checkpoint_index import PlainState
from kielo.artifact.manifest import hash_manifest, read_manifest, rewrite_counts, write_stage
from kielo.corpus.step import effective_settings
from kielo.dataset.pack import pack
from kielo.dataset.provenance import (
    check_recipe,
    check_tokenizer,
    check_tokenizer_of_checkpoint,
    check_tokens,
    tokenizer_of_tokens,
)
from kielo.recipe.cards import language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import tokenizer_facts, tokenizer_hash
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import make_documents, recipe, write_corpus


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("a run")
    write_corpus(folder / "corpus", make_documents(60))
    train_tokenizer(recipe(), folder / "corpus", folder / "tokenizer")
    pack(recipe(), folder / "corpus", folder / "tokenizer", folder / "tokens")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def write_tokens(run: Path, section: dict, inputs: dict | None = None, **sources: dict) -> None:
    with write_stage(run / "tokens", "tokens", 1, inputs or {}, section) as stage:
        of = {name: {"tokens": 1} | counts for name, counts in sources.items()}
        stage.counts.update(sources=of, heldout={"tokens": 1})


def other_tokenizer(folder: Path) -> Path:
    """The same files but for a space: another hash."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
    return folder


def test_the_tokenizer_of_the_tokens_is_told_from_others(run: Path, made: Path) -> None:
    """Its facts are given; files that changed, another stage and one without a manifest are refused, and
    tokens that another program packed are compared with nothing.
    """
    facts = tokenizer_facts(made / "tokenizer")
    assert tokenizer_of_tokens(run) == facts and check_tokenizer(run) is None
    shown = re.escape(hash_manifest(made / "tokenizer")[:12])
    told = f"is not the tokenizer that made .*tokens: that was {shown}, this is "
    tokenizer = run / "tokenizer"

    def refused(words: str) -> None:
        for check in (tokenizer_of_tokens, check_tokenizer):
            with pytest.raises(KieloError, match=told + words):
                check(run)

    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    other = config | {"eos_token": "a", "pad_token": "a"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(other))
    (tokenizer / "special_tokens_map.json").write_text(json.dumps({"eos_token": "a"}))
    refused("a tokenizer that was changed later")  # end-of-text is another token
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 9}))
    assert tokenizer_of_tokens(run) == facts  # which changes no id
    other_tokenizer(tokenizer)
    refused("a tokenizer that was changed later")
    (tokenizer / "manifest.json").rename(run / "kept.json")
    refused("a tokenizer without manifest.json")
    shutil.rmtree(tokenizer)
    changed = recipe().model_copy(
        update={"tokenizer": recipe().tokenizer.model_copy(update={"vocab_size": 300})}
    )
    train_tokenizer(changed, run / "corpus", tokenizer)
    refused(hash_manifest(tokenizer)[:12])
    write_tokens(run, {})
    assert tokenizer_of_tokens(run) == tokenizer_facts(tokenizer) and check_tokenizer(run) is None
    shutil.rmtree(tokenizer)
    assert check_tokenizer(run) is None  # no tokenizer is needed


def test_the_recipe_of_the_tokens_is_told_from_others(run: Path) -> None:
    """One change at a time is named with both values; the recipe itself has none. A corpus that was made
    again is refused, one that is no longer there is not compared.
    """
    assert check_recipe(recipe(), run) is None

    def changed(**sections: dict) -> Recipe:
        values = recipe().model_dump(exclude_unset=True)
        for name, value in sections.items():
            values[name] = values.get(name, {}) | value if isinstance(value, dict) else value
        return Recipe(**values)

    with write_stage(run / "corpus", "corpus", 1, {"a": "1", "b": "2"}, _settings(recipe())):
        pass
    write_tokens(run, {"heldout_share": 0.2}, {"corpus": hash_manifest(run / "corpus")}, a={}, b={})
    assert check_recipe(recipe(), run) is None
    sources = [{"name": name, "path": f"{name}.txt"} for name in "ac"]
    for asked, lines in (
        (changed(dataset={"heldout_share": 0.3}), ["dataset.heldout_share: was 0.2, is now 0.3"]),
        (changed(tokenizer={"vocab_size": 500}), ["tokenizer.vocab_size: was 400, is now 500"]),
        (
            changed(corpus={"min_line_characters": 3}, tokenizer={"min_frequency": 9}),
            ["tokenizer.min_frequency: was 2, is now 9", "corpus.min_line_characters: was 10, is now 3"],
        ),
        # A manifest lacks later keys at their defaults.
        (
            changed(corpus={"mask_personal_data": ["email"]}),
            ["corpus.mask_personal_data: was [], is now ['email']"],
        ),
        (changed(language="fi"), ["language: was 'et', is now 'fi'"]),
        (
            changed(train={"objective": "masked_tokens"}),
            ["train.objective: encoders have a token before each document, and decoders none"],
        ),
    ):
        with pytest.raises(KieloError) as refusal:
            check_recipe(asked, run)
        text = str(refusal.value)
        assert [line[4:] for line in text.splitlines() if line.startswith("  - ")] == lines
        assert text.startswith(f"{run / 'tokens'}: was packed by a recipe with other values:")
    with pytest.raises(KieloError, match=r"corpus\.sources: were \['a', 'b'\], are now \['a', 'c'\]"):
        check_recipe(changed(corpus={"sources": sources}), run)
    # Values that a manifest of an earlier version lacks are not compared.
    section = read_manifest(run / "corpus").section
    del section["min_line_characters"]
    with write_stage(run / "corpus", "corpus", 1, {"a": "1", "b": "2"}, section):
        pass
    write_tokens(run, {}, {"corpus": hash_manifest(run / "corpus")}, a={}, b={})
    less = changed(corpus={"min_line_characters": 3}, dataset={"heldout_share": 0.4})
    assert check_recipe(less, run) is None
    with write_stage(run / "corpus", "corpus", 1, {"a": "1", "b": "3"}, section):
        pass
    with pytest.raises(KieloError, match="corpus: was made again after .*tokens was packed from it"):
        check_recipe(recipe(), run)
    shutil.rmtree(run / "corpus")
    assert check_recipe(recipe(), run) is None
    shutil.rmtree(run / "tokenizer")
    assert check_recipe(changed(tokenizer={"vocab_size": 500}), run) is None


def _settings(asked: Recipe) -> dict:
    return effective_settings(asked.corpus, language(asked.language))


def test_masks_encoders_and_ready_tokens_are_compared(run: Path) -> None:
    """With what the recipe asks for, each in both directions; tokens of another program are not."""
    chats = [{"name": "a", "path": "a.jsonl", "kind": "instructions", "loss": "answers"}]
    base = recipe().model_dump(exclude_unset=True)
    on_answers = Recipe(**base | {"corpus": {"sources": chats}})
    encoder = Recipe(**base | {"train": {"objective": "masked_tokens"}})
    ready = Recipe(
        **base | {"corpus": {"sources": [{"name": "a", "tokens": "x"}]}, "tokenizer": {"path": "./t"}}
    )
    for name in ("corpus", "tokenizer"):
        shutil.rmtree(run / name)
    packed = {
        "plain": ({}, {"a": {}}), "answers": ({"loss_on_answers": ["a"]}, {"a": {}}),
        "encoder": ({"begins_with_cls": True}, {"a": {}}), "ready": ({}, {"a": {"folder": "x"}}),
    }  # fmt: skip
    asked = {"plain": recipe(), "answers": on_answers, "encoder": encoder, "ready": ready}
    told = {
        ("plain", "answers"): [r"loss = 'answers': were \[\], are now \['a'\]"],
        ("answers", "plain"): [r"loss = 'answers': were \['a'\], are now \[\]"],
        ("plain", "encoder"): ["train.objective"], ("encoder", "plain"): ["train.objective"],
        ("plain", "ready"): [r"corpus.sources with tokens: were \[\], are now \['a'\]"],
        ("ready", "plain"): [r"corpus.sources with tokens: were \['a'\], are now \[\]"],
        ("ready", "answers"): [r"\['a'\], are now \[\]", "answers"],
        ("encoder", "ready"): ["train.objective", "with tokens"],
    }  # fmt: skip
    for before, (section, sources) in packed.items():
        write_tokens(run, section, {"tokenizer": "x"}, **sources)
        assert check_recipe(asked[before], run) is None
        for (was, now), words in told.items():
            if was == before:
                with pytest.raises(KieloError) as refusal:
                    check_recipe(asked[now], run)
                assert all(re.search(word, str(refusal.value)) for word in words)
                assert str(refusal.value).count("\n  - ") == len(words)
        write_tokens(run, section, {}, **sources)
        assert all(check_recipe(one, run) is None for one in asked.values())


def test_a_checkpoint_names_its_tokens(run: Path) -> None:
    """Tokens of another hash are refused with both; a checkpoint that names none is taken."""
    found = hash_manifest(run / "tokens")
    for plain in ({}, {"identity": {}}, {"identity": {"tokens_hash": found}}):
        assert check_tokens(PlainState(**plain), run) is None
    other = {"identity": {"tokens_hash": "0123456789abcdef"}}
    with pytest.raises(KieloError, match=rf"other tokens \({found[:12]}\) than .*\(0123456789ab\)"):
        check_tokens(PlainState(**other), run)
    other_tokenizer(run / "tokenizer")
    with pytest.raises(KieloError, match="is not the tokenizer that made"):
        check_tokens(PlainState(identity={"tokens_hash": found}), run)


def test_a_checkpoint_names_its_tokenizer(run: Path, made: Path, tmp_path: Path) -> None:
    """By its hash, or by the run's tokens where they are those of the checkpoint."""
    own, other = made / "tokenizer", other_tokenizer(shutil.copytree(made / "tokenizer", tmp_path / "other"))
    named = {"tokenizer_hash": tokenizer_hash(own)}
    tokens, foreign = ({"identity": {"tokens_hash": one}} for one in (hash_manifest(run / "tokens"), "x"))
    shown = f"that was {tokenizer_hash(own)[:12]}, this is {tokenizer_hash(other)[:12]}"
    for plain, folder in ((named, None), (named, run), (named, tmp_path), (tokens, run)):
        assert check_tokenizer_of_checkpoint(PlainState(**plain), folder, own) is None
        with pytest.raises(KieloError, match=f"the checkpoint's tokens: {shown}"):
            check_tokenizer_of_checkpoint(PlainState(**plain), folder, other)
    for plain, folder in ((tokens, None), (foreign, run), ({}, run), (tokens, tmp_path)):
        assert check_tokenizer_of_checkpoint(PlainState(**plain), folder, other) is None
    other_tokenizer(run / "tokenizer")
    with pytest.raises(KieloError, match="a tokenizer that was changed later"):
        check_tokenizer_of_checkpoint(PlainState(**tokens), run, own)


def test_counts_of_earlier_manifests_lack_the_end_of_text(run: Path) -> None:
    """Then the file's hash alone tells the tokenizer."""
    counts = dict(read_manifest(run / "tokenizer").counts)
    del counts["end_of_text_id"], counts["largest_id"]
    rewrite_counts(run / "tokenizer", counts)
    assert tokenizer_of_tokens(run).end_of_text_id == 0
