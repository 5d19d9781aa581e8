"""Checks before the first step: equal ranks, sound token files, and the tokenizer."""

import json
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import xxhash

from kielo.artifact.manifest import (
    READ_BYTES,
    Manifest,
    check_sizes,
    hash_file,
    hash_json,
    hash_manifest,
    read_manifest,
    write_json_atomically,
)
from kielo.artifact.metrics import Row, TrainingStep
from kielo.artifact.token_shards import LOSS_MASK
from kielo.artifact.weights_folder import resolve_weights
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.auto_tokenizer import NOT_COMPARED, compare_folder
from kielo.dataset.batches import packed_manifest
from kielo.dataset.query import packed_sample
from kielo.recipe.errors import KieloError
from kielo.resolve.resolve import flat
from kielo.resolve.resolved import Identity, Resolved
from kielo.tokenizer.load import TOKENIZER_FILE, load_tokenizer
from kielo.tokenizer.trial import doubts_about_weights

# Keys that may differ: folders, devices and their speed. Compiled layers differ only in rounding.
_OF_ONE_RANK: dict[str, Any] = {
    **dict.fromkeys(("device", "accelerator", "peak_tflops"), True),
    **dict.fromkeys(("tokens_folder", "tokenizer_folder", "train_folder"), True),
    "layout": {"compile"},
    "phases": {"__all__": {"planned_tokens_per_second"}},
}
_MOST_KEYS = 8


def refuse_unlike_ranks(resolved: Resolved, ranks: Agreement) -> None:
    """Raise KieloError on every rank if two ranks resolved different values, with the keys, values and ranks.

    Each resolves the recipe by its own processor and files, and unequal ranks would wait for each other for
    ever.
    """
    own = flat(resolved.placement.model_dump(mode="json", exclude=_OF_ONE_RANK))
    own |= flat(resolved.identity.model_dump(mode="json"))
    if len(set(ranks.gather(hash_json(own)))) == 1:
        return
    everyone = ranks.gather(own)
    names = dict.fromkeys(key for one in everyone for key in one)
    keys = [key for key in names if any(one.get(key) != everyone[0].get(key) for one in everyone)]
    lines = [f"  - {key}: {_by_ranks(key, everyone)}" for key in keys[:_MOST_KEYS]]
    if len(keys) > _MOST_KEYS:
        lines.append(f"  - and {len(keys) - _MOST_KEYS} keys more")
    ways = "the same recipe and run folder on all nodes, or nodes of one kind"
    if "train.precision" in keys:
        ways = f"--set train.precision={everyone[0]['train.precision']}. Or {ways}"
    listed = "\n".join(lines)
    raise KieloError(f"the ranks would not train the same:\n{listed}\nFix: {ways}. Nothing was changed")


def _by_ranks(key: str, everyone: list[dict[str, object]]) -> str:
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        found.setdefault(f"{one.get(key)}", []).append(rank)
    return ", ".join(
        f"{value} on rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
        for value, ranks in found.items()
    )


def check_tokenizer(resolved: Resolved) -> list[str]:
    """Return warnings about the run's tokenizer, which other programs will read by AutoTokenizer.

    Raise KieloError, with the first text that differs, if AutoTokenizer gives other ids than were packed.
    """
    placement, folder = resolved.placement, Path(resolved.placement.tokenizer_folder)
    packed = read_manifest(placement.tokens_folder)
    if packed is None or "tokenizer" not in packed.inputs or not (folder / TOKENIZER_FILE).is_file():
        return []  # packed by another program
    made = read_manifest(folder)
    if made is not None and not (made.section.get("path") or made.section.get("extend")):
        # Only Kielo wrote it, and the export compares it: here that would cost an import of transformers.
        return _doubts(resolved.identity, folder)
    sample = packed_sample(Path(placement.tokens_folder).parent)
    try:
        said, warnings = compare_folder(folder, resolved.identity.model.model_type, sample)
    except KieloError:
        refuse_altered(Path(placement.tokens_folder), packed)  # a damaged file has other ids too
        raise
    if said == NOT_COMPARED:
        warnings.append(said)
    else:
        print(f"tokenizer: {said}", flush=True)
    return warnings + _doubts(resolved.identity, folder)


def _doubts(identity: Identity, folder: Path) -> list[str]:
    weights = identity.model.weights
    if weights is None or identity.model.transplant is not None:
        return []
    return doubts_about_weights(load_tokenizer(folder), resolve_weights(weights))


class FirstLoss:
    """A sink of the log that warns if the weights predict the first step's text no better than a guess."""

    def __init__(self, identity: Identity, alert: Callable[[int, str], None]):
        self._model, self._alert = identity.model, alert
        self._is_watching = False

    def start(self, step: int) -> None:
        self._is_watching = step == 0

    def write(self, row: Row) -> None:
        if not self._is_watching or not isinstance(row, TrainingStep):
            return
        self._is_watching = False
        guess = math.log(self._model.vocab_size)
        if row.loss is not None and not row.loss < guess:
            self._alert(
                row.step,
                f"the first loss of {self._model.weights} is {row.loss:.2f}, and a random guess among "
                f"{self._model.vocab_size:,} tokens has {guess:.2f}. The tokenizer probably does not belong "
                "to these weights. Fix: tokenizer.path = the tokenizer that they were trained with",
            )

    def close(self) -> None: ...


RECORD_NAME = "tokens_verified.json"
SUFFIXES = (".bin", ".idx", LOSS_MASK)
WAIT_SECONDS = 10.0  # between two collectives: a collective that waited for terabytes would time out


class TokenCheck:
    """A check of the token files' checksums, in a thread while the model is built. The ranks share the files.

    `train/tokens_verified.json` lists verified files with size, times and inode: a requeued job reads
    nothing. All ranks make it, `finish` it and leave it together. Raises KieloError on every rank for a file
    of another size.
    """

    def __init__(self, resolved: Resolved, ranks: Agreement):
        placement = resolved.placement
        self._folder, self._ranks = Path(placement.tokens_folder), ranks
        self._tokens_hash = resolved.identity.tokens_hash
        self._record_path = Path(placement.train_folder) / RECORD_NAME
        self._stopped = Event()
        self._listed, self._unread = ranks.on_first(self._look)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokens")
        own = self._unread[ranks.rank :: ranks.size]
        self._reading: Future[str | None] = self._reader.submit(self._read, own)

    def __enter__(self) -> "TokenCheck":
        return self

    def __exit__(self, *problem: object) -> None:
        self._stopped.set()
        self._reader.shutdown()

    def finish(self) -> None:
        """Wait until every rank has read its share. Raises KieloError on every rank for a changed file."""
        while not all(self._ranks.gather(bool(wait([self._reading], timeout=WAIT_SECONDS).done))):
            pass
        self._ranks.refuse_together(self._reading.result())
        if self._unread:
            self._ranks.on_first(lambda: write_json_atomically(self._record_path, self._states))

    def _look(self) -> tuple[dict[str, str], list[str]]:
        """Return, on rank 0: file → listed checksum, and the files to read, the largest first."""
        manifest = packed_manifest(self._folder)
        if hash_manifest(self._folder) != self._tokens_hash:
            raise KieloError(f"{self._folder}: was replaced while this job started. Fix: start it again")
        names = [name for name in manifest.files if name.endswith(SUFFIXES)]
        check_sizes(self._folder, manifest, names)
        self._listed, self._states = {}, {}
        for name in names:
            if (checksum := manifest.files[name].xxh3_128) is None:
                raise KieloError(f"{self._folder}: no checksum of {name} in its manifest. Fix: pack again")
            self._listed[name] = checksum
            # From before the reading: a file that changes meanwhile is read again next time.
            of = (self._folder / name).stat()
            self._states[name] = [checksum, of.st_size, of.st_mtime_ns, of.st_ctime_ns, of.st_ino]
        verified = _read_record(self._record_path)
        unread = [name for name in names if verified.get(name) != self._states[name]]
        return self._listed, sorted(unread, key=lambda name: -manifest.files[name].bytes)

    def _read(self, names: list[str]) -> str | None:
        for name in names:
            path = self._folder / name
            try:
                if hash_unless_stopped(path, self._stopped) not in (None, self._listed[name]):
                    return _altered(path)
            except OSError as error:
                return f"{path}: cannot be read ({error.strerror})"
        return None


def refuse_altered(folder: Path, manifest: Manifest) -> None:
    for name, listed in manifest.files.items():
        if hash_file(folder / name) != listed.xxh3_128:
            raise KieloError(_altered(folder / name))


def _altered(path: Path) -> str:
    return (
        f"{path}: is not what the pack stage wrote. Its checksum differs from "
        f"{path.with_name('manifest.json')}, so it was altered or damaged. No step was taken. Fix: put a "
        f"complete copy in its place. Or move {path.parent} away, and `kielo run RECIPE --to pack` packs the "
        "same corpus again"
    )


def hash_unless_stopped(path: Path, stopped: Event) -> str | None:
    """Compute a file's xxh3-128 as `manifest.hash_file` does, or return None once `stopped` is set."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            if stopped.is_set():
                return None
            digest.update(block)
    return digest.hexdigest()


def _read_record(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
