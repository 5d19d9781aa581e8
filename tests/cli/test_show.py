"""`kielo show` tells what is in force, also of an idea and of a model that starts from weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kielo.cli.main import main
from kielo.tokenizer.load import tokenizer_facts
from tests.cli.test_run import write_recipe


def shown(capsys, *arguments: str | Path) -> dict:
    assert main(["show", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_idea_is_shown(tmp_path: Path, capsys) -> None:
    """A [model] alone, which `plan` takes: what it lacks is not shown as if somebody had given it."""
    idea = tmp_path / "idea.toml"
    idea.write_text('[model]\nparams = "1B"\n')
    found = shown(capsys, idea)
    for key in ("name", "language", "corpus.sources"):
        assert found[key] == {"value": None, "origin": "not given"}
    assert found["model.params"]["value"] == 10**9 and found["corpus.workers"]["origin"] == "default"
    assert main(["show", str(idea)]) == 0
    said = capsys.readouterr().out
    assert "998.8 million parameters" in said and "needs name, language, corpus.sources too" in said
    assert "as usual for this size: train.tokens" in said
    assert main(["run", str(idea)]) == 1 and "corpus is missing" in capsys.readouterr().err
    idea.write_text("")
    assert main(["show", str(idea)]) == 1 and "name is missing" in capsys.readouterr().err


def test_keys_that_weights_replace_are_not_shown_as_in_force(finished, tmp_path: Path, capsys) -> None:
    """`show` and `run` name the given keys that config.json has otherwise; before they are fetched, all."""
    run = finished[0].parent / "run"
    recipe = write_recipe(tmp_path)
    with_tokenizer = [recipe, "--set", f"tokenizer.path={run / 'tokenizer'}"]
    sets = [*with_tokenizer, "--set", f"model.weights=hf:{run / 'hf'}", "--set", "model.hidden_size=64"]
    found = shown(capsys, *sets)
    found.pop("tokenizer.vocab_size")  # tokenizer.path replaces it
    replaced = {key: entry["not_in_force"] for key, entry in found.items() if "not_in_force" in entry}
    assert replaced == {"model.hidden_size": {"value": 64, "origin": "--set"}}
    assert found["model.hidden_size"]["value"] == 16 and found["model.vocab_size"]["value"] == 320
    assert found["model.num_hidden_layers"] == {"value": 2, "origin": "model.weights"}
    assert found["model.weights"]["origin"] == "--set"
    assert main(["run", *map(str, sets), "--to", "corpus"]) == 0
    assert "model.hidden_size = 64 (16 there)" in capsys.readouterr().err
    found = shown(capsys, *with_tokenizer, "--set", "model.weights=hf:nobody/nowhere")
    assert found["model.hidden_size"]["value"] is None
    assert found["model.hidden_size"]["not_in_force"]["value"] == 16


def test_keys_that_a_ready_tokenizer_replaces_are_not_shown_as_in_force(tmp_path: Path, capsys) -> None:
    """None of them is used: the size is that of tokenizer.json, the other keys have no value."""
    vocabulary = {"<|endoftext|>": 0, "tere": 1, "maailm": 2}
    Tokenizer(WordLevel(vocabulary, unk_token="tere")).save(str(tmp_path / "tokenizer.json"))
    found = shown(capsys, "demo_estonian", "--set", f"tokenizer.path={tmp_path}")
    given = shown(capsys, "demo_estonian")["tokenizer.vocab_size"]
    assert given["value"] == 4096 and given["origin"] != "default"
    assert found["tokenizer.vocab_size"] == {"value": 3, "origin": "tokenizer.path", "not_in_force": given}
    for key in ("tokenizer.min_frequency", "tokenizer.max_sample_bytes"):
        assert found[key] == {"value": None, "origin": "tokenizer.path"}


def test_a_vocabulary_that_the_text_cannot_fill_is_said_once(tmp_path: Path, capsys) -> None:
    """The number that was reached is that of the tokenizer, and the one to set."""
    command = ["run", str(write_recipe(tmp_path)), "--to", "tokenizer", "--set", "tokenizer.vocab_size=5000"]
    assert main(command) == 0
    said = capsys.readouterr().err
    size = tokenizer_facts(tmp_path / "run" / "tokenizer").vocabulary_size
    assert 257 < size < 5000 and f"gives {size:,} of the 5,000" in said
    assert main(command) == 0 and "tokenizer" not in capsys.readouterr().err
    assert main([*command, "--set", f"tokenizer.vocab_size={size}"]) == 0
    assert "of tokenizer.vocab_size" not in capsys.readouterr().err
