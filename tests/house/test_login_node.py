"""A login node's code loads neither torch nor transformers, also not through a library; by sys.modules."""

import subprocess
import sys

import pytest

from tests.house.checks import FAMILY_TABLES, PACKAGE

ROOMS = ["recipe", "artifact", "corpus", "tokenizer", "dataset", "resolve", "plan", "launch", "report", "cli"]
TABLES = ["models.families"] + sorted(
    f"models.{path.parent.name}.{path.stem}"
    for path in PACKAGE.glob("models/*/*.py")
    if path.stem in FAMILY_TABLES
)


def loaded_after(statements: str, watched: tuple[str, ...]) -> list[str]:
    """Returns the watched packages that are in sys.modules after the statements, in a fresh Python."""
    script = f"{statements}\nimport sys\nprint(*[name for name in {watched!r} if name in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.split()


def imports_of_all(room: str) -> str:
    modules = sorted(path.relative_to(PACKAGE).with_suffix("") for path in (PACKAGE / room).rglob("*.py"))
    names = [".".join(path.parts).removesuffix(".__init__") for path in modules]
    return "\n".join(f"import kielo.{name}" for name in names)


@pytest.mark.parametrize("room", ROOMS)
def test_the_room_loads_no_torch(room):
    """Every module of the room can be imported without torch or transformers being loaded."""
    assert loaded_after(imports_of_all(room), ("torch", "transformers")) == []


def test_the_families_tables_load_no_torch():
    """The registry and each family's tensor-parallel plan, names and count are plain tables."""
    assert loaded_after("\n".join(f"import kielo.{name}" for name in TABLES), ("torch", "transformers")) == []


def test_the_command_line_loads_no_room():
    """`kielo --help` pays for no library: not pydantic, numpy or datatrove either."""
    heavy = ("torch", "transformers", "pydantic", "numpy", "datatrove", "tokenizers", "matplotlib", "pyarrow")
    rooms = ("kielo.recipe.sections", "kielo.corpus.run", "kielo.train.loop", "kielo.resolve.resolve")
    asked = (
        "import io, contextlib\nfrom kielo.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main([])"
    )
    assert loaded_after(asked, heavy + rooms) == []


def test_the_check_sees_what_a_library_loads():
    """Broken on purpose: a library that loads another one in turn is noticed."""
    assert loaded_after("import kielo.recipe.sections", ("pydantic", "pydantic_core")) == [
        "pydantic",
        "pydantic_core",
    ]
