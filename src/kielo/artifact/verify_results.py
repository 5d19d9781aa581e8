"""JSON of proofs: `verify/parity.json`, the certificate of parity, and `preflight.json`, of the nodes."""

from typing import Any, ClassVar

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject

# `preflight.json`: the verdict of `kielo preflight` on each node of a job, with all that was measured.


BAD_NODES_NAME = "bad_nodes.txt"  # beside preflight.json: the names of its bad nodes, one a line


class Complaint(JsonObject):
    """A finding of one check about a rank, and so about its node, or about the whole job."""

    check: str
    """Name of the check."""
    rank: int | None
    """The rank; null: the whole job, which no node is to blame for."""
    node: str | None
    """The rank's node; null for the whole job."""
    message: str
    """The fault, the expected value, and the difference."""
    is_refusal: bool
    """False: a warning, with which training may begin."""


class NodeVerdict(JsonObject):
    """One node and whether its ranks passed every check."""

    name: str
    """The scheduler's name of the node, or its host name."""
    ranks: list[int]
    """The ranks that ran on it."""
    passed: bool
    """False where a check refused one of its ranks."""


class CheckReport(JsonObject):
    """One check of the job."""

    name: str
    """Name of the check."""
    summary: str
    """The findings in a line."""
    seconds: float
    """How long it took; 0 where it was not run."""
    found: list[Any]
    """The measurements of each rank, in the order of the ranks; empty where the check was not run."""


class Preflight(JsonFile):
    """Verdict on the nodes of a job before training begins."""

    FILE_NAME: ClassVar[str] = "preflight.json"

    passed: bool
    """True if no check refused a node or the job."""
    bad_nodes: list[str]
    """Names of the nodes that a check refused."""
    nodes: list[NodeVerdict]
    """The nodes, in the order of their first ranks."""
    complaints: list[Complaint]
    """All findings, refusals first."""
    checks: list[CheckReport]
    """The checks, in the order in which they ran."""
    ranks: int
    """Number of ranks."""
    seconds: float
    """How long all checks took together, without the start of the ranks."""
    finished_at: str
    """Time of the verdict, by rank 0's clock (ISO 8601, UTC)."""


# `verify/parity.json`: the certificate that Kielo and Hugging Face's transformers compute the same.


ROUNDING_FACTOR = 10  # losses may part this many times as far as by rounding alone; seen: up to 4


class Settings(JsonObject):
    """Effective settings, side by side."""

    ours: JsonTable
    """Name of the setting → its value in Kielo."""
    theirs: JsonTable
    """Name of the setting → its value in transformers."""
    differing: list[str]
    """Names of the settings that differ."""


class Losses(JsonObject):
    """The loss of each optimiser step, in nats per token."""

    ours: list[float]
    """Kielo's, one for each step."""
    theirs: list[float]
    """Those of transformers, one for each step."""
    relative_differences: list[float]
    """|ours - theirs| / |theirs| of each step."""
    rounding_differences: list[float] | None = None
    """Largest relative difference up to each step between transformers and itself, trained from weights
    that are one unit in the last place off; null: not measured, since all losses are within the tolerance
    or step 1 differs.
    """


class GradientNorms(JsonObject):
    """The gradient norm of each optimiser step, before clipping."""

    ours: list[float]
    """Kielo's, one for each step."""
    theirs: list[float]
    """Those of transformers, one for each step."""


class FirstDifference(JsonObject):
    """The place where the two sides part first, as far as it is known."""

    layer: str | None = None
    """The first layer whose outputs or gradients differ."""
    where: str | None = None
    """The pass in which that layer differs."""
    relative_difference: float | None = None
    """Relative distance of that layer's values."""
    settings: list[str] | None = None
    """Names of the settings that differ."""
    weight: str | None = None
    """The starting weight that differs most; null: none differs."""
    gradient: str | None = None
    """The gradient of step 1 that differs most; null: none is beyond the tolerance."""
    update: str | None = None
    """The weight that differs most after step 1; null where the losses never part."""
    step: int | None = None
    """The first step whose losses are further apart than their limit."""


class SourceFolder(JsonObject):
    """The folder of model.weights as Kielo imports it and as transformers reads it, before any step."""

    passed: bool
    """True if the logits are equal but for rounding and no setting differs."""
    folder: str
    """The folder that both have read."""
    layers: int
    """Layers that were compared; fewer than the model's if it is too large to load twice."""
    layers_of_model: int
    """Layers of the model."""
    is_transplanted: bool
    """True with model.transplant: the rows that Kielo makes for the run's vocabulary are in no file."""
    sequence_length: int
    """Tokens of a sequence, drawn at random from the folder's own vocabulary."""
    logits_max_difference: float
    """Largest absolute difference of the logits."""
    logits_relative_difference: float
    """Relative distance of the logits."""
    settings: Settings
    """Settings of both models, windows of all layers too."""
    layer: str | None
    """The first layer whose values differ; null: none does."""
    where: str | None
    """The part of that layer in which they differ."""

    def in_words(self) -> str:
        """Return a sentence: what was compared, and how far apart it is."""
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
            found += "; all layers are equal, and what follows the head is not"
        return found + "."


class Parity(JsonFile):
    """Comparison of Kielo and transformers: the same weights and samples, trained in fp32 in one process."""

    FILE_NAME: ClassVar[str] = "parity.json"

    passed: bool
    """True if losses and gradients are within their limits, no setting differs and the source is equal."""
    max_relative_loss_difference: float
    """Largest relative difference of the losses over all steps."""
    logits_max_difference: float
    """Largest absolute difference of the first batch's logits, before the first step."""
    gradient_max_relative_difference: float
    """Largest relative difference of a tensor's gradient in step 1."""
    settings: Settings
    losses: Losses
    gradient_norms: GradientNorms
    first_difference: FirstDifference | None
    source: SourceFolder | None = None
    """The import of model.weights; null: the run began from initial values."""
    weights: str
    """Origin of the weights: a checkpoint, Hugging Face weights, or the initial values of a seed."""
    steps: int
    """Optimiser steps that were compared."""
    sequences_per_step: int
    """Sequences of each step."""
    tolerance: float
    """Largest relative difference of the losses with which the certificate passes, but for rounding's."""
    sequence_length: int
    """Tokens of a sequence."""
    hugging_face_overrides: JsonTable
    """Settings of transformers that were set wrong on purpose, to check the check; empty in a run."""

    def limit_in_words(self) -> str:
        """Return how far apart the losses may be, as part of a sentence."""
        limit = f"tolerance {self.tolerance:.0e}"
        rounding = self.losses.rounding_differences
        if rounding is None:
            return limit
        return (
            f"{limit}, or {ROUNDING_FACTOR} times what rounding alone makes: transformers parts from itself "
            f"by up to {rounding[-1]:.1e}"
        )


def loss_limits(tolerance: float, rounding_differences: list[float]) -> list[float]:
    """Return the largest relative difference of each step's losses with which the certificate passes."""
    return [max(tolerance, ROUNDING_FACTOR * value) for value in rounding_differences]
