"""`kielo init`, and plans of an idea: a size alone, a [model] alone, a recipe without text."""

import json
import shlex
import shutil
import time
import tomllib
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import refuse_before_text
from tests.docs.toy_text import SCRIPTS
from tests.house.checks import ROOT


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
    assert (
        "exists already and stays" in capsys.readouterr().out
        and Path("recipe.schema.json").read_text() == "mine"
    )


def test_the_questions_are_asked_again_until_they_are_answered(capsys, monkeypatch) -> None:
    """On a terminal: a wrong answer is said to be wrong, an empty one is the default."""
    answers = iter(["", "Elbonian", "estonian", "a.txt, b.jsonl", "laptop", "much", "5M", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["init", "mine.toml"]) == 0
    said = capsys.readouterr()
    assert "Elbonian" in said.err and "'much'" in said.err and "missing yet: a.txt, b.jsonl" in said.out
    recipe = read_recipe("mine.toml").recipe
    assert [source.path for source in recipe.corpus.sources] == ["a.txt", "b.jsonl"]
    assert (recipe.name, recipe.language, recipe.model.params) == ("mine", "et", 5_000_000)
    assert recipe.train.tokens is None  # it follows from the text


def test_nothing_is_asked_where_nobody_can_answer(capsys, monkeypatch) -> None:
    """A closed standard input, as of a service: flags and defaults, or a refusal that names the flag."""
    monkeypatch.setattr("sys.stdin", None)
    assert main(["init"]) == 1 and "Fix: --language fi" in capsys.readouterr().err
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
    "a language without a card": (["init", "--language", "xx"], "`kielo languages` lists all"),
    "two machines begin so": ([*FINNISH[:-1], "j"], "did you mean jean_zay"),
    "no size": (["init", "--language", "fi", "--params", "big"], "350M or 3B"),
    "no budget": ([*FINNISH, "--budget", "lots"], "60B"),
    "hours of a device without a peak": ([*FINNISH[:-1], "laptop", "--budget", "9h"], "in tokens"),
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
        assert ("as usual for this size" in said.err) == (words[0] != "poro_34b")


@pytest.mark.full
def test_a_rehearsal_of_a_size_needs_no_tokenizer(capsys) -> None:
    assert main(["rehearse", "--params", "20M", "--ranks", "2", "--set", "dataset.sequence_length=128",
                 "--set", "train.tokens_per_step=4096", "--json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)[0]["peak_bytes"] > 20e6


def test_a_size_beside_a_shape_is_refused_but_replaces_that_of_the_recipe(capsys) -> None:
    assert main(["show", "own_text", "--set", "model.params=3B"]) == 0
    capsys.readouterr()
    assert main(["show", "own_text", "--set", "model.params=3B", "--set", "model.hidden_size=64"]) == 1
    assert "Fix: leave one out" in capsys.readouterr().err
    Path("child.toml").write_text('extends = "own_text"\n[model]\nparams = "20M"\n')
    assert read_recipe("child.toml").recipe.model.params == 20_000_000


# --- What is written and printed, word for word


def init(capsys, *words: str) -> str:
    assert main(["init", "--language", "et", *words]) == 0
    return capsys.readouterr().out


def written(name: str) -> dict:
    return tomllib.loads(Path(name).read_text(encoding="utf-8"))


def test_a_recipe_for_a_cluster_is_as_usual_for_its_size(capsys) -> None:
    """GPT-3's steps and rate (Brown et al. 2020), 20 tokens a parameter, in whole steps."""
    assert init(capsys, "--params", "3B", "--cluster", "lumi_g") == (
        "wrote estonian_3b.toml\nwrote recipe.schema.json, against which your editor checks the recipe\n"
        "next:\n  kielo plan estonian_3b.toml --nodes 1..16  # layouts that fit, days, hours\n"
        "  kielo rehearse estonian_3b.toml --nodes 1  # one rank's exact bytes, here\n"
        "  kielo run estonian_3b.toml  # after corpus.sources names text\n"
    )
    steps = 20 * 3 * 10**9 // 2**20
    assert written("estonian_3b.toml") == {
        "name": "estonian_3b", "language": "et", "description": "llama, 3B, Estonian", "cluster": "lumi_g",
        "tokenizer": {"vocab_size": 131_072}, "dataset": {"sequence_length": 4096, "max_epochs": 4},
        "model": {"model_type": "llama", "params": "3B"},
        "train": {"tokens": steps * 2**20, "tokens_per_step": 2**20, "learning_rate": 1.6e-4},
        "checkpoint": {"every_steps": 500},
    }  # fmt: skip
    assert "\\u" not in Path("recipe.schema.json").read_text(encoding="utf-8")  # letters are as they are
    text = Path("estonian_3b.toml").read_text(encoding="utf-8")
    assert "\n# [corpus]\n" in text and "  # 20 for each parameter\n" in text
    layers, hidden = 27, 2560
    assert f": {layers} layers of {hidden:,}, 32 heads, 8 of keys and values,\n# MLP 8,960." in text


@pytest.mark.parametrize("model_type", ["modernbert", "ltg_bert", "llama"])
def test_an_encoder_learns_masked_tokens(capsys, model_type) -> None:
    """Also if a recipe is varied. A new recipe runs as it is."""
    flags = ["--model-type", model_type]
    init(capsys, *flags, "--params", "5M", "a.toml")
    other = "own_text" if model_type != "llama" else "demo_estonian_bert"
    assert main(["init", "--from", other, *flags, "--params", "5M", "b.toml"]) == 0
    for file in ("a.toml", "b.toml"):
        read = read_recipe(file, ["corpus.sources=a.txt", "train.tokens=10M"]).recipe
        assert read.train.objective == ("next_token" if model_type == "llama" else "masked_tokens")
        if file == "a.toml":
            refuse_before_text(read, 1, "cpu")


def test_commands_quote_the_name_of_the_file(capsys) -> None:
    """Texts at addresses are not looked for."""
    for flags in ([], ["--from", "demo_estonian"], ["--cluster", "lumi"], ["--text", "s3://bucket/x,b.txt"]):
        name = f"my recipe{len(flags)}{flags[-1:]}.toml".replace("/", "")
        said = init(capsys, name, *flags)
        commands = [line for line in said.splitlines() if line.startswith("  kielo ")]
        assert commands and all(shlex.split(line, comments=True)[2] == name for line in commands)
    assert "missing yet: b.txt\n" in said


def test_a_recipe_for_a_laptop_reads_all_of_its_text(capsys) -> None:
    """Steps of 16 sequences, since nobody knows how much text there is; files that are not there are told."""
    Path("here.txt").touch()
    assert init(capsys, "--text", " here.txt ,gone.txt,b*.txt,,c[1].txt,d?", "--model-type", "qwen3") == (
        "wrote estonian_10m.toml\nwrote recipe.schema.json, against which your editor checks the recipe\n"
        "missing yet: gone.txt\nnext:\n  kielo run estonian_10m.toml\n"
    )
    found = written("estonian_10m.toml")
    assert found["corpus"] == {"sources": ["here.txt", "gone.txt", "b*.txt", "c[1].txt", "d?"]}
    assert found["train"] == {"tokens_per_step": 16 * 512, "learning_rate": 1e-3}
    assert found["dataset"]["max_epochs"] == 8 and found["checkpoint"] == {"every_steps": 200}
    assert found["model"] == {"model_type": "qwen3", "params": "10M"} and found["cluster"] == "laptop"
    text = ("--text", "here.txt", "--cluster", "lumi_g")
    assert init(capsys, *text).endswith("\n  kielo run estonian_3b.toml --to pack\n")


@pytest.mark.parametrize(("machine", "size", "nodes"), [
    ("lumi_g", "19.9B", "1..16"), ("lumi_g", "20B", "8..128"), ("betzy", "3B", "1..4"), ("betzy", "20B", "4"),
    ("dgx_a100", "20B", "8..128"),
])  # fmt: skip
def test_the_nodes_to_plan_with_are_those_of_the_site(machine, size, nodes, capsys) -> None:
    """All of a site that has fewer than the eight which a large model begins with."""
    said = init(capsys, "--params", size, "--cluster", machine, "f.toml")
    assert f"\n  kielo plan f.toml --nodes {nodes}  #" in said


@pytest.mark.parametrize(("words", "file", "name"), [
    (["--params", "25.5M"], "estonian_25_5m.toml", "estonian_25_5m"),
    (["a/My recipe (2)!.toml"], "a/My recipe (2)!.toml", "My_recipe_2"),
    (["--params", "5M", "---.toml"], "---.toml", "estonian_5m"),
    (["--language", "nb"], "norwegian_10m.toml", "norwegian_10m"),
])  # fmt: skip
def test_a_run_is_called_by_its_file_or_language_and_size(words, file, name, capsys) -> None:
    Path("a").mkdir()
    words = [f"./{word}" if word.startswith("---") else word for word in words]
    init(capsys, *words)
    assert written(file)["name"] == name and (Path(file).parent / "recipe.schema.json").is_file()


@pytest.mark.full  # half a minute of planning for ten trillion
def test_the_smallest_and_the_largest_size_have_a_plan(capsys) -> None:
    for size in ("1M", "10T"):
        init(capsys, "--params", size, "--cluster", "lumi_g", f"{size}.toml")


def test_sizes_and_budgets_at_their_borders(capsys) -> None:
    for number, (size, near) in enumerate(
        {"999_999": "1M to 10T", "10_000_000_000_001": "1M to 10T"}.items()
    ):
        assert main(["init", "--language", "et", "--params", size, f"x{number}.toml"]) == 1
        assert near in capsys.readouterr().err
    for budget, tokens in {"5M": 1220, "5M tokens": 1220, "1": 1, "8191 token": 1, " ": None}.items():
        init(capsys, "--budget", budget, "laptop.toml")
        train = written("laptop.toml")["train"]
        assert train.get("tokens") == (tokens and tokens * train["tokens_per_step"]), budget
        Path("laptop.toml").unlink()


@pytest.mark.parametrize(("given", "code"), [
    ("Estonian", "et"), ("ESTO", "et"), (" et ", "et"), ("fi", "fi"), ("Norwegian B", "nb"),
    ("Serbo-Croatian", "hbs"), ("serbo_", "hbs"),
])  # fmt: skip
def test_a_language_is_its_code_its_name_or_their_beginning(given, code, capsys) -> None:
    assert main(["init", "--language", given, "f.toml"]) == 0
    assert written("f.toml")["language"] == code


@pytest.mark.parametrize("given", ["", "s", "Elbonian"])
def test_a_language_that_is_none_or_several_is_refused(given, capsys) -> None:
    assert main(["init", "--language", given]) == 1
    assert capsys.readouterr().err.startswith(f"kielo: no language {given!r}; `kielo languages` lists all")


def test_a_card_of_ones_own_is_a_machine(capsys, tmp_path) -> None:
    """The recipe has its path. A name that is none is told how to write a card."""
    card = shipped_card("lumi_g").replace('name = "lumi_g"', 'name = "mine"')
    Path("mõni.toml").write_text(card, encoding="utf-8")
    init(capsys, "--cluster", "mõni.toml", "--text", "õpik.txt", "f.toml")
    text = Path("f.toml").read_text(encoding="utf-8")
    assert 'cluster = "mõni.toml"' in text and 'sources = ["õpik.txt"]' in text
    assert written("f.toml")["cluster"] == "mõni.toml"
    assert main(["init", "--language", "et", "--cluster", "zzz"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kielo: no machine 'zzz'; known: abci3, ") and "; " in said and "--new" in said


def shipped_card(name: str) -> str:
    return (ROOT / "src/kielo/cards/clusters" / f"{name}.toml").read_text(encoding="utf-8")


def test_each_question_shows_its_default(capsys, monkeypatch) -> None:
    """Only those that no flag answers are asked; the end of the input ends it, and nothing is written."""
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "")
    assert main(["init", "--language", "et", "--cluster", "lumi_g"]) == 0
    assert asked == [
        "Where is the text (files or folders, separated by commas)? ", "How many parameters? [3B] ",
        "What budget: tokens (60B) or device-hours (20000h)? Enter for the usual budget ",
    ]  # fmt: skip
    asked.clear()
    assert main(["init", "--language", "et", "--text", "", "--budget", ""]) == 0
    assert asked == ["On which machine? [laptop] ", "How many parameters? [10M] "]

    def end(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(["init", "x.toml"]) == 1 and not Path("x.toml").exists()
    assert capsys.readouterr().err.endswith("kielo: no answer, and nothing was written. Fix: --language\n")


def test_an_idea_takes_settings_from_flags(capsys) -> None:
    """A size in place of a recipe; settings and a machine without one are an idea too; nothing is none."""
    machine = ["--cluster", "lumi_g", "--nodes", "4", "--json"]
    assert main(["plan", "--set", "model.params=1B", *machine]) == 0
    facts = json.loads(capsys.readouterr().out)["run"]
    assert facts["tokens"] == pytest.approx(20e9, rel=0.01)
    assert main(["plan", "--params", "1B", "--set", "train.tokens=7B", *machine]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["tokens"] == pytest.approx(7e9, rel=0.01)
    sequence = "dataset.sequence_length=32768"  # more than the default step
    assert main(["plan", "--params", "1B", "--set", sequence, *machine]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["tokens"] == pytest.approx(20e9, rel=0.01)
    assert main(["plan"]) == 1 and "no recipe and no size" in capsys.readouterr().err


def test_a_wrong_family_is_not_taken_for_a_wrong_size(capsys, monkeypatch) -> None:
    """On a terminal: no answer to a question could mend it, so none is asked again."""
    answers = iter(["", "", "", ""])

    def answer(question: str) -> str:
        if (given := next(answers, None)) is None:
            raise EOFError
        return given

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", "--language", "et", "--model-type", "lama"]) == 1
    assert "did you mean llama" in capsys.readouterr().err and list(Path().iterdir()) == []


# --- From what exists


def test_a_recipe_is_varied(capsys) -> None:
    """A shipped recipe, a file, and a recipe that extends another itself; flags change values."""
    assert (
        main(["init", "--from", "demo_estonian", "--params", "20M", "--budget", "5M", "--cluster", "lumi"])
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "wrote demo_estonian_2.toml, which varies demo_estonian"
    assert said[-3:] == ["next:", "  kielo show demo_estonian_2.toml", "  kielo run demo_estonian_2.toml"]
    assert written("demo_estonian_2.toml") == {
        "extends": "demo_estonian", "name": "demo_estonian_2", "cluster": "lumi_g",
        "model": {"params": "20M"}, "train": {"tokens": 5_000_000},
    }  # fmt: skip
    Path("a").mkdir()
    assert main(["init", "--from", "demo_estonian_2.toml", "a/mine.toml", "--text", "x.txt,y.txt"]) == 0
    found = read_recipe("a/mine.toml")
    assert written("a/mine.toml")["extends"] == "demo_estonian"  # the one level that there may be
    assert [source.path for source in found.recipe.corpus.sources] == ["x.txt", "y.txt"]
    assert (found.recipe.name, found.recipe.train.tokens, found.recipe.cluster) == (
        "mine",
        5_000_000,
        "lumi_g",
    )
    Path("base.toml").write_text('name = "base"\nlanguage = "et"\n[corpus]\nsources = ["t.txt"]\n')
    assert main(["init", "--from", "base.toml", "a/base_3.toml"]) == 0
    assert written("a/base_3.toml") == {"extends": "../base.toml", "name": "base_3"}
    assert main(["init", "--from", "base.toml"]) == 0 and main(["init", "--from", "base.toml"]) == 0
    assert read_recipe("base_3.toml").recipe.name == "base_3"  # base_2.toml was taken
    assert main(["init", "--from", "seventy_five_berts"]) == 0  # a run for each language
    assert written("seventy_five_berts_2.toml")["name"] == "seventy_five_berts_2_{language}"


def test_a_finished_run_is_continued(finished, tmp_path, capsys) -> None:
    """Its weights and its tokenizer, its text, half its learning rate; the shape is that of the weights."""
    run = finished[0].parent / "run"
    before = read_recipe(run).recipe
    assert main(["init", "--from", str(run), "more.toml", "--text", "more.txt"]) == 0
    assert f"wrote more.toml, which continues the weights of {run}/hf" in capsys.readouterr().out
    content, recipe = written("more.toml"), read_recipe("more.toml").recipe
    assert content["model"] == {"weights": f"hf:{run}/hf"}
    assert content["tokenizer"] == {"path": f"{run}/tokenizer"} and "extends" not in content
    assert recipe.train.learning_rate == before.train.learning_rate / 2
    assert [source.path for source in recipe.corpus.sources] == ["more.txt"] and not recipe.folder
    assert main(["init", "--from", str(run), "x.toml", "--params", "3B"]) == 1
    assert "fix size and type" in capsys.readouterr().err and not Path("x.toml").exists()
    Path("young").mkdir()
    shutil.copy(run / "recipe.toml", "young")
    assert main(["init", "--from", "young", "x.toml"]) == 1
    assert "Fix: kielo run young --only export" in capsys.readouterr().err and not Path("x.toml").exists()


@pytest.mark.parametrize(("flags", "said"), [
    (["--from", "demo_estonain"], "did you mean demo_estonian?"),
    (["--from", "hf:A/B"], "names weights"),
    (["--from", "demo_estonian", "--budget", "2000h"], "beside --from give tokens"),
    (["--from", "demo_estonian", "--model-type", "lama"], "model_type"),
])  # fmt: skip
def test_what_cannot_be_varied_writes_nothing(flags, said, capsys) -> None:
    assert main(["init", *flags, "x.toml"]) == 1
    assert said in capsys.readouterr().err and list(Path().iterdir()) == []


# --- From a script of another engine


def test_a_script_becomes_a_recipe_that_is_shown_and_planned(capsys) -> None:
    shutil.copy(SCRIPTS / "viking_7b.sh", "pretrain.sh")
    said = init(capsys, "--from-megatron", "pretrain.sh")
    assert "line\targument\t\tbecomes\n10\t--nproc_per_node 8\ttranslated\t" in said
    assert "wrote pretrain.toml: 16 understood, " in said and said.endswith("  kielo plan pretrain.toml\n")
    assert main(["show", "pretrain.toml"]) == main(["plan", "pretrain.toml", "--nodes", "32"]) == 0
    assert written("pretrain.toml")["cluster"] == "lumi_g" and written("pretrain.toml")["nodes"] == [32]


SCRIPT = ["init", "--language", "et", "--from-megatron", "pretrain.sh"]
WRONG_SCRIPTS = {
    "two origins": ([*SCRIPT, "--from", "own_text"], "--from and --from-megatron: a recipe has one origin"),
    "a size": ([*SCRIPT, "--params", "3B"], "--params: the script says it"),
    "a variable alone": (["init", "--variable", "A=1"], "--variable belongs to --from-megatron"),
    "no value": ([*SCRIPT, "--variable", "A"], "no NAME=VALUE. Fix: --variable NNODES=4"),
    "no file": (SCRIPT, "pretrain.sh: No such file or directory. Fix: the path of a bash script"),
}


@pytest.mark.parametrize(("words", "expected"), WRONG_SCRIPTS.values(), ids=WRONG_SCRIPTS)
def test_a_wrong_script_writes_nothing(words, expected, capsys) -> None:
    assert main(words) == 1
    assert expected in capsys.readouterr().err and list(Path().iterdir()) == []
