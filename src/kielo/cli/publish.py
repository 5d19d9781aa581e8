"""`kielo publish`: a run's export, card and certificates to the hub, a server, a folder or an address."""

import argparse
import sys
from pathlib import Path

from kielo.cli.flags import takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.stages.publication import (
    is_folder,
    overwritten,
    publication_of,
    refuse_overwriting,
    revisions_of,
)
from kielo.stages.publication import publish as send


@takes("""
    $ kielo publish runs/demo_estonian my_group/demo_estonian
    $ kielo publish runs/demo_estonian my_group/demo_estonian --gguf my_gguf --revisions all --yes
    $ kielo publish runs/demo_estonian ./shared_folder
    RUN                run folder with a finished export
    TARGET             OWNER/NAME on the hub, a folder's path that begins with . or / or ~, or an address
                       such as s3://BUCKET/NAME
    --gguf DIR         also the file of this folder, made by `kielo export RUN --to DIR --format gguf`
    --revisions STEPS  also checkpoints, each as a revision step_N: all, or steps as 1000,2000
    --public           make a new repository public; default: private
    --replace          replace files of the repository, and delete older weights and certificates there
    --endpoint URL     a server with the hub's interface; default: HF_ENDPOINT, else huggingface.co
    --yes              do not ask
    --json             print the files and the address as JSON
""")
def publish(options: argparse.Namespace) -> None:
    run = Path(options.run)
    if options.replace and is_folder(options.target):
        raise KieloError("--replace: files of a folder are never replaced. Fix: a new folder or address")
    if not (run / "hf").is_dir():
        raise KieloError(f"{run}: no run folder with an export (hf). Fix: kielo run RECIPE --to export")
    gguf = None if options.gguf is None else Path(options.gguf)
    with keep_stdout_for_json(options.json):
        publications = [publication_of(run, options.target, gguf)]
        if options.revisions is not None:
            steps = _steps(options.revisions)
            publications += revisions_of(run, read_recipe(run, []).recipe, options.target, steps)
        rows = [
            (one.revision or "main", name, f"{path.stat().st_size:,}")
            for one in publications
            for name, path in sorted(one.files.items())
        ]
        print_table(("revision", "file", "bytes"), rows)
        where = (
            options.target if is_folder(options.target) else f"{options.target} (private unless it exists)"
        )
        if options.public and not is_folder(options.target):
            where = f"{options.target} (PUBLIC unless it exists)"
        total = sum(one.bytes for one in publications)
        print_text(f"{len(rows):,} files, {total / 1e6:,.1f} MB, to {where}")
        found = overwritten(publications, options.endpoint)
        if found:
            print_table(("revision", "file there", "is"), found)
        if not options.replace:
            refuse_overwriting(options.target, found)
        if not options.yes:
            _ask()
        address = send(publications, options.public, options.endpoint, print_text, options.replace)
    if options.json:
        print_json(
            {
                "address": address,
                "files": [{"revision": one, "file": name} for one, name, _ in rows],
                "bytes": total,
                "overwritten": [{"revision": one, "file": name, "is": what} for one, name, what in found],
            }
        )
        return
    print_text(f"published: {address}")


def _steps(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise KieloError(f"--revisions {text}: give all, or steps as 1000,2000") from None


def _ask() -> None:
    if sys.stdin is None or not sys.stdin.isatty():
        raise KieloError("nobody is here to say yes, and nothing was sent. Fix: --yes")
    print_text("send these files? [y/N]", sys.stderr)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KieloError("nothing was sent, as you wished")
