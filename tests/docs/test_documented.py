"""Commands and recipes of the pages parse and are valid, and the list of their results is complete."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kielo.cli.main import command_line, main
from kielo.plan.layout_name import layout_name, matches
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout
from tests.docs.blocks import Block, blocks, pages
from tests.docs.documented import listed
from tests.docs.recipe_parts import complaint
from tests.house.checks import ROOT

ALL = [block for page in pages() for block in blocks(page)]


def unparsed(block: Block) -> list[str]:
    """The commands of a block that name a verb, a flag, a script or a target that there is not."""
    found = []
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for command in block.commands():
        words = shlex.split(command)
        if words[0] == "make" and words[1] not in targets:
            found.append(command)
        if words[0].endswith("python") and words[1].endswith(".py") and not (ROOT / words[1]).is_file():
            found.append(command)
        if "kielo" in words and words[0] not in ("git", "pip", "cd", "podman"):
            try:
                command_line().parse_args(words[words.index("kielo") + 1 :])
            except SystemExit:
                found.append(command)
    return found


def test_every_block_has_a_known_kind():
    """A block is run, checked, plain text, or says why it is not run."""
    assert [(block.page, block.line) for block in ALL if not block.is_known] == []


def test_commands_parse():
    """Each verb and flag of the pages exists, those that are not run here too."""
    assert [one for block in ALL if block.kind == "sh" for one in unparsed(block)] == []


@pytest.mark.parametrize(
    "planted",
    ["kielo trian runs/mine", "kielo train mine --sett a=1", "make rest", "python benchmarks/no.py"],
)
def test_a_command_that_does_not_parse_is_found(planted):
    """Broken on purpose."""
    assert unparsed(Block("page", 1, "sh", "", planted + "\n")) == [planted]


NAMES_RECIPES = sorted(
    {
        command
        for block in ALL
        for command in (block.commands() if block.kind == "sh" else ())
        if command.startswith("kielo ") and "RECIPE" in command.split()
    }
)


@pytest.mark.parametrize("command", NAMES_RECIPES)
def test_a_verb_takes_a_recipe_where_the_pages_say_so(command, tmp_path, monkeypatch, capsys):
    """Each looks for a recipe of that name, not only for a folder, and says that there is none."""
    monkeypatch.chdir(tmp_path)
    words = ["no_such.toml" if word == "RECIPE" else word for word in shlex.split(command)[1:]]
    assert main(words) == 1
    assert re.search(r"no_such\.toml: no .*recipe", capsys.readouterr().err)


def test_recipes_are_valid(tmp_path):
    """Each TOML block is a recipe, or a part of one."""
    found = {
        (block.page, block.line): complaint(block.text, tmp_path) for block in ALL if block.kind == "toml"
    }
    assert {place: said for place, said in found.items() if said} == {}


def test_an_invalid_recipe_is_found(tmp_path):
    """Broken on purpose."""
    assert "train.tokenz" in complaint("[train]\ntokenz = 3\n", tmp_path)


def test_the_list_has_each_command_and_no_other():
    """benchmarks/results/documented_commands.md is of the pages as they are, and nothing in it failed."""
    rows = listed()
    assert [row for row in rows if row.result.startswith("FAILED")] == []
    on_pages = [(block.page, command) for block in ALL for command in block.commands()]
    assert [(row.page, row.command) for row in rows] == on_pages


@pytest.mark.full
@pytest.mark.timeout(2700)  # beside two other processes on two cores
def test_every_block_does_what_its_page_says():
    """Runs them all: minutes. The list is written anew."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.documented"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_layout_names_are_those_of_the_planner():
    """docs/layouts.md explains every term that exists; its example has the name that it says."""
    page = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8").partition("## Names of layouts")[2]
    terms = [term for row in re.findall(r"^\| (`.*?) \|", page, re.M) for term in re.findall(r"`(.+?)`", row)]
    for term in terms:
        matches(term)
    unknown = pytest.raises(KieloError, matches, "nonsense").value
    known = re.search(r"Fix: (.*)", str(unknown))[1].split(", ")
    asked_only = re.search(r"also accepts these terms.*?without a number", page, re.S)[0]
    kinds = {re.sub(r"[\d+]+", "#", term) for term in [*terms, *re.findall(r"`(.+?)`", asked_only)]}
    assert {re.sub(r"[\d+]+", "#", term) for term in known} - kinds == {"full/#"} - kinds
    name, text = re.search(r"So `(.*?)` is\s+```toml\n(.*?)```", page, re.S).groups()
    table = tomllib.loads(text)
    micro_batch = table["train"]["micro_batch_sequences"]
    assert layout_name(Layout(**table["layout"]), micro_batch) == name


def dead_links(page: Path, text: str) -> list[str]:
    """The links of a page to files and headings of the repository that there are not."""
    found = []
    for link in re.findall(r"\]\(([^)\s:]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if target and not path.exists():
            found.append(link)
        elif anchor:
            lines = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8") if target else text, flags=re.S)
            headings = re.findall(r"^#+ (.*)$", lines, re.M)
            if anchor not in {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}:
                found.append(link)
    return found


def test_links_lead_somewhere():
    """`make docs` refuses a dead link too, but downloads what it needs."""
    notes = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    texts = {page: page.read_text(encoding="utf-8") for page in {*pages(), *notes}}
    found = {page.name: dead_links(page, text) for page, text in texts.items()}
    assert {name: links for name, links in found.items() if links} == {}


def test_each_page_is_in_the_site():
    """`make docs` ends at a page that its navigation does not name."""
    named = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert {page.name for page in pages()} - {"README.md"} - {Path(name).name for name in named} == set()


def test_a_dead_link_is_found():
    """Broken on purpose: a file, a heading of another page and of its own."""
    text = "# Here\n[a](no.md) [b](recipe.md#no) [c](#no) [d](#here) [e](recipe.md) [f](https://no.org/x)\n"
    assert dead_links(ROOT / "docs" / "page.md", text) == ["no.md", "recipe.md#no", "#no"]
