"""A folder of Hugging Face weights, or a tokenizer, without torch: its place, and the files of its tensors.

In: `hf:FOLDER`, `hf:OWNER/NAME[@REVISION]` on the Hugging Face hub, or `megatron:FOLDER`, which
`megatron_folder.py` reads. Out: a folder with a config.json and weights, for a repository its snapshot in the
local cache or the folder of `kielo prefetch`, for Megatron the folder of an iteration. Files are looked
for in transformers' order: the file that `transformers_weights` of config.json names, `model.safetensors`,
the shards of `model.safetensors.index.json`, then the same of `pytorch_model.bin`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kielo.artifact.json_object import JsonTable
from kielo.artifact.megatron_folder import FORM, resolve_megatron
from kielo.artifact.prefetched import HUB_FOLDER, not_brought, prefetched_folder
from kielo.recipe.errors import KieloError
from kielo.recipe.places import conversion, without_form

CONFIG_FILE = "config.json"
_INDEX = ".index.json"
# transformers' order. An index beside a single file can belong to older shards.
_WEIGHTS = tuple(name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", _INDEX))
_NAMED_FILE = "transformers_weights"  # key of config.json
_SMALL_FILES = ["*.json", "*.jinja", "merges.txt", "tokenizer.model", "vocab.txt"]
_TOKENIZER_FILE = "tokenizer.json"
# Named chat templates of a tokenizer, such as tool_use.jinja.
TEMPLATES_FOLDER = "additional_chat_templates"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_weights(reference: str) -> Path:
    """Return the local folder of `reference`. Weights on the hub are downloaded into its cache once.

    The cache comes first, so that a new commit does not change the training. KieloError if there is none.
    """
    if (found := weights_here(reference)) is not None:
        return found
    if reference.startswith(FORM):
        return resolve_megatron(reference)  # which says why there is none
    if not _is_repository(where := reference.removeprefix("hf:")):
        of_run = ", which the stage export of a run makes" if Path(where).name == "hf" else ""
        raise KieloError(
            f"model.weights = {reference!r}: there is no folder {where}{of_run}. Fix: hf:FOLDER, "
            "a folder with a Hugging Face config.json and its safetensors files, or hf:OWNER/NAME of the "
            "Hugging Face hub"
        )
    if prefetched_folder() is not None:
        raise not_brought(f"model.weights = {reference!r}")
    return fetch_weights(reference)


def resolve_tokenizer(path: str) -> Path:
    """Return the folder of a ready tokenizer, or of hf:OWNER/NAME[@REVISION], downloaded like weights."""
    where = path.removeprefix("hf:")
    if where == path or Path(where).expanduser().is_dir():
        return Path(where).expanduser()
    if (found := _here(where, _has_tokenizer)) is not None:
        return found
    if prefetched_folder() is not None:
        raise not_brought(f"tokenizer {path!r}")
    return fetch_tokenizer(path)


def is_on_hub(reference: str | None) -> bool:
    """Return True for hf:OWNER/NAME[@REVISION] if no such folder exists here."""
    where = (reference or "").removeprefix("hf:")
    return where != reference and _is_repository(where) and not Path(where).is_dir()


def _is_repository(where: str) -> bool:
    return where.count("/") == 1 and where[0] not in "/.~"


def tokenizer_here(path: str) -> Path | None:
    folder = Path(path.removeprefix("hf:")).expanduser()
    return folder if not is_on_hub(path) else _here(path.removeprefix("hf:"), _has_tokenizer)


def weights_here(reference: str) -> Path | None:
    if reference.startswith(FORM):
        return resolve_megatron(reference) if Path(without_form(reference)).expanduser().is_dir() else None
    where = reference.removeprefix("hf:")
    if (folder := Path(where).expanduser()).is_dir():
        return folder
    return _here(where, _has_weights) if _is_repository(where) else None


def pinned(reference: str, folder: Path) -> str:
    """Add the commit of the snapshot `folder` to `reference`, or the iteration. A local folder stays."""
    if reference.startswith(FORM):
        return f"{FORM}{folder}"
    where = reference.removeprefix("hf:")
    if Path(where).expanduser().is_dir() or not _COMMIT.fullmatch(folder.name):
        return reference
    return f"hf:{where.partition('@')[0]}@{folder.name}"


def weight_files(folder: Path) -> Mapping[Path, list[str] | None]:
    """Return each file of weights → its tensors by an index, None for a single file. KieloError."""
    chosen, _ = _chosen(Path(folder))
    return _files_of(Path(folder), chosen)


def passed_over_in_words(folder: Path) -> str:
    """Return a sentence about files of weights in `folder` that are not read, or ""."""
    try:
        chosen, others = _chosen(folder)
    except KieloError:
        return ""
    read = _names_in(folder, chosen)
    # The index of an export names its single file.
    if not (unread := [name for name in others if not _names_in(folder, name) <= read]):
        return ""
    return (
        f"{folder} has more than one set of weights: {chosen} is read, as transformers does, and not "
        f"{', '.join(unread)}. If that is the wrong set, move {chosen} to another folder"
    )


def _names_in(folder: Path, name: str) -> set[str]:
    """Return the files that `name` stands for; itself if it is no index or cannot be read."""
    try:
        return {path.name for path in _files_of(folder, name)}
    except KieloError:
        return {name}


def _chosen(folder: Path) -> tuple[str, list[str]]:
    """Return the file or index of weights that transformers reads in `folder`, and the others there."""
    present = [name for name in _WEIGHTS if (folder / name).is_file()]
    named = _named_file(folder)
    if named is None and not present:
        raise KieloError(f"{folder}: no weights; looked for {', '.join(_WEIGHTS)}")
    chosen = named or present[0]
    return chosen, [name for name in present if name != chosen]


def _named_file(folder: Path) -> str | None:
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the reader of the model complains
    if not isinstance(content, dict) or (name := content.get(_NAMED_FILE)) is None:
        return None
    is_plain = isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors(\.index\.json)?", name)
    if not is_plain or not (folder / name).is_file():
        raise KieloError(
            f"{path}: {_NAMED_FILE} = {name!r} is no safetensors file or index in that folder. Fix: remove "
            "the key, or fetch that file too"
        )
    return name


def _files_of(folder: Path, name: str) -> Mapping[Path, list[str] | None]:
    return _indexed(folder, name) if name.endswith(_INDEX) else {folder / name: None}


def _indexed(folder: Path, index: str) -> Mapping[Path, list[str]]:
    path = folder / index
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(unique_keys, path))
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise KieloError(f"{path}: not a weight index: not valid JSON ({error})") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise KieloError(f"{path}: not a weight index: it has no weight_map from tensors to files")
    files: dict[Path, list[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            raise KieloError(f"{path}: {tensor} is in {name!r}, which is no name of a file in that folder")
        files.setdefault(folder / name, []).append(tensor)
    files = dict(sorted(files.items()))
    if absent := [path.name for path in files if not path.is_file()]:
        raise KieloError(f"{folder}: {index} names files that do not exist: {', '.join(absent[:8])}")
    return files


def unique_keys(path: Path, pairs: list[tuple[str, Any]]) -> JsonTable:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise KieloError(f"{path}: damaged: it names {twice} twice")
    return content


def _here(where: str, is_whole: Callable[[Path], bool]) -> Path | None:
    """Return the complete snapshot of OWNER/NAME[@REVISION] from `kielo prefetch` or the hub's cache.

    The hub is not asked, because thousands of ranks can call. Without the patterns of the download, newer
    clients refuse a snapshot that lacks any other file of the repository.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    prefetched = prefetched_folder()
    hubs = [prefetched / HUB_FOLDER, None] if prefetched else [None]
    for hub, pattern in product(hubs, ("*.safetensors", "*.bin", _TOKENIZER_FILE)):
        with suppress(LocalEntryNotFoundError, ValueError):
            if is_whole(folder := _snapshot(where, pattern, hub, is_here=True)):
                return folder
    return None


def _snapshot(where: str, pattern: str, hub: Path | None, is_here: bool = False) -> Path:
    """Return the snapshot with small files and `pattern`, without subfolders, which have other formats."""
    from huggingface_hub import snapshot_download

    name, _, revision = where.partition("@")
    found = snapshot_download(
        name,
        revision=revision or None,
        cache_dir=hub,
        local_files_only=is_here,
        allow_patterns=[*_SMALL_FILES, pattern],
        ignore_patterns=["*/*"],
    )
    return Path(found)


def _has_weights(folder: Path) -> bool:
    try:
        weight_files(folder)
    except KieloError:
        return False
    return (folder / CONFIG_FILE).is_file()


def _has_tokenizer(folder: Path) -> bool:
    return (folder / _TOKENIZER_FILE).is_file()


def fetch_weights(reference: str, hub: Path | None = None) -> Path:
    """Download the weights of hf:OWNER/NAME[@REVISION] and return their snapshot. A broken download resumes.

    hub: the folder of repositories; default: the client's cache. KieloError if it does not have them.
    """
    folder = _fetched(f"model.weights = {reference!r}", reference, "*.safetensors", hub)
    if not any(folder.glob("*.safetensors")):
        folder = _fetched(f"model.weights = {reference!r}", reference, "*.bin", hub)
    weight_files(folder)
    return folder


def fetch_tokenizer(path: str, hub: Path | None = None) -> Path:
    folder = _fetched(f"tokenizer {path!r}", path, _TOKENIZER_FILE, hub)
    if not _has_tokenizer(folder):
        name = path.removeprefix("hf:").partition("@")[0]
        raise KieloError(
            f"tokenizer {path!r}: the repository has no {_TOKENIZER_FILE}{conversion(folder, name)}"
        )
    return folder


def _fetched(what: str, reference: str, pattern: str, hub: Path | None) -> Path:
    from huggingface_hub import snapshot_download

    name, _, revision = reference.removeprefix("hf:").partition("@")
    try:
        snapshot = _snapshot(reference.removeprefix("hf:"), pattern, hub)
        commit = snapshot.name if _COMMIT.fullmatch(snapshot.name) else revision or None
        templates = [f"{TEMPLATES_FOLDER}/*.jinja"]
        snapshot_download(name, revision=commit, allow_patterns=templates, cache_dir=hub)
        return snapshot
    except Exception as error:  # the client has a dozen kinds of errors for missing files and networks
        raise KieloError(
            f"{what}: the folder {name} does not exist, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        ) from error
