"""Bash scripts, read and not executed: the commands that a script would run, with their words.

Variables, arrays, functions, loops over known words and decidable conditions are followed. If a condition is
known only in a job, all branches are read, and variables that they set to different values become unknown.
"""

import fnmatch
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from kielo.recipe.errors import KieloError
from kielo.recipe.from_script.bash_expansion import Expansion, Variables, unknown, unknown_names
from kielo.recipe.from_script.bash_syntax import (
    Assignment,
    BashParser,
    Case,
    Commands,
    For,
    If,
    Negated,
    Node,
    Simple,
    Subshell,
    Test,
    Text,
    While,
    placed,
    plain,
)

_MOST_BYTES = 2_000_000
_MOST_COMMANDS = 100_000
_MOST_LEVELS = 30
_KEPT = ("WANDB_", "ACCELERATE_")  # variables that a command's program reads
# Variables that a job or a login shell sets, to values that the script does not say.
_OF_A_JOB = [
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_NODELIST",
    "SLURM_NODELIST",
    "SLURM_PROCID",
    "SLURM_NODEID",
    "SLURM_LOCALID",
    "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST",
    "SLURM_TMPDIR",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_TASKS_PER_NODE",
    "SLURMD_NODENAME",
    "HOME",
    "USER",
    "PWD",
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "HOSTNAME",
    "RANDOM",
    "TMPDIR",
    "SECONDS",
    "SLURM_JOB_USER",
    "SLURM_JOB_UID",
    "UID",
    "EUID",
    "LOGNAME",
]
# Options of #SBATCH → the variables that a job has of them.
_OF_SBATCH = {
    "nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "job-name": ("SLURM_JOB_NAME",),
    "partition": ("SLURM_JOB_PARTITION",),
    "account": ("SLURM_JOB_ACCOUNT",),
}
_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "J": "job-name",
    "p": "partition",
    "A": "account",
}


@dataclass(frozen=True)
class Command:
    """The words of a command, each with its place, and the variables it begins with."""

    words: tuple[tuple[str, str], ...]
    variables: dict[str, str]


@dataclass
class Script:
    """What a script says. files: path → text that it writes. sbatch: option → value, of #SBATCH lines.

    missing: variable → the place where its value is needed and not known. absent: file that it reads and that
    is not here → place.
    """

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    sbatch: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def read_script(path: Path, variables: dict[str, str] | None = None) -> Script:
    """Read a bash script. Raise KieloError, with the line, for a text that is no bash.

    variables: values that win over the script's. "1" is the first argument of the script.
    """
    text = _text_of(path)
    reader = _Reader(path)
    reader.begin(text)
    reader.fix(variables or {})
    try:
        reader.run(BashParser(placed(text)).script())
    except KieloError as error:
        raise KieloError(f"{path}: {error}") from None
    except RecursionError:
        raise KieloError(f"{path}: nested too deeply. Fix: write the arguments out") from None
    reader.script.missing = reader.expansion.missing
    return reader.script


def _text_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise KieloError(f"{path}: {error.strerror}. Fix: the path of a bash script") from None
    if len(raw) > _MOST_BYTES or b"\0" in raw:
        raise KieloError(f"{path}: no bash script. Fix: the file that starts the training")
    return raw.decode("utf-8", "replace")


class _Reader:
    def __init__(self, path: Path) -> None:
        self.script = Script()
        self.expansion = Expansion({}, [], self._output)
        self._path = path
        self._functions: dict[str, Node] = {}
        self._fixed: set[str] = set()
        self._commands = 0
        self._level = 0
        self._is_assumed = False  # True after a command that is taken to succeed
        self._is_cut = False  # True after `break` or `continue` in a `for`
        self._local: list[Variables] = []  # of each function that runs, outer values of its local variables

    @property
    def _variables(self) -> Variables:
        return self.expansion.variables

    def begin(self, text: str) -> None:
        """Set the variables of a job, from #SBATCH lines."""
        for name in (*_OF_A_JOB, "$"):
            self._variables[name] = [unknown(name, "1")]
        for name in ("0", "BASH_SOURCE"):
            self._variables[name] = [[(character, "1") for character in str(self._path)]]
        values = self.script.sbatch
        for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
            for name, value in re.findall(r"(?:^|\s)--?([A-Za-z-]+)(?:[ =]|(?=\d))([^\s#]+)", line):
                values[_SHORT.get(name, name)] = value.strip("\"'")
        if "gpus-per-node" not in values and (
            gpus := re.fullmatch(r"gpu(?::.*)?:\d+", values.get("gres", ""))
        ):
            values["gpus-per-node"] = gpus[0]
        if "gpus-per-node" in values:
            values["gpus-per-node"] = values["gpus-per-node"].rpartition(":")[2]
        nodes, tasks = values.get("nodes", ""), values.get("ntasks-per-node", "")
        if nodes.isdecimal() and tasks.isdecimal():
            values.setdefault("ntasks", str(int(nodes) * int(tasks)))
        for name, variables in _OF_SBATCH.items():
            if name in values:
                for variable in variables:
                    self._variables[variable] = [placed(values[name])]

    def fix(self, variables: dict[str, str]) -> None:
        """Set variables that no assignment of the script changes."""
        numbers = [int(name) for name in variables if name.isdecimal() and int(name) < 100]
        arguments = [unknown(str(number + 1), "1") for number in range(max(numbers, default=0))]
        for name, value in variables.items():
            if name.isdecimal() and 0 < int(name) < 100:
                arguments[int(name) - 1] = placed(value)
            else:
                self._variables[name] = [placed(value)]
                self._fixed.add(name)
        self.expansion.arguments = arguments

    # --- Nodes. Each returns True or False for its success, and None if only a job knows.

    def run(self, node: Node) -> bool | None:
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise KieloError(
                f"commands that call themselves in {_MOST_LEVELS} levels. Fix: write the arguments out"
            )
        try:
            return self._run(node)
        finally:
            self._level -= 1

    def _run(self, node: Node) -> bool | None:
        if isinstance(node, Commands):
            return self._run_commands(node)
        if isinstance(node, Simple):
            return self._run_simple(node)
        if isinstance(node, Test):
            return self._arithmetic_test(node) if node.is_arithmetic else self._test(node.words)
        if isinstance(node, Negated):
            result = self.run(node.command)
            return None if result is None else not result
        if isinstance(node, If):
            return self._run_branches(node.branches)
        if isinstance(node, Case):
            return self._run_case(node)
        if isinstance(node, For):
            return self._run_for(node)
        if isinstance(node, While):
            return self._run_while(node)
        if isinstance(node, Subshell):
            before, arguments = self._copied(), self.expansion.arguments
            result = self.run(node.body)
            self.expansion.variables, self.expansion.arguments = before, arguments
            return result
        self._functions[node.name] = node.body
        return True

    def _run_commands(self, node: Commands) -> bool | None:
        result: bool | None = True
        for operator, command in node.items:
            if result is None and self._is_assumed:
                result = True
            if operator in ("&&", "||") and result is None:
                self._run_branches([(_UNDECIDED, command)])
                continue
            if operator in ("&&", "||") and result != (operator == "&&"):
                continue
            result = self.run(command)
        return result

    def _run_branches(self, branches: list[tuple[Node | None, Node]]) -> bool | None:
        """Run the branch that is taken. If only a job knows, run all from the same variables, and compare."""
        outcomes: list[Variables] = []
        before = self._copied()
        for condition, body in branches:
            holds = True if condition is None else self.run(condition)
            if holds is False:
                continue
            self.run(body)
            outcomes.append(self._copied())
            if holds:
                break
            self.expansion.variables = {name: list(values) for name, values in before.items()}
        else:
            outcomes.append(before)
        self._merge(outcomes)
        return True

    def _copied(self) -> Variables:
        return {name: list(values) for name, values in self._variables.items()}

    def _merge(self, outcomes: list[Variables]) -> None:
        """Keep the variables that are equal in all outcomes. The others become unknown."""
        merged: Variables = dict(outcomes[0]) if outcomes else {}
        for name in dict.fromkeys(name for outcome in outcomes for name in outcome):
            texts = [[plain(value) for value in outcome.get(name, [])] for outcome in outcomes]
            if any(text != texts[0] for text in texts):
                last = next(outcome[name] for outcome in reversed(outcomes) if outcome.get(name))
                merged[name] = [unknown(name, last[0][0][1] if last and last[0] else "")]
        self.expansion.variables = merged

    def _run_case(self, node: Case) -> bool | None:
        subject = plain(self.expansion.text(node.subject))
        if unknown_names(subject):
            return self._run_branches([(_UNDECIDED, body) for _, body in node.branches])
        for patterns, body in node.branches:
            texts = [plain(self.expansion.text(pattern)) for pattern in patterns]
            if any(fnmatch.fnmatchcase(subject, text) for text in texts):
                return self.run(body)
        return True

    def _run_for(self, node: For) -> bool | None:
        words = [word for raw in node.words for word in self.expansion.fields(raw)]
        if not node.name or any(unknown_names(plain(word)) for word in words):
            return self._run_branches([(_UNDECIDED, node.body)])
        outer, self._is_cut = self._is_cut, False
        outcomes = [self._copied()]
        for word in words:
            self._variables[node.name] = [word]
            self.run(node.body)
            outcomes.append(self._copied())
        if self._is_cut:  # which rounds ended early is not followed
            self._merge(outcomes)
        self._is_cut = outer
        return True

    def _run_while(self, node: While) -> bool | None:
        for _ in range(200):
            holds = self.run(node.condition)
            if holds is None:
                return self._run_branches([(_UNDECIDED, node.body)])
            if holds == node.is_until:
                return True
            self.run(node.body)
        return self._run_branches([(_UNDECIDED, node.body)])  # it ends by a `break`

    # --- One command

    def _run_simple(self, node: Simple) -> bool | None:
        self._commands += 1
        if self._commands > _MOST_COMMANDS:
            raise KieloError(
                f"line {node.place}: more than {_MOST_COMMANDS:,} commands. Fix: write the arguments out"
            )
        words = [word for raw in node.words for word in self.expansion.fields(raw)]
        name = plain(words[0]) if words else ""
        is_declaration = not words or name in ("export", "declare", "local", "readonly", "typeset")
        if self._local and name in ("local", "declare", "typeset") and "-g" not in map(plain, words):
            self._make_local([one.name for one in node.assignments], [plain(word) for word in words[1:]])
        own = self._variables if is_declaration else self._copied()
        for assignment in node.assignments:
            self._assign(assignment, own)
        if not words or is_declaration:
            return True
        outside, self.expansion.variables = self._variables, own
        try:
            return self._call(name, words, node)
        finally:
            if node.assignments and name not in self._functions:
                self.expansion.variables = outside

    def _make_local(self, assigned: list[str], declared: list[str]) -> None:
        """Keep the outer values of a function's local variables. Those without a value here have none."""
        for name in (*assigned, *declared):
            if name not in self._fixed and not name.startswith("-"):
                self._local[-1].setdefault(name, self._variables.get(name, []))
        for name in declared:
            if name not in self._fixed:
                self._variables.pop(name, None)

    def _assign(self, given: Assignment, own: Variables) -> None:
        if given.name in self._fixed:
            return
        if given.values is not None:
            values = [word for raw in given.values for word in self.expansion.fields(raw)]
            own[given.name] = (own.get(given.name, []) if given.appends else []) + values
            return
        itself = rf"\$({given.name}\b|{{{given.name}}})"
        if given.name not in self._variables and re.search(
            f'.{itself}|{itself}[^"]', plain(given.value).strip('"')
        ):
            self._variables[given.name] = [[]]  # a list that grows begins empty
        value = self.expansion.text(given.value)
        old = own.get(given.name, [])
        if given.index is not None:
            number = plain(self.expansion.arithmetic(placed(given.index), ""))
            if not number.isdecimal() or int(number) > len(old):
                own[given.name] = [unknown(given.name, value[0][1] if value else "")]
                return
            own[given.name] = [*old[: int(number)], value, *old[int(number) + 1 :]]
        elif given.appends:
            own[given.name] = [(old[0] if old else []) + value, *old[1:]]
        else:
            own[given.name] = [value]

    def _call(self, name: str, words: list[Text], node: Simple) -> bool | None:
        base = os.path.basename(name)
        if name in self._functions:
            before, self.expansion.arguments = self.expansion.arguments, words[1:]
            self._local.append({})
            result = self.run(self._functions[name])
            self.expansion.arguments = before
            for variable, values in self._local.pop().items():
                self._variables.pop(variable, None)
                self._variables.update({variable: values} if values else {})
            return result
        self._is_cut |= name in ("break", "continue")
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("[", "test"):
            return self._test([raw for raw in node.words[1:] if plain(raw) != "]"])
        if name == "eval":
            return self._read_text([part for word in words[1:] for part in (*word, (" ", word[0][1]))])
        if name in ("source", "."):
            return self._source(words)
        if name == "set":
            if [plain(word) for word in words[1:2]] == ["--"]:
                self.expansion.arguments = words[2:]
            return True
        if name == "shift":
            given = plain(words[1]) if len(words) > 1 else "1"
            arguments = self.expansion.arguments
            if not given.isdecimal():
                self.expansion.arguments = [unknown(str(n), node.place) for n in range(1, len(arguments) + 1)]
            elif int(given) <= len(arguments):
                self.expansion.arguments = arguments[int(given) :]
            return True
        if name == "unset":
            for word in words[1:]:
                self._variables.pop(plain(word), None)
            return True
        if name in ("read", "mapfile", "readarray", "let", "getopts"):
            for word in words[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", plain(word), re.ASCII):
                    self._variables[plain(word)] = [unknown(plain(word), word[0][1])]
            return None
        self._writes_file(base, words, node)
        if (inner := self._inner_script(base, words, node)) is not None:
            self._read_text(inner)
            return None
        if base not in ("echo", "printf", "cat", "exit", "return", "mkdir"):
            texts = tuple((plain(word), word[0][1] if word else node.place) for word in words)
            kept = {key: value for key, value in self._variables.items() if key.startswith(_KEPT) and value}
            exported = {key: plain(value[0]) for key, value in kept.items()}
            self.script.commands.append(Command(texts, exported))
        self._is_assumed = True
        return None

    def _inner_script(self, base: str, words: list[Text], node: Simple) -> Text | None:
        """Return the script that a command gives to a shell: `bash -c SCRIPT`, or a here-document."""
        texts = [plain(word) for word in words]
        for number, text in enumerate(texts[:-1]):
            if os.path.basename(text) in ("bash", "sh"):
                options = [
                    at for at in range(number + 1, len(texts) - 1) if re.fullmatch(r"-[a-z]*c", texts[at])
                ]
                if options and all(one.startswith("-") for one in texts[number + 1 : options[0]]):
                    return words[options[0] + 1]
        if base in ("bash", "sh", "sbatch") and not [text for text in texts[1:] if not text.startswith("-")]:
            return self._here(node)
        return None

    def _here(self, node: Simple) -> Text | None:
        for redirect in node.redirects:
            if redirect.operator in ("<<", "<<<"):
                if redirect.is_literal:
                    return redirect.body
                return [(c, p) for c, p, _ in self.expansion.expanded(redirect.body, is_quoted=True) if c]
        return None

    def _writes_file(self, base: str, words: list[Text], node: Simple) -> None:
        """Keep the text of a file that `cat`, `echo`, `printf` or `tee` writes."""
        text = self._here(node) if base in ("cat", "tee") else None
        if base in ("echo", "printf") and len(words) > 1:
            given = [plain(word) for word in words[1:]]
            given = given[1:] if given[0] in ("-e", "-n", "%s", "%s\\n") else given
            text = placed(" ".join(given) + "\n")
        if text is None:
            return
        targets = [
            (one.operator, self.expansion.text(one.target))
            for one in node.redirects
            if one.operator in (">", ">>", ">|")
        ]
        targets += [(">", word) for word in words[1:] if base == "tee" and not plain(word).startswith("-")]
        for operator, target in targets:
            path = os.path.normpath(plain(target))
            before = self.script.files.get(path, "") if operator == ">>" else ""
            self.script.files[path] = before + plain(text)

    def _source(self, words: list[Text]) -> bool | None:
        given = plain(words[1]) if len(words) > 1 else ""
        for place in (self._path.parent / given, self._path.parent / os.path.basename(given)):
            if given and not unknown_names(str(place)) and place.is_file():
                return self._read_text(placed(_text_of(place), place.name))
        if given:
            self.script.absent.setdefault(given, words[1][0][1])
        return None

    def _read_text(self, text: Text) -> bool | None:
        return self.run(BashParser(text).script())

    def _output(self, command: Text) -> Text | None:
        """Return the output of commands that only change text. The output of others is unknown."""
        try:
            items = [item for _, item in BashParser(command).script().items]
        except KieloError:
            return None
        simple = [item for item in items if isinstance(item, Simple) and not item.redirects]
        if len(simple) != len(items):
            return None
        calls = [[word for raw in item.words for word in self.expansion.fields(raw)] for item in simple]
        names = [plain(words[0]) if words else "" for words in calls]
        if names == ["cd", "pwd"] and len(calls[0]) == 2:
            return calls[0][1]
        words = calls[0] if len(calls) == 1 else []
        if names == ["echo"] and len(words) > 1 and plain(words[1]) not in ("-e", "-n"):
            return [
                part
                for number, word in enumerate(words[1:])
                for part in ([(" ", "")] if number else []) + word
            ]
        if names in (["readlink"], ["realpath"]) and len(words) > 1:
            return words[-1]
        if names in (["basename"], ["dirname"]) and len(words) == 2 and not unknown_names(plain(words[1])):
            change = os.path.basename if names == ["basename"] else os.path.dirname
            return [(c, words[1][0][1]) for c in change(plain(words[1]).rstrip("/")) or "."]
        return None

    # --- Conditions

    def _arithmetic_test(self, node: Test) -> bool | None:
        self._is_assumed = False
        text = plain(node.words[0])
        changed = re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))", text, re.ASCII)
        if changed:
            for name in changed:
                self._variables[name] = [unknown(name, node.place)]
            return None
        number = plain(self.expansion.arithmetic(node.words[0], node.place))
        return None if unknown_names(number) else number != "0"

    def _test(self, words: list[Text]) -> bool | None:
        """Return what a test of strings and numbers gives. Files are only known in a job."""
        self._is_assumed = False
        texts = [plain(raw) for raw in words]
        for sign, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if sign in texts:
                at = texts.index(sign)
                results = (self._test(words[:at]), self._test(words[at + 1 :]))
                if decides in results:
                    return decides
                return None if None in results else not decides
        if texts[:1] == ["!"]:
            result = self._test(words[1:])
            return None if result is None else not result
        if len(words) == 1 or (len(words) == 2 and texts[0] in ("-n", "-z", "-v")):
            return self._is_set(texts, words[-1])
        if len(words) != 3:
            return None
        left, right = (plain(self.expansion.text(words[at])) for at in (0, 2))
        if unknown_names(left) or unknown_names(right):
            return None
        return _compared(left, texts[1], right)

    def _is_set(self, texts: list[str], raw: Text) -> bool | None:
        """Return what -z, -n and -v give. A variable without a value here is not set."""
        if texts[0] == "-v":
            return texts[1] in self._variables
        missing = dict(self.expansion.missing)
        value = plain(self.expansion.text(raw))
        names = [name for name in unknown_names(value) if name in self.expansion.missing]
        if names and value == plain(unknown(names[0], "")):
            value = ""
        self.expansion.missing = missing
        return (value == "") if texts[0] == "-z" else value != ""


_UNDECIDED: Node = Test("", [placed("-f"), placed("x")])


def _compared(left: str, sign: str, right: str) -> bool | None:
    numbers = [int(text) for text in (left, right) if re.fullmatch(r"[-+]?\d+", text)]
    if len(numbers) == 2 and sign in ("-eq", "-ne", "-lt", "-le", "-gt", "-ge"):
        order = (numbers[0] > numbers[1]) - (numbers[0] < numbers[1])
        return (
            order
            in {"-eq": (0,), "-ne": (-1, 1), "-lt": (-1,), "-le": (-1, 0), "-gt": (1,), "-ge": (0, 1)}[sign]
        )
    if sign in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if sign == "!=":
        return not fnmatch.fnmatchcase(left, right)
    return None
