"""Text with markup or code: text of the user or a stranger stays text in the report and the model card.
The page has no element that was not there before, and the card's front matter says what the recipe says.
"""

import json
from html.parser import HTMLParser

import pytest
import yaml

from kielo.artifact.manifest import hash_file
from kielo.recipe.read import read_recipe
from kielo.report.write import write_report
from tests.faults.trial import refused, went_well

# Fonts lack control characters, and a name of a line's length leaves a figure no room.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Glyph"),
    pytest.mark.filterwarnings("ignore:constrained_layout"),
]
WORDS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title></svg><svg onload=alert(1)>",
    "' onmouseover='alert(1)' x='",
    '<a href="javascript:alert(1)">x</a> [x](javascript:alert(1))',
    "<!-- ]]> --> &lt;script&gt; &#60;script&#62;",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "\n---\nlicense: mit\n---\n```\n# owned\n",
    "$\\mathrm{x}$ {{7*7}} %s {0} \u202e\u2028\u0000\u0007",
)


class Elements(HTMLParser):
    """The tags of a page with their attributes' names, and the addresses in them that lead out of it."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[tuple[str, str]] = set()
        self.addresses: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags |= {(tag, name) for name, _ in attrs} or {(tag, "")}
        leading = ("href", "src", "xlink:href", "action", "srcdoc")
        self.addresses |= {value for name, value in attrs if name in leading and not value.startswith("#")}

    handle_startendtag = handle_starttag


def edit(path, *keys, words: str) -> None:
    """Put words into a JSON file of the run, at the keys, as a stage would that had them:
    its manifest knows the file.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = words
    path.write_text(json.dumps(content), encoding="utf-8")
    manifest = path.with_name("manifest.json")
    listed = json.loads(manifest.read_text(encoding="utf-8"))
    if path.name in listed["files"]:
        listed["files"][path.name] = {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
        manifest.write_text(json.dumps(listed), encoding="utf-8")


PLACES = {
    "a prompt":
        lambda run, words: edit(run / "evaluate" / "scores.json", "samples", 0, "prompt", words=words),
    "a sample": lambda run, words: edit(run / "evaluate" / "scores.json", "samples", 0, "text", words=words),
    "the convention": lambda run, words: edit(run / "evaluate" / "scores.json", "convention", words=words),
    "the sampling":
        lambda run, words: edit(run / "evaluate" / "scores.json", "sampling", words={words: words}),
    "a step of the corpus":
        lambda run, words: edit(run / "corpus" / "funnel.json", "steps", 0, "name", words=words),
    "a reason to drop":
        lambda run, words: edit(run / "corpus" / "funnel.json", "steps", 0, "reason", words=words),
    "a threshold": lambda run, words: edit(run / "corpus" / "funnel.json", "threshold_table",
        words={words: {words: 0.5}}),
    "a difference":
        lambda run, words: edit(run / "verify" / "parity.json", "first_difference", words={"layer": words}),
    "a setting":
        lambda run, words: edit(run / "verify" / "parity.json", "settings", "theirs", words={words: words}),
    "a version": lambda run, words: edit(run / "tokens" / "manifest.json", "versions", words={words: words}),
    "a packed source": lambda run, words: edit(
        run / "tokens" / "manifest.json", "counts", "sources",
        words={words: {"tokens": 1, "documents": 1, "bytes": 1}}),
    "what was measured":
        lambda run, words: edit(run / "tokenizer" / "measure.json", "measured_on", words=words),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_words_in_the_run_stay_words(finished, monkeypatch, place):
    """Nothing in a run's files becomes an element, an attribute or an address of the page."""
    monkeypatch.chdir(finished)
    recipe, run = read_recipe("tiny.toml").recipe, finished / "run"
    before = Elements((run / "report.html").read_text(encoding="utf-8"))
    PLACES[place](run, " ".join(WORDS))
    page = write_report(run, recipe, {}).read_text(encoding="utf-8")
    after = Elements(page)
    assert after.tags <= before.tags | {("details", ""), ("summary", ""), ("p", "class")}, (
        after.tags - before.tags
    )
    assert not after.addresses
    assert "<script" not in page.lower() and "default-src 'none'" in page


@pytest.mark.parametrize("number", range(len(WORDS)))
def test_words_in_the_recipe_stay_words(finished, monkeypatch, number):
    """The same of the recipe's own text, on the page and in the card; the card's front matter is read back as
    it was meant.
    """
    monkeypatch.chdir(finished)
    run, text = finished / "run", json.dumps(WORDS[number].replace("\u0000", ""))  # zeros are no TOML
    before = Elements((run / "report.html").read_text(encoding="utf-8"))
    (finished / "odd.toml").write_text(
        # fmt: skip
        f'extends = "tiny.toml"\ndescription = {text}\n'
        f"report = {{license = {text}, text_license = {text}}}\n",
        encoding="utf-8",
    )
    recipe = read_recipe("odd.toml").recipe
    after = Elements(write_report(run, recipe, {}).read_text(encoding="utf-8"))
    assert after.tags <= before.tags | {("p", "")} and not after.addresses
    card = (run / "hf" / "README.md").read_text(encoding="utf-8")
    _, front, rest = card.split("---\n", 2)
    said = yaml.safe_load(front)
    assert (
        said["license"] == recipe.report.license and said["language"] == ["et"] and said["tags"] == ["kielo"]
    )
    bare = rest.replace("\\<", "").replace("\\[", "")
    assert "<script" not in bare and "<img" not in bare and "[x]" not in bare


def test_a_run_folder_that_is_a_tag(here, finished):
    """A folder called `<img src=x onerror=…>` is a folder; its name is on the page as text."""
    name = "<img src=x onerror=alert(1)>"
    (finished / "run").rename(finished / name)
    went_well(here(finished, "run", "tiny.toml", "--only", "report", "--set", f"folder={name}"))
    assert "img" not in {
        tag for tag, _ in Elements((finished / name / "report.html").read_text(encoding="utf-8")).tags
    }


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", 'x" onload="x', "a&b", "javascript:x", "../../x"]
)
def test_a_source_named_like_code(here, workplace, name):
    """Names of sources become files and cells of tables: those that are more than a name are refused."""
    toml = json.dumps(name)
    (workplace / "odd.toml").write_text(
        # fmt: skip
        f'extends = "tiny.toml"\ncorpus.sources = [{{path = "text.txt", name = {toml}}}]\n',
        encoding="utf-8",
    )
    refused(here(workplace, "show", "odd.toml"), "does not fit. Fix", "name", "odd.toml")
