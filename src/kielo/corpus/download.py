"""Downloads of text: a Debian package through apt-get, or a dataset from the Hugging Face hub.

apt works in the source's folder alone, with its own package lists, so it needs neither root nor an
installation, and does not change the machine.
"""

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from kielo.artifact.text_files import COMPRESSED
from kielo.corpus.raw_formats import is_about
from kielo.recipe.sections import Source

APT_SECONDS = 300
PAGES = "pages"
DATA_SUFFIXES = (
    ".parquet",
    *(f".{form}{cover}" for form in ("jsonl", "ndjson") for cover in ("", *COMPRESSED)),
    *(f".json{cover}" for cover in COMPRESSED),
)
OFTEN_SETTINGS = ".json"  # data only if there is nothing else


class FetchProblem(Exception):
    """A download that failed, with the reason. Another may work."""


def fetch_debian_package(source: Source, folder: Path) -> str:
    """Download a package's HTML pages and licence to folder/pages. Return its name. Raises FetchProblem."""
    if missing := [program for program in ("apt-get", "apt-config", "dpkg-deb") if not shutil.which(program)]:
        raise FetchProblem(f"{missing[0]} is missing (not a Debian or Ubuntu machine?)")
    workplace = (folder / "apt").resolve()
    environment = os.environ | {"APT_CONFIG": str(write_apt_configuration(workplace)), "LC_ALL": "C"}
    # An update that misses one of several servers fails, but may have fetched the right list.
    update = _run(["apt-get", "-qq", "update"], workplace, environment)
    download = _run(["apt-get", "-qq", "download", "--", source.debian_package or ""], workplace, environment)
    packages = sorted(workplace.glob("*.deb"))
    if download.returncode or not packages:
        raise FetchProblem(last_errors(download.stderr + update.stderr))
    unpacked = _run(["dpkg-deb", "-x", packages[0].name, "tree"], workplace, environment)
    if unpacked.returncode:
        raise FetchProblem(last_errors(unpacked.stderr))
    for path in sorted((workplace / "tree").rglob("*")):
        is_wanted = path.suffix in (".html", ".htm") or path.name == "copyright"
        if is_wanted and path.is_file() and not path.is_symlink():
            target = folder / PAGES / path.relative_to(workplace / "tree")
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    shutil.rmtree(workplace)
    package, version, *_ = unquote(packages[0].stem).split("_")
    return f"Debian package {package} {version}"


def fetch_huggingface_dataset(source: Source, folder: Path, aside: Path) -> str:
    """Download as many files of a dataset (of its subset) as max_documents needs. Return its name."""
    # aside: the folder of files until all are there, from which an interrupted download resumes.
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        raise FetchProblem("huggingface_hub is not installed") from None
    dataset, subset = source.huggingface_dataset or "", source.huggingface_subset
    try:
        information = HfApi().dataset_info(dataset, timeout=30)
        files = sorted(sibling.rfilename for sibling in information.siblings or ())
        of_subset = [file for file in files if not subset or file.startswith(subset + "/")]
        wanted = [file for file in of_subset if file.endswith(DATA_SUFFIXES)]
        wanted = wanted or [file for file in of_subset if file.endswith(OFTEN_SETTINGS)]
        wanted = [file for file in wanted if not is_about(Path(file))]
        if leading_out := [file for file in wanted if ".." in Path(file).parts or Path(file).is_absolute()]:
            raise FetchProblem(f"its file {leading_out[0]!r} would be written outside of the folder")
        if not wanted:
            folders = sorted({file.partition("/")[0] for file in files if file.endswith(DATA_SUFFIXES)})
            raise FetchProblem(
                f"no data files in subset {subset!r}. Its subsets: {', '.join(folders[:20]) or 'none'}"
            )
        num_rows, fetched = 0, []
        for file in wanted:
            hf_hub_download(dataset, file, repo_type="dataset", revision=information.sha, local_dir=aside)
            fetched.append(file)
            num_rows += _num_rows(aside / file)
            if source.max_documents and num_rows >= source.max_documents:
                break
    except FetchProblem:
        raise
    except Exception as problem:  # the hub's client raises errors of several libraries
        raise FetchProblem(last_errors(f"{type(problem).__name__}: {problem}")) from None
    for file in fetched:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (aside / file).rename(folder / file)
    return f"Hugging Face dataset {dataset} {subset or ''} revision {information.sha}".replace("  ", " ")


def write_apt_configuration(workplace: Path) -> Path:
    """Write an apt configuration of `workplace` with the machine's servers, keys and proxies."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (workplace / name).mkdir(parents=True, exist_ok=True)
    (workplace / "status").touch()
    dump = subprocess.run(
        ["apt-config", "dump"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    # Without the machine's hooks, which clean or refresh its things.
    kept = [line for line in dump.splitlines() if line.startswith("Acquire::")]
    own = {
        "Dir::Etc::parts": "/dev/null",
        "Dir::Etc::main": "/dev/null",
        "Dir::State": workplace / "state",
        "Dir::State::status": workplace / "status",
        "Dir::Cache": workplace / "cache",
        # As root, apt would become a user who cannot write here.
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "30",
        "Acquire::https::Timeout": "30",
    }
    lines = [*kept, "#clear Acquire::Languages;", *(f'{key} "{value}";' for key, value in own.items())]
    path = workplace / "apt.conf"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _run(command: list[str], workplace: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    run = partial(subprocess.run, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        return run(command, cwd=workplace, env=environment, timeout=APT_SECONDS)
    except subprocess.TimeoutExpired:
        raise FetchProblem(f"{' '.join(command)}: no answer in {APT_SECONDS} s") from None


def last_errors(output: str) -> str:
    """Return the errors of a program on one line: the lines that it marks as errors, if any."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E:")] or lines
    return " ".join(errors[:3])[:500] or "failed without saying why"


def _num_rows(path: Path) -> int:
    if path.suffix != ".parquet":
        return 0
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path).metadata.num_rows
