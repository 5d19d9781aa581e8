"""The certificate of parity as a stage: what it certifies, and whether one is there already; torch-free."""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import MANIFEST_NAME, hash_manifest, is_current
from kielo.artifact.parity import Parity
from kielo.artifact.stage_json import read_stage_json
from kielo.resolve.resolved import Resolved, as_stored_now, stored_identity

KIND, VERSION = "parity", 3


@dataclass(frozen=True)
class ParityOptions:
    """Options of the parity check: how many steps of what size, and what counts as equal.

    tolerance: the largest relative difference of a step's losses. hugging_face_overrides: keys of the Hugging
    Face side to set wrong on purpose (`rope_theta`, `rms_norm_eps`, `weight_decay`, …): the check of the
    check.
    """

    steps: int = 20
    sequences_per_step: int = 4
    tolerance: float = 1e-5
    sequence_length: int = 128
    hugging_face_overrides: dict[str, Any] = field(default_factory=dict)

    def fitting(self, max_position_embeddings: int) -> "ParityOptions":
        """Returns these options with sequences no longer than the model has positions."""
        return replace(self, sequence_length=min(self.sequence_length, max_position_embeddings))


def asked(
    resolved: Resolved, checkpoint: Path | None, options: ParityOptions
) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the inputs and the section of the stage: which run and checkpoint are certified, and how."""
    options = options.fitting(resolved.identity.model.max_position_embeddings)
    inputs = {"tokens": resolved.identity.tokens_hash}
    if checkpoint is not None:
        inputs["checkpoint"] = hash_manifest(checkpoint)
    return inputs, asdict(options) | {"identity": stored_identity(resolved.identity)}


def current_certificate(
    resolved: Resolved, folder: Path, checkpoint: Path | None, options: ParityOptions
) -> Parity | None:
    """Returns the certificate in `folder` if it certifies just this and passed; else None.

    One that failed is checked again: the cause may have been outside the recipe.
    """
    inputs, section = asked(resolved, checkpoint, options)
    if not is_current(folder, KIND, VERSION, inputs, section, migrate=partial(_migrated, folder)):
        return None
    certificate = read_stage_json(folder, Parity)
    return certificate if certificate.passed else None


def _migrated(folder: Path, section: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest's section, of any version of the identity's format, as this version writes it."""
    return section | {"identity": as_stored_now(section.get("identity", {}), folder / MANIFEST_NAME)}
