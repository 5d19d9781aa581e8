"""A login node's code loads neither torch nor transformers, also not through a library; by sys.modules."""

import subprocess
import sys

from tests.house.checks import FAMILY_TABLES, PACKAGE

ROOMS = [
    "recipe",
    "artifact",
    "corpus",
    "tokenizer",
    "dataset",
    "resolve",
    "plan",
    "launch",
    "report",
    "stages",
    "cli",
]
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


def test_the_rooms_load_no_torch():
    """Every module of these rooms can be imported without torch or transformers being loaded, and so can the
    registry and each family's tensor-parallel plan, names and count, which are plain tables.
    """
    imports = {room: imports_of_all(room) for room in ROOMS}
    imports["models"] = "\n".join(f"import kielo.{name}" for name in TABLES)
    # One process for all: it ends at the first room after which one of them is there.
    asked = "import sys\n" + "".join(
        f"{text}\nif {{'torch', 'transformers'}} & set(sys.modules): sys.exit({room!r})\n"
        for room, text in imports.items()
    )
    assert loaded_after(asked, ("torch", "transformers")) == []


def test_the_command_line_loads_no_room():
    """`kielo --help` pays for no library: not pydantic, numpy or datatrove either."""
    heavy = ("torch", "transformers", "pydantic", "numpy", "datatrove", "tokenizers", "matplotlib", "pyarrow")
    rooms = (
        "kielo.recipe.sections",
        "kielo.corpus.corpus_stage",
        "kielo.train.loop",
        "kielo.resolve.resolve",
    )
    asked = (
        "import io, contextlib\nfrom kielo.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main([])"
    )
    assert loaded_after(asked, heavy + rooms) == []


def test_cleaning_loads_no_tables_or_toolkits():
    """The corpus stage, which every worker imports anew, brings no library for data frames or pipelines."""
    heavy = ("pandas", "nltk", "dill", "multiprocess", "datatrove", "pyarrow", "scipy")
    assert loaded_after("import kielo.corpus.corpus_stage", heavy) == []


def test_the_check_sees_what_a_library_loads():
    """Broken on purpose: a library that loads another one in turn is noticed."""
    assert loaded_after("import kielo.recipe.sections", ("pydantic", "pydantic_core")) == [
        "pydantic",
        "pydantic_core",
    ]
