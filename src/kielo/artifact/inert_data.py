"""Pickles read as plain data: nothing that they name is imported, called or made.

A pickle is a program. `torch.save` and Megatron write pickles, so a checkpoint from somewhere else could run
anything. Here its opcodes are decoded by `pickletools` and followed by a machine without calls: a class or
function is its name (`Named`), a call is a record of it (`Made`), a persistent id is `Stored`.

Names of Python's own modules are refused unless a checkpoint needs them. Names of unknown packages are only
accepted inside the arguments of the training, because forks keep settings of their own there.
"""

import pickletools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kielo.recipe.errors import KieloError

MOST_BYTES = 512 * 2**20  # the table of a model of a trillion parameters has less
MOST_OBJECTS = 20_000_000  # lists, tables, tuples and calls: one of a byte takes 60 and more
_MOST_DEPTH = 100
_MOST_WAITING = 100_000  # values on the stack; pickles add at most 1,000 to a list at once
# Objects of checkpoints, in their modules of Python 3 and 2.
_OF_PYTHON = {
    "collections": "OrderedDict defaultdict deque",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "_codecs": "encode",
    "builtins": "object set frozenset slice complex bytearray dict list tuple int float bool str bytes",
    "copyreg": "_reconstructor",
    "pathlib": "Path PosixPath PurePath PurePosixPath WindowsPath PureWindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath WindowsPath PureWindowsPath",
    "datetime": "date datetime time timedelta timezone",
    "signal": "Signals",
    "functools": "partial",
}
_OLDER_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_KNOWN_PACKAGES = {"torch", "numpy", "megatron", "deepspeed", "transformer_engine", "apex"}
_DICTIONARIES = ("collections.OrderedDict", "collections.defaultdict", "builtins.dict")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_TUPLE_SIZES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# Opcodes that make no object with others in it.
_PLAIN = {
    *_LITERALS, *_CONSTANTS, "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "PUT", "BINPUT",
    "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
    "ADDITEMS", "BUILD",
}  # fmt: skip
_MARK = object()


@dataclass(frozen=True, eq=False)
class Named:
    """A class, function or constant that the pickle names, such as "torch.bfloat16"."""

    name: str


@dataclass(frozen=True, eq=False)
class Stored:
    """A reference to bytes that `torch.save` keeps beside the pickle, by its persistent id."""

    identity: Any


@dataclass(eq=False)
class Made:
    """An object that the pickle asks for, which was not made: its class or function, arguments and state."""

    what: Named
    arguments: tuple[Any, ...]
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.what.name


def check_size(number: int, where: str) -> None:
    """Raise KieloError for a pickle of more bytes than any checkpoint's. To be called before it is read."""
    if number > MOST_BYTES:
        raise KieloError(f"{where}: its pickle has {number:,} bytes, and Kielo reads up to {MOST_BYTES:,}")


def read_as_data(data: bytes, where: str, plain_under: str | None = None) -> Any:
    """Return the content of a pickle as plain data. where: its file, for messages.

    plain_under: the key of the content under which unknown packages are accepted. Raise KieloError for names
    that no checkpoint needs, for tuples nested too deep, and for damage.
    """
    check_size(len(data), where)
    machine = _Machine(where)
    try:
        content = machine.run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise KieloError(f"{where}: cannot be read, cut short or damaged ({error!r})") from error
    if machine.unknown:
        plain = content.get(plain_under) if isinstance(content, dict) and plain_under else None
        accepted = {id(one) for one in walk(plain)}
        for one in machine.unknown:
            if id(one) not in accepted:
                _refuse(where, one.name)
    return content


def walk(content: Any) -> Iterator[Any]:
    """Yield `content` and everything in it, each object once."""
    seen, left = set[int](), [content]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            left += one
        elif isinstance(one, Made):
            left += [one.what, one.arguments, one.state, one.entries]


def _refuse(where: str, name: str) -> NoReturn:
    raise KieloError(
        f"{where}: refused: its pickle names {name}, which is no data of a checkpoint, and loading it could "
        "run code. Nothing was run. Fix: fetch the checkpoint again from its publisher"
    )


class _Machine:
    """The stack, marks and memo of a pickle, without a way to call anything."""

    def __init__(self, where: str):
        self.unknown: list[Named] = []
        self._where = where
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        # Of containers of containers; each is kept, so that no other object gets its id.
        self._depths: dict[int, tuple[int, Any]] = {}

    def run(self, data: bytes) -> Any:
        made = 0
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            made += name not in _PLAIN
            if made > MOST_OBJECTS:
                raise KieloError(
                    f"{self._where}: refused: its pickle makes more than {MOST_OBJECTS:,} objects, which no "
                    "checkpoint does. Nothing was run. Fix: fetch the checkpoint again from its publisher"
                )
            if len(self._stack) > _MOST_WAITING:
                self._refuse_depth()
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _TUPLE_SIZES:
                self._tuple(self._popped(_TUPLE_SIZES[name]))
            elif name == "STOP":
                break
            elif name not in ("PROTO", "FRAME"):
                step = getattr(self, f"_do_{name.lower()}", None)
                if step is None:
                    raise ValueError(f"the opcode {name}")
                step(argument)
        (content,) = self._stack
        return content

    def _popped(self, number: int) -> list[Any]:
        if number > len(self._stack):
            raise ValueError("an empty stack")
        first = len(self._stack) - number
        values, self._stack[first:] = self._stack[first:], []
        return values

    def _since_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        values = self._stack[place + 1 :]
        del self._stack[place:]
        return values

    def _tuple(self, values: Iterable[Any]) -> None:
        made = tuple(values)
        self._note_depth(made, made)
        self._stack.append(made)

    def _note_depth(self, container: Any, added: Iterable[Any]) -> None:
        inside = [one for one in added if isinstance(one, (tuple, list, dict, Made))]
        if not inside:
            return
        depth = 1 + max(self._depths.get(id(one), (1, None))[0] for one in inside)
        if depth > self._depths.get(id(container), (1, None))[0]:
            self._depths[id(container)] = (depth, container)
        if depth > _MOST_DEPTH:
            self._refuse_depth()

    def _refuse_depth(self) -> NoReturn:
        raise KieloError(
            f"{self._where}: refused: its pickle nests values more than {_MOST_DEPTH} deep, which no "
            "checkpoint does. Nothing was run. Fix: fetch the checkpoint again from its publisher"
        )

    def _do_mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _do_pop(self, _: Any) -> None:
        self._stack.pop()

    def _do_pop_mark(self, _: Any) -> None:
        self._since_mark()

    def _do_dup(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _do_tuple(self, _: Any) -> None:
        self._tuple(self._since_mark())

    def _do_empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _do_list(self, _: Any) -> None:
        values = self._since_mark()
        self._note_depth(values, values)
        self._stack.append(values)

    def _do_append(self, _: Any) -> None:
        self._extend(self._popped(1))

    def _do_appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    _do_additems = _do_appends

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        self._note_depth(target, values)
        if isinstance(target, list):
            target += values
        elif isinstance(target, Made):  # a deque
            target.entries |= {(len(target.entries), number): one for number, one in enumerate(values)}
        else:
            raise ValueError("values for no list")

    def _do_empty_set(self, _: Any) -> None:
        self._stack.append([])  # the members only, which may have no hash here

    def _do_frozenset(self, _: Any) -> None:
        self._do_list(None)

    def _do_empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _do_dict(self, _: Any) -> None:
        values = self._since_mark()
        self._stack.append({})
        self._set(values)

    def _do_setitem(self, _: Any) -> None:
        self._set(self._popped(2))

    def _do_setitems(self, _: Any) -> None:
        self._set(self._since_mark())

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        self._note_depth(target, values)
        entries = target.entries if isinstance(target, Made) else target
        if not isinstance(entries, dict) or len(values) % 2:
            raise ValueError("items for no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # The hash of a tuple goes through all of it, so that a few bytes could take for ever.
            if isinstance(key, tuple) and any(isinstance(one, tuple) for one in key):
                raise ValueError("a key of nested tuples")
            entries[key] = value

    def _do_put(self, number: Any) -> None:
        self._memo[int(number)] = self._stack[-1]

    _do_binput = _do_long_binput = _do_put

    def _do_memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _do_get(self, number: Any) -> None:
        self._stack.append(self._memo[int(number)])

    _do_binget = _do_long_binget = _do_get

    def _do_persid(self, identity: Any) -> None:
        self._stack.append(Stored(identity))

    def _do_binpersid(self, _: Any) -> None:
        self._stack.append(Stored(self._stack.pop()))

    def _do_global(self, names: str) -> None:
        module, _, name = names.partition(" ")
        self._name(module, name)

    def _do_stack_global(self, _: Any) -> None:
        module, name = self._popped(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is no text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        module = _OLDER_MODULES.get(module, module)
        named, package = Named(f"{module}.{name}"), module.partition(".")[0]
        if name not in _OF_PYTHON.get(module, "").split() and package not in _KNOWN_PACKAGES:
            if package in sys.stdlib_module_names or not package:
                _refuse(self._where, named.name)
            self.unknown.append(named)
        self._stack.append(named)

    def _do_reduce(self, _: Any) -> None:
        what, arguments = self._popped(2)
        self._make(what, arguments)

    _do_newobj = _do_reduce

    def _do_newobj_ex(self, _: Any) -> None:
        what, arguments, _ = self._popped(3)
        self._make(what, arguments)

    def _do_obj(self, _: Any) -> None:
        what, *arguments = self._since_mark()
        self._make(what, tuple(arguments))

    def _do_inst(self, names: str) -> None:
        arguments = tuple(self._since_mark())
        self._do_global(names)
        self._make(self._stack.pop(), arguments)

    def _make(self, what: Any, arguments: Any) -> None:
        if isinstance(what, Made):  # a partial, or a method
            what = what.what
        if not isinstance(what, Named) or not isinstance(arguments, tuple):
            raise ValueError("a call of something without a name")
        made: Any = Made(what, arguments)
        if what.name == "copyreg._reconstructor" and arguments and isinstance(arguments[0], Named):
            made = Made(arguments[0], ())
        elif what.name in _DICTIONARIES and all(isinstance(one, Named) for one in arguments):
            made = {}
        elif what.name == "torch.Size" and len(arguments) == 1:
            (made,) = arguments
        self._note_depth(made, arguments)
        self._stack.append(made)

    def _do_build(self, _: Any) -> None:
        target, state = self._stack[-2], self._stack.pop()
        self._note_depth(target, [state])
        if isinstance(target, Made):
            target.state = state
