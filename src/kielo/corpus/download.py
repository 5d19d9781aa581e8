"""Downloads of text: a Debian package by apt-get, a dataset of the Hugging Face hub, or files of an address.

apt works in the source's folder alone, with its own package lists, so it needs neither root nor an
installation, and does not change the machine.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from kielo.artifact.manifest import hash_json
from kielo.artifact.remote_files import ChangedFile, RemoteFile, RemoteFiles, without_query
from kielo.artifact.text_files import COMPRESSED
from kielo.corpus.raw_formats import first_names, formats, is_about, is_left_out, is_readable, refuse_unread
from kielo.recipe.addresses import scheme_of
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Source

APT_SECONDS = 300
PAGES = "pages"
DATA_SUFFIXES = (
    ".parquet",
    *(f".{form}{cover}" for form in ("jsonl", "ndjson") for cover in ("", *COMPRESSED)),
    *(f".json{cover}" for cover in COMPRESSED),
)
OFTEN_SETTINGS = ".json"  # data only if there is nothing else


CHANGES = 3  # of a file at its address during its download, until it is refused


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


def fetch_address(
    source: Source, folder: Path, aside: Path, versions: dict[str, str], say: Callable[[str], None]
) -> str:
    """Download the files of an address, as many as max_documents needs. Return their origin.

    aside: the folder of complete and unfinished files, from which an interrupted download resumes.
    versions: gets the ETag, checksum or date of each file at its address.
    """
    address = source.path or ""
    try:
        there = RemoteFiles(address, say)
        origin = f"{address}{_pin(there)}"
        wanted = _files_to_fetch(source, there)
        aside.mkdir(parents=True, exist_ok=True)
        if source.max_documents is None:
            there_already = sum(path.stat().st_size for path in aside.iterdir() if path.is_file())
            _refuse_full_disk(aside, sum(one.bytes or 0 for one in wanted) - there_already)
        enough, num_rows, fetched = source.max_documents, 0, list[tuple[RemoteFile, Path]]()
        for number, one in enumerate(wanted, start=1):
            size = "" if one.bytes is None else f", {one.bytes / 1e6:,.1f} MB"
            say(f"{source.name}: file {number:,} of {len(wanted):,}, {one.name}{size}")
            fetched.append(_fetch_file(there, one, aside))
            num_rows += _num_rows(fetched[-1][1])
            if enough is not None and num_rows >= enough:
                break
    except KieloError as problem:
        told = str(problem).removeprefix(f"{address}: ").removeprefix(f"corpus.sources, {source.name}: ")
        raise FetchProblem(told) from None
    for one, path in fetched:
        (folder / one.name).parent.mkdir(parents=True, exist_ok=True)
        path.rename(folder / one.name)
        versions[one.name] = one.version
    return origin


def _pin(there: RemoteFiles) -> str:
    """Make an address of the hub's datasets and models lead to the commit of now. Return its name."""
    if scheme_of(there.address) != "hf":
        return ""
    from huggingface_hub import HfApi

    def pinned() -> Any:
        place = there.system.resolve_path(there.path)
        if not hasattr(place, "revision"):  # a bucket has no commits
            return None
        told = HfApi().repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision)
        return replace(place, revision=told.sha, _raw_revision=None)

    if (place := there.tried(pinned, there.address)) is None:
        return ""
    there.path = place.unresolve()
    return f", commit {place.revision}"


def _files_to_fetch(source: Source, there: RemoteFiles) -> list[RemoteFile]:
    """Return the files of the source's kind. KieloError for an address without, and for odd names."""
    files = [one for one in there.files() if not is_left_out(one.name, source)]
    if not files:
        raise KieloError("no file is there, or none fits the pattern. Fix: another address")
    for one in files:
        if not one.name or ".." in PurePosixPath(one.name).parts or PurePosixPath(one.name).is_absolute():
            raise KieloError(
                f"its file {one.name!r} would be written outside of the folder. Fix: another address"
            )
    known = [one for one in files if is_readable(Path(one.name), source.kind)]
    wanted = [one for one in known if one.path == there.path or not is_about(Path(one.name))]
    if not wanted:
        names = first_names([one.name for one in files])
        raise KieloError(f"no file of text ({names}). Fix: {formats(source.kind)}")
    if len({one.name for one in wanted}) < len(wanted):
        raise KieloError("two of its files have the same name. Fix: a source for each")
    if source.kind != "code":
        refuse_unread(source, sorted({one.name for one in files} - {one.name for one in wanted}))
    return wanted


def _refuse_full_disk(aside: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(aside).free):
        raise KieloError(f"disk full: {needed:,} bytes are needed, {free:,} are free. Fix: free space")


def _fetch_file(there: RemoteFiles, one: RemoteFile, aside: Path) -> tuple[RemoteFile, Path]:
    """Download a file. If it changes at its address meanwhile, begin again. Return its last description."""
    for _ in range(CHANGES):
        name = hash_json([one.path, one.bytes, one.version])[:16]
        whole, part = (
            aside / f"{name}.whole{''.join(PurePosixPath(one.name).suffixes)}",
            aside / f"{name}.part",
        )
        if whole.is_file() and one.bytes in (None, whole.stat().st_size):
            return one, whole
        _refuse_full_disk(aside, (one.bytes or 0) - (part.stat().st_size if part.is_file() else 0))
        try:
            there.download(one, part)
            _sync(part)
            part.rename(whole)
            return one, whole
        except ChangedFile:
            part.unlink(missing_ok=True)
            one = there.describe(one.path, one.name)
    raise KieloError(
        f"{without_query(one.path)}: changed {CHANGES} times while it was read. Fix: run again when nobody "
        "writes"
    )


def _sync(path: Path) -> None:
    """Wait until the file is on the disk, so that its name never outlives its content."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


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

    try:
        return pyarrow.parquet.ParquetFile(path).metadata.num_rows
    except (pyarrow.ArrowException, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno is not None:  # of the disk
            raise
        return 0  # damaged: the stage names it, as a file of this disk
