"""Verbs that answer a question: every row and number of `show`, `data`, `tokenizer map` and the lists."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.metrics import METRICS_NAME, PassedOver, write_row
from kielo.artifact.stage_counts import RowMap
from kielo.cli.main import main
from kielo.cli.tokenizer import tokenizer_folder
from kielo.recipe.errors import KieloError
from tests.cli.test_run import write_recipe


def said(capsys: pytest.CaptureFixture, *words: str | Path) -> str:
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def content(capsys: pytest.CaptureFixture, *words: str) -> Any:
    return json.loads(said(capsys, *words, "--json"))


# --- show


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def test_the_facts_of_a_run_stand_above_its_values(recipe, capsys) -> None:
    """Keys of a source that are empty are left out of the table, and not out of the JSON."""
    rows = said(capsys, "show", recipe).splitlines()
    assert rows[0].startswith("model\tllama, ") and rows[1].startswith("shape\t2 layers of 16, 2 heads,")
    values = rows[rows.index("key\tvalue\tfrom") + 1 :]
    assert f'name\t"tiny"\t{recipe}' in values and "seed\t1\tdefault" in values
    source = next(row for row in values if row.startswith("corpus.sources\t")).split("\t")[1]
    (shown,) = json.loads(source)
    assert shown["clean"] is True and shown["kind"] == "text" and "tokens" not in shown
    whole = content(capsys, "show", recipe)["corpus.sources"]["value"][0]
    assert shown == {key: value for key, value in whole.items() if value not in (None, "", [])} != whole


def test_files_are_listed_before_anything_is_read(tmp_path, capsys) -> None:
    """Those of each source that are read, those that are not, and why a source would be refused."""
    for name in ("a.jsonl", "b.txt.gz", "README.md"):
        (tmp_path / "text" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "text" / name).touch()
    asked = ["show", "own_text", "--set", "name=x", "--set", "language=et"]
    asked += ["--set", f"corpus.sources={tmp_path / 'text'}"]
    assert main(asked) == 0
    assert "text\t2 read: a.jsonl, b.txt.gz; 1 not read: README.md\n" in capsys.readouterr().out
    (tmp_path / "text" / "c.csv").touch()
    assert main([*asked, "--json"]) == 0
    of = json.loads(capsys.readouterr().out)["corpus.sources"]["files"]["text"]
    assert "would not be read: c.csv" in of["problem"]


def test_a_model_that_is_not_known_has_its_reason(recipe, capsys, monkeypatch) -> None:
    fetched = f"hf:{recipe.parent}/nobody"
    sets = ["--set", f"model.weights={fetched}", "--set", "model.transplant=mean"]
    monkeypatch.setattr("kielo.cli.show.weights_here", lambda weights: None)
    rows = said(capsys, "show", recipe, *sets).splitlines()
    assert rows[0] == f"model\tfrom {fetched}, which `kielo train` fetches"
    assert rows[1].startswith("weights\t")

    def refuse(*_: Any) -> None:
        raise KieloError("it lacks a head")

    monkeypatch.setattr("kielo.cli.show.overview_of_recipe", refuse)
    assert said(capsys, "show", recipe).startswith("model\tnot possible: it lacks a head\nkey\tvalue\tfrom\n")


def test_ranks_that_do_not_divide_a_step_are_told_for_nodes_of_the_site(recipe, capsys, monkeypatch) -> None:
    asked = []

    def resolve(recipe: Any, folder: Any, ranks: int, device: str, **_: Any) -> int:
        asked.append((ranks, device))
        if ranks == 16:
            raise KieloError("no layout")
        return ranks

    monkeypatch.setattr("kielo.cli.show.resolve", resolve)
    monkeypatch.setattr("kielo.cli.show.uneven_steps", lambda of: ["a", "b"] if of == 8 else [])
    sets = ["--set", "cluster=lumi_g", "--set", "nodes=[1,2,3,2978,2979]"]
    rows = said(capsys, "show", recipe, *sets).splitlines()
    assert asked == [(8, "cuda"), (16, "cuda"), (24, "cuda"), (8 * 2978, "cuda")]
    assert [row for row in rows if row.startswith("batches")] == [
        "batches on 1 nodes\ta", "batches on 1 nodes\tb", "batches on 2 nodes\tnot possible: no layout",
    ]  # fmt: skip


# --- Lists


def test_recipes_are_listed_and_copied_once(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = said(capsys, "recipes").splitlines()
    assert rows[0] == "recipe\tlanguage\twhat it makes"
    assert "own_text\ten\tA small language model from one's own text" in rows
    assert [row.split("\t")[1] for row in rows if row.startswith("seventy_five")] == ["75 languages"]
    listed = content(capsys, "recipes")
    own = {"name": "own_text", "language": "en", "description": "A small language model from one's own text"}
    assert own in listed and len(listed) == len(rows) - 1
    wrote = "wrote own_text.toml. To start: kielo run own_text.toml\n"
    assert said(capsys, "recipes", "--copy", "own_text") == wrote
    Path("own_text.toml").write_text("mine")
    assert main(["recipes", "--copy", "own_text"]) == 1
    assert "own_text.toml exists already, and nothing was written" in capsys.readouterr().err
    assert Path("own_text.toml").read_text() == "mine"
    assert main(["recipes", "--copy", "none"]) == 1
    assert "--copy none: no shipped recipe. Fix: one of bluumi_176b" in capsys.readouterr().err


def test_a_language_is_copied_measured_and_taught(capsys, tmp_path, monkeypatch) -> None:
    """Each way is refused by name if a flag or a line does not fit, and no file is replaced."""
    monkeypatch.chdir(tmp_path)
    wrote = 'wrote vro.toml. To use it: language = "vro.toml" in a recipe\n'
    assert said(capsys, "languages", "vro", "--copy") == wrote
    (shown,) = content(capsys, "languages", "vro.toml")
    (shipped,) = content(capsys, "languages", "vro")
    assert shown == shipped
    text = "See on eesti keele lause number {}, mida keegi ei ole enne kirjutanud"
    Path("et.txt").write_text("\n".join(text.format(at) for at in range(60)))
    rows = said(capsys, "languages", "et", "--measure", "et.txt").splitlines()
    assert rows[0] == "threshold\tEstonian kept\tothers kept" and "0.5\t100.0%\t-" in rows
    assert '"py3langid" = { text = "60 lines of et.txt", own = 1.000, others = 0.0000 }' in rows[-1]
    other = "Tämä on suomenkielinen lause numero {}, jota kukaan ei ole kirjoittanut"
    Path("fi.txt").write_text("\n".join(other.format(at) for at in range(60)))
    learn = ["languages", "--learn", "own.kielo_lid", "--sample", "et=et.txt", "--sample", "fi=fi.txt"]
    rows = said(capsys, *learn).splitlines()
    assert rows[1:3] == ["et\t6\t100.0%\t-", "fi\t6\t100.0%\t-"]
    assert rows[-1].endswith('corpus.language_identifier = "own.kielo_lid" in a recipe')
    Path("bad.tsv").write_text("et no tab")
    for words, problem in (
        (["vro", "--copy"], "vro.toml exists already"),
        (["norwegian", "--copy"], "nb, nn are meant. Fix: one code"),
        (["--copy"], "--copy is about one language"),
        (["xx", "--measure", "et.txt"], "no language 'xx'; `kielo languages` lists all"),
        (["et", "--measure", "none.txt"], "none.txt: no such file"),
        (["et", "--measure", "bad.tsv"], "bad.tsv, line 1: no tab"),
        (["--learn", "own.kielo_lid"], "own.kielo_lid exists already"),
        (["--learn", "own.bin"], "Fix: own.kielo_lid"),
        (["--learn", "b.kielo_lid", "--sample", "et"], "--sample et: does not fit"),
    ):
        assert main(["languages", *words]) == 1
        assert problem in capsys.readouterr().err


def test_cards_and_formats_are_listed(capsys) -> None:
    """In JSON each card has all that it says."""
    rows = said(capsys, "clusters").splitlines()
    assert rows[0] == "cluster\taccelerator\tdevices a node\tnodes\tpeak bf16 TFLOP/s a device"
    assert "jupiter_booster\tgh200_96\t4\t6000\t989.0" in rows
    cards = content(capsys, "clusters")
    assert [card["name"] for card in cards] == [row.split("\t")[0] for row in rows[1:]]
    rows = said(capsys, "languages").splitlines()
    assert rows[0] == "code\tlanguage\tscript\tdocument threshold\tmeasured" and len(rows) > 300
    assert "fi\tFinnish\tLatin\tpy3langid ≥ 0.5, lid176 ≥ 0.65, heliport ≥ 0.5\tall" in rows
    assert [card["code"] for card in content(capsys, "languages")] == [row.split("\t")[0] for row in rows[1:]]
    found = said(capsys, "languages", "norwegian").splitlines()
    assert [row.split("\t")[0] for row in found] == ["code", "nb", "nn"]
    (card,) = content(capsys, "languages", "se")
    assert card["fineweb2"] == {"sme_Latn": 0.3} and card["identifier_codes"]["heliport"] == ["sme"]
    assert "iso639_3\tsme" in said(capsys, "languages", "Northern Sami")
    rows = said(capsys, "schema").splitlines()
    assert rows[:2] == ["format\tfile\tcontent", "recipe\trecipe.toml\tThe settings of a run, written by a "
                        "person."]  # fmt: skip
    assert "model" in json.loads(said(capsys, "schema", "--of", "recipe"))["properties"]


# --- tokenizer map


MADE = RowMap(
    method="mean", old_tokenizer="", old_vocabulary_size=9, control_tokens={"<b>": "<old>", "<a>": "<s>"},
    rows=[[1], [2, 3], [4, 5], [], [6, 7]],
)  # fmt: skip


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Tokenizers are the names of their folders; a token is called by its tokenizer and id."""
    noted = SimpleNamespace(made=MADE, asked=[])
    make = "kielo.cli.tokenizer.make_row_map"
    monkeypatch.setattr(make, lambda *given: noted.asked.append(given) or noted.made)
    monkeypatch.setattr("kielo.cli.tokenizer.load_tokenizer", lambda folder: folder.name)
    monkeypatch.setattr("kielo.cli.tokenizer.TokenNames", lambda of: lambda number: f"{of}{number}")
    return noted


def test_old_tokens_of_new_rows_are_shown(mapped, capsys) -> None:
    """Show as many composed rows as are asked for."""
    assert said(capsys, "tokenizer", "map", "a/old", "b/new") == (
        "5 rows of the new vocabulary: 1 (20.0%) are rows of the same text or role, 3 (60.0%) are means of "
        "2.0 old rows, 1 (20.0%) are random\n"
        "control token\trow of\n<a>\t<s>\n<b>\t<old>\n"
        "new token\told tokens\nnew1\told2 + old3\nnew2\told4 + old5\nnew4\told6 + old7\n"
    )
    assert mapped.asked == [("old", "new", "mean", None)]
    mapped.made = MADE.model_copy(update={"control_tokens": {}})
    table = said(capsys, "tokenizer", "map", "old", "new", "--examples", "1", "--vectors", "v.vec")
    assert table.endswith("random\nnew token\told tokens\nnew1\told2 + old3\n")
    assert mapped.asked[1] == ("old", "new", "focus", Path("v.vec"))
    assert said(capsys, "tokenizer", "map", "old", "new", "--examples", "0").endswith("old tokens\n")
    assert content(capsys, "tokenizer", "map", "old", "new") == mapped.made.content()
    assert main(["tokenizer", "map", "old", "new", "--examples", "-1"]) == 1
    assert capsys.readouterr().err == "kielo: --examples -1: give 0 or more\n"


def test_the_folder_of_a_run_is_not_that_of_its_tokenizer(tmp_path) -> None:
    assert tokenizer_folder(tmp_path) == tmp_path
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").touch()
    with pytest.raises(KieloError, match=f"a run folder. Fix: {tmp_path}/tokenizer?"):
        tokenizer_folder(tmp_path)
    assert tokenizer_folder(tmp_path / "tokenizer") == tmp_path / "tokenizer"
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_folder(tmp_path) == tmp_path


# --- data


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A run of 20 steps, of which the second half is of phase 2."""
    phases = (SimpleNamespace(number=1), SimpleNamespace(number=2))
    of = SimpleNamespace(asked=[], is_skipped=False, text="Tere\n  maailm")
    identity = SimpleNamespace(
        total_steps=20, phases=phases, seed=7, longest_sequence_length=64,
        next_steps=lambda step: SimpleNamespace(phase_index=int(step > 10), is_skipped=of.is_skipped),
    )  # fmt: skip
    resolved = SimpleNamespace(identity=identity, placement=SimpleNamespace(end_of_text_id=3))

    def resolve(recipe: Any, folder: Any, world_size: int, device: str) -> Any:
        assert (world_size, device) == (1, "cpu")
        return resolved

    def documents(*given: Any) -> list[dict]:
        of.asked.append(given[:-1])
        return [{"sample": 5, "text": of.text, "tokens": given[-1](SimpleNamespace(tolist=lambda: [1, 2]))}]

    monkeypatch.setattr("kielo.cli.show.resolve", resolve)
    monkeypatch.setattr("kielo.cli.show.load_tokenizer", lambda folder: folder.name)
    monkeypatch.setattr("kielo.cli.show.decode", lambda tokenizer, ids: [f"{tokenizer}{ids}"])
    monkeypatch.setattr("kielo.cli.show.documents_of_step", documents)
    return of


def test_documents_of_a_step_are_shown(step, recipe, capsys) -> None:
    """The beginning of each text on one line: 40 characters are whole."""
    table = "sample\ttext\ttokens\n5\tTere maailm\ttokenizer[[1, 2]]\n"
    assert said(capsys, "data", recipe, "--step", "1") == f"step 1, phase 1\n{table}"
    assert said(capsys, "data", recipe, "--step", "20").startswith("step 20, phase 2\n")
    first, last = step.asked
    assert first[0] == recipe.parent / "run" / "tokens" and (first[1], *first[3:]) == (7, 64, 3, 1)
    assert (first[2].number, last[2].number, last[-1]) == (1, 2, 20)
    step.text = "x" * 40
    assert f"\t{'x' * 40}\t" in said(capsys, "data", recipe, "--step", "2")
    step.text = "x" * 41
    assert f"\t{'x' * 39}…\t" in said(capsys, "data", recipe, "--step", "2")
    assert content(capsys, "data", str(recipe), "--step", "2")[0]["text"] == "x" * 41
    for wrong in ("0", "21", "-1"):
        assert main(["data", str(recipe), "--step", wrong]) == 1
        assert capsys.readouterr().err == f"kielo: --step {wrong}: the run has steps 1 to 20\n"


def test_a_step_that_was_passed_over_is_told(step, recipe, capsys) -> None:
    """Name the skipped steps, of the recipe or after a spike, from the first to the last of each range."""
    folder = recipe.parent / "run" / "train"
    folder.mkdir(parents=True)
    rows = [PassedOver(step=9, passed_over_from=7, passed_over_for="spike"),
            PassedOver(step=15, passed_over_from=15)]  # fmt: skip
    (folder / METRICS_NAME).write_text("".join(write_row(row) + "\n" for row in rows), encoding="utf-8")
    after_spike = ", skipped after a spike of the loss"
    for number, words in {6: "", 7: after_spike, 9: after_spike, 10: "", 15: ""}.items():
        first = said(capsys, "data", recipe, "--step", str(number)).splitlines()[0]
        assert first == f"step {number}, phase {1 + (number > 10)}{words}"
    step.is_skipped = True
    first = said(capsys, "data", recipe, "--step", "15").splitlines()[0]
    assert first == "step 15, phase 2, skipped by train.skip_steps"
