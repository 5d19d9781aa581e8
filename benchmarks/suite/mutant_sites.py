"""Small changes to a source tree, drawn by seed, and probes that note which test runs the place of each.

A change is one of six kinds: a boundary or comparison, an operator, a number, a condition, a statement that
is dropped, two arguments that are swapped. At most one change is drawn from each function.
"""

import ast
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Statement = ast.stmt
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
_EXTREMES = {
    "max": "min",
    "min": "max",
    "all": "any",
    "any": "all",
    "maximum": "minimum",
    "minimum": "maximum",
}


# In a class, for each of its fields that may change; the one before is called from it. The word super itself
# is not allowed in a NamedTuple.
_READ = """
def __getattribute__(self, name, before=locals().get("__getattribute__")):
    if name in {names!r}:
        {call}
    above = getattr(__import__("builtins"), "super")({owner}, self).__getattribute__
    return before(self, name) if before else above(name)
"""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    file: below the package. line: where it is. old, new: the text. number: the place of `old` in the file, in
    bytes. test: the test that is known to catch it, if there is one.
    """

    file: str
    line: int
    old: str
    new: str
    number: int
    test: str | None = None

    def apply(self, source: bytes) -> bytes:
        """Returns the changed file."""
        end = self.number + len(self.old.encode())
        assert source[self.number : end] == self.old.encode(), self
        return source[: self.number] + self.new.encode() + source[end:]


def draw(package: Path, count: int, seed: int, folders: tuple[str, ...] = ()) -> list[Mutant]:
    """Draws `count` changes from the files of the package, or of these folders ("plan/") of it.

    A function is drawn as often as it has places; each of its places is as likely as another.
    """
    of_function: dict[tuple[str, str], list[Mutant]] = {}
    for path in sorted(package.rglob("*.py")):
        if folders and not path.relative_to(package).as_posix().startswith(folders):
            continue
        source = path.read_bytes()
        for function, mutant in _mutants(path.relative_to(package).as_posix(), source):
            of_function.setdefault((mutant.file, function), []).append(mutant)
    functions = [key for key, mutants in of_function.items() for _ in mutants]
    generator = random.Random(seed)
    generator.shuffle(functions)
    chosen = list(dict.fromkeys(functions))[:count]
    return [generator.choice(of_function[key]) for key in chosen]


def _mutants(file: str, source: bytes) -> Iterator[tuple[str, Mutant]]:
    """Yields the name of the function and the change, for each change of a file."""
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for function, node in _changeable(ast.parse(source)):
        for changed in _changes(node):
            begin = starts[node.lineno - 1] + node.col_offset
            old = source[begin : starts[node.end_lineno - 1] + node.end_col_offset].decode()
            text = ast.unparse(changed)
            new = text if isinstance(node, ast.stmt | ast.Constant | ast.Call) else f"({text})"
            yield function, Mutant(file, node.lineno, old, new, begin)


def _changeable(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yields the nodes that may change, each with the name of its outermost function or class' method.

    A name is among them if it alone is a condition.
    """
    branches = (node for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While))
    conditions = {id(branch.test) for branch in branches}

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and "." not in function:
            function = f"{function}.{node.name}" if function else node.name
        if not isinstance(node, ast.Name | ast.Attribute) or id(node) in conditions:
            yield function, node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
                continue  # positions inside of an f-string are not those of the file
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.Assert):
                    yield from visit(child, function)

    yield from visit(tree, "")


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what a node may become."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            yield _with(node, ops=[_COMPARISONS[type(operator)]()])
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right)):
                yield _with(node, op=_OPERATORS[type(operator)]())
        case ast.BoolOp(op=ast.And()):
            yield _with(node, op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield _with(node, op=ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1 if isinstance(value, int) else value * 2 or 1.0)
        case ast.Name() | ast.Attribute():
            yield ast.UnaryOp(ast.Not(), node)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Call(func=ast.Name(id=name)) if name in _EXTREMES:
            yield _with(node, func=ast.Name(_EXTREMES[name]))
        case ast.Call(func=ast.Attribute(attr=name)) if name in _EXTREMES:
            yield _with(node, func=_with(node.func, attr=_EXTREMES[name]))
        case ast.Call(args=[ast.Name() as first, ast.Name() as second, *rest]) if first.id != second.id:
            yield _with(node, args=[second, first, *rest])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def add_probes(package: Path, mutants: list[Mutant], call: Callable[[int], str]) -> None:
    """Writes a call before the statement of each mutant, made of its number in the list.

    A name that is set outside of functions is used elsewhere: its probes stand at the beginning of each
    function of the package that reads the name. That of a class is also read by tests: its class gets a
    method that notes who reads it. Comments are lost.
    """
    trees = {path: ast.parse(path.read_bytes()) for path in sorted(package.rglob("*.py"))}
    for number, mutant in enumerate(mutants):
        probe = ast.parse(call(number)).body[0]
        tree = trees[package / mutant.file]
        place = _statement(tree, mutant)
        if place is not None:
            body, statement = place
            body.insert(body.index(statement), probe)
            continue
        names = _names_outside(tree, mutant.line)
        if (owner := _class_around(tree, mutant.line)) is not None:
            method = _READ.format(names=names, call=call(number), owner=owner.name)
            owner.body.append(ast.parse(method).body[0])
        for other in trees.values():
            for function in ast.walk(other):
                if isinstance(function, ast.FunctionDef) and names & _names_read(function):
                    function.body.insert(0, probe)
    for path, tree in trees.items():
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def _statement(tree: ast.Module, mutant: Mutant) -> tuple[list[Statement], Statement] | None:
    """Returns the innermost statement of a function around the mutant, with the list that it is in."""
    found = None
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for parent in ast.walk(function):
            for _, body in ast.iter_fields(parent):
                if not (isinstance(body, list) and body and isinstance(body[0], ast.stmt)):
                    continue
                for statement in body:
                    if getattr(statement, "lineno", mutant.line + 1) <= mutant.line <= statement.end_lineno:
                        found = body, statement
    return found


def _class_around(tree: ast.Module, line: int) -> ast.ClassDef | None:
    """Returns the class of whose body, outside of its functions, the line is."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.lineno <= line <= node.end_lineno), None)


def _names_outside(tree: ast.Module, line: int) -> set[str]:
    """Returns the names that the statement outside of functions around a line sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= line <= node.end_lineno:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= node.end_lineno:
            return {node.name}  # a default of an argument
    return set()


def _names_read(function: ast.FunctionDef) -> set[str]:
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
