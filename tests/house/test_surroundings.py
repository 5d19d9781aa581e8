"""The suite says the same wherever it lies and whoever runs it; `.ci/run` runs it whole in such a place."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.surroundings import ROOT, make_own

# Collects as pytest does, then says which modules lie elsewhere, and what a process of a test would get.
COLLECT = """
import os, subprocess, sys
from pathlib import Path
import pytest
code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]])
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
ours = {name: file for name, file in files.items() if file and name.partition(".")[0] in ("kielo", "tests")}
away = [name for name, file in ours.items() if not Path(file).is_relative_to(Path.cwd())]
print(f"{len(ours)} modules, not of this folder: {away}")
child = "import kielo, os; print(os.path.relpath(kielo.__file__, os.getcwd()))"
said = subprocess.check_output([sys.executable, "-c", child], text=True).strip()
print(f"a child: {said}, RANK={os.environ.get('RANK')}")
sys.exit(code)
"""


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_PROCID",
        "RANK",
        "HF_HOME",
        "FORCE_COLOR",
        "COLUMNS",
        "LC_ALL",
        "GIT_DIR",
        "https_proxy",
        "KIELO_X",
    ],
)
def test_a_variable_that_decides_results_is_taken_away(name):
    """A job, a terminal, a hook of git or a person sets it; a test that wants it sets it itself."""
    environment = {name: "theirs", "KIELO_TEST_SLURM": "1", "CUDA_VISIBLE_DEVICES": "3", "PATH": "/bin"}
    make_own(environment, "/home of tests")
    assert environment.get(name) != "theirs"
    kept = {key: environment[key] for key in ("KIELO_TEST_SLURM", "CUDA_VISIBLE_DEVICES", "PATH", "HOME")}
    assert kept == {
        "KIELO_TEST_SLURM": "1", "CUDA_VISIBLE_DEVICES": "3", "PATH": "/bin", "HOME": "/home of tests"
    }  # fmt: skip


def test_python_paths_hold_in_every_folder():
    """A relative path would be lost in a test that runs elsewhere; this checkout comes first."""
    environment = {"PYTHONPATH": os.pathsep.join(["src", "", "/other"])}
    make_own(environment, "/home")
    first, root, *others = environment["PYTHONPATH"].split(os.pathsep)
    assert os.path.isfile(os.path.join(first, "kielo", "__init__.py"))
    assert os.path.isfile(os.path.join(root, "tests", "__init__.py"))
    assert others == [one for one in (os.path.abspath("src"), "/other") if one != first]


@pytest.mark.parametrize("rooms", [["tests/house", "tests/recipe"], ["tests"]], ids=" ".join)
@pytest.mark.full  # .ci/run does so too
def test_a_clone_named_kielo_tests_itself(rooms, tmp_path):
    """As the README says: `git clone ADDRESS kielo && cd kielo`; here below a folder with a space, by a
    Python that has the Kielo of another checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    clone, settings = tmp_path / "a folder" / "kielo", tmp_path / "gitconfig"
    settings.write_text("[safe]\ndirectory = *\n", encoding="utf-8")  # of whoever owns the checkout
    environment = os.environ | {"GIT_CONFIG_GLOBAL": str(settings), "RANK": "7"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ["PYTHONPATH"]])}
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], env=environment, check=True)
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *rooms], cwd=clone, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, modules, child = done.stdout.splitlines()
    assert modules.endswith("not of this folder: []") and int(modules.split()[0]) > 50, modules
    assert child == "a child: src/kielo/__init__.py, RANK=None"
