"""Recipes: what is read, where it came from, and what is said when it does not fit."""

import os
import tomllib

import pytest
from pydantic import ValidationError

from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder, shipped_recipes

SMALL = """
name = "small"
language = "et"
corpus.sources = ["a.txt"]
[train]
tokens = 1_000_000
[dataset.mixture]
a = 1.0
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def message(reference, sets=()) -> str:
    with pytest.raises(KieloError) as caught:
        read_recipe(reference, sets)
    return str(caught.value)


def test_every_value_has_an_origin(small):
    """Default, file or --set; --set wins; a shipped recipe is named without the package's path."""
    read = read_recipe(str(small), ["train.tokens=2_000_000", "evaluate.prompts=['Tere']"])
    assert read.recipe.train.tokens == 2_000_000 and read.recipe.evaluate.prompts == ("Tere",)
    assert read.origins["train.tokens"] == "--set" and read.origins["evaluate.prompts"] == "--set"
    assert read.origins["name"] == read.origins["dataset.mixture"] == str(small)
    assert read.origins["train.learning_rate"] == "default"
    dumped = read.recipe.model_dump()
    leaves = {f"{key}.{inner}" for key, value in dumped.items() if isinstance(value, dict) for inner in value}
    for outer, inner in (
        ("train", "fp8"),
        ("train", "spikes"),
        ("corpus", "code"),
        ("evaluate", "part_of_speech"),
    ):  # sections within a section
        leaves |= {f"{outer}.{inner}.{key}" for key in dumped[outer][inner]}
    assert set(read.origins) == leaves - {
        "train.fp8", "train.spikes", "corpus.code", "evaluate.part_of_speech"
    } | {key for key in dumped if not isinstance(dumped[key], dict)}  # fmt: skip
    assert read_recipe("demo_estonian").origins["language"] == "demo_estonian.toml"


def test_a_recipe_is_frozen(small):
    """Nobody changes a recipe on the way."""
    recipe = read_recipe(small).recipe
    with pytest.raises(ValidationError):
        recipe.train.tokens = 1
    assert str(run_folder(recipe)) == "runs/small"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("corpus.sources=texts/one.jsonl.zst,two.txt", [("one", "texts/one.jsonl.zst"), ("two", "two.txt")]),
        ("corpus.sources=a/x.txt,b/x.txt", [("x", "a/x.txt"), ("x_2", "b/x.txt")]),
        ("corpus.sources=my texts/*.html", [("my_texts", "my texts/*.html")]),
        ("corpus.sources=heldout.txt", [("heldout_2", "heldout.txt")]),
        ('corpus.sources=[{path = "y.txt", name = "own"}]', [("own", "y.txt")]),
    ],
)
def test_set_sources(small, text, value):
    """A person's own files, as paths; each source gets a name of its own."""
    sources = read_recipe(small, [text, "dataset.mixture={}"]).recipe.corpus.sources
    assert [(source.name, source.path) for source in sources] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("name=2024", "2024"),
        ('name="x"', "x"),
        ("folder=/tmp/my run", "/tmp/my run"),
        ("folder=true", "true"),
    ],
)
def test_set_text_as_it_stands(small, text, value):
    """2024 and true are text where text is wanted; where TOML does not parse, the value is text."""
    recipe = read_recipe(small, [text]).recipe
    assert getattr(recipe, text.partition("=")[0]) == value


@pytest.mark.parametrize("value", ["{path=ok.txt}", "[ok.txt]", "[{path=ok.txt}]", "{path=ok.txt, kind=code"])
def test_a_list_or_table_without_quotes_is_no_path(small, value):
    told = f"--set corpus.sources={value}: not valid TOML. Fix: single quotes around KEY=VALUE and double"
    assert told in message(small, [f"corpus.sources={value}"])


@pytest.mark.parametrize("path", ["[ab]*.txt", "a.tx[t]", "[a].tx[t]", "{language}/a.txt", "{language}"])
def test_a_pattern_with_brackets_is_a_path(tmp_path, monkeypatch, path):
    """One that begins and ends with them is, if a file fits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    recipe = read_recipe("own_text", [f"corpus.sources={path}", "language=et", "description={a=b}"]).recipe
    assert recipe.corpus.sources[0].path == path.replace("{language}", "et")
    assert recipe.description == "{a=b}"


def test_no_is_a_word():
    """The Norwegian `no` stays a word; the complaint offers the cards."""
    assert "'no' has no card; `kielo languages` lists all; did you mean nb?" in message(
        "demo_estonian", ["language=no"]
    )
    text = 'evaluate.texts=[{name = "books", path = "books.txt", language = "finnish"}]'
    told = message("demo_estonian", [text])
    assert "evaluate.texts, books: language = 'finnish' has no card" in told and "did you mean fi?" in told


MEANT = {
    "cluster=lumi": "did you mean lumi_g?",
    "cluster=lumi_c": "did you mean lumi_g?",
    "language=finnish": "did you mean fi?",
    "language=Nynorsk": "did you mean nn?",
    "language=et-EE": "did you mean et?",
    "language=FI_fi": "did you mean fi?",
    "name=my model": "Fix: my_model",
    "name=Põhi mudel": "Fix: Pohi_mudel",
    "name=モデル": "Fix: Latin letters",
    "train=5": "train is a section. Fix: a key of it, such as train.tokens",
    "corpus=text.txt": "corpus is a section",
}


@pytest.mark.parametrize("text", MEANT)
def test_a_near_miss_is_answered_with_what_was_meant(text):
    """In one line, without a pattern and without a dump of defaults."""
    complaint = message("demo_estonian", [text])
    assert MEANT[text] in complaint and "\n" not in complaint and len(complaint) < 400


def test_extends_one_level(tmp_path, small):
    """Tables are joined, lists replaced, origins kept apart; a second level is refused."""
    child = tmp_path / "child.toml"
    child.write_text('extends = "small.toml"\nname = "child"\n[train]\nz_loss = 1e-4\n', encoding="utf-8")
    read = read_recipe(child)
    assert (read.recipe.name, read.recipe.train.tokens, read.recipe.train.z_loss) == (
        "child",
        1_000_000,
        1e-4,
    )
    assert (read.origins["train.z_loss"], read.origins["train.tokens"]) == (str(child), str(small))
    grandchild = tmp_path / "grandchild.toml"
    grandchild.write_text('extends = "child.toml"\nname = "grandchild"\n', encoding="utf-8")
    assert "a single level" in message(grandchild)
    by_name = tmp_path / "by_name.toml"
    by_name.write_text('extends = "demo_estonian"\nname = "mine"\n', encoding="utf-8")
    assert read_recipe(by_name).recipe.tokenizer.vocab_size == 4096


def test_all_complaints_at_once(small):
    """Unknown keys, wrong types and contradictions in one message, each with file, key,
    value and the fix.
    """
    small.write_text(
        SMALL.replace("tokens = 1_000_000", 'tokns = 1\nschedule = "cosin"\nhidden_size = 8\nprecision = 16')
    )
    text = message(
        small, ["model.num_key_value_heads=3", "trane.x=1", "train.z_loss=-1", "dataset.mixture.b=1", "seed"]
    )
    for part in (
        f"{small}: unknown key train.tokns; the nearest known key is train.tokens",
        f"{small}: unknown key train.hidden_size; the nearest known key is model.hidden_size",
        f"{small}: train.schedule = 'cosin' does not fit. Fix: 'cosine', 'linear' or 'wsd'",
        f"{small}: train.precision = 16 does not fit. Fix: 'fp32', 'bf16' or 'fp8'",
        "--set: unknown key trane; the nearest known key is train",
        "--set: train.z_loss = -1 does not fit. Fix: a number greater than or equal to 0",
        "--set: model.num_key_value_heads = 3 does not divide model.num_attention_heads = 8. Fix: 1, 2, 4, 8",
        "--set: dataset.mixture.b: no source has this name. Fix: a",
        "--set seed: not KEY=VALUE. Fix: section.key=value",
    ):
        assert part in text, text
    assert text.startswith("9 things to put right")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('name = "x"\nlanguage = "et"\n', "corpus is missing"),
        ("name = \n", "not valid TOML: Invalid value (at line 1, column 8)"),
        (SMALL + "[model]\nlayers = 3\n", "the nearest known key is model.num_hidden_layers"),
        (
            SMALL.replace('"a.txt"', '{path = "a.txt", nam = "b"}'),
            "unknown key corpus.sources[0].nam; the nearest known key is corpus.sources[0].name",
        ),
        (
            SMALL.replace('"a.txt"', '{name = "a"}'),
            "corpus.sources[0] does not fit: no place of the text. Fix: path, debian_package",
        ),
        (
            SMALL.replace('"a.txt"', '{path = "a.txt", debian_package = "bc"}'),
            "two places of the text. Fix: path, or debian_package",
        ),
        (SMALL + "[train.tokens]\nx = 1\n", "not valid TOML"),
        (SMALL + '[model]\nweights = "llama"\n', "Fix: hf:llama"),
        (SMALL + '[tokenizer]\npath = "nowhere"\n', "no tokenizer.json in this folder"),
    ],
)
def test_one_complaint_names_file_and_key(tmp_path, content, expected):
    """Each with the file in front."""
    path = tmp_path / "broken.toml"
    path.write_text(content, encoding="utf-8")
    text = message(path)
    assert text.startswith(f"{path}: ") and expected in text, text


def test_files_that_are_no_recipes(tmp_path):
    """Missing, a folder, not UTF-8: the message says which, and what ships."""
    assert "did you mean demo_estonian?" in message("demo_estonia")
    assert "a folder without recipe.toml" in message(str(tmp_path))
    path = tmp_path / "latin1.toml"
    path.write_bytes(b'name = "s\xe4\xe4"\n')
    assert f"{path}: byte 9 is not UTF-8" in message(path)


def test_shipped_recipes_are_toml_files():
    """A name is the file's stem, of a recipe of several runs with the language or the variant."""
    for name, path in shipped_recipes().items():
        given = tomllib.loads(path.read_text(encoding="utf-8"))["name"]
        assert given.removesuffix("_{language}").removesuffix("_{variant}") == name


SHAPE = "[model]\nhidden_size = 64\nnum_attention_heads = 4\nhead_dim = 8\nvocab_multiple = 32\n"


def test_a_size_and_a_shape_take_each_others_place(tmp_path, small):
    """The nearer of both holds: --set over a file, a file over the one that it extends."""
    small.write_text(SMALL + SHAPE, encoding="utf-8")
    sized = read_recipe(small, ["model.params=3B"])
    model = sized.recipe.model
    assert (model.params, model.vocab_multiple) == (3 * 10**9, 32)
    assert not model.model_fields_set & {"hidden_size", "num_attention_heads", "head_dim"}
    assert sized.origins["model.hidden_size"] == "default" and sized.origins["model.params"] == "--set"
    assert sized.origins["model.vocab_multiple"] == str(small)
    child = tmp_path / "child.toml"
    child.write_text('extends = "small.toml"\nname = "child"\nmodel.params = "2B"\n', encoding="utf-8")
    assert read_recipe(child).recipe.model.params == 2 * 10**9
    shaped = read_recipe(child, ["model.head_dim=16"])
    assert (shaped.recipe.model.params, shaped.recipe.model.head_dim) == (None, 16)
    for both in (["model.params=3B", "model.head_dim=16"], ["model.head_dim=16", "model.params=3B"]):
        assert message(small, both) == (
            "--set: model.params = 3B makes the shape, but model.head_dim is given too. Fix: leave one out"
        )
    small.write_text("model = 5\n" + SMALL, encoding="utf-8")
    assert "model = 5 does not fit" in message(small, ["train.tokens=2B"])


def test_settings_that_cannot_be_made(small):
    told = {
        "train": "--set train: not KEY=VALUE. Fix: section.key=value, e.g. --set train.tokens=1000000",
        "=5": "--set =5: not KEY=VALUE. Fix: section.key=value, e.g. --set train.tokens=1000000",
        "train..x=5": "--set train..x=5: "
        "not KEY=VALUE. Fix: section.key=value, e.g. --set train.tokens=1000000",
        "name.first=5": "--set name.first=5: name holds a value, so name.first does not exist",
        "“name”=x": "--set “name”=x: “ ” are letters to a shell. Fix: \" or '",
        "name=\udcff": "--set 'name=\\udcff': is not UTF-8. Fix: a terminal with a UTF-8 locale",
    }
    assert {text: message(small, [text]) for text in told} == told


def test_values_of_settings(small):
    """A second one of the same key holds; text that goes on with another key stays text."""
    recipe = read_recipe(small, ["seed = 3", "seed=4", "description=1\nx = 2", "folder=[1]"]).recipe
    assert (recipe.seed, recipe.description, recipe.folder) == (4, "1\nx = 2", "[1]")
    mixed = read_recipe(small, ["corpus.sources=[{path='b.txt'}]", "dataset.mixture={b = 2.0}"])
    assert mixed.recipe.dataset.mixture == {"b": 2.0} and mixed.origins["dataset.mixture"] == "--set"


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    """What each is taken for, and the fix; a mark of Windows' editors is passed over."""
    monkeypatch.chdir(tmp_path)
    files = {"a.toml": "x\xe4".encode("latin-1"), "b.toml": "x = 1".encode("utf-16"), "c.txt": b"Kord\n",
             "d.TSV.gz": b"Kord\n", "e.toml": b"x = \n", "f.md": b"Kord\n"}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert message("a.toml") == (
        "a.toml: byte 1 is not UTF-8, which TOML requires. Fix: iconv -f LATIN1 -t UTF-8 a.toml > "
        "converted.toml"
    )
    assert "iconv -f UTF-16 -t UTF-8 b.toml" in message("b.toml")
    for name in ("c.txt", "d.TSV.gz"):
        assert message(name).endswith(f". Fix: kielo run own_text --set corpus.sources={name}")
    for name in ("e.toml", "f.md"):
        assert message(name).endswith(". Fix: a line for each key = value, with text in quotes")
    (tmp_path / "g.toml").write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert read_recipe("g.toml").recipe.name == "small"
    (tmp_path / "h.toml").write_text('language = "et"\nlanguages = ["et"]\n')
    assert message("h.toml") == "h.toml: has both language and languages. Fix: one of them"
    (tmp_path / "i.toml").write_text('extends = ""\n')
    assert message("i.toml") == "i.toml: extends = '' does not fit. Fix: a path or shipped name"
    (tmp_path / "j.toml").write_text("extends = 5\n")
    assert message("j.toml") == "j.toml: extends = 5 does not fit. Fix: a path or shipped name"


def test_folders_for_recipes(tmp_path, monkeypatch):
    """A run's folder is its recipe, wherever it was moved; one inside of it is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "recipe.toml").write_text('folder = "elsewhere"\n' + SMALL, encoding="utf-8")
    read = read_recipe("run")
    assert read.recipe.folder == "run" and read.origins["folder"] == "run/recipe.toml"
    assert message("run/hf") == (
        "run/hf: a folder without recipe.toml, which `kielo run` writes into its run folder. Did you mean "
        "run?"
    )
    assert message("hf:o/n").endswith("Fix: a recipe with --set model.weights=hf:o/n")
    assert message("zzqx.toml").startswith("zzqx.toml: no such recipe file, and no shipped recipe (")
    assert message("zzqx.toml").endswith(")") and message("demo_eston.toml").endswith(
        "; did you mean demo_estonian?"
    )


def test_a_run_folder_is_none_of_its_inputs(tmp_path, monkeypatch, small):
    """Text, a tokenizer and weights may not lie where a stage replaces; a link needs its end, and no file."""
    monkeypatch.chdir(tmp_path)

    def refusal(*sets: str) -> str | None:
        try:
            run_folder(read_recipe(small, ["dataset.mixture={}", "folder=r", *sets]).recipe)
        except KieloError as error:
            return str(error)
        return None

    assert refusal() is None and refusal("corpus.sources=r/raw/a.txt") is None
    for place in ("r/corpus/a.txt", "./r/hf/x/a.txt", "r/tokens/*.txt", f"{tmp_path}/r/verify/a.txt"):
        said = refusal(f"corpus.sources={place}")
        assert (
            said is not None and said.startswith(f"corpus.sources, a = '{place}': is in r/") or "*" in place
        )
        assert said is not None and said.endswith("another `folder`; nothing was changed")
    assert refusal("corpus.sources=r/train/a.txt") is None
    (tmp_path / "r" / "tokenizer").mkdir(parents=True)
    (tmp_path / "r" / "tokenizer" / "tokenizer.json").write_text("{}")
    assert refusal("tokenizer.path=r/tokenizer").startswith(
        "tokenizer.path = 'r/tokenizer': is in r/tokenizer, a "
    )
    assert refusal("model.weights=hf:r/hf", "tokenizer.path=hf:o/n").startswith(
        "model.weights = 'hf:r/hf': is in r/hf"
    )
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    assert refusal("folder=gone/x").startswith(
        "folder = 'gone/x': gone is a symbolic link to nowhere, which does not exist"
    )
    assert refusal("folder=file/x").startswith("folder = 'file/x': file is a file. Fix: move it")
    assert refusal("folder=r/new/deep") is None
    # Near the longest path that the system takes, a run trained for hours and could not save.
    most = os.pathconf("/", "PC_PATH_MAX") - 1
    longest = (("/" + "d" * 99) * 50)[: most - 128]
    assert refusal(f"folder={longest}") is None
    said = refusal(f"folder={longest}d")
    assert said.startswith(f"folder: the path of the run folder has {most - 127:,} bytes, and its files need")


def test_a_key_that_is_gone_is_dropped_only_from_recipes_that_kielo_wrote(small):
    """A run of format version 2 goes on from its folder; in a person's recipe the key is unknown."""
    text = SMALL.replace("[train]\n", "[train]\nmax_left_out_sequences = 3\n")
    small.write_text(text, encoding="utf-8")
    assert "unknown key train.max_left_out_sequences" in message(small)
    small.write_text(f"# The recipe of this run\n{text}", encoding="utf-8")
    assert read_recipe(small).recipe.train.tokens == 1_000_000
    ordered = f'# The recipe of this run\n{SMALL}\n[dataset]\nmixture_order = "every_sample"\n'
    small.write_text(ordered, encoding="utf-8")
    assert read_recipe(small).recipe.name == "small"
    small.write_text(ordered.replace("every_sample", "blocks_of_256"), encoding="utf-8")
    assert "unknown key dataset.mixture_order" in message(small)
    small.write_text('# The recipe of this run\nname = "x"\nlanguage = "et"\ntrain = 5\n', encoding="utf-8")
    assert "train = 5 does not fit" in message(small)
