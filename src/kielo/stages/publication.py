"""Publication of a run's export: to the Hugging Face hub, to a server with its interface, or into a folder.

A file that the destination has already, by its checksum, is not sent again, so an interrupted publication
resumes. Large files go one by one, and the model card last: a card never stands without its weights. Weights
of an earlier publication are deleted, as transformers loads an old model.safetensors before new shards.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from kielo.artifact.checkpoint_folder import saved_step, step_folders
from kielo.artifact.durable import bring_to_disk, make_folder
from kielo.artifact.manifest import MANIFEST_NAME, finished_manifest, hash_file, read_manifest
from kielo.artifact.remote_files import RemoteFiles
from kielo.checkpoint.export_stage import CARD_FILE
from kielo.recipe.addresses import address_problem, is_address
from kielo.recipe.errors import KieloError
from kielo.recipe.places import place
from kielo.recipe.sections import Recipe
from kielo.stages.results import export_checkpoint

LARGE_BYTES = 10_000_000
_CERTIFICATES = "verify"
_WEIGHTS = re.compile(r".*\.(safetensors|bin|gguf|pt|pth|h5|msgpack)(\.index\.json)?")
_Overwritten = list[tuple[str, str, str]]  # revision, file, "replaced" or "deleted"


@dataclass(frozen=True)
class Publication:
    """Files for a destination. files: path there → file here. revision: a branch there, or a subfolder."""

    target: str
    files: Mapping[str, Path]
    revision: str | None = None

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


def is_folder(target: str) -> bool:
    """Return True for a folder of this disk or of an address such as s3://…, False for a name on the hub."""
    return target.startswith((".", "/", "~")) or is_address(target)


def check_target(target: str) -> None:
    """Raise KieloError if `target` is neither a folder's path nor OWNER/NAME."""
    if is_address(target) and (problem := address_problem(target)):
        raise KieloError(f"TARGET {problem}")
    if is_folder(target):
        return
    try:
        validate_repo_id(target)
    except HFValidationError as error:
        raise KieloError(f"{target}: no name on the hub ({error}). Fix: OWNER/NAME, or ./FOLDER") from None
    if "/" not in target:
        raise KieloError(f"{target}: has no owner. Fix: OWNER/{target}, or ./{target} for a folder")


def publication_of(run: Path, target: str, gguf: Path | None = None) -> Publication:
    """Collect a run's export, its certificates and a GGUF folder. Raise KieloError if one is not whole."""
    check_target(target)
    files = _whole(run / "hf", "export", f"kielo run {run} --to export")
    if gguf is not None:
        found = _whole(gguf, "gguf", f"kielo export {run} --to {gguf} --format gguf")
        ours, theirs = (finished_manifest(one).inputs["checkpoint"] for one in (run / "hf", gguf))
        if ours != theirs:
            raise KieloError(
                f"{gguf}: is an export of another checkpoint than {run / 'hf'}. Fix: kielo export {run} --to "
                "NEW_FOLDER --format gguf"
            )
        files |= {name: path for name, path in found.items() if name != CARD_FILE}
    certificates = sorted((run / _CERTIFICATES).glob("*.json"))
    names = (MANIFEST_NAME, CARD_FILE)
    files |= {f"{_CERTIFICATES}/{one.name}": one for one in certificates if one.name not in names}
    return Publication(target, files)


def revisions_of(run: Path, recipe: Recipe, target: str, steps: Sequence[int] | None) -> list[Publication]:
    """Export checkpoints into RUN/revisions, each as a revision `step_N`. steps: None for all kept ones."""
    folders = {saved_step(path): path for path in step_folders(run / "train" / "checkpoints")}
    chosen = sorted(folders) if steps is None else steps
    if missing := [step for step in chosen if step not in folders]:
        kept = ", ".join(map(str, sorted(folders))) or "none"
        raise KieloError(f"{run}: has no checkpoint of step {missing[0]}. Fix: one of {kept}")
    publications = []
    for step in chosen:
        to = run / "revisions" / folders[step].name
        export_checkpoint(folders[step], to, run / "tokenizer", recipe)
        files = _whole(to, "export", f"kielo export {folders[step]} --to {to}")
        publications.append(Publication(target, files, folders[step].name))
    return publications


def _whole(folder: Path, kind: str, fix: str) -> dict[str, Path]:
    """Return the files of a finished export, each compared with its checksum, and its model card."""
    manifest = read_manifest(folder)
    if manifest is None or manifest.kind != kind:
        raise KieloError(f"{folder}: no finished export is there. Fix: {fix}")
    for name, record in manifest.files.items():
        path = folder / name
        is_whole = path.is_file() and path.stat().st_size == record.bytes
        if not is_whole or _sha256(path) != manifest.counts["sha256"][name]:
            raise KieloError(f"{path}: is missing or not as it was exported. Fix: remove {folder}, and {fix}")
    files = {name: folder / name for name in manifest.files}
    return files | ({CARD_FILE: folder / CARD_FILE} if (folder / CARD_FILE).is_file() else {})


def publish(
    publications: Sequence[Publication],
    is_public: bool = False,
    endpoint: str | None = None,
    say: Callable[[str], None] = print,
    is_replacing: bool = False,
) -> str:
    """Send what the destination lacks, and return its address. Raise KieloError.

    endpoint: of a server with the hub's interface; default: HF_ENDPOINT, else the hub. The token of
    `hf auth login` or HF_TOKEN is used, and written nowhere. A new repository is private unless is_public; an
    existing one stays as it is. is_replacing: replace and delete the files that `overwritten` lists, instead
    of refusing them.
    """
    target = publications[0].target
    if is_address(target):
        for one in publications:
            _upload(one, say)
        return target
    if is_folder(target):
        for one in publications:
            _copy(one, place(target) / (one.revision or ""), say)
        return str(place(target))
    hub = HfApi(endpoint=endpoint, library_name="kielo")
    with _server_named(target, hub):
        address = hub.create_repo(target, private=not is_public, exist_ok=True)
        for one in publications:
            _send(hub, one, is_replacing, say)
    return _without_user(str(address))


def overwritten(publications: Sequence[Publication], endpoint: str | None = None) -> _Overwritten:
    """List the files of a repository that `publish` would replace or delete. Raise KieloError.

    They are files of other content, and on `main` foreign weights and certificates. A revision loses all
    foreign files. The files that a new branch has from `main` are not listed.
    """
    target = publications[0].target
    if is_folder(target):
        return []
    hub = HfApi(endpoint=endpoint, library_name="kielo")
    with _server_named(target, hub):
        if not hub.repo_exists(target):  # quick if the server cannot be reached, as listings are repeated
            return []
        trees = [(one, _tree(hub, target, one.revision or "main")) for one in publications]
        return [row for one, there in trees for row in _overwritten(hub, one, there)]


def refuse_overwriting(target: str, found: _Overwritten) -> None:
    if found:
        revision, name, _ = found[0]
        raise KieloError(
            f"{target}: {len(found):,} files would be replaced or deleted, such as {name} of {revision}. "
            "Nothing was sent. Fix: --replace, or another name"
        )


def _overwritten(hub: HfApi, one: Publication, there: Mapping[str, RepoFile]) -> _Overwritten:
    main = {} if one.revision is None else _tree(hub, one.target, "main")
    replaced = [name for name in _missing(one, there) if name in there]
    rows = [(name, "replaced") for name in replaced] + [(name, "deleted") for name in _stale(one, there)]
    return [
        (one.revision or "main", name, what)
        for name, what in rows
        if name not in main or _content(main[name]) != _content(there[name])
    ]


def _content(file: RepoFile) -> tuple[str, str | None]:
    return file.blob_id, None if file.lfs is None else file.lfs.sha256


def _stale(one: Publication, there: Mapping[str, RepoFile]) -> list[str]:
    """Return the foreign files to delete: of a revision all, of `main` weights and certificates."""
    return [
        name
        for name in there
        if name not in one.files
        and name != ".gitattributes"
        and (one.revision or _WEIGHTS.fullmatch(name) or name.startswith(f"{_CERTIFICATES}/"))
    ]


@contextmanager
def _server_named(target: str, hub: HfApi) -> Iterator[None]:
    try:
        yield
    except LocalTokenNotFoundError:
        raise KieloError(f"{target}: the hub asks who you are. Fix: hf auth login, or HF_TOKEN") from None
    except HfHubHTTPError as error:
        raise KieloError(_without_user(_refusal(target, error))) from None
    except Exception as error:  # of the HTTP library, which versions of the hub's client change
        if isinstance(error, KieloError):
            raise
        raise KieloError(
            _without_user(
                f"{target}: {hub.endpoint} cannot be reached ({type(error).__name__}: {error}). What arrived "
                "stays. Fix: the same command resumes"
            )
        ) from None


def _without_user(text: str) -> str:
    """Return the text without names and passwords in its addresses."""
    return re.sub(r"://[^/\s]*@", "://", text)


def _refusal(target: str, error: HfHubHTTPError) -> str:
    code = error.response.status_code
    fix = {
        401: "hf auth login, or HF_TOKEN",
        403: "a token with the right to write there, or another owner",
        413: "ask the hub for more room",
    }.get(code, "the same command resumes")
    said = error.server_message or " ".join(str(error).split())[:200]
    return f"{target}: the server answered {code}: {said}. Fix: {fix}"


def _send(hub: HfApi, one: Publication, is_replacing: bool, say: Callable[[str], None]) -> None:
    revision = one.revision or "main"
    there = _tree(hub, one.target, revision)
    if not is_replacing:
        refuse_overwriting(one.target, _overwritten(hub, one, there))
    if one.revision is not None:
        hub.create_branch(one.target, branch=one.revision, exist_ok=True)
        there = _tree(hub, one.target, revision)
    missing, stale = _missing(one, there), _stale(one, there)
    say(f"{revision}: {len(one.files) - len(missing)} of {len(one.files)} files are there already")
    large = [name for name in missing if one.files[name].stat().st_size > LARGE_BYTES]
    small = [name for name in missing if name not in large and name != CARD_FILE]
    card = [name for name in missing if name == CARD_FILE]
    for names in (*([name] for name in large), small, card):
        # In the first commit, so that old weights never stand beside new weights.
        deletes = [CommitOperationDelete(name) for name in stale]
        if names or (deletes and names is card):
            adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=one.files[name]) for name in names]
            message = " and ".join(
                f"{verb} {', '.join(files)}" for verb, files in (("Add", names), ("Delete", stale)) if files
            )
            hub.create_commit(one.target, [*deletes, *adds], commit_message=message[:100], revision=revision)
            say(f"{revision}: {message}")
            stale = []
    if left := _missing(one, _tree(hub, one.target, revision)):
        raise KieloError(
            f"{one.target}: the server has {left[0]} with another checksum than it was sent with. Fix: the "
            "same command sends it again"
        )


def _tree(hub: HfApi, target: str, revision: str) -> dict[str, RepoFile]:
    try:
        found = hub.list_repo_tree(target, recursive=True, revision=revision)
        return {one.path: one for one in found if isinstance(one, RepoFile)}
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return {}


def _missing(one: Publication, there: Mapping[str, RepoFile]) -> list[str]:
    return [name for name, path in one.files.items() if name not in there or not _is_same(path, there[name])]


def _is_same(path: Path, there: RepoFile) -> bool:
    """Compare by git's checksum of a small file, and by the sha256 of a file in LFS."""
    if there.size != path.stat().st_size:
        return False
    if there.lfs is not None:
        return _sha256(path) == there.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % there.size + path.read_bytes()).hexdigest() == there.blob_id


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _upload(one: Publication, say: Callable[[str], None]) -> None:
    """Copy to a file system of fsspec, each file verified, the card last. Existing files stay."""
    there, names = RemoteFiles(one.target, say), sorted(one.files, key=lambda name: (name == CARD_FILE, name))
    places = {name: there.below(*filter(None, (one.revision, name))) for name in names}
    for name, path in places.items():
        if there.exists(path) and not there.is_same(one.files[name], path):
            raise KieloError(f"{one.target}: {path} is there already, with other content. Fix: a new address")
    sent = [name for name, path in places.items() if there.put(one.files[name], path)]
    say(f"{one.target}: copied {len(sent)} of {len(names)} files; the others were there already")


def _copy(one: Publication, to: Path, say: Callable[[str], None]) -> None:
    foreign = [
        name
        for name, path in one.files.items()
        if (to / name).exists() and hash_file(to / name) != hash_file(path)
    ]
    if foreign:
        raise KieloError(f"{to / foreign[0]}: is there already, with other content. Fix: a new folder")
    weights = [path for path in to.glob("*") if _WEIGHTS.fullmatch(path.name) and path.name not in one.files]
    if weights:
        raise KieloError(
            f"{weights[0]}: is of another export, and transformers or llama.cpp can load it instead. "
            "Fix: a new folder"
        )
    free = shutil.disk_usage(next(folder for folder in (to, *to.parents) if folder.exists())).free
    names = sorted(
        (name for name in one.files if not (to / name).exists()), key=lambda name: name == CARD_FILE
    )
    needed = sum(one.files[name].stat().st_size for name in names)
    if needed > free:
        raise KieloError(
            f"{to}: disk full: {needed:,} bytes are needed, {free:,} are free. Nothing was copied"
        )
    for name in names:
        _copy_file(one.files[name], to / name)
    say(f"{to}: copied {len(names)} of {len(one.files)} files; the others were there already")


def _copy_file(source: Path, path: Path) -> None:
    """Copy a file to the disk under a name of its own, and then name it. An existing file stays."""
    make_folder(path.parent)
    aside = path.with_name(f".{path.name}.{os.getpid()}.kielo-partial")
    try:
        shutil.copyfile(source, aside)
        bring_to_disk(aside)
        if hash_file(aside) != hash_file(source):
            raise KieloError(f"{path}: was not copied whole. Fix: another disk")
        try:
            os.link(aside, path)  # never replaces a file, as a rename would
        except FileExistsError:
            raise KieloError(f"{path}: appeared during the copy, and stays. Fix: a new folder") from None
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise KieloError(f"{path}: appeared during the copy, and stays. Fix: a new folder") from None
            os.rename(aside, path)
        bring_to_disk(path.parent)
    finally:
        aside.unlink(missing_ok=True)
