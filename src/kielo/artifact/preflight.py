"""`preflight.json`: the verdict of `kielo preflight` on each node of a job, with all that was measured."""

from typing import Any, ClassVar

from kielo.artifact.stage_json import JsonFile, JsonObject

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
