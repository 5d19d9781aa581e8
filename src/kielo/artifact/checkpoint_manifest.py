"""The manifest of a checkpoint: size, checksums and save id of each of its files, and a digest of itself.

It is written last: it is what makes a folder a checkpoint.
"""

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kielo.artifact.checkpoint_faults import Fault, FaultyCheckpoint, another_version, fault_of_reading
from kielo.artifact.checkpoint_folder import INDEX_NAME, VERSION, step_of
from kielo.artifact.checkpoint_index import CheckpointIndex
from kielo.artifact.manifest import (
    MANIFEST_NAME,
    Manifest,
    hash_json,
    installed_versions,
    write_text_atomically,
)

_OWN_DIGEST = "xxh3_128"  # the key for the digest of all its other content


def write_checkpoint_manifest(
    folder: Path,
    index: CheckpointIndex,
    files: dict[str, dict[str, Any]],
    tensor_bytes: int,
    wall_seconds: float,
) -> None:
    """Write `manifest.json`, which makes the folder a checkpoint: call it when all `files` are on the disk.

    files: name → {"bytes", "xxh3_64_blocks", "save_id"}, the index among them.
    """
    manifest = Manifest(
        kind="checkpoint",
        version=VERSION,
        inputs={},
        section={},
        counts={"step": index.step, "tensor_bytes": tensor_bytes, "save_id": index.save_id},
        wall_seconds=round(wall_seconds, 3),
        versions=installed_versions(),
        files=files,
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    content = dataclasses.asdict(manifest)
    write_text_atomically(
        Path(folder) / MANIFEST_NAME, _manifest_text(content | {_OWN_DIGEST: hash_json(content)})
    )


def read_checkpoint_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint; raises FaultyCheckpoint if it is missing or not what was written.

    It must be of the step in the folder's name, or a whole checkpoint could be taken for another.
    """
    folder = Path(folder)
    try:
        text = (folder / MANIFEST_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise FaultyCheckpoint(
            folder, Fault("damaged", f"{MANIFEST_NAME} is missing: the save did not finish")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FaultyCheckpoint(folder, fault_of_reading(MANIFEST_NAME, error)) from error
    fault = _manifest_fault(text)
    if fault is not None:
        raise FaultyCheckpoint(folder, fault)
    content = json.loads(text)
    del content[_OWN_DIGEST]
    manifest = Manifest(**content)
    step = step_of(folder.resolve())
    if step not in (None, manifest.counts["step"]):
        reason = (
            f"{MANIFEST_NAME} is the manifest of another checkpoint, that of step {manifest.counts['step']}"
        )
        raise FaultyCheckpoint(folder, Fault("damaged", reason))
    return manifest


def listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the files that the manifest lists: name → {"bytes", "xxh3_64_blocks", "save_id"}.

    Raises what `read_checkpoint_manifest` raises.
    """
    return read_checkpoint_manifest(folder).files


def _manifest_fault(text: str) -> Fault | None:
    """Returns the fault of a manifest's text; None if it is what was written.

    Another version may store its digest in another way; a version that the digest does not cover is a
    flipped bit.
    """
    altered = Fault(
        "damaged",
        f"{MANIFEST_NAME} is not what was written (its own checksum differs), so the files beside it cannot "
        "be checked",
    )
    try:
        content = json.loads(text)
        digest = content.pop(_OWN_DIGEST, None)
        kind, version = content["kind"], content["version"]
        is_ours = digest == hash_json(content | {"version": VERSION})
        if kind == "checkpoint" and isinstance(version, int) and version != VERSION and not is_ours:
            return another_version(
                MANIFEST_NAME, version, f", written by kielo {content['versions']['kielo']}"
            )
        if version != VERSION or not is_ours or text != _manifest_text(content | {_OWN_DIGEST: digest}):
            return altered
        manifest = Manifest(**content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return altered
    if manifest.kind != "checkpoint" or INDEX_NAME not in manifest.files:
        return Fault("damaged", f"{MANIFEST_NAME} is not that of a checkpoint but of a {manifest.kind}")
    return None


def _manifest_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
