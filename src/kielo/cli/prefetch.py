"""`kielo prefetch`: the downloads of a recipe, in a folder for machines without a network."""

import argparse
import os
import platform
import re
import sys

from kielo.artifact.prefetched import VARIABLE
from kielo.cli.flags import takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.launch.prefetch import own_files
from kielo.launch.prefetch import prefetch as bring
from kielo.recipe.errors import KieloError
from kielo.recipe.places import place
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import refuse_before_text

_PYTHON = ".".join(platform.python_version_tuple()[:2])


@takes(f"""
    $ kielo prefetch demo_estonian --to brought
    $ kielo prefetch my_recipe.toml --to brought --wheels 3.12
    RECIPE
    --to DIR!                  folder to copy to them; may contain files already
    --wheels [PYTHON={_PYTHON}]  also Kielo and its packages, for the cluster and this Python; default: the
                               running Python
    --json                     print the list as JSON
""")
def prefetch(options: argparse.Namespace) -> None:
    if options.wheels is not None and not re.fullmatch(r"3\.\d{1,2}", options.wheels):
        raise KieloError(f"--wheels {options.wheels}: not a version of Python. Fix: --wheels 3.12")
    for name in (VARIABLE, "HF_HUB_OFFLINE"):
        if os.environ.get(name):
            raise KieloError(f"{name} is set, so nothing is downloaded. Fix: env -u {name} kielo prefetch")
    recipe = read_recipe(options.recipe, options.sets).recipe
    refuse_before_text(recipe)
    folder = place(options.to).absolute()
    with keep_stdout_for_json(options.json):
        brought = bring(recipe, folder, options.wheels, lambda line: print(line, file=sys.stderr))
    own = own_files(recipe)
    if options.json:
        told = {"folder": str(folder), "brought": [one.content() for one in brought], "own_files": own}
        return print_json(told)
    if brought:
        rows = [(one.kind, one.name, one.origin, f"{one.bytes / 1e6:,.1f}") for one in brought]
        print_table(("what", "name", "from", "MB"), rows)
        print_text(f"copy {folder} to the machine without a network, and there: export {VARIABLE}=FOLDER")
    else:
        print_text(f"{recipe.name} downloads nothing")
    if own:
        print_text(f"copy the recipe's own files yourself: {', '.join(own)}")
    return None
