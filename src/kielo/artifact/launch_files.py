"""JSON of launches: `site.json`, `launch.json` and `ladder.json`."""

from typing import ClassVar, Literal

from kielo.artifact.attempt_files import UtcTime
from kielo.artifact.stage_json import JsonFile, JsonObject

Work = Literal["train", "evaluate", "watch", "corpus", "pack"]


class MadeSite(JsonFile):
    """The container image and the environment of Kielo that site.sh made on a cluster, for its jobs."""

    FILE_NAME: ClassVar[str] = "site.json"

    cluster: str
    image: str
    """Container image in which ranks start; empty: none."""
    venv: str
    """Virtual environment with Kielo, as ranks see it."""
    squash: str
    """File that the container mounts there; empty: the environment is a folder."""
    python: str
    torch: str
    made_at: UtcTime


class Forecast(JsonObject):
    layout: str
    tokens_per_second: float
    """Over all ranks, in the phase with most tokens."""
    step_seconds: float
    interval_seconds: list[float]
    """Expected interval of the seconds of a step, low and high."""
    peak_gigabytes: float
    """10^9 bytes at the peak of the fullest device."""
    usable_gigabytes: float
    """10^9 bytes that a device can give."""
    wall_hours: float
    """Hours of the whole run, with starts of jobs, saves and held-out text."""
    device_hours: float
    """Hours of all devices together, of the whole run."""
    safe_device_hours: float | None = None
    """By the slower of the plan and a published engine on such devices; null: a launch of an older Kielo."""
    billed: float | None
    """Bill in the site's billing unit; null: its card does not say."""
    billing_unit: str
    """Empty: the site's card does not say."""
    jobs: int
    """Consecutive jobs of the longest requested time."""
    checkpoint_gigabytes: float
    checkpoint_seconds: float
    """Seconds until a save is safe on disk."""
    save_stop_seconds: float
    """Seconds for which a save stops training."""


class Launch(JsonFile):
    """The request of a `kielo launch`, with its forecast and versions."""

    FILE_NAME: ClassVar[str] = "launch.json"

    cluster: str
    """Name of the cluster's card, or path of an own card."""
    scheduler: str
    """slurm, pbs or grid_engine."""
    job_name: str
    work: Work = "train"
    """The jobs train, score the newest checkpoint, or score each new checkpoint."""
    nodes: int
    spares: int
    """Further nodes of a job."""
    devices: int
    """Devices that train, each with one rank."""
    partition: str
    wall_seconds: int
    """Longest time of a job."""
    grace_seconds: int
    """Seconds before its end at which a job is asked to save and stop."""
    jobs: int
    """Jobs in the chain."""
    forecast: Forecast | None
    """null: no card says how fast the devices are."""
    no_forecast: str
    """Reason; empty if there is a forecast."""
    versions: dict[str, str]
    """Versions of Kielo (and its commit, if known), Python, the scheduler's command and the card."""
    created_at: UtcTime


# The ladder's folder, RUN/launch/ladder_SITE, has a run NODES_nodes/LAYOUT of ten steps for each rung.
# `kielo launch --ladder` writes the plan, `kielo status` adds the measurements.
TABLE_NAME = "ladder.md"  # beside ladder.json


class PlannedSpeed(JsonObject):
    """The planner's forecast of a rung, over all ranks."""

    tokens_per_second: float
    low_tokens_per_second: float
    """Low end of the expected interval."""
    high_tokens_per_second: float
    tflops_per_device: float
    """Model FLOPs, without recomputation."""


class MeasuredSpeed(JsonObject):
    """The median of a rung's steps, without the first steps."""

    steps: int
    step_seconds: float
    tokens_per_second: float
    """Over all ranks."""
    tflops_per_device: float
    """Model FLOPs, without recomputation."""


class Rung(JsonObject):
    nodes: int
    devices: int
    layout: str
    folder: str
    """The rung's own run folder, below the ladder's."""
    planned: PlannedSpeed | None
    """null: no card says how fast the devices are."""
    measured: MeasuredSpeed | None
    """null: not yet measured, or its steps failed."""
    state: str
    """"measured", "not run yet", or the failure of its steps."""


class ReferenceSpeed(JsonObject):
    """A published speed of this machine, with a model of about this size."""

    nodes: int
    tflops_per_device: float
    tolerance: float
    """Share of it, either way, that the source accepts."""
    software: str
    """The software that trained, and its model's size."""
    source: str


class Ladder(JsonFile):
    """A ladder of measurements: layouts on growing numbers of nodes, planned beside measured."""

    FILE_NAME: ClassVar[str] = "ladder.json"

    name: str
    cluster: str
    """Name of the cluster's card, or path of an own card."""
    machine: str
    """Card of `kielo plan calibrate` that the plan used; empty: the shipped constants."""
    parameters: int
    tokens_per_step: int
    sequence_length: int
    rungs: list[Rung]
    """Few nodes first, and for each number of nodes the fastest planned layout first."""
    references: list[ReferenceSpeed]
    """Empty: the card has none for models of about this size."""
    kielo_version: str
    written_at: UtcTime
