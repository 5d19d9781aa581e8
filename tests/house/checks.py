"""The searches of the house tests, as functions of a source tree: each also runs on a planted fault."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jinja2

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kielo"
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "core", "base", "tools", "manager"}
FORBIDDEN_IN_MODELS = ("torch.distributed", "torch.cuda", "os", "kielo.parallel", "kielo.ranks")
UNPICKLING = re.compile(
    r"(\w+\.)*((all_)?gather|broadcast|scatter|send|recv)_object(_list)?|torch\.load|(\w*pickle|shelve|rpc|Listener)"
)
FAMILY_TABLES = ("tables",)
MOST_ARGUMENTS = 7
# The library, each of whose functions loads what it needs.
MAY_IMPORT_LATE = ("api.py",)
# Files that still do. None is added.
IMPORT_LATE = {"dataset/heldout_sets.py", "recipe/complaints.py", "tokenizer/chat_template.py"}


def folders_without_init(package: Path) -> list[str]:
    """Folders that hold Python but are no packages: import-linter does not see what is in them."""
    folders = {path.parent for path in package.rglob("*.py")}
    inside = {
        above for folder in folders for above in (folder, *folder.parents) if above.is_relative_to(package)
    }
    return sorted(
        str(folder.relative_to(package)) for folder in inside if not (folder / "__init__.py").is_file()
    )


def models_inits_with_code(package: Path) -> list[str]:
    """An `__init__` that imports would bring torch to whoever asks for a family's tables."""
    inits = [package / "models" / "__init__.py", *(package / "models").glob("*/__init__.py")]
    return [str(path.relative_to(package)) for path in inits if path.read_text(encoding="utf-8").strip()]


def banned_names(package: Path) -> list[str]:
    """Rooms and files whose name does not tell what is inside; recipes have the names of models."""
    return sorted(
        str(path.relative_to(package))
        for path in package.rglob("*")
        if BANNED_NAMES & set(path.stem.lower().split("_")) and path.parent != package / "recipes"
    )


def parsed(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, _tree(path.read_text(encoding="utf-8"))


@cache
def _tree(text: str) -> ast.Module:
    """Several checks look at the same files. None changes a tree."""
    return ast.parse(text)


def repeated_names(package: Path) -> list[str]:
    """Names that several files outside of models/ and cli/ have: a reader could not tell them apart."""
    names = Counter(
        path.name
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in ("models", "cli") and path.name != "__init__.py"
    )
    return sorted(name for name, count in names.items() if count > 1)


def functions_with_many_arguments(package: Path) -> list[str]:
    """Functions with more than `MOST_ARGUMENTS` arguments, self and cls not counted, as `FILE: NAME`."""
    found = []
    for path, tree in parsed(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                signature = node.args
                arguments = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
                arguments += [one for one in (signature.vararg, signature.kwarg) if one is not None]
                names = [one.arg for one in arguments if one.arg not in ("self", "cls")]
                if len(names) > MOST_ARGUMENTS:
                    found.append(f"{path.relative_to(package)}: {node.name}")
    return found


def files_that_import_late(package: Path) -> set[str]:
    """Files with an import of Kielo's inside a function, which a reader of the file's top does not see."""
    found = set()
    for path, tree in parsed(package):
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
                    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                    if any(name.partition(".")[0] == "kielo" for name in names):
                        found.add(str(path.relative_to(package)))
    return found - {*MAY_IMPORT_LATE}


def exchanged_files_by_name(package: Path, names: set[str]) -> list[str]:
    """Files outside artifact/ that name a file which stages exchange, instead of its type there."""
    return sorted(
        f"{path.relative_to(package)}:{node.lineno}: {node.value}"
        for path, tree in parsed(package)
        if not path.is_relative_to(package / "artifact")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    )


def ranks_and_devices_in_models(package: Path) -> list[str]:
    """Finds where models/ leaves the single device: distributed code, the environment, a device by name."""
    found = []
    for path, tree in parsed(package / "models"):
        aliases = _aliases(tree)
        for node in ast.walk(tree):
            for name in _mentioned(node, aliases):
                if any(name == word or name.startswith(word + ".") for word in FORBIDDEN_IN_MODELS):
                    found.append(f"{path.relative_to(package)}:{node.lineno}: {name}")
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"cuda(:\d+)?", node.value)
            ):
                found.append(f"{path.relative_to(package)}:{node.lineno}: the device {node.value!r}")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "cuda"
            ):
                found.append(f"{path.relative_to(package)}:{node.lineno}: .cuda()")
    return sorted(set(found))


def unpicklings(package: Path) -> list[str]:
    """Finds what may unpickle: collectives of objects, and readers of pickles, by their names."""
    found = set()
    for path, tree in parsed(package):
        for node in ast.walk(tree):
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [name.name for name in node.names] + node.module.split(".")
            elif isinstance(node, ast.Import):
                names = [part for name in node.names for part in name.name.split(".")]
            found |= {f"{path.relative_to(package)}: {name}" for name in names if UNPICKLING.fullmatch(name)}
    return sorted(found)


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name → what it was imported as, so that `import torch as t; t.cuda` is seen."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                name.asname or name.name.split(".")[0]: name.name if name.asname else name.name.split(".")[0]
                for name in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return aliases


def _mentioned(node: ast.AST, aliases: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{name.name}" for name in node.names]
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if parts and isinstance(node, ast.Name) and node.id in aliases:
        return [".".join([aliases[node.id], *parts])]
    return []


def private_names_used(tests: Path, package: Path) -> list[str]:
    """Finds where tests read, import or patch a private name that the package defines.

    A test's own `self._name` is its own. A string counts as an argument of a call: `setattr(part, "_name")`.
    """
    private = {name for _, tree in parsed(package) for name in _private_names(tree)}
    found = []
    for path in sorted(tests.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if private.isdisjoint(re.findall(r"\b_\w+", text)):
            continue  # most files: to parse them would take seconds
        for node in ast.walk(ast.parse(text, str(path))):
            found += [
                f"{path.relative_to(tests)}:{node.lineno}: {name}"
                for name in _outside_names(node)
                if name.rpartition(".")[2] in private
            ]
    return sorted(set(found))


def _private_names(tree: ast.Module) -> Iterator[str]:
    """The names with one leading underscore that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr if _is_of_self(node) else ""
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and name != "_":
            yield name


def _outside_names(node: ast.AST) -> list[str]:
    """The names by which a node reaches into another object or file."""
    if isinstance(node, ast.Attribute):
        return [] if _is_of_self(node) else [node.attr]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kielo"):
        return [name.name for name in node.names]
    if isinstance(node, ast.Call):
        return [
            each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
    return []


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


@cache
def attributes_read(package: Path, leaving_out: tuple[str, ...]) -> dict[str, set[str]]:
    """Finds for each attribute that some file reads (`x.y.sequence_length`) the names that it is read of.

    `recipe.dataset.sequence_length` is read of "dataset". A local name stands for what it was assigned from
    (`section = recipe.corpus`) and for its annotation (`def f(corpus: Corpus)`), in lower case.
    """
    read: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        if str(path.relative_to(package)) not in leaving_out:
            for name, owners in _attributes_of(path.read_text(encoding="utf-8")).items():
                read.setdefault(name, set()).update(owners)
    for path in package.rglob("*.jinja"):
        template = jinja2.Environment().parse(path.read_text(encoding="utf-8"))
        for node in template.find_all(jinja2.nodes.Getattr):
            owner = getattr(node.node, "attr", getattr(node.node, "name", ""))
            read.setdefault(node.attr, set()).add(owner)
    return read


@cache
def _attributes_of(text: str) -> dict[str, set[str]]:
    """Of one file's text: several tests ask about the same files, and one about a copy with a change."""
    tree, read = _tree(text), {}
    stands_for = _stands_for(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = _last_name(node.value)
            read.setdefault(node.attr, set()).update({owner} | stands_for.get(owner, set()))
    return read


def _last_name(node: ast.AST) -> str:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def _stands_for(tree: ast.Module) -> dict[str, set[str]]:
    meanings: dict[str, set[str]] = {}

    def means(name: str, value: ast.AST | None) -> None:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):  # a quoted annotation
            meanings.setdefault(name, set()).add(value.value.rpartition(".")[2].lower())
        elif value is not None and (word := _last_name(value)):
            meanings.setdefault(name, set()).add(word.lower())

    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            means(node.arg, node.annotation)
        elif isinstance(node, ast.AnnAssign):
            means(_last_name(node.target), node.annotation)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            names, values = node.targets[0], node.value
            pairs = (
                zip(names.elts, values.elts)
                if isinstance(names, ast.Tuple) and isinstance(values, ast.Tuple)
                else [(names, values)]
            )
            for target, value in pairs:
                means(_last_name(target), value)
        elif isinstance(node, ast.For | ast.comprehension):
            iterated = node.iter
            if isinstance(iterated, ast.Call) and _last_name(iterated.func) == "enumerate" and iterated.args:
                iterated = iterated.args[0]
            target = node.target.elts[-1] if isinstance(node.target, ast.Tuple) else node.target
            means(_last_name(target), iterated)
    return meanings
