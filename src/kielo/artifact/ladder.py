"""`ladder.json`: a run's layouts on several numbers of nodes, as planned and as ten steps of each measured.

It is in the ladder's folder, RUN/launch/ladder_SITE, whose folder NODES_nodes/LAYOUT is a run of its own for
each rung. `kielo launch --ladder` writes what is planned, `kielo status` adds what was measured.
"""

from typing import ClassVar

from kielo.artifact.stage_json import JsonFile, JsonObject

PAGE_NAME, TABLE_NAME = "ladder.html", "ladder.md"  # beside ladder.json


class PlannedSpeed(JsonObject):
    """The planner's forecast of a rung."""

    tokens_per_second: float
    """Over all ranks."""
    low_tokens_per_second: float
    """The slow end of the interval in which the speed is expected."""
    high_tokens_per_second: float
    """The fast end."""
    tflops_per_device: float
    """TFLOP/s of a device: model FLOPs, without recomputation."""


class MeasuredSpeed(JsonObject):
    """The median of a rung's steps, without the first ones."""

    steps: int
    """Steps that the median is of."""
    step_seconds: float
    """Seconds of an optimiser step."""
    tokens_per_second: float
    """Over all ranks."""
    tflops_per_device: float
    """TFLOP/s of a device: model FLOPs, without recomputation."""


class Rung(JsonObject):
    """One layout on one number of nodes."""

    nodes: int
    """Number of nodes."""
    devices: int
    """Number of devices, each with one rank."""
    layout: str
    """The layout's name."""
    folder: str
    """The rung's own run folder, below the ladder's."""
    planned: PlannedSpeed | None
    """The forecast; null: no card says how fast the devices are."""
    measured: MeasuredSpeed | None
    """The measurement; null: not yet made, or its steps failed."""
    state: str
    """"measured", "not run yet", or why its steps failed."""


class ReferenceSpeed(JsonObject):
    """A speed that others measured on this machine, with a model of about this size."""

    nodes: int
    """Number of nodes."""
    tflops_per_device: float
    """TFLOP/s of a device, as its source counts them."""
    tolerance: float
    """Share of it, either way, that the source accepts."""
    software: str
    """The software that trained, and its model's size."""
    source: str
    """Its source, with a date."""


class Ladder(JsonFile):
    """A ladder of measurements: layouts on growing numbers of nodes, planned beside measured."""

    FILE_NAME: ClassVar[str] = "ladder.json"

    name: str
    """The run's name."""
    cluster: str
    """The name of the cluster's card, or the path of an own one."""
    machine: str
    """The card of `kielo plan calibrate` that the plan counted with; empty: the shipped constants."""
    parameters: int
    """The model's parameters."""
    tokens_per_step: int
    """Tokens of an optimiser step, over all ranks."""
    sequence_length: int
    """Tokens of a sequence."""
    rungs: list[Rung]
    """The rungs, few nodes first, and on each number of nodes the fastest by plan first."""
    references: list[ReferenceSpeed]
    """Speeds that others measured there; empty: the card has none for models of about this size."""
    kielo_version: str
    """The version of Kielo that wrote the file."""
    written_at: str
    """Time in UTC."""
