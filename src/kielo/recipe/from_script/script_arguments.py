"""The arguments of a training script, and what becomes of each: understood, translated, or not honoured.

A table in TOML lists the arguments of an engine. Rules of the engine's file translate those that have no
recipe key of the same value.
"""

import fnmatch
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from kielo.recipe.complaints import did_you_mean
from kielo.recipe.errors import KieloError
from kielo.recipe.from_script.bash_expansion import shown, unknown_names
from kielo.recipe.from_script.bash_reader import Command, Script
from kielo.recipe.toml_text import toml_value

UNDERSTOOD, TRANSLATED, NOT_HONOURED = "understood", "translated", "not honoured"
_FEWEST = 3  # arguments of the table that make a command the training's
_TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Table:
    """An engine's arguments: name → type, with the recipe key of the same value if it has one; and the rest.

    also: another name → the name. defaults: values in force without the argument. not_honoured: name or
    pattern → why.
    """

    same: dict[str, tuple[str, str]]
    translated: dict[str, str]
    also: dict[str, str]
    defaults: dict[str, Any]
    not_honoured: dict[str, str]

    def kind(self, name: str) -> str | None:
        """Return the type of an argument's value, or None for an argument that the recipe has nothing of."""
        return self.same[name][0] if name in self.same else self.translated.get(name)

    def why_not(self, name: str) -> str | None:
        if name in self.not_honoured:
            return self.not_honoured[name]
        return next((why for sign, why in self.not_honoured.items() if fnmatch.fnmatchcase(name, sign)), None)

    def names(self) -> set[str]:
        return {*self.same, *self.translated, *self.also}


@cache
def table(engine: str) -> Table:
    """Return the table of `engine`, "megatron" or "trainer"."""
    text = resources.files("kielo.recipe.from_script").joinpath(f"{engine}_arguments.toml").read_text("utf-8")
    content = tomllib.loads(text)
    same = {name: tuple(entry.split()) for name, entry in content["same"].items()}
    return Table(same, content["translated"], content["also"], content["defaults"], content["not_honoured"])


@dataclass(frozen=True)
class Given:
    """An argument of the script. name: the table's. written: as the script writes it."""

    name: str
    written: str
    values: tuple[str, ...]
    place: str

    @property
    def text(self) -> str:
        return " ".join(map(shown, (self.written, *self.values)))


@dataclass(frozen=True)
class Row:
    """An argument for people. place: line. Empty: a value in force without an argument."""

    place: str
    argument: str
    verdict: str
    meaning: str

    @property
    def changes_the_run(self) -> bool:
        """Return True if the recipe trains something else than the script for want of this argument."""
        return self.verdict == NOT_HONOURED and self.meaning.startswith("changes the ")


def training_command(script: Script, arguments: Table, path: Path) -> Command:
    """Return the command with arguments of the table. Raise KieloError for none, or several."""
    known = {name.lstrip("-").replace("_", "-") for name in arguments.names()}
    found: dict[tuple[str, ...], Command] = {}
    for command in script.commands:
        names = {
            word.partition("=")[0].lstrip("-").replace("_", "-")
            for word, _ in command.words
            if word[:2] == "--"
        }
        if len(names & known) >= _FEWEST:
            found.setdefault(tuple(word for word, _ in command.words), command)
    if not found:
        absent = "".join(
            f"; line {place} reads {shown(file)}, which is not here" for file, place in script.absent.items()
        )
        raise KieloError(
            f"{path}: no command has arguments of a training{absent}. Fix: the script that has them, such as "
            f"{', '.join(list(arguments.same)[:3])}"
        )
    if len(found) > 1:
        lines = ", ".join(command.words[0][1] for command in found.values())
        raise KieloError(
            f"{path}: {len(found)} commands train (lines {lines}). Fix: a script with one of them"
        )
    return next(iter(found.values()))


def split_command(command: Command) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the words of the launcher, and the program's arguments. A word has its place."""
    words = list(command.words)
    for at, (word, _) in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return _without_python(words[:at]), words[at + 1 :]
        if (
            word == "-m"
            and at + 1 < len(words)
            and not re.match(r"(torch\.|accelerate|deepspeed)", words[at + 1][0])
        ):
            return words[:at], words[at + 2 :]
    first = next((at for at, (word, _) in enumerate(words) if word.startswith("--")), len(words))
    return words[:first], words[first:]


def _without_python(words: list[tuple[str, str]]) -> list[tuple[str, str]]:
    while words and re.fullmatch(r"(.*/)?python[\d.]*|-u", words[-1][0]):
        words = words[:-1]
    return words


def read_arguments(
    words: Sequence[tuple[str, str]], arguments: Table, is_dashed: bool = True
) -> Iterator[Given]:
    """Yield the arguments in order. A word that belongs to none is an argument without a name."""
    at = 0
    while at < len(words):
        word, place = words[at]
        at += 1
        if not re.match(r"--?[A-Za-z]", word):
            yield Given("", word, (), place)
            continue
        written, has_value, value = word.partition("=")
        values = [value] if has_value else []
        while not has_value and at < len(words) and not re.match(r"--?[A-Za-z]", words[at][0]):
            values.append(words[at][0])
            at += 1
        name = written if is_dashed else f"--{written.lstrip('-').replace('-', '_')}"
        yield Given(arguments.also.get(name, name), written, tuple(values), place)


class Translation:
    """A recipe in the making: keys with their values and origins, rows for people, and complaints."""

    def __init__(self, path: Path, script: Script, arguments: Table, engine: str) -> None:
        self.path, self.script, self.arguments, self.engine = path, script, arguments, engine
        self.given: dict[str, Given] = {}
        self.keys: dict[str, tuple[Any, str]] = {}  # dotted key → value, origin
        self.comments: dict[str, list[str]] = {}  # table → lines below its head
        self.complaints: list[str] = []
        self._rows: list[tuple[Given, str, str]] = []
        self._said: dict[str, tuple[str, str]] = {}
        self._defaults: list[Row] = []

    # --- What the script gives

    def read(self, words: Sequence[tuple[str, str]], is_dashed: bool = True) -> None:
        """Read the program's arguments, and take over those with a key of the same value."""
        for given in read_arguments(words, self.arguments, is_dashed):
            self._rows.append((given, "", ""))
            earlier = self.given.get(given.name)
            if given.name and earlier is not None and earlier.values != given.values:
                self._replace_row(earlier, NOT_HONOURED, f"line {given.place} gives it again")
            if given.name:
                self.given[given.name] = given
        for given in list(self.given.values()):
            kind = self.arguments.kind(given.name)
            if kind is not None and kind != "path":
                self._check(given, kind)

    def _check(self, given: Given, kind: str) -> None:
        """Refuse values of a wrong number or type, and values that the script does not say."""
        names = [name for value in given.values for name in unknown_names(value)]
        if names:
            for name in names:
                self._complain(given, self._unknown(name))
        elif (kind == "flag") != (not given.values) and not (kind == "bool" and not given.values):
            what = "takes no value" if kind == "flag" else "has no value"
            self._complain(given, f"{what}. Fix: {given.written}{'' if kind == 'flag' else ' VALUE'}")
        elif kind not in ("flag", "list", "bool") and len(given.values) > 1:
            self._complain(given, f"takes one value. Fix: {given.written} {given.values[0]}")
        elif kind in ("int", "float") and self._number(given.values[0], kind) is None:
            self._complain(
                given, f"{given.values[0]!r} is no {'whole ' if kind == 'int' else ''}number. Fix: a number"
            )
        else:
            return
        del self.given[given.name]
        self._replace_row(given, NOT_HONOURED, "refused")

    def _unknown(self, name: str) -> str:
        if not re.fullmatch(r"\w+|@", name):
            return f"{shown(name)} is known only when it runs. Fix: write the value there"
        absent = [
            f"; line {place} reads {shown(file)}, which is not here"
            for file, place in self.script.absent.items()
        ]
        return f"${name} has no value in the script{''.join(absent)}. Fix: --variable {name}=VALUE"

    @staticmethod
    def _number(text: str, kind: str) -> Any:
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            return None

    def has(self, name: str) -> bool:
        return name in self.given

    def is_on(self, name: str) -> bool:
        """Return True for a flag that is given, and for a switch that is on."""
        given = self.given.get(name)
        if given is None:
            return False
        return not given.values or _TRUE.get(given.values[0].lower(), False)

    def value(self, name: str, otherwise: Any = None) -> Any:
        """Return the value of an argument in its type, a tuple for a list; or the engine's default."""
        given = self.given.get(name)
        if given is None:
            return self.arguments.defaults.get(name, otherwise)
        kind = self.arguments.kind(name) or "text"
        if kind == "list":
            return given.values
        if kind in ("int", "float"):
            return self._number(given.values[0], kind)
        return given.values[0] if given.values else otherwise

    # --- What becomes of it

    def put(self, key: str, value: Any, *names: str, origin: str = "") -> None:
        """Set a key. The arguments it comes from are translated. origin: a place that is no argument."""
        present = [name for name in names if name in self.given]
        said = ", ".join(
            self.given[name].text if len(self.given[name].text) < 60 else name for name in present
        )
        self.keys[key] = (value, said or origin or f"the default of {self.engine}")
        for name in present:
            self.say(name, TRANSLATED, f"{key} = {_short(value)}")
        if not present:
            self.add_default(origin or (names[0] if names else key), f"{key} = {_short(value)}", TRANSLATED)

    def say(self, name: str, verdict: str, meaning: str) -> None:
        """Say what becomes of an argument. What was said before stays in front."""
        before = self._said.get(name)
        if before and before[1] != meaning:
            meaning = f"{before[1]}; {meaning}"
            verdict = before[0] if verdict == NOT_HONOURED else verdict
        self._said[name] = (verdict, meaning)

    def drop(self, name: str, why: str) -> None:
        if name in self.given:
            self.say(name, NOT_HONOURED, why)

    def add_row(self, place: str, argument: str, verdict: str, meaning: str) -> None:
        self._rows.append((Given("", argument, (), place), verdict, meaning))

    def add_default(self, argument: str, meaning: str, verdict: str = NOT_HONOURED) -> None:
        """Add what holds although the script does not say it."""
        self._defaults.append(Row("", argument, verdict, meaning))

    def refuse(self, what: str, *names: str) -> None:
        """Complain of arguments, by their lines."""
        said = " and ".join(
            f"{self.given[name].text} (line {self.given[name].place})" for name in names if name in self.given
        )
        self.complaints.append(f"{said}: {what}" if said else what)

    def must_divide(self, whole: int, part: int, *names: str) -> None:
        """Complain of the arguments `names` unless `part` divides `whole`."""
        if part <= 0 or whole % part:
            self.refuse(f"{whole} is no multiple of {part}. Fix: numbers that divide", *names)

    def _complain(self, given: Given, what: str) -> None:
        self.complaints.append(f"line {given.place}: {shown(given.written)}: {what}")

    def _replace_row(self, given: Given, verdict: str, meaning: str) -> None:
        for number, (one, _, _) in enumerate(self._rows):
            if one is given:
                self._rows[number] = (given, verdict, meaning)

    def take_same(self) -> None:
        """Take over the arguments with a key of the same value, and the engine's defaults of such keys."""
        for name, (kind, key) in self.arguments.same.items():
            if name in self.given:
                value = self.value(name) if kind != "bool" else self.is_on(name)
                self.keys[key] = (value, self.given[name].text)
                self.say(name, UNDERSTOOD, f"{key} = {_short(value)}")
            elif name in self.arguments.defaults:
                self.put(key, self.arguments.defaults[name], name)

    def rows(self) -> list[Row]:
        """Return all arguments in the script's order, then what holds without an argument."""
        found = []
        for given, verdict, meaning in self._rows:
            if not verdict and given.name in self._said and self.given.get(given.name) is not None:
                verdict, meaning = self._said[given.name]
            if not verdict:
                verdict, meaning = NOT_HONOURED, self._why_not(given)
            found.append(Row(given.place, given.text, verdict, meaning))
        return found + self._defaults

    def _why_not(self, given: Given) -> str:
        if not given.name:
            return "it belongs to no argument"
        if why := self.arguments.why_not(given.name):
            return why
        if self.arguments.kind(given.name) is not None:
            return "without effect beside the other arguments"
        names: dict[str, list[str]] = {name: [] for name in self.arguments.names()}
        hint = did_you_mean(given.name, names)
        return f"changes the run, perhaps: Kielo does not know this argument of {self.engine}{hint}"

    def finish(self) -> None:
        """Raise KieloError with all complaints."""
        if self.complaints:
            told = (
                "\n".join(f"  {one}" for one in self.complaints)
                if len(self.complaints) > 1
                else self.complaints[0]
            )
            joint = ":\n" if len(self.complaints) > 1 else ": "
            raise KieloError(f"{self.path}{joint}{told}")


def _short(value: Any) -> str:
    if isinstance(value, list | dict) and len(value) > 6:
        return f"{len(value)} entries"
    return number_text(value)


def number_text(value: Any) -> str:
    """Return a value as TOML, with _ in large numbers."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:_}"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {number_text(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, float) and value == int(value) and abs(value) >= 1e15:
        return f"{value:e}"
    return toml_value(value)


@dataclass(frozen=True)
class Machine:
    """The machine of a job, as far as the script says it. cluster: card, by the name of its partition."""

    nodes: int | None = None
    devices_per_node: int | None = None

    @property
    def devices(self) -> int | None:
        return self.nodes * self.devices_per_node if self.nodes and self.devices_per_node else None


# A number of the job → its arguments. One task of a node can start a process for each device.
_NUMBERS = {
    "nodes": ("nnodes", "num_nodes", "nodes", "num_machines", "N"),
    "processes of a node": ("nproc_per_node", "num_gpus", "npernode"),
    "devices of a node": ("gpus_per_node",),
    "processes": ("num_processes", "np"),
    "devices": ("gpus", "G"),
    "tasks of a node": ("ntasks_per_node",),
    "tasks": ("ntasks", "n"),
}


def read_launcher(words: Sequence[tuple[str, str]], into: Translation) -> Machine:
    """Return the nodes and devices of the launcher's arguments, else of #SBATCH lines."""
    found: dict[str, int] = {}
    for given in read_arguments(words, Table({}, {}, {}, {}, {})):
        if not given.name:
            continue
        name = given.name.lstrip("-").replace("-", "_")
        kind = next((kind for kind, names in _NUMBERS.items() if name in names), "")
        number = given.values[0].rpartition(":")[2] if given.values else ""
        if kind and number.isdecimal():
            found.setdefault(kind, int(number))
            into.add_row(given.place, given.text, TRANSLATED, f"the job's {kind}")
        else:
            into.add_row(
                given.place, given.text, NOT_HONOURED, "of the launcher; kielo launch writes job scripts"
            )
    sbatch = {name.replace("-", "_"): value for name, value in into.script.sbatch.items()}
    for name, value in sbatch.items():
        kind = next((kind for kind, names in _NUMBERS.items() if name in names), "")
        number = value.rpartition(":")[2]
        if kind and number.isdecimal():
            found.setdefault(kind, int(number))
    return _machine_of(found)


def _machine_of(found: dict[str, int]) -> Machine:
    """Return nodes and their devices. Numbers of processes and devices count before tasks."""
    nodes = found.get("nodes")
    per_node = found.get("processes of a node") or found.get("devices of a node")
    everywhere = found.get("processes") or found.get("devices")
    if per_node is None and nodes and everywhere and everywhere % nodes == 0:
        per_node = everywhere // nodes
    per_node = per_node or found.get("tasks of a node")
    everywhere = everywhere or found.get("tasks", 0)
    if nodes is None and per_node and everywhere % per_node == 0:
        nodes = everywhere // per_node or None
    if per_node is None and nodes and everywhere % nodes == 0:
        per_node = everywhere // nodes or None
    return Machine(nodes, per_node)


def text_of_file(script: Script, path: Path, name: str) -> str | None:
    """Return the text of a file that the script writes, or that lies beside it; None if there is none."""
    written = script.files.get(os.path.normpath(name))
    if written is not None:
        return written
    if unknown_names(name):
        return None
    for place in (path.parent / name, Path(name), path.parent / os.path.basename(name)):
        if place.is_file() and place.stat().st_size < 10_000_000:
            return place.read_text(encoding="utf-8", errors="replace")
    return None


@dataclass(frozen=True)
class TranslatedScript:
    """A script as a recipe. keys: dotted key → value, origin. comments: table → lines."""

    keys: dict[str, tuple[Any, str]]
    comments: dict[str, list[str]]
    rows: list[Row]
    machine: Machine
    partition: str = ""
    phases: list[dict[str, Any]] = field(default_factory=list)
