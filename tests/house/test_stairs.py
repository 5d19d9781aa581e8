"""The import stairs, held by import-linter; each contract is also broken on purpose."""

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.house.checks import FAMILY_TABLES, PACKAGE, ROOT

CONTRACTS = ROOT / ".importlinter"
LINT = (
    "import sys; from importlinter.cli import lint_imports; "
    "sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"
)


def lint(source_folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": f"{source_folder}:{os.environ['PYTHONPATH']}"}
    return subprocess.run(
        [sys.executable, "-c", LINT, str(CONTRACTS)],
        cwd=source_folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_code_imports_only_downwards_and_the_login_node_needs_no_torch():
    """The contracts of .importlinter hold for the house as it is."""
    outcome = lint(PACKAGE.parent)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


# File, the line planted at its end, and what the contract that it breaks says.
PLANTED = [
    ("recipe/planted.py", "import kielo.artifact.manifest",
     "kielo.recipe is not allowed to import kielo.artifact"),
    ("dataset/planted.py", "import kielo.models.families",
     "kielo.dataset is not allowed to import kielo.models"),
    ("evaluate/planted.py", "import kielo.verify", "kielo.evaluate is not allowed to import kielo.verify"),
    ("train/planted.py", "import kielo.plan.workload", "kielo.train is not allowed to import kielo.plan"),
    ("recipe/sections.py", "import kielo.recipe.read", "No cycles are allowed in kielo.recipe"),
    ("plan/planted.py", "import torch.nn", "kielo.plan is not allowed to import torch"),
    ("models/llama/tables.py", "from torch import nn",
     "kielo.models.llama.tables is not allowed to import torch"),
    ("report/planted.py", "import transformers", "kielo.report is not allowed to import transformers"),
]  # fmt: skip


def plant(folder: Path, *planted: tuple[str, str]) -> subprocess.CompletedProcess:
    """Run the contracts over a copy of the house with further lines."""
    shutil.copytree(PACKAGE, folder / "kielo", ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in planted:
        path = folder / "kielo" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n", encoding="utf-8")
    return lint(folder)


def test_planted_imports_are_caught(tmp_path):
    """The contracts fail when broken: upwards, sideways, in a circle, torch on the login node."""
    outcome = plant(tmp_path, *((file, line) for file, line, _ in PLANTED))
    said = " ".join(outcome.stdout.split())
    assert outcome.returncode == 1
    assert [complaint for *_, complaint in PLANTED if complaint not in said] == [], outcome.stdout


def test_a_room_without_a_step_is_caught(tmp_path):
    outcome = plant(tmp_path, ("attic/__init__.py", ""))
    assert outcome.returncode == 1 and "kielo.attic" in outcome.stdout


def test_every_torch_free_room_is_in_the_login_contract():
    """A launch room, once there is one, must be torch-free as well; families by pattern."""
    contracts = configparser.ConfigParser()
    contracts.read(CONTRACTS)
    listed = contracts["importlinter:contract:login_node"]["source_modules"].split()
    rooms = ("recipe", "artifact", "corpus", "tokenizer", "dataset", "resolve", "plan", "report", "launch")
    assert {f"kielo.{room}" for room in rooms if (PACKAGE / room).is_dir()} <= set(listed)
    assert {f"kielo.models.*.{table}" for table in FAMILY_TABLES} <= set(listed)
