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
    scheduler: Literal["slurm", "none"]
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
    torch: str | None = Field(
        None, pattern=r"^\d+\.\d+", description="version that plans are made for; default: the newest tried"
    )
    source: str
    date: str
    notes: str = ""


def language(code: str) -> Language:
    """Returns the card of a language, e.g. "et". Raises KieloError naming the known ones."""
    return _card("languages", code, Language)


def cluster(name: str) -> Cluster:
    """Returns the card of a cluster, e.g. "lumi_g". Raises KieloError naming the known ones."""
    return _card("clusters", name, Cluster)


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


@cache
def _card(kind: str, name: str, model: type[Card]) -> Card:
    known = _names(kind)
    if name not in known:
        raise KieloError(f"no card in {kind} is called {name!r}; known: {', '.join(known)}")
    path = _CARDS / kind / f"{name}.toml"
    try:
        return model.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise KieloError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        refuse(str(path), from_validation(error, model, lambda key: str(path)))
        raise
