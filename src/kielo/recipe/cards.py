"""Cards: facts of languages, clusters and accelerators. A name → a frozen, typed card.

Cards are TOML files inside the package (kielo/cards), so a new language or machine is a file, not a patch;
each figure has its source and date in the card.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from kielo.recipe.complaints import from_validation, refuse
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Section

_CARDS = Path(__file__).resolve().parent.parent / "cards"


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
    """A queue of a site, with its limits. Those of the usual one are the card's own, and left out here."""

    name: str = Field(description="as the scheduler calls it; of Grid Engine the type of node")
    max_hours: float | None = Field(None, gt=0, description="longest job")
    max_nodes: int | None = Field(None, gt=0, description="most nodes of a job")
    qos: str = Field("", description="quality of service that goes with it, where the site wants one")


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

    @model_validator(mode="after")
    def _has_sources(self) -> "Jobs":
        given = self.model_fields_set - {"sources"}
        if given != set(self.sources):
            differing = ", ".join(sorted(given ^ set(self.sources)))
            raise ValueError(f"jobs.sources must name each field of the table: {differing}")
        return self


class Cluster(Section):
    """A machine room: what a node is made of and how jobs get there."""

    name: str
    description: str
    accelerator: str
    devices_per_node: int = Field(gt=0)
    nodes: int = Field(gt=0)
    memory_gib_per_node: float = Field(gt=0)
    cpu_cores_per_node: int = Field(gt=0)
    network: str
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
    billing_unit: str = Field("", description='the site\'s, such as "GPU-hours"; empty: not known')
    billed_per_node_hour: float | None = Field(None, gt=0, description="billing units of a whole node")
    internet_on_compute_nodes: bool
    start_timeout_seconds: float | None = Field(
        None, ge=1, description="longest start of its largest jobs; left out: what a recipe has by default"
    )
    torch: str | None = Field(
        None, pattern=r"^\d+\.\d+", description="version that plans are made for; default: the newest tried"
    )
    source: str
    date: str
    notes: str = ""
    jobs: Jobs | None = Field(
        None, description="how jobs are started there; left out: none by `kielo launch`"
    )


def language(code: str) -> Language:
    """Returns the card of a language, e.g. "et". Raises KieloError naming the known ones."""
    return _card("languages", code, Language)


def cluster(name: str) -> Cluster:
    """Returns the card of a cluster, e.g. "lumi_g", or of a file, "my_site.toml".

    Raises KieloError naming the known ones.
    """
    return _read_card(Path(name), Cluster) if is_own_card(name) else _card("clusters", name, Cluster)


def is_own_card(name: str) -> bool:
    """Returns True for a path of a card that a person wrote, in place of a shipped card's name."""
    return name.endswith(".toml")


def accelerator(name: str) -> Accelerator:
    """Returns the card of an accelerator, e.g. "h100_80". Raises KieloError naming the known ones."""
    return _card("accelerators", name, Accelerator)


def accelerator_of_device(device_name: str) -> Accelerator | None:
    """Returns the card for a driver's name of a device ("NVIDIA H100 80GB HBM3"); None if no card fits."""
    cards = [accelerator(name) for name in accelerators()]
    return next((card for card in cards if any(part in device_name for part in card.device_names)), None)


def languages() -> list[str]:
    """Returns the codes of all language cards."""
    return _names("languages")


def clusters() -> list[str]:
    """Returns the names of all cluster cards."""
    return _names("clusters")


def accelerators() -> list[str]:
    """Returns the names of all accelerator cards."""
    return _names("accelerators")


Card = TypeVar("Card", Language, Cluster, Accelerator)


def _names(kind: str) -> list[str]:
    return sorted(path.stem for path in (_CARDS / kind).glob("*.toml"))


def _card(kind: str, name: str, model: type[Card]) -> Card:
    known = _names(kind)
    if name not in known:
        raise KieloError(f"no card in {kind} is called {name!r}; known: {', '.join(known)}")
    return _read_card(_CARDS / kind / f"{name}.toml", model)


@cache
def _read_card(path: Path, model: type[Card]) -> Card:
    try:
        return model.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KieloError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        refuse(str(path), from_validation(error, model, lambda key: str(path)))
        raise
