"""The certificate of parity: its inputs, a check that it is current, and its table. Torch-free."""

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import MANIFEST_NAME, hash_manifest, is_current
from kielo.artifact.stage_json import read_stage_json
from kielo.artifact.verify_results import Parity, loss_limits
from kielo.resolve.resolved import Resolved, as_stored_now, stored_identity

KIND, VERSION = "parity", 3


@dataclass(frozen=True)
class ParityOptions:
    """Options of the parity check: steps, their size, and the tolerance."""

    steps: int = 20
    sequences_per_step: int = 4
    tolerance: float = 1e-5  # largest relative difference of a step's losses
    sequence_length: int = 128
    # Keys to set wrong on purpose (`rope_theta`, `rms_norm_eps`, `weight_decay`, …), to check the check.
    hugging_face_overrides: JsonTable = field(default_factory=dict)

    def fitting(self, max_position_embeddings: int) -> "ParityOptions":
        """Return these options with sequences no longer than the model has positions."""
        return replace(self, sequence_length=min(self.sequence_length, max_position_embeddings))


def asked(
    resolved: Resolved, checkpoint: Path | None, options: ParityOptions
) -> tuple[dict[str, str], JsonTable]:
    """Return the inputs and the section of the stage: the certified run and checkpoint, and the options."""
    options = options.fitting(resolved.identity.model.max_position_embeddings)
    inputs = {"tokens": resolved.identity.tokens_hash}
    if checkpoint is not None:
        inputs["checkpoint"] = hash_manifest(checkpoint)
    return inputs, asdict(options) | {"identity": stored_identity(resolved.identity)}


def current_certificate(
    resolved: Resolved, folder: Path, checkpoint: Path | None, options: ParityOptions
) -> Parity | None:
    """Return the certificate in `folder` if it certifies the same inputs and passed, else None.

    A failed certificate is made again: the cause may have been outside the recipe.
    """
    inputs, section = asked(resolved, checkpoint, options)
    if not is_current(folder, KIND, VERSION, inputs, section, migrate=partial(_migrated, folder)):
        return None
    certificate = read_stage_json(folder, Parity)
    return certificate if certificate is not None and certificate.passed else None


def _migrated(folder: Path, section: JsonTable) -> JsonTable:
    """Return a manifest's section, of any version of the identity's format, in this version's format."""
    if "identity" not in section:
        return section
    return section | {"identity": as_stored_now(section["identity"], folder / MANIFEST_NAME)}


def print_parity(certificate: Parity, console: Console | None = None) -> None:
    console = console or Console()
    ours, theirs = certificate.settings.ours, certificate.settings.theirs
    different = set(certificate.settings.differing)
    table = Table(title="Effective settings", title_justify="left")
    for column in ("", "Kielo", "Hugging Face"):
        table.add_column(column)
    for name, value in ours.items():
        style = "bold red" if name in different else None
        label = f"≠ {name}" if name in different else name
        table.add_row(label, in_words(value), in_words(theirs[name]), style=style)
    console.print(table)

    curves = Table(title="Loss of each step (nats per token)", title_justify="left")
    losses = certificate.losses
    rounding = losses.rounding_differences
    shown = ("step", "Kielo", "Hugging Face", "relative difference")
    for column in (*shown, *(() if rounding is None else ("by rounding alone, so far",))):
        curves.add_column(column, justify="right")
    limits = loss_limits(certificate.tolerance, rounding or [0.0] * len(losses.ours))
    for index, (our_loss, their_loss, difference, limit) in enumerate(
        zip(losses.ours, losses.theirs, losses.relative_differences, limits, strict=True)
    ):
        cells = [str(index + 1), f"{our_loss:.7f}", f"{their_loss:.7f}", f"{difference:.1e}"]
        cells += [] if rounding is None else [f"{rounding[index]:.1e}"]
        curves.add_row(*cells, style="bold red" if not difference <= limit else None)
    console.print(curves)
    console.print(verdict(certificate), style="green" if certificate.passed else "bold red", highlight=False)


def verdict(certificate: Parity) -> str:
    """Return one paragraph: passed with the figures, or the differences with their first place."""
    figures = (
        f"largest relative loss difference {certificate.max_relative_loss_difference:.1e} over "
        f"{certificate.steps} steps ({certificate.limit_in_words()}); logits differ by at most "
        f"{certificate.logits_max_difference:.1e}, gradients by "
        f"{certificate.gradient_max_relative_difference:.1e}"
    )
    source = [] if certificate.source is None else [certificate.source.in_words()]
    if certificate.passed:
        return "\n".join([*source, f"Parity with Hugging Face holds: {figures}."])
    lines = [*source, f"NO parity with Hugging Face: {figures}."]
    if (first := certificate.first_difference) is None:
        return "\n".join(lines)
    if first.settings:
        ours, theirs = certificate.settings.ours, certificate.settings.theirs
        lines += [
            f"Setting: {name}: {in_words(ours[name])} here, {in_words(theirs[name])} there."
            for name in first.settings
        ]
    if first.layer and first.relative_difference is not None:
        lines.append(
            f"First layer that differs: {first.layer} ({first.where}; relative "
            f"{first.relative_difference:.1e})."
        )
    parts = {
        "Starting weight that differs": first.weight,
        "Gradient that differs most": first.gradient,
        "Weight that differs most after step 1": first.update,
    }
    lines += [f"{label}: {name}." for label, name in parts.items() if name]
    if first.step:
        lines.append(f"Losses part at step {first.step}.")
    return "\n".join(lines)


def in_words(value: Any) -> str:
    if isinstance(value, dict):
        groups = sorted(Counter(value.values()).items())
        return "; ".join(f"{decay:g}: {count} tensors" for decay, count in groups)
    if isinstance(value, (list, tuple)):
        if len(value) > 4:
            return f"{in_words(value[0])}, {in_words(value[1])} … {in_words(value[-1])} ({len(value)})"
        return ", ".join(map(in_words, value)) or "none"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
