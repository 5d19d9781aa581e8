"""Recipes: what is read, where it came from, and what is said when it does not fit."""

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
    "name=my model": "what would work: my_model",
    "name=Põhi mudel": "what would work: Pohi_mudel",
    "name=モデル": "what would work: Latin letters",
    "train=5": "train is a section with keys of its own; what would work: a key of it, such as train.tokens",
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
    assert "only one level" in message(grandchild)
    by_name = tmp_path / "by_name.toml"
    by_name.write_text('extends = "demo_estonian"\nname = "mine"\n', encoding="utf-8")
    assert read_recipe(by_name).recipe.tokenizer.vocab_size == 4096


def test_all_complaints_at_once(small):
    """Unknown keys, wrong types and contradictions in one message, each with file, key,
    value and what would work.
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
        f"{small}: train.schedule = 'cosin' does not fit; what would work: 'cosine', 'linear' or 'wsd'",
        f"{small}: train.precision = 16 does not fit; what would work: 'fp32', 'bf16' or 'fp8'",
        "--set: unknown key trane; the nearest known key is train",
        "--set: train.z_loss = -1 does not fit; what would work: a number greater than or equal to 0",
        "--set: model.num_key_value_heads = 3 does not divide model.num_attention_heads = 8; "
        "what would work: 1, 2, 4, 8",
        "--set: dataset.mixture.b: no source has this name; the sources are a",
        "--set seed: give section.key=value",
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
            "corpus.sources[0] does not fit; say where the text is: path, debian_package",
        ),
        (
            SMALL.replace('"a.txt"', '{path = "a.txt", debian_package = "bc"}'),
            "give either path, or debian_package",
        ),
        (SMALL + "[train.tokens]\nx = 1\n", "not valid TOML"),
        (SMALL + '[model]\nweights = "llama"\n', "what would work: hf:llama"),
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
    """A name is the file's stem, of a recipe for any language with its code."""
    for name, path in shipped_recipes().items():
        given = tomllib.loads(path.read_text(encoding="utf-8"))["name"]
        assert given.removesuffix("_{language}") == name
