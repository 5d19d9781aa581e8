"""`kielo docs` and `kielo completion`: the pages, and the Tab key."""

import argparse
import webbrowser
from importlib import resources
from pathlib import Path
from typing import Any

from kielo.cli.flags import VerbParser, examples
from kielo.cli.main import command_line
from kielo.cli.terminal import print_json, print_text
from kielo.recipe.errors import KieloError
from kielo.recipe.read import shipped_recipes

SHELLS = {
    "bash": "kielo completion bash > ~/.kielo_completion && . ~/.kielo_completion",
    "zsh": "kielo completion zsh > ~/.zfunc/_kielo",
    "fish": "kielo completion fish > ~/.config/fish/completions/kielo.fish",
}
# Arguments that are a recipe or a run folder.
_RECIPE_ARGUMENTS = ("recipe", "model", "checkpoint", "run")


def docs_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, "kielo docs", "kielo docs --open")
    parser.add_argument("--open", action="store_true", help="open the first page in a browser")
    parser.add_argument("--json", action="store_true", help="print the path of the first page as JSON")


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


def completion_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, *SHELLS.values())
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
        is_path = argument.nargs != 0 and argument.choices is None and argument.type not in (int, float)
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
