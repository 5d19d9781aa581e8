"""`kielo init`, and plans of an idea: a size alone, a [model] alone, a recipe without text."""

import json
import time
import tomllib
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.recipe.read import read_recipe


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


FINNISH = ["init", "--language", "Finnish", "--params", "3B", "--cluster", "lumi"]


def test_from_init_to_a_plan_in_under_a_minute(capsys) -> None:
    """The bar: a 3B Finnish model on LUMI, without text, planned by the very command that init prints."""
    started = time.monotonic()
    assert main(FINNISH) == 0
    said = capsys.readouterr().out
    command = next(line for line in said.splitlines() if "kielo plan" in line).partition("#")[0].split()
    assert main([*command[1:], "--json"]) == 0
    assert time.monotonic() - started < 60
    assert {layout["nodes"] for layout in json.loads(capsys.readouterr().out)["layouts"]} == {1, 2, 4, 8, 16}
    text = Path("finnish_3b.toml").read_text(encoding="utf-8")
    assert text.startswith("#:schema recipe.schema.json\n") and json.loads(
        Path("recipe.schema.json").read_text()
    )
    assert tomllib.loads(text)["model"]["params"] == "3B" and 'language = "fi"' in text


def test_a_file_is_never_replaced(capsys) -> None:
    assert main(FINNISH) == 0
    before = Path("finnish_3b.toml").read_bytes()
    assert main(FINNISH) == 1
    assert "exists already" in capsys.readouterr().err and Path("finnish_3b.toml").read_bytes() == before
    Path("recipe.schema.json").write_text("mine")
    assert main([*FINNISH, "other.toml"]) == 0
    assert "was there already" in capsys.readouterr().out and Path("recipe.schema.json").read_text() == "mine"


def test_the_questions_are_asked_again_until_they_are_answered(capsys, monkeypatch) -> None:
    """On a terminal: a wrong answer is said to be wrong, an empty one is the default."""
    answers = iter(["", "Klingon", "estonian", "a.txt, b.jsonl", "laptop", "much", "5M", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["init", "mine.toml"]) == 0
    said = capsys.readouterr()
    assert "Klingon" in said.err and "'much'" in said.err and "not there yet: a.txt, b.jsonl" in said.out
    recipe = read_recipe("mine.toml").recipe
    assert [source.path for source in recipe.corpus.sources] == ["a.txt", "b.jsonl"]
    assert (recipe.name, recipe.language, recipe.model.params) == ("mine", "et", 5_000_000)
    assert recipe.train.tokens is None  # it follows from the text


def test_nothing_is_asked_where_nobody_can_answer(capsys, monkeypatch) -> None:
    """A closed standard input, as of a service: flags and defaults, or a refusal that names the flag."""
    monkeypatch.setattr("sys.stdin", None)
    assert main(["init"]) == 1 and "Give --language" in capsys.readouterr().err
    assert main(["init", "--language", "et"]) == 0


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [(["--budget", "60B"], 60e9), (["--budget", "2000h"], 2000 * 3600 * 191.5e12 * 0.35 / (6 * 3e9)),
     ([], 60e9)],
)  # fmt: skip
def test_a_budget_is_tokens_or_hours(flags, tokens) -> None:
    """2,000 hours of a device at 35 % of LUMI's peak; without a budget 20 tokens for each parameter."""
    assert main([*FINNISH, *flags]) == 0
    recipe = read_recipe("finnish_3b.toml", ["corpus.sources=a.txt"]).recipe
    assert recipe.train.tokens == pytest.approx(tokens, rel=0.01)


WRONG = {
    "no language": (["init"], "--language fi"),
    "a language without a card": (["init", "--language", "xx"], "known: af"),
    "two machines begin so": ([*FINNISH[:-1], "j"], "did you mean jup"),
    "no size": (["init", "--language", "fi", "--params", "big"], "350M or 3B"),
    "no budget": ([*FINNISH, "--budget", "lots"], "60B"),
    "hours of a device without a peak": ([*FINNISH[:-1], "leonardo", "--budget", "9h"], "give tokens"),
    "a family": ([*FINNISH, "--model-type", "lama"], "did you mean llama"),
}


@pytest.mark.parametrize(("words", "expected"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer_writes_nothing(words, expected, capsys) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) == 1 and list(Path().iterdir()) == []


def test_a_plan_of_a_size_and_of_a_model_alone(capsys) -> None:
    """Keys that were filled in are said; those that the file gives stay."""
    Path("idea.toml").write_text('[model]\nmodel_type = "qwen3"\nparams = "1B"\n[train]\ntokens = "7B"\n')
    for words, model_type, tokens in (
        (["--params", "3B"], "llama", 60e9),
        (["idea.toml"], "qwen3", 7e9),
        (["poro_34b", "--params", "3B"], "bloom", 1e12),
    ):
        assert main(["plan", *words, "--cluster", "lumi_g", "--nodes", "4", "--json"]) == 0
        said = capsys.readouterr()
        facts = json.loads(said.out)["run"]
        assert facts["model_type"] == model_type and facts["tokens"] == pytest.approx(tokens, rel=0.01)
        assert ("as usual for this size" in said.err) == (words[0] == "--params")


@pytest.mark.full
def test_a_rehearsal_of_a_size_needs_no_tokenizer(capsys) -> None:
    assert main(["rehearse", "--params", "20M", "--ranks", "2", "--set", "dataset.sequence_length=128",
                 "--set", "train.tokens_per_step=4096", "--json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)[0]["peak_bytes"] > 20e6


def test_a_size_beside_a_shape_is_refused_but_replaces_that_of_the_recipe(capsys) -> None:
    assert main(["show", "own_text", "--set", "model.params=3B"]) == 0
    capsys.readouterr()
    assert main(["show", "own_text", "--set", "model.params=3B", "--set", "model.hidden_size=64"]) == 1
    assert "leave out one or the other" in capsys.readouterr().err
    Path("child.toml").write_text('extends = "own_text"\n[model]\nparams = "20M"\n')
    assert read_recipe("child.toml").recipe.model.params == 20_000_000
