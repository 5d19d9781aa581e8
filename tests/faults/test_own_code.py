"""Files of the current folder are data: no process that Kielo starts takes them for modules."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kielo.launch.script import environment_script
from tests.house.checks import ROOT
from tests.launch.hand_made import plan, site

# Modules that each Python, torch, and Kielo import early; and the package itself.
NAMES = [
    "json",
    "random",
    "signal",
    "socket",
    "tempfile",
    "torch",
    "numpy",
    "kielo",
    "pickle",
    "runpy",
    "struct",
]
MADE = "MADE_BY_A_MODULE"


@pytest.fixture
def hostile(workplace: Path) -> Path:
    """The workplace, with a module of each name that would leave a file."""
    for name in NAMES:
        (workplace / f"{name}.py").write_text(f"open({str(workplace / MADE)!r}, 'a').write({name!r})\n")
    return workplace


def kielo(workplace: Path, *words: str) -> subprocess.CompletedProcess:
    """Starts Kielo as its command does: Python then looks beside the script, not in the current folder."""
    script = workplace.parent / "bin" / "kielo"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "import sys\nfrom kielo.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    program = [sys.executable, str(script)]
    return subprocess.run([*program, *words], cwd=workplace, capture_output=True, text=True, timeout=300)


def test_no_stage_and_no_rank_takes_modules_of_the_folder(hostile: Path) -> None:
    """Workers of the corpus, ranks, what they are forked from, compilers of layers, and preflight."""
    done = kielo(hostile, "run", "tiny.toml", "--to", "train", "--ranks", "2", "--set", "corpus.workers=2")
    assert done.returncode == 0, done.stderr
    done = kielo(hostile, "preflight", "tiny.toml", "--ranks", "2")
    assert done.returncode in (0, 1), done.stderr
    assert not (hostile / MADE).exists(), (hostile / MADE).read_text()


def test_ranks_of_a_job_do_not_either(hostile: Path) -> None:
    """By the variables that rank.sh reads; torchrun's workers too."""
    (hostile / "environment.sh").write_text(environment_script(plan(site())))
    start = (
        '. ./environment.sh; "${PYTHON[@]}" -c "import json, random, socket"; "${PYTHON[@]}" -m pip --version'
    )
    start += '; "${TORCHRUN[@]}" --nproc-per-node=1 --no-python "${PYTHON[@]}" -c "import json"'
    done = subprocess.run(["bash", "-c", start], cwd=hostile, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "pip" in done.stdout, done.stderr
    assert not (hostile / MADE).exists(), (hostile / MADE).read_text()


def test_every_start_of_a_python_leaves_the_folder_out() -> None:
    """No list that begins with this Python goes on with another word than -P."""
    starts = [
        (path.name, found[1])
        for path in sorted((ROOT / "src").rglob("*.py"))
        for found in re.finditer(r"\[sys\.executable(.*)", path.read_text(encoding="utf-8"))
    ]
    others = [start for start in starts if not start[1].startswith((', "-P"', "] if _is_own_python"))]
    assert len(starts) >= 4 and others == []
