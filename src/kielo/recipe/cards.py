"""Cards: facts of languages, clusters and accelerators. A name → a frozen, typed card.

Cards are TOML files inside the package (kielo/cards), so a new language or machine is a file, not a patch;
each figure has its source and date in the card.
"""

import os
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from kielo.recipe.complaints import did_you_mean, from_validation, refuse
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Section
from kielo.recipe.toml_text import line_of, lines_of_keys

_MOST_IB_TIMEOUT = 22
_CARDS = Path(__file__).resolve().parent.parent / "cards"
NEW_CARD = _CARDS / "new_cluster.toml"  # to fill in; @NAME@ stands for its name


class Language(Section):
    """A language: how it is written, what the identifiers call it, and how sure they must be."""

    code: str
    name: str
    script: str = Field(description="Latin, Japanese, …: for people")
    unicode_scripts: tuple[str, ...] = Field(
        (), description="scripts its letters are in; default: `script` alone"
    )
    letters: str = Field("", description="lower-case letters; empty: every letter of its scripts")
    identifier_codes: dict[str, tuple[str, ...]]
    line_language_threshold: dict[str, float]
    document_language_threshold: dict[str, float]
    notes: str = ""

    @model_validator(mode="before")
    @classmethod
    def _scripts(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("unicode_scripts") and "script" in data:
            data = data | {"unicode_scripts": (data["script"],)}
        return data


class Accelerator(Section):
    """A device as PyTorch sees it. `peak_tflops` maps each precision that is known to dense TFLOP/s."""

    name: str
    device: Literal["cpu", "cuda"]
    device_names: tuple[str, ...] = Field((), description="parts of the name that the driver gives it")
    memory_bytes: int | None = Field(
        None, gt=0, description="as sold, in decimal; left out where it is the machine's"
    )
    given_bytes: int | None = Field(
        None, gt=0, description="that the driver gives a process; default: 0.99 × 2^30 for each 10^9 sold"
    )
    context_bytes: int = Field(
        0, ge=0, description="of those, what the driver's context and communicators take"
    )
    memory_source: str = Field("", description="of given_bytes and context_bytes")
    peak_tflops: dict[Literal["bf16", "fp32", "fp8", "fp4"], float] = Field(
        description="bf16 is fp16's rate too"
    )
    architecture: str = Field("cpu", description="whose fitted constants it has")
    memory_bandwidth_tb_per_second: float | None = None
    link_gb_per_second: float = Field(
        0.0, description="to the other devices of a node, one way, in 10^9 bytes"
    )
    allocator_settings: str = Field(
        "", description="PYTORCH_ALLOC_CONF of a training, where the environment sets none"
    )
    power_share: float = Field(1.0, description="its power limit by that of its architecture's full part")
    source: str
    date: str
    notes: str = ""


class Partition(Section):
    """A queue of a site, with its limits. Those of the usual one are the card's own, and left out here.

    Several of one name may have different limits: the first that gives a job's nodes is taken.
    """

    name: str = Field(
        "",
        description="as the scheduler calls it; of Grid Engine the type of node; empty: Slurm chooses it by "
        "qos or constraint",
    )
    max_hours: float | None = Field(None, gt=0, description="longest job")
    min_nodes: int = Field(1, gt=0, description="fewest nodes of a job")
    max_nodes: int | None = Field(None, gt=0, description="most nodes of a job")
    max_jobs: int | None = Field(None, gt=0, description="jobs of one person, waiting and running together")
    qos: str = Field("", description="quality of service that goes with it, where the site wants one")
    constraint: str = Field("", description="features of its nodes, as sbatch --constraint takes them")

    @property
    def label(self) -> str:
        """How messages and `--partition` call it."""
        return self.qos or self.name or self.constraint

    @model_validator(mode="after")
    def _is_named(self) -> "Partition":
        if not self.label:
            raise ValueError("it has none of name, qos and constraint; give at least one of them")
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than max_nodes {self.max_nodes}")
        return self


class Jobs(Section):
    """How a site wants its jobs: what `kielo launch` writes into their scripts.

    `sources` names the origin of each field that the card sets.
    """

    partitions: tuple[Partition, ...] = Field(min_length=1, description="the usual one first")
    devices: str = Field(
        "", description="the request for all devices of a node, without the scheduler's own prefix"
    )
    options: tuple[str, ...] = Field((), description="further lines of the request")
    account: str = Field(
        "", description="pattern of a project's name, which the job must have; empty: the job needs none"
    )
    account_example: str = Field("", description="such a name, for the message that asks for one")
    architecture: Literal["x86_64", "aarch64"] = Field("x86_64", description="of the processors, by uname -m")
    setup: tuple[str, ...] = Field((), description="lines of bash before anything else: modules")
    container: tuple[str, ...] = Field(
        (), description="the command in which ranks start, up to the image; empty: no container"
    )
    image: str = Field("", description="the site's container image with torch")
    squash: tuple[str, ...] = Field(
        (),
        description="options of the mksquashfs that packs an environment into one file, which the container "
        "mounts; empty: it stays a folder",
    )
    storage: str = Field("", description="where environments and runs lie, and what is too small for them")
    driver_cuda: str = Field("", description="newest CUDA that the site's driver runs, as 12.2")
    cpu_bind: str = Field("cores", description="how srun binds the ranks of a node to cores")
    environment: dict[str, str] = Field({}, description="variables of every rank")
    environment_between_nodes: dict[str, str] = Field({}, description="those of jobs of several nodes")
    network_log: str = Field(
        "",
        description="regular expression of what NCCL's or RCCL's log says where the fast network is used",
    )
    host_suffix: str = Field("", description="what a host's name lacks to be reached over the fast network")
    node_folder: str = Field("/tmp", description="a node's own folder, for caches of compilers")
    stripe: str = Field("", description="command that spreads a folder's files over the file system")
    sources: dict[str, str] = Field(
        description="field of this table → where its content is from, with a date"
    )

    @field_validator("environment", "environment_between_nodes")
    @classmethod
    def _has_valid_timeout(cls, variables: dict[str, str]) -> dict[str, str]:
        """An InfiniBand adapter waits 4.096 µs × 2^NCCL_IB_TIMEOUT; NCCL's documentation gives the range."""
        timeout = variables.get("NCCL_IB_TIMEOUT", "20")
        if not (timeout.isdecimal() and 1 <= int(timeout) <= _MOST_IB_TIMEOUT):
            raise ValueError(
                f"NCCL_IB_TIMEOUT = {timeout} is an exponent, not seconds. Fix: a whole number "
                f"of 1 to {_MOST_IB_TIMEOUT}"
            )
        return variables

    @model_validator(mode="after")
    def _has_one_constraint(self) -> "Jobs":
        both = [one for one in self.options if re.match(r"(--constraint|-C)\b", one)]
        if both and any(one.constraint for one in self.partitions):
            raise ValueError(f"{both[0]} in options would replace the constraint of a partition; give one")
        return self

    @model_validator(mode="after")
    def _has_sources(self) -> "Jobs":
        given = self.model_fields_set - {"sources", "account_example"}
        if given != set(self.sources) - {"account_example"}:
            differing = ", ".join(sorted(given ^ set(self.sources) - {"account_example"}))
            raise ValueError(f"jobs.sources must name each field of the table: {differing}")
        if empty := [field for field, origin in self.sources.items() if not origin.strip()]:
            raise ValueError(f"jobs.sources says nothing of: {', '.join(empty)}")
        return self

    @field_validator("account", "network_log")
    @classmethod
    def _is_expression(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"it is no regular expression ({error})") from None
        return pattern


class Reference(Section):
    """A speed that others measured on a machine: training of a dense model, by the site's own tests."""

    parameters: float = Field(gt=0, description="of the model, in all")
    nodes: int = Field(gt=0)
    tflops_per_device: float = Field(gt=0, description="TFLOP/s of a device, without recomputation")
    tolerance: float = Field(gt=0, description="share of it, either way, that its source accepts")
    software: str = Field(description="what trained")
    source: str


class Cluster(Section):
    """A machine room: what a node is made of and how jobs get there."""

    name: str = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")
    description: str = Field(min_length=1)
    accelerator: str
    devices_per_node: int = Field(gt=0)
    nodes: int = Field(gt=0)
    memory_gib_per_node: float = Field(gt=0)
    cpu_cores_per_node: int = Field(gt=0)
    network: str = Field(min_length=1)
    network_gbit_per_second_per_node: float = Field(ge=0)
    ring_share: float | None = Field(
        None, gt=0, le=1, description="of the network's rate that rings in training were measured to reach"
    )
    scheduler: Literal["slurm", "pbs", "grid_engine", "none"]
    max_wall_hours: float | None = None
    max_nodes_per_job: int | None = Field(
        None, gt=0, description="in its usual queue; left out where it is not known"
    )
    file_system_gb_per_second: float | None = Field(
        None, gt=0, description="writing, of the file system for checkpoints"
    )
    failures_per_1000_device_days: float | None = Field(
        None, gt=0, description="surprising ends of jobs, by device and 1,000 days; left out: not known"
    )
    billing_unit: str = Field("", description='the site\'s, such as "GPU-hours"; empty: not known')
    billed_per_node_hour: float | None = Field(None, gt=0, description="billing units of a whole node")
    internet_on_compute_nodes: bool
    internet_on_login_nodes: bool = True
    start_timeout_seconds: float | None = Field(
        None, ge=1, description="longest start of its largest jobs; left out: what a recipe has by default"
    )
    file_stall_seconds: float | None = Field(
        None,
        ge=1,
        description="longest stall of its file system that ends no run; left out: 120 with a scheduler, "
        "whose nodes share a file system, else 18",
    )
    torch: str | None = Field(
        None, pattern=r"^\d+\.\d+", description="version that plans are made for; default: the newest tried"
    )
    references: tuple[Reference, ...] = Field(
        (), description="speeds that others measured there; `kielo launch --ladder` shows them beside its own"
    )
    source: str = Field(
        min_length=1, description="page and date of each fact above [jobs] that `sources` does not name"
    )
    sources: dict[str, str] = Field({}, description="field → its page and date, where `source` is not it")
    date: str = Field(min_length=1)
    notes: str = ""
    jobs: Jobs | None = Field(
        None, description="how jobs are started there; left out: none by `kielo launch`"
    )

    @field_validator("sources")
    @classmethod
    def _names_fields(cls, sources: dict[str, str]) -> dict[str, str]:
        if unknown := [field for field in sources if field not in cls.model_fields]:
            raise ValueError(f"no field of the card is called {unknown[0]}")
        if empty := [field for field, origin in sources.items() if not origin.strip()]:
            raise ValueError(f"it says nothing of: {', '.join(empty)}")
        return sources

    @model_validator(mode="after")
    def _queues_fit_the_scheduler(self) -> "Cluster":
        for one in () if self.jobs is None or self.scheduler == "slurm" else self.jobs.partitions:
            if not one.name or one.qos or one.constraint:
                raise ValueError(
                    f"jobs.partitions: {one.label} has no name, or has qos or constraint, which are Slurm's; "
                    f"{self.scheduler} takes a name alone"
                )
        return self

    @field_validator("accelerator")
    @classmethod
    def _has_card(cls, name: str) -> str:
        known = accelerators()
        if name not in known:
            named: dict[str, list[str]] = {one: [] for one in known}
            raise ValueError(
                f"no accelerator card has this name; known: {', '.join(known)}{did_you_mean(name, named)}"
            )
        return name


def language(code: str) -> Language:
    """Return the card of a language, e.g. "et". Raises KieloError naming the known ones."""
    return _card("languages", code, Language)


def cluster(name: str) -> Cluster:
    """Return the card of a cluster, e.g. "lumi_g", or of a file, "my_site.toml".

    Raises KieloError naming the known ones, or each wrong key of the file with its line.
    """
    if not is_own_card(name):
        return _card("clusters", name, Cluster)
    place = os.path.abspath(name)
    return _read_card(Path(name), Cluster, (place, os.path.getmtime(place) if os.path.exists(place) else 0))


def is_own_card(name: str) -> bool:
    """Return True for a path of a card that a person wrote, in place of a shipped card's name."""
    return name.endswith(".toml")


def a_new_card(name: str) -> str:
    """Return the fix for a cluster `name` that has no card."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-") or "NAME"
    return f"kielo site --new {stem} writes a card to fill in"


def accelerator(name: str) -> Accelerator:
    """Return the card of an accelerator, e.g. "h100_80". Raises KieloError naming the known ones."""
    return _card("accelerators", name, Accelerator)


def accelerator_of_device(device_name: str) -> Accelerator | None:
    """Return the card for a driver's name of a device ("NVIDIA H100 80GB HBM3"); None if no card fits."""
    cards = [accelerator(name) for name in accelerators()]
    return next((card for card in cards if any(part in device_name for part in card.device_names)), None)


def languages() -> list[str]:
    """Return the codes of all language cards."""
    return _names("languages")


def clusters() -> list[str]:
    """Return the names of all cluster cards."""
    return _names("clusters")


def accelerators() -> list[str]:
    """Return the names of all accelerator cards."""
    return _names("accelerators")


Card = TypeVar("Card", Language, Cluster, Accelerator)


def _names(kind: str) -> list[str]:
    return sorted(path.stem for path in (_CARDS / kind).glob("*.toml"))


def _card(kind: str, name: str, model: type[Card]) -> Card:
    known = _names(kind)
    if name not in known:
        own = f"; {a_new_card(name)}" if model is Cluster else ""
        meant = did_you_mean(name, {one: [] for one in known})
        raise KieloError(f"no card in {kind} is called {name!r}; known: {', '.join(known)}{meant}{own}")
    return _read_card(_CARDS / kind / f"{name}.toml", model)


@cache
def _read_card(path: Path, model: type[Card], version: tuple[str, float] | None = None) -> Card:
    """Read a card. version: what tells a person's file from an older one, and from another folder's."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return model.model_validate(tomllib.loads(text))
    except OSError as error:
        own = f"; {a_new_card(path.stem)}" if model is Cluster and not path.exists() else ""
        raise KieloError(f"{path}: cannot be read ({error.strerror}){own}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KieloError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        lines = lines_of_keys(text)

        def origin(key: str) -> str:
            line = line_of(key, lines)
            return f"{path}, line {line}" if line else str(path)

        refuse(str(path), from_validation(error, model, origin))
        raise
