"""Makes the tests independent of who runs them and where: an empty home, no variable that decides results.

What a test wants of its environment it sets itself. tests/conftest.py calls this before any test is imported,
as libraries read their variables when they are imported; the processes that tests start inherit all of it.
"""

import locale
import os
import signal
import site
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of launchers of jobs, of Kielo and its libraries, of git's hooks, of a person's folders and language.
PREFIXES = (
    "SLURM", "SBATCH_", "SRUN_", "PBS_", "PMI", "OMPI_", "SGE_", "TORCHELASTIC_", "NCCL_DEBUG", "KIELO_",
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "WANDB_", "MPL", "GIT_", "XDG_", "LC_", "LANG",
)  # fmt: skip
NAMES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_PROTO", "CUBLAS_WORKSPACE_CONFIG",
    "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE",
    "TTY_INTERACTIVE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "CDPATH", "BASH_ENV", "PYTHONWARNINGS",
}  # fmt: skip
KEPT = {"KIELO_TEST_SLURM", "KIELO_TEST_BORDER", "KIELO_TEST_IMAGE"}  # ask for tests
ENCODING = "C.UTF-8"  # of files and streams whose encoding a test does not name


def is_foreign(name: str) -> bool:
    """Returns True if a variable of the caller would change what tests see."""
    return name not in KEPT and (name.upper() in NAMES or name.startswith(PREFIXES))


def make_own(environment: MutableMapping[str, str], home: str) -> None:
    """Takes foreign variables away; gives tests `home`, one thread, and the Kielo of this checkout."""
    for name in [name for name in environment if is_foreign(name)]:
        del environment[name]
    environment["PYTHONUSERBASE"] = site.getuserbase()  # packages that lie in the real home stay in reach
    environment["HOME"] = home
    environment.setdefault("USER", f"user_{os.getuid()}")  # libraries ask for a name, which not each has
    environment |= {"LC_ALL": ENCODING, "TERM": "xterm"}
    environment["OMP_NUM_THREADS"] = "1"  # whatever the cores, and beside other workers
    own = [str(ROOT / "src"), str(ROOT)]  # and the tests: processes leave the current folder out
    paths = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*own, *(path for path in paths if path not in own)])


def hear_interrupts() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and so would all that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def decode_alike() -> None:
    """Files that this process opens have the encoding that its children use."""
    with suppress(locale.Error):  # what a machine without this locale has is UTF-8 too, or the tests say so
        locale.setlocale(locale.LC_CTYPE, ENCODING)
