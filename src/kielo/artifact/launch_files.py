"""JSON of launches: `site.json`, `launch.json` and `ladder.json`."""

from typing import ClassVar

from kielo.artifact.stage_json import JsonFile, JsonObject

# `site.json` in the folder of a site: the image and the environment that site.sh made there.


class MadeSite(JsonFile):
    """The container image and the environment of Kielo that site.sh made on a cluster, for its jobs."""

    FILE_NAME: ClassVar[str] = "site.json"

    cluster: str
    """Name of the cluster's card."""
    image: str
    """The container image in which ranks start; empty: none."""
    venv: str
    """The virtual environment with Kielo, as ranks see it."""
    squash: str
    """The file that the container mounts there; empty: the environment is a folder."""
    python: str
    """Version of its Python."""
    torch: str
    """Version of its torch."""
    made_at: str
    """Time in UTC."""


# `launch.json` in the folder of a launch: what was asked of a cluster, and what the planner expects.


class Forecast(JsonObject):
    """The planner's forecast of a run."""

    layout: str
    """The layout's name."""
    tokens_per_second: float
    """Over all ranks, of the phase with most tokens."""
    step_seconds: float
    """Seconds of an optimiser step."""
    interval_seconds: list[float]
    """Interval in which the seconds of a step are expected, low and high."""
    peak_gigabytes: float
    """10^9 bytes at the peak of the fullest device."""
    usable_gigabytes: float
    """10^9 bytes that a device can give."""
    wall_hours: float
    """Hours of the whole run on the machine, with starts of jobs, saves and held-out text."""
    device_hours: float
    """Hours of all devices together, of the whole run."""
    billed: float | None
    """The site's bill for them, in its billing unit; null: its card does not say."""
    billing_unit: str
    """The site's billing unit; empty: its card does not say."""
    jobs: int
    """Jobs of the longest time that was asked for, one after another."""
    checkpoint_gigabytes: float
    """10^9 bytes of a checkpoint."""
    checkpoint_seconds: float
    """Seconds until a save is safe on disk."""
    save_stop_seconds: float
    """Seconds for which a save stops training."""


class Launch(JsonFile):
    """The request of one `kielo launch`, with its forecast and the versions that it was made by."""

    FILE_NAME: ClassVar[str] = "launch.json"

    cluster: str
    """The name of the cluster's card, or the path of an own one."""
    scheduler: str
    """slurm, pbs or grid_engine."""
    job_name: str
    """The jobs' name at the scheduler."""
    nodes: int
    """Nodes that train."""
    spares: int
    """Nodes of a job beyond those."""
    devices: int
    """Devices that train, each with one rank."""
    partition: str
    """The queue."""
    wall_seconds: int
    """Longest time of a job."""
    grace_seconds: int
    """Seconds before its end at which a job is asked to save and stop."""
    jobs: int
    """Jobs in the chain."""
    forecast: Forecast | None
    """The planner's forecast; null: no card says how fast the devices are."""
    no_forecast: str
    """Why there is no forecast; empty: there is one."""
    versions: dict[str, str]
    """Versions of Kielo, Python, the scheduler's command and the card; Kielo's commit where it has one."""
    created_at: str
    """Time in UTC."""


# `ladder.json`: a run's layouts on several numbers of nodes, as planned and as ten steps of each measured.
#
# It is in the ladder's folder, RUN/launch/ladder_SITE, whose folder NODES_nodes/LAYOUT is a run of its own
# for each rung. `kielo launch --ladder` writes what is planned, `kielo status` adds what was measured.


TABLE_NAME = "ladder.md"  # beside ladder.json


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
