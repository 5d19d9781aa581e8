"""JSON of proofs: `verify/parity.json`, the certificate of parity, and `preflight.json`, of the nodes."""

from typing import Any, ClassVar

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject

PARITY_ON_RANKS = "parity_on_ranks"  # folder of its certificate, beside verify/, which a stage replaces
BAD_NODES_NAME = "bad_nodes.txt"  # beside preflight.json: the names of its bad nodes, one a line


class Complaint(JsonObject):
    """A finding of a check about a rank, and so about its node, or about the whole job."""

    check: str
    rank: int | None
    """null: the whole job, for which no node is blamed."""
    node: str | None
    message: str
    """The fault, the expected value, and the difference."""
    is_refusal: bool
    """False: a warning; training can begin."""


class NodeVerdict(JsonObject):
    name: str
    """The scheduler's name of the node, or its host name."""
    ranks: list[int]
    passed: bool


class CheckReport(JsonObject):
    name: str
    summary: str
    seconds: float
    """0 if it did not run."""
    found: list[Any]
    """Measurements of each rank, in order; empty if it did not run."""


class Preflight(JsonFile):
    """Verdict on the nodes of a job before training begins."""

    FILE_NAME: ClassVar[str] = "preflight.json"

    passed: bool
    bad_nodes: list[str]
    nodes: list[NodeVerdict]
    """In the order of their first ranks."""
    complaints: list[Complaint]
    """Refusals first."""
    checks: list[CheckReport]
    """In the order in which they ran."""
    ranks: int
    seconds: float
    """Seconds of all checks, without the start of the ranks."""
    finished_at: str
    """Time of rank 0 (ISO 8601, UTC)."""


ROUNDING_FACTOR = 10  # losses can differ by this many times the difference of rounding alone; seen: up to 4


class Settings(JsonObject):
    """Effective settings of both: name → value."""

    ours: JsonTable
    theirs: JsonTable
    differing: list[str]


class Losses(JsonObject):
    """The loss of each optimiser step, in nats per token."""

    ours: list[float]
    theirs: list[float]
    relative_differences: list[float]
    """|ours - theirs| / |theirs| of each step."""
    rounding_differences: list[float] | None = None
    """Largest relative difference up to each step between transformers and itself, trained from weights that
    differ by a unit in the last place. null: not measured, because all losses are within the tolerance or
    step 1 differs."""


class GradientNorms(JsonObject):
    ours: list[float]
    theirs: list[float]


class FirstDifference(JsonObject):
    layer: str | None = None
    """First layer whose outputs or gradients differ."""
    where: str | None = None
    """Pass in which that layer differs."""
    relative_difference: float | None = None
    settings: list[str] | None = None
    weight: str | None = None
    """First weight that differs most; null: none differs."""
    gradient: str | None = None
    """Gradient of step 1 that differs most; null: none is beyond the tolerance."""
    update: str | None = None
    """Weight that differs most after step 1; null if the losses never differ."""
    step: int | None = None
    """First step whose losses differ by more than their limit."""


class SourceFolder(JsonObject):
    """The folder of model.weights as Kielo imports it and as transformers reads it, before any step."""

    passed: bool
    """True if the logits are equal but for rounding and no setting differs."""
    folder: str
    layers: int
    """Compared layers; fewer than the model's if it is too large to load twice."""
    layers_of_model: int
    is_transplanted: bool
    """True with model.transplant: no file has the rows of the run's vocabulary."""
    sequence_length: int
    """Tokens of a sequence, drawn at random from the folder's own vocabulary."""
    logits_max_difference: float
    """Largest absolute difference."""
    logits_relative_difference: float
    settings: Settings
    """With the windows of all layers."""
    layer: str | None
    """First layer whose values differ; null: none."""
    where: str | None
    """Part of that layer in which they differ."""

    def in_words(self) -> str:
        which = " with their own vocabulary" if self.is_transplanted else ""
        if self.layers < self.layers_of_model:
            which += f" with {self.layers} of {self.layers_of_model} layers (too large to load twice)"
        found = (
            f"Before any step, Kielo's import of the weights and transformers' own reading{which} "
            f"{'are equal' if self.passed else 'DIFFER'}: logits by at most "
            f"{self.logits_max_difference:.1e} ({self.logits_relative_difference:.1e} relative)"
        )
        if self.settings.differing:
            found += f"; settings that differ: {', '.join(self.settings.differing)}"
        if self.layer:
            found += f"; first layer that differs: {self.layer} ({self.where})"
        elif not self.passed and not self.settings.differing:
            found += "; all layers are equal, but the head's output is not"
        return found + "."


class Parity(JsonFile):
    """Comparison of Kielo and transformers: the same weights and samples, trained by both."""

    FILE_NAME: ClassVar[str] = "parity.json"

    passed: bool
    """True if losses and gradients are within their limits, no setting differs and the source is equal."""
    max_relative_loss_difference: float
    """Over all steps."""
    logits_max_difference: float
    """Largest absolute difference of the first batch's logits, before the first step."""
    gradient_max_relative_difference: float
    """Largest of a tensor's gradient in step 1."""
    settings: Settings
    losses: Losses
    gradient_norms: GradientNorms
    first_difference: FirstDifference | None
    source: SourceFolder | None = None
    """Import of model.weights; null: the run began from initial values."""
    weights: str
    """Origin of the weights: a checkpoint, Hugging Face weights, or the initial values of a seed."""
    steps: int
    sequences_per_step: int
    tolerance: float
    """Largest relative difference of the losses that passes, apart from rounding."""
    sequence_length: int
    hugging_face_overrides: JsonTable
    """Settings of transformers that were set wrong on purpose, to check the check; empty in a run."""
    precision: str = "fp32"
    """Precision of the steps. Logits and gradients are compared in fp32."""
    layout: str = ""
    """Kielo's layout and precision; empty: one process in fp32."""

    def limit_in_words(self) -> str:
        limit = f"tolerance {self.tolerance:.0e}"
        rounding = self.losses.rounding_differences
        if rounding is None:
            return limit
        return (
            f"{limit}, or {ROUNDING_FACTOR} times the effect of rounding alone: transformers differs from "
            f"itself by up to {rounding[-1]:.1e}"
        )


def loss_limits(tolerance: float, rounding_differences: list[float]) -> list[float]:
    return [max(tolerance, ROUNDING_FACTOR * value) for value in rounding_differences]
