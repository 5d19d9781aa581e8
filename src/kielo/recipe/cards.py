"""Cards: facts of languages, their tasks, clusters and accelerators. A name → a frozen, typed card.

A card is a TOML file in kielo/cards, which has the source and date of each figure. Most languages have a row
of cards/languages.json.
"""

import difflib
import json
import os
import re
import tomllib
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from kielo.recipe.complaints import did_you_mean, from_validation, refuse
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import FASTTEXT_SUFFIXES, IDENTIFIERS, Section
from kielo.recipe.toml_text import line_of, lines_of_keys

_MOST_IB_TIMEOUT = 22
_CARDS = Path(__file__).resolve().parent.parent / "cards"
BUNDLE = "bundle:"  # before the name of a language's tasks, in evaluate.tasks
NEW_CARD = _CARDS / "new_cluster.toml"  # a template; @NAME@ stands for its name


_WITHOUT_SPACES = frozenset(("Han", "Khmer", "Lao", "Myanmar", "Thai", "Tibetan"))
USUAL_THRESHOLD = 0.5  # of a card without one
_LANGUAGES = _CARDS / "languages.json"  # made by benchmarks/data/language_cards.py
PROBES = _CARDS / "probes"  # own tasks that every recipe can name


class Measured(Section):
    """Which share of texts passes an identifier's threshold of lines."""

    text: str
    """Text on which it was measured."""
    own: float = Field(ge=0, le=1)
    """Share of texts in the language."""
    others: float = Field(ge=0, le=1)
    """Share of texts in other languages."""
    taken: dict[str, float] = {}
    """Code of a similar language → share of its texts, if that is more than 5 %."""


class Language(Section):
    """A language: its letters, its codes in the identifiers, and the probabilities that they must give it."""

    code: str
    name: str
    script: str
    """Script for people to read: Latin, Japanese, …"""
    unicode_scripts: tuple[str, ...] = ()
    """Scripts of the language's letters. Default: `script` alone."""
    letters: str = ""
    """Lower-case letters. Default: every letter of the scripts."""
    characters: str = ""
    """Lower-case letters and marks of its spelling, by CLDR and hyperglot. Not of scripts with more than 500,
    such as Han and Hangul."""
    characters_coverage: float | None = None
    """Share of the letters of the Universal Declaration of Human Rights that are in `characters` or in a to
    z, which names have."""
    iso639_3: tuple[str, ...] = ()
    fineweb2: dict[str, float] = {}
    """Name in FineWeb2 and GlotLID → the probability by GlotLID that FineWeb2 asks of a document."""
    hplt: tuple[str, ...] = ()
    """Names in HPLT, which are OpenLID's too."""
    identifier_codes: dict[str, tuple[str, ...]] = {}
    """Identifier, or the name of its file → codes."""
    line_language_threshold: dict[str, float] = {}
    document_language_threshold: dict[str, float] = {}
    measured: dict[str, Measured] = {}
    """Identifier, or the name of its file → what its threshold keeps."""
    notes: str = ""

    @model_validator(mode="before")
    @classmethod
    def _scripts(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("unicode_scripts") and "script" in data:
            data = data | {"unicode_scripts": (data["script"],)}
        return data

    @property
    def has_spaces(self) -> bool:
        """Return True if the language is written with spaces between words."""
        is_korean = "Hangul" in self.unicode_scripts  # Han too, but with spaces
        return is_korean or not _WITHOUT_SPACES.intersection(self.unicode_scripts)

    def codes_of(self, identifier: str) -> tuple[str, ...]:
        """Return the codes in an identifier, () if it does not know the language.

        Of a file they are the card's own, else all by which published models call the language.
        """
        name = Path(identifier).name
        if name in self.identifier_codes or identifier in IDENTIFIERS:
            return self.identifier_codes.get(name, ())
        return tuple(dict.fromkeys((self.code, *self.iso639_3, *self.fineweb2, *self.hplt)))

    def thresholds(self, identifier: str) -> tuple[float, float]:
        """Return the probabilities that lines and documents must have."""
        name = Path(identifier).name
        is_fasttext = name.endswith(FASTTEXT_SUFFIXES)
        by_glotlid = min(self.fineweb2.values() if is_fasttext else (), default=USUAL_THRESHOLD)
        return (
            self.line_language_threshold.get(name, USUAL_THRESHOLD),
            self.document_language_threshold.get(name, by_glotlid),
        )

    def other_identifiers(self) -> str:
        """Return the identifiers that know the language, as a fix."""
        known = [name for name, codes in self.identifier_codes.items() if codes and name in IDENTIFIERS]
        own = f"an identifier of your own (kielo languages {self.code} --learn), or clean = false"
        return " or ".join(known) or own

    def measured_of(self, identifier: str) -> Measured | None:
        """Return what the identifier's threshold keeps of the language, or None if nobody measured it."""
        return self.measured.get(Path(identifier).name)


class Accelerator(Section):
    """A device as PyTorch sees it."""

    name: str
    device: Literal["cpu", "cuda"]
    device_names: tuple[str, ...] = ()
    """Parts of the name that the driver reports."""
    memory_bytes: int | None = Field(None, gt=0)
    """Bytes of memory as sold, in decimal. Left out if the machine decides."""
    given_bytes: int | None = Field(None, gt=0)
    """Bytes that the driver gives a process. Default: 0.99 × 2^30 for each 10^9 sold."""
    context_bytes: int = Field(0, ge=0)
    """Bytes of these that the driver's context and communicators take."""
    memory_source: str = ""
    peak_tflops: dict[Literal["bf16", "fp32", "fp8", "fp4"], float]
    """Precision → dense TFLOP/s. bf16 is fp16's rate too."""
    architecture: str = "cpu"
    """Whose fitted constants the device has."""
    memory_bandwidth_tb_per_second: float | None = None
    link_gb_per_second: float = 0.0
    """Rate to the other devices of a node, one way, in 10^9 bytes a second."""
    allocator_settings: str = ""
    """PYTORCH_ALLOC_CONF of a training, if the environment sets none."""
    power_share: float = 1.0
    """Power limit as a share of the limit of its architecture's full device."""
    source: str
    date: str
    notes: str = ""


class Partition(Section):
    """A queue of a site, with its limits. The card itself has the limits of the usual queue.

    Entries of the same name can have different limits. A job takes the first that allows its nodes.
    """

    name: str = ""
    """Name in the scheduler; for Grid Engine the type of node. Empty: Slurm chooses by qos or constraint."""
    max_hours: float | None = Field(None, gt=0)
    min_nodes: int = Field(1, gt=0)
    max_nodes: int | None = Field(None, gt=0)
    max_jobs: int | None = Field(None, gt=0)
    """Jobs of one person, waiting and running together."""
    qos: str = ""
    constraint: str = ""
    """Features of its nodes, as in sbatch --constraint."""

    @property
    def label(self) -> str:
        """Return the name that messages and `--partition` use."""
        return self.qos or self.name or self.constraint

    @model_validator(mode="after")
    def _is_named(self) -> "Partition":
        if not self.label:
            raise ValueError("it has no name. Fix: name, qos or constraint")
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than max_nodes {self.max_nodes}")
        return self


class CpuNodes(Section):
    """A site's nodes without devices, for jobs that need none. `account` is by default as in [jobs]."""

    partitions: tuple[Partition, ...] = Field(min_length=1)
    """Queues, the usual queue first."""
    cores_per_node: int = Field(gt=0)
    options: tuple[str, ...] = ()
    account: str | None = None
    """Pattern of the project's name."""
    account_example: str = ""
    billing_unit: str = ""
    billed_per_node_hour: float | None = Field(None, gt=0)


class Jobs(Section):
    """The form of a site's jobs, which `kielo launch` writes into their scripts."""

    partitions: tuple[Partition, ...] = Field(min_length=1)
    """Queues, the usual queue first."""
    devices: str = ""
    """Request for all devices of a node, without the scheduler's own prefix."""
    options: tuple[str, ...] = ()
    account: str = ""
    """Pattern of a project's name, which the job must have. Empty: the job needs none."""
    account_example: str = ""
    architecture: Literal["x86_64", "aarch64"] = "x86_64"
    """Architecture of the CPUs, by uname -m."""
    setup: tuple[str, ...] = ()
    """Lines of bash before anything else: modules."""
    container: tuple[str, ...] = ()
    """Command in which ranks start, up to the image. Empty: no container."""
    image: str = ""
    squash: tuple[str, ...] = ()
    """Options of the mksquashfs that packs an environment into one file, which the container mounts. Empty:
    it stays a folder."""
    storage: str = ""
    """Place of environments and runs, and places that are too small for them."""
    driver_cuda: str = ""
    """Newest CUDA that the site's driver runs, as 12.2."""
    cpu_bind: str = "cores"
    """Binding of a node's ranks to cores, as in srun --cpu-bind."""
    environment: dict[str, str] = {}
    environment_between_nodes: dict[str, str] = {}
    network_log: str = ""
    """Regular expression of a line in NCCL's or RCCL's log that shows that the fast network is used."""
    host_suffix: str = ""
    """Suffix that makes a host's name reachable over the fast network."""
    node_folder: str = "/tmp"
    stripe: str = ""
    """Command that spreads a folder's files over the file system."""
    cpu: CpuNodes | None = None
    """Nodes without devices, whose CPUs run the same environment. Left out: every job is on nodes with
    devices."""
    sources: dict[str, str]
    """Field of this table → source of its content, with a date."""

    @property
    def all_partitions(self) -> tuple[Partition, ...]:
        return self.partitions + (self.cpu.partitions if self.cpu else ())

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
        both = [option for option in self.options if re.match(r"(--constraint|-C)\b", option)]
        if both and any(partition.constraint for partition in self.partitions):
            raise ValueError(f"{both[0]} in options replaces the constraint of a partition. Fix: one of both")
        return self

    @model_validator(mode="after")
    def _has_sources(self) -> "Jobs":
        given = self.model_fields_set - {"sources", "account_example"}
        if given != set(self.sources) - {"account_example"}:
            differing = ", ".join(sorted(given ^ set(self.sources) - {"account_example"}))
            raise ValueError(f"jobs.sources must name each field of the table. Fix: {differing}")
        if empty := [field for field, origin in self.sources.items() if not origin.strip()]:
            raise ValueError(f"jobs.sources is empty for: {', '.join(empty)}")
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
    """A published speed of a machine: training of a dense model, by the site's own tests."""

    parameters: float = Field(gt=0)
    nodes: int = Field(gt=0)
    tflops_per_device: float = Field(gt=0)
    """Without recomputation."""
    tolerance: float = Field(gt=0)
    """Share of it, either way, that its source accepts."""
    software: str
    source: str


class Cluster(Section):
    """A cluster: its nodes, and the form of its jobs."""

    name: str = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")
    description: str = Field(min_length=1)
    accelerator: str
    devices_per_node: int = Field(gt=0)
    nodes: int = Field(gt=0)
    memory_gib_per_node: float = Field(gt=0)
    cpu_cores_per_node: int = Field(gt=0)
    network: str = Field(min_length=1)
    network_gbit_per_second_per_node: float = Field(ge=0)
    ring_share: float | None = Field(None, gt=0, le=1)
    """Share of the network's rate that rings in training were measured to reach."""
    scheduler: Literal["slurm", "pbs", "grid_engine", "none"]
    max_wall_hours: float | None = None
    max_nodes_per_job: int | None = Field(None, gt=0)
    """In the usual queue. Left out if not known."""
    file_system_gb_per_second: float | None = Field(None, gt=0)
    """Rate of writing to the file system for checkpoints, in 10^9 bytes a second."""
    failures_per_1000_device_days: float | None = Field(None, gt=0)
    """Unexpected ends of jobs in 1,000 days of a device. Left out if not known."""
    billing_unit: str = ""
    """Unit of the site's bills, such as "GPU-hours". Empty: not known."""
    billed_per_node_hour: float | None = Field(None, gt=0)
    internet_on_compute_nodes: bool
    internet_on_login_nodes: bool = True
    start_timeout_seconds: float | None = Field(None, ge=1)
    """Longest start of its largest jobs, in seconds. Default: the recipe's default."""
    file_stall_seconds: float | None = Field(None, ge=1)
    """Longest stall of its file system that ends no run, in seconds. Default: 120 with a scheduler, whose
    nodes share a file system, else 18."""
    torch: str | None = Field(None, pattern=r"^\d+\.\d+")
    """Version of torch that plans are made for. Default: the newest that was tried."""
    references: tuple[Reference, ...] = ()
    """Published speeds of this cluster. `kielo launch --ladder` shows them beside its own."""
    source: str = Field(min_length=1)
    """Page and date of each fact above [jobs] that `sources` does not name."""
    sources: dict[str, str] = {}
    """Field → its page and date, if `source` does not hold for it."""
    date: str = Field(min_length=1)
    notes: str = ""
    jobs: Jobs | None = None
    """Way in which jobs are started. Left out: `kielo launch` cannot start any."""

    @field_validator("sources")
    @classmethod
    def _names_fields(cls, sources: dict[str, str]) -> dict[str, str]:
        if unknown := [field for field in sources if field not in cls.model_fields]:
            raise ValueError(f"no field of the card is called {unknown[0]}")
        if empty := [field for field, origin in sources.items() if not origin.strip()]:
            raise ValueError(f"it is empty for: {', '.join(empty)}")
        return sources

    @model_validator(mode="after")
    def _queues_fit_the_scheduler(self) -> "Cluster":
        for queue in () if self.jobs is None or self.scheduler == "slurm" else self.jobs.all_partitions:
            if not queue.name or queue.qos or queue.constraint:
                raise ValueError(
                    f"jobs.partitions: {queue.label} has no name, or has qos or constraint, which only Slurm "
                    f"has. Fix: a name alone, for {self.scheduler}"
                )
        return self

    @field_validator("accelerator")
    @classmethod
    def _has_card(cls, name: str) -> str:
        known = accelerators()
        if name not in known:
            meant = did_you_mean(name, {card: [] for card in known})
            raise ValueError(f"no accelerator card has this name; known: {', '.join(known)}{meant}")
        return name


class BundledTask(Section):
    measures: Literal["knowledge", "reading", "culture", "truthfulness", "translation", "language"]
    version: str
    """Version of the task's file in lm-eval."""


class TaskBundle(Section):
    """Tasks of lm-eval that measure a language."""

    language: str
    harness: str
    """Version of lm-eval that has the tasks in these versions."""
    tasks: dict[str, BundledTask]


def language(name: str) -> Language:
    """Return the card of a language, e.g. "et", or of a file, "my_language.toml".

    A shipped card has the values of its file in cards/languages, over the values of cards/languages.json.
    Raises KieloError with the nearest names, or with each wrong key of the file and its line.
    """
    if is_own_card(name):
        return _own_card(name, Language)
    if name not in _language_codes():
        raise KieloError(f"no language has the code {name!r}{without_language_card(name)}")
    return _language(name)


def language_code(name: str) -> str:
    """Return the code of a language or of a card of one's own, which is named after it."""
    return Path(name).stem if is_own_card(name) else name


def without_language_card(name: str) -> str:
    """Return the nearest languages of a name or code without a card, and how to write a card."""
    made, asked = _made_languages(), name.lower()
    names = {code: made.get(code, {}).get("name") or _language(code).name for code in languages()}
    called = {
        word: code for code, full in names.items() for word in (*full.lower().split(), full.lower(), code)
    }
    near = dict.fromkeys(called[word] for word in difflib.get_close_matches(asked, called, n=4, cutoff=0.7))
    nearest = f"; nearest: {', '.join(f'{code} ({names[code]})' for code in near)}" if near else ""
    meant = did_you_mean(name, {code: [names[code]] for code in _names("languages")})
    if (code := re.split("[-_]", asked)[0]) in names:  # et-EE, ET
        meant = f"; did you mean {code}?"
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_-") or "xx"
    card = f"a card of your own, {stem}.toml (docs/languages.md)"
    return f"; `kielo languages` lists all{meant}{nearest}. Fix: {card}"


@cache
def _made_languages() -> dict[str, dict[str, Any]]:
    return json.loads(_LANGUAGES.read_bytes())["languages"]


@cache
def _language(code: str) -> Language:
    made, path = _made_languages().get(code), _CARDS / "languages" / f"{code}.toml"
    if made is None:
        return _read_card(path, Language)
    by_hand = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    joined = {"code": code, **made, **by_hand}
    for key, value in made.items():
        if isinstance(value, dict) and key in by_hand:
            joined[key] = {**value, **by_hand[key]}
    return Language.model_validate(joined)


def languages() -> list[str]:
    return list(_language_codes())


@cache
def _language_codes() -> dict[str, None]:
    """Return the codes in order. Lists ask for each card, so looking a code up is quick."""
    return dict.fromkeys(sorted({*_names("languages"), *_made_languages()}))


def cluster(name: str) -> Cluster:
    """Return the card of a cluster, e.g. "lumi_g", or of a file, "my_site.toml".

    Raises KieloError with the known names, or with each wrong key of the file and its line.
    """
    return _own_card(name, Cluster) if is_own_card(name) else _card("clusters", name, Cluster)


def on_cpu_nodes(site: Cluster, partition: str | None) -> Cluster:
    """Return the card as jobs without devices see it: its CPU nodes, unless `partition` has devices alone."""
    jobs = site.jobs
    if jobs is None or jobs.cpu is None:
        return site
    cpu = jobs.cpu
    with_devices, without = (
        {name for one in queues for name in (one.label, one.name)}
        for queues in (jobs.partitions, cpu.partitions)
    )
    if partition in with_devices - without:
        return site
    own = {"partitions": cpu.partitions, "options": cpu.options, "devices": ""}
    if cpu.account is not None:
        own |= {"account": cpu.account, "account_example": cpu.account_example}
    limits = {"max_wall_hours": None, "max_nodes_per_job": None, "cpu_cores_per_node": cpu.cores_per_node}
    billed = {"billing_unit": cpu.billing_unit, "billed_per_node_hour": cpu.billed_per_node_hour}
    return site.model_copy(update={"jobs": jobs.model_copy(update=own), **limits, **billed})


def is_own_card(name: str) -> bool:
    """Return True for the path of a person's own card, False for a shipped card's name."""
    return name.endswith(".toml")


def a_new_card(name: str) -> str:
    """Return the fix for a cluster `name` that has no card."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-") or "NAME"
    return f"kielo site --new {stem} writes a card to fill in"


def accelerator(name: str) -> Accelerator:
    """Return the card of an accelerator, e.g. "h100_80". Raises KieloError with the known names."""
    return _card("accelerators", name, Accelerator)


def task_bundle(code: str) -> TaskBundle:
    """Return the tasks of a language, e.g. "et". Raises KieloError with the known codes."""
    return _card("tasks", code, TaskBundle)


def accelerator_of_device(device_name: str) -> Accelerator | None:
    """Return the card for a driver's device name, "NVIDIA H100 80GB HBM3", or None if no card fits."""
    cards = [accelerator(name) for name in accelerators()]
    return next((card for card in cards if any(part in device_name for part in card.device_names)), None)


Card = TypeVar("Card", Language, Cluster, Accelerator, TaskBundle)


def _names(kind: str) -> list[str]:
    return list(_files(kind))


@cache
def _files(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_CARDS / kind).glob("*.toml")))


clusters = partial(_names, "clusters")
accelerators = partial(_names, "accelerators")
task_bundles = partial(_names, "tasks")


def _own_card(name: str, model: type[Card]) -> Card:
    place = os.path.abspath(name)
    card = _read_card(Path(name), model, (place, os.path.getmtime(place) if os.path.exists(place) else 0))
    if isinstance(card, Language) and card.code != Path(name).stem:
        raise KieloError(f"{name}: code = {card.code!r}. Fix: name the file {card.code}.toml")
    return card


def _card(kind: str, name: str, model: type[Card]) -> Card:
    known = _names(kind)
    if name not in known:
        own = f"; {a_new_card(name)}" if model is Cluster else ""
        meant = did_you_mean(name, {card: [] for card in known})
        raise KieloError(f"no card in {kind} is called {name!r}; known: {', '.join(known)}{meant}{own}")
    return _read_card(_CARDS / kind / f"{name}.toml", model)


@cache
def _read_card(path: Path, model: type[Card], version: tuple[str, float] | None = None) -> Card:
    """Read a card. version: tells a person's file from an older version and from another folder's file."""
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
