"""Runs the code blocks of README.md and docs/ as they stand: `python -m tests.docs.documented [PAGE.md …]`.

In: the pages. Each page has a temporary folder with toy text in place of the files that it names, and with
runs/demo_estonian, a small run of own_text in place of the demo. Out: the table of
benchmarks/results/documented_commands.md; with pages named, only their rows are new. Ends with exit code 1
if a block did not do what its page says.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

from kielo.recipe.read import RUN_RECIPE_NAME
from tests.docs.blocks import Block, blocks, pages
from tests.docs.recipe_parts import complaint
from tests.docs.toy_text import write_texts
from tests.house.checks import ROOT

TABLE = ROOT / "benchmarks" / "results" / "documented_commands.md"
LIMIT_SECONDS = 600  # of a command, beside two other processes of make test-full
STAND_IN = (
    "kielo run own_text --set name=demo_estonian --set language=fi --set corpus.sources=my_text.txt "
    "--set train.tokens=24576 --set checkpoint.every_steps=4 --set verify.parity_steps=2 "
    "--set evaluate.sample_tokens=8 --set train.log_every_steps=1"
)
# The beginning of a command → what is added to it, so that it takes seconds; the table says so.
SMALLER = {
    "kielo rehearse estonian_llama31_70b": " --set model.num_hidden_layers=8",
    "kielo rehearse lumi_140b_scaling": " --set model.num_hidden_layers=40",
}
# A file, which fewer verbs would take than a run folder.
PLACEHOLDERS = {"RECIPE": "demo.toml"}
GOOD = "as written"


class Row(NamedTuple):
    """A line of the table. seconds: empty where nothing was run."""

    page: str
    command: str
    result: str
    seconds: str

    def text(self) -> str:
        cells = (self.page, f"`{self.command}`", self.result, self.seconds)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def run_page(page: Path, world: Path) -> Iterator[Row]:
    """Runs the blocks of a page one after another in `world`."""
    for block in blocks(page):
        for command in block.commands():
            if block.reason_not_run:
                yield Row(block.page, command, f"not run: {block.reason_not_run}", "")
                continue
            begun = time.monotonic()
            result = _try(block, command, world)
            yield Row(block.page, command, result, f"{time.monotonic() - begun:.1f}")


def _try(block: Block, command: str, world: Path) -> str:
    """Returns `GOOD`, with what was made smaller, or how it failed."""
    if block.kind == "toml":
        found = complaint(block.text, world)
        return f"FAILED: {found}" if found else "a valid recipe, or part of one"
    if block.kind == "python":
        (world / "example.py").write_text(block.text, encoding="utf-8")
        return _result("python example.py", world, block.exit_code)
    for word, value in PLACEHOLDERS.items():
        command = re.sub(rf"(?<!\S){word}(?!\S)", value, command)
    for written, smaller in SMALLER.items():
        if command.startswith(written):
            result = _result(command + smaller, world, block.exit_code)
            return f"{result}, with `{smaller.strip()}`"
    return _result(command, world, block.exit_code)


def _result(command: str, world: Path, expected: int) -> str:
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=world,
        env=environment(world),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"FAILED: not done after {LIMIT_SECONDS} s"
    if process.returncode == expected and "Traceback (most recent call last)" not in said:
        return GOOD if expected == 0 else f"refused with exit code {expected}, {GOOD}"
    print(said, file=sys.stderr)
    last = (said.strip().splitlines() or [""])[-1]
    return f"FAILED: exit code {process.returncode}: {last}"


def environment(world: Path) -> dict[str, str]:
    """The environment of the commands: this Python's `kielo` and `python`, one thread, no network."""
    names = world / ".bin"
    if not names.exists():
        names.mkdir()
        for name, start in (("kielo", f'"{sys.executable}" -m kielo'), ("python", f'"{sys.executable}"')):
            (names / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
            (names / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{names}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def run_pages(chosen: Iterable[Path], folder: Path) -> Iterator[Row]:
    """Runs pages, each in a copy of one world in `folder`."""
    world = folder / "world"
    world.mkdir()
    write_texts(world)
    made = _result(STAND_IN, world, 0)
    if made != GOOD:
        raise SystemExit(f"the stand-in for the demo was not made: {made}")
    shutil.rmtree(world / ".bin")
    shutil.copy(world / "runs" / "demo_estonian" / RUN_RECIPE_NAME, world / PLACEHOLDERS["RECIPE"])
    for page in chosen:
        own = folder / page.stem
        shutil.copytree(world, own, symlinks=True)
        yield from run_page(page, own)


def listed() -> list[Row]:
    """Returns the rows of the committed table."""
    if not TABLE.is_file():
        return []
    rows = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("\0", "|") for cell in line.replace("\\|", "\0").split("|")]
        if len(cells) == 6 and cells[2].startswith("`"):
            rows.append(Row(cells[1], cells[2].strip("`"), cells[3], cells[4]))
    return rows


def write_table(rows: list[Row]) -> None:
    """Writes the table, in the order of the pages."""
    order = [str(page.relative_to(ROOT)) for page in pages()]
    rows = sorted((row for row in rows if row.page in order), key=lambda row: order.index(row.page))
    failed, idle = (sum(row.result.startswith(word) for row in rows) for word in ("FAILED", "not run"))
    head = f"""# Documented commands

Written by `python -m tests.docs.documented`, which runs each code block of README.md and docs/ as it stands,
in a folder with toy text in place of the files that the pages name. `runs/demo_estonian` is this run there:

    {STAND_IN}

RECIPE stands for `{PLACEHOLDERS["RECIPE"]}`, the recipe of that run.

{len(rows)} commands and blocks: {len(rows) - failed - idle} did what their page says, {failed} failed, {idle}
were not run, for the reason in their row. {date.today().isoformat()}, Python {platform.python_version()}, two
cores that other work shared.

| page | command | result | s |
|---|---|---|--:|
"""
    TABLE.write_text(head + "".join(row.text() + "\n" for row in rows), encoding="utf-8")


def main() -> int:
    names = sys.argv[1:]
    chosen = [page for page in pages() if not names or page.name in names or str(page) in names]
    if not chosen:
        raise SystemExit(f"no such page: {', '.join(names)}; there are {', '.join(p.name for p in pages())}")
    new = []
    with tempfile.TemporaryDirectory() as folder:
        for row in run_pages(chosen, Path(folder)):
            print(row.text(), flush=True)
            new.append(row)
    done = {str(page.relative_to(ROOT)) for page in chosen}
    write_table([row for row in listed() if row.page not in done] + new)
    return int(any(row.result.startswith("FAILED") for row in new))


if __name__ == "__main__":
    sys.exit(main())
