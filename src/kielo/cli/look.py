"""Verbs that show recipes, cards, schemas, pages of runs and documentation, and completion by the Tab key."""

import argparse
import os
import sys
import webbrowser
from importlib import resources
from pathlib import Path
from typing import Any

from kielo.api import Run, compare
from kielo.artifact.formats import FORMATS, schema_of
from kielo.artifact.manifest import write_text_atomically
from kielo.cli.flags import VerbParser, takes
from kielo.cli.main import command_line
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_first_language, recipe_choices, shipped_recipes


@takes("""
    $ kielo recipes --copy demo_estonian
    --copy NAME  copy this recipe into the current folder
    --json
""")
def recipes(options: argparse.Namespace) -> None:
    shipped = shipped_recipes()
    if options.copy:
        if options.copy not in shipped:
            raise KieloError(f"--copy {options.copy}: no shipped recipe. Fix: one of {', '.join(shipped)}")
        target = Path(shipped[options.copy].name)
        if os.path.lexists(target):
            raise KieloError(f"{target} exists already, and nothing was written. Fix: move it away")
        write_text_atomically(target, shipped[options.copy].read_text(encoding="utf-8"))
        print_text(f"wrote {target}. To start: kielo run {target}")
        return
    rows = [_recipe_row(name) for name in shipped]
    if options.json:
        return print_json([dict(zip(("name", "language", "description"), row, strict=True)) for row in rows])
    print_table(["recipe", "language", "what it makes"], rows)


def _recipe_row(name: str) -> tuple[str, str, str]:
    choices, recipe = recipe_choices(name), read_first_language(name).recipe
    kind = choices[0].partition("=")[0] if choices else ""
    language = {
        "": recipe.language,
        "language": f"{len(choices)} languages",
        "variant": f"{recipe.language}, {len(choices)} variants",
    }
    return name, language[kind], recipe.description


def schema_flags(parser: VerbParser) -> None:
    parser.takes("$ kielo schema\n$ kielo schema --of recipe > recipe.schema.json")
    parser.add_argument(
        "--of",
        choices=FORMATS,
        metavar="NAME",
        help=f"name of a format to print: {', '.join(FORMATS)}. Default: a table of all",
    )


def schema(options: argparse.Namespace) -> None:
    if options.of:
        return print_json(schema_of(options.of))
    rows = [(name, format.file, format.content) for name, format in FORMATS.items()]
    print_table(["format", "file", "content"], rows)


@takes("""
    $ kielo clusters
    --json
""")
def clusters(options: argparse.Namespace) -> None:
    known = [cards.cluster(name) for name in cards.clusters()]
    if options.json:
        return print_json([card.model_dump(mode="json") for card in known])
    peaks = [cards.accelerator(card.accelerator).peak_tflops.get("bf16") for card in known]
    rows = [
        (card.name, card.accelerator, card.devices_per_node, card.nodes, peak)
        for card, peak in zip(known, peaks, strict=True)
    ]
    print_table(["cluster", "accelerator", "devices a node", "nodes", "peak bf16 TFLOP/s a device"], rows)


SHELLS = {
    "bash": "kielo completion bash > ~/.kielo_completion && . ~/.kielo_completion",
    "zsh": "kielo completion zsh > ~/.zfunc/_kielo",
    "fish": "kielo completion fish > ~/.config/fish/completions/kielo.fish",
}
# Arguments that are a recipe or a run folder.
_RECIPE_ARGUMENTS = ("recipe", "model", "checkpoint", "run")


@takes("""
    $ kielo docs
    $ kielo docs --open
    --open  open the first page in a browser
    --json  print the path of the first page as JSON
""")
def docs(options: argparse.Namespace) -> None:
    page = first_page()
    if options.json:
        print_json({"page": str(page)})
    else:
        print_text(str(page))
    if options.open and not webbrowser.open(page.as_uri()):
        raise KieloError(f"no browser opened. Fix: open {page} yourself")


def first_page() -> Path:
    """Return the site inside the wheel, else docs/start.md of the checkout."""
    site = Path(str(resources.files("kielo") / "site" / "index.html"))
    checkout = Path(__file__).resolve().parents[3] / "docs" / "start.md"
    for page in (site, checkout):
        if page.is_file():
            return page
    raise KieloError(
        f"this installation has no pages: neither {site} nor {checkout} exists. "
        "Fix: read docs/start.md in the repository"
    )


def completion_flags(parser: VerbParser) -> None:
    parser.takes("\n".join(f"$ {command}" for command in SHELLS.values()))
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def completion(options: argparse.Namespace) -> None:
    """Print the script that completes verbs, flags, recipes and files in a shell."""
    try:
        import shtab
    except ImportError:
        raise KieloError("completion needs the package shtab. Fix: pip install shtab") from None
    parser = command_line()
    for verb in parser.subverbs.values():
        _describe_values(verb)
    print(shtab.complete(parser, options.shell))


def _describe_values(parser: VerbParser) -> None:
    """Declare a verb's flags, and attach to each free value what shtab completes it with."""
    parser.declare_flags()
    for argument in parser._actions:
        is_path = argument.nargs != 0 and argument.choices is None and argument.type in (None, str, Path)
        if argument.dest in _RECIPE_ARGUMENTS:
            argument.complete = _recipes_and_files(parser)  # type: ignore[attr-defined]
        elif is_path:
            argument.complete = "file"  # type: ignore[attr-defined]
    if parser.has_required_subverb:
        for subverb in parser.subverbs.values():
            _describe_values(subverb)


def _recipes_and_files(parser: VerbParser) -> dict[str, Any]:
    """Return shtab's completion of a recipe: the shipped names, files, and `plan`'s subverbs."""
    words = " ".join([*parser.subverbs, *shipped_recipes()])
    name = "_kielo_plan_files" if parser.subverbs else "_kielo_recipe_files"
    return {
        "bash": name,
        "zsh": name,
        "fish": f"({name})",
        "preamble": {
            "bash": f'{name}() {{\n  compgen -W "{words}" -- "$1"\n  compgen -f -- "$1"\n}}',
            "zsh": f"{name}() {{\n  compadd -- {words}\n  _files\n}}",
            "fish": f"function {name}\n  string split ' ' '{words}'\n"
            "  __fish_complete_path (commandline -ct)\nend",
        },
    }


_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "JOB_ID")


@takes("""
    $ kielo report runs/demo_estonian --open
    $ kielo report runs/a runs/b --to a_b.html
    RUN... as runs  a run folder; several are compared
    --to FILE       Page of the comparison. Default: comparison.html. Only with several runs
    --open          open the page in a browser
""")
def report(options: argparse.Namespace) -> None:
    runs = list(dict.fromkeys(options.runs))
    if len(runs) > 1:
        page = compare(*runs, to=options.to or "comparison.html")
    elif options.to is not None:
        raise KieloError(f"--to {options.to}: the page of one run stays in its folder. Fix: name two runs")
    else:
        page = Run(*runs).report()
    print_text(f"wrote {page}")
    if options.open:
        if reason := no_browser():
            return print_text(f"not opened: {reason}. Fix: copy this one file to your own machine")
        webbrowser.open(page.resolve().as_uri())


def no_browser() -> str | None:
    """Return the reason why no browser can be opened here, or None if it can."""
    if job := next((name for name in _JOB_VARIABLES if name in os.environ), None):
        return f"this is a job ({job} is set)"
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not has_display:
        return "this machine has no display"
    return None
