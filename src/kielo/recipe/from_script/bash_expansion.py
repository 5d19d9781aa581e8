"""The values of words of bash: variables, arrays, quotes and arithmetic. Nothing is executed.

A value that only a running job has, such as the output of a command, stays in the text as a marked name.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Sequence

from kielo.recipe.errors import KieloError
from kielo.recipe.from_script.bash_syntax import Text, closing, plain

_OPEN, _CLOSE, _FIELD = "\ue000", "\ue001", "\ue002"
_ASIDE = 0xE100  # from here on stand signs that a shell would read
_MARKED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_BLANKS = (" ", "\t", "\n")
_MOST_CHARACTERS = 1_000_000
_MOST_OF_RANGE = 10_000
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]", re.ASCII)
_PARAMETER = re.compile(
    r"(?P<sign>[#!]?)(?P<name>[A-Za-z_]\w*|[0-9@*#?]+)(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)",
    re.ASCII | re.DOTALL,
)
Variables = dict[str, list[Text]]  # name → its values, several of an array
Quoted = list[tuple[str, str, bool]]  # characters with place, and whether they are quoted


def unknown(name: str, place: str) -> Text:
    """Return a marked name for a value that only a running job has. No shell splits it or changes it."""
    name = re.sub(f"[{_OPEN}-{_FIELD}]", "", name)
    name = "".join(chr(_ASIDE + ord(c)) if ord(c) < 128 and not c.isalnum() and c != "_" else c for c in name)
    return [(character, place) for character in f"{_OPEN}{name}{_CLOSE}"]


def unknown_names(text: str) -> list[str]:
    return list(dict.fromkeys(map(_read_aside, _MARKED.findall(text))))


def _read_aside(name: str) -> str:
    return re.sub("[\ue100-\ue17f]", lambda found: chr(ord(found[0]) - _ASIDE), name)


def shown(text: str) -> str:
    """Return the text for people: a marked name as $NAME, the output of a command as $(COMMAND)."""
    names = _MARKED.sub(
        lambda found: found[1] if found[1][:1] == chr(_ASIDE + ord("$")) else f"${found[1]}", text
    )
    return _read_aside(names)


class Expansion:
    """The expansion of words with these variables. `substitute` gives a command's output, None if unknown."""

    def __init__(
        self, variables: Variables, arguments: Sequence[Text], substitute: Callable[[Text], Text | None]
    ) -> None:
        self.variables = variables
        self.arguments = arguments
        self.missing: dict[str, str] = {}  # name of a variable without a value → its first place
        self._substitute = substitute
        self._left = _MOST_CHARACTERS

    def fields(self, raw: Text) -> list[Text]:
        """Return the words that a word becomes: none for an empty variable, several for a list."""
        found: list[Text] = []
        for word in self._braced(raw):
            is_open = False
            for character, place, is_quoted in self.expanded(word):
                if character == _FIELD or (character in _BLANKS and not is_quoted):
                    is_open = False
                    continue
                if not is_open:
                    found.append([])
                    is_open = True
                if character:
                    found[-1].append((character, place))
        return found

    def _braced(self, raw: Text) -> list[Text]:
        """Return the words that {a,b} and {1..3} outside of quotes make. Bash expands them first of all."""
        at = 0
        while at < len(raw):
            if raw[at][0] == "{":
                parts, end = _alternatives(raw, at)
                self._spend(20 * len(parts) * len(raw), raw)  # each is read again
                if parts:
                    return [word for part in parts for word in self._braced(raw[:at] + part + raw[end:])]
            at = closing(raw, at) if raw[at][0] in "\\'\"`$" else at + 1
        return [raw]

    def _spend(self, characters: int, raw: Text) -> None:
        self._left -= characters
        if self._left < 0:
            raise KieloError(
                f"line {raw[0][1]}: the script's variables grow beyond {_MOST_CHARACTERS:,} characters. Fix: "
                "write the arguments out"
            )

    def text(self, raw: Text) -> Text:
        """Return the value of an assignment or of a quoted word, without splitting."""
        return [(" " if c == _FIELD else c, place) for c, place, _ in self.expanded(raw) if c]

    def expanded(self, raw: Text, is_quoted: bool = False) -> Quoted:
        """Return the characters of a word after expansion. An empty quoted character keeps an empty word."""
        found: Quoted = []
        at = 0
        while at < len(raw):
            character, place = raw[at]
            is_literal = is_quoted and character in "'\""
            end = closing(raw, at) if character in "\\'\"`$" and not is_literal else at + 1
            part = raw[at:end]
            if is_literal:
                found.append((character, place, True))
            elif character == "\\" and len(part) == 2:
                kept = is_quoted and part[1][0] not in '$`"\\\n'
                found += [(c, p, True) for c, p in (part if kept else part[1:]) if c != "\n"]
            elif character == "'":
                found += [("", place, True), *((c, p, True) for c, p in part[1:-1])]
            elif character == '"':
                inner = self.expanded(part[1:-1], is_quoted=True)
                if inner or "@" not in plain(part):  # "$@" of nothing is no word
                    found += [("", place, True), *inner]
            elif character == "`":
                found += self._output(part[1:-1], place, is_quoted)
            elif character == "$":
                value, end = self._dollar(raw, at, end, is_quoted)
                found += value
            else:
                found.append((character, place, is_quoted))
            at = end
        self._spend(len(found), raw)
        return found

    def _dollar(self, raw: Text, at: int, end: int, is_quoted: bool) -> tuple[Quoted, int]:
        """Return the value of the expansion at `at`, and the index after it."""
        place, following = raw[at][1], plain(raw[at + 1 : at + 3])
        if following == "((" and plain(raw[end - 2 : end]) == "))":
            return self._quoted(self.arithmetic(raw[at + 3 : end - 2], place), is_quoted), end
        if following[:1] == "(":
            return self._output(raw[at + 2 : end - 1], place, is_quoted), end
        if following[:1] == "{":
            return self._parameter(raw[at + 2 : end - 1], place, is_quoted), end
        if following[:1] == "'" and not is_quoted:
            text = raw[at + 2 : end - 1]
            return [(c, place, True) for c in _unescaped(plain(text))], end
        if following[:1] == '"' and not is_quoted:
            return self.expanded(raw[at + 1 : end]), end
        name = _NAME.match(plain(raw[at + 1 : at + 200]))
        if name is None:
            return [("$", place, is_quoted)], at + 1
        return self._value(name[0], None, place, is_quoted), at + 1 + name.end()

    def _quoted(self, text: Text, is_quoted: bool) -> Quoted:
        return [(character, place, is_quoted) for character, place in text]

    def _output(self, command: Text, place: str, is_quoted: bool) -> Quoted:
        output = self._substitute(command)
        if output is None:
            output = unknown(f"$({' '.join(plain(command).split())[:60]})", place)
        while output and output[-1][0] == "\n":
            output = output[:-1]
        return self._quoted(output, is_quoted)

    # --- Variables

    def values(self, name: str, index: str | None) -> list[Text] | None:
        """Return the values of a variable or of its index, and None if it has no value here."""
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return [[(c, "") for c in str(len(self.arguments))]]
        if name == "?":
            return [[("0", "")]]
        if name.isdecimal() and name != "0":
            return [self.arguments[int(name) - 1]] if int(name) <= len(self.arguments) else None
        found = self.variables.get(name)
        if found is None or index in ("@", "*"):
            return found
        number = self.arithmetic([(c, "") for c in index or "0"], "")
        if unknown_names(plain(number)):
            return [number]
        position = int(plain(number))
        return [found[position]] if -len(found) <= position < len(found) else None

    def _value(self, name: str, index: str | None, place: str, is_quoted: bool) -> Quoted:
        values = self.values(name, index)
        if values is None:
            return self._quoted(self._without_value(name, place), is_quoted)
        return self._joined(values, name if index is None else index, is_quoted)

    def _without_value(self, name: str, place: str) -> Text:
        self.missing.setdefault(name, place)
        return unknown(name, place)

    def _joined(self, values: list[Text], how: str, is_quoted: bool) -> Quoted:
        found: Quoted = []
        for number, value in enumerate(values):
            if number:
                found.append((" " if how == "*" and is_quoted else _FIELD, "", is_quoted))
            found += self._quoted(value, is_quoted) or ([("", "", True)] if is_quoted else [])
        return found

    def _parameter(self, inside: Text, place: str, is_quoted: bool) -> Quoted:
        """Return the value of what ${ } has inside."""
        parts = _PARAMETER.fullmatch(plain(inside))
        if parts is None:
            return self._quoted(unknown(f"${{{plain(inside)}}}", place), is_quoted)
        name, index, rest = parts["name"], parts["index"], inside[parts.start("rest") :]
        values = self.values(name, index)
        if parts["sign"] == "#" and not rest:
            length = len(values or []) if index in ("@", "*") else len((values or [[]])[0])
            return [(c, place, is_quoted) for c in str(length)]
        if parts["sign"] == "!":
            if rest or values is None or unknown_names(plain(values[0])):
                return self._quoted(unknown(f"${{{plain(inside)}}}", place), is_quoted)
            return self._value(plain(values[0]), index, place, is_quoted)
        operation = re.match(r":?[-=+?]|//?|##?|%%?|\^\^?|,,?|:", plain(rest))
        if operation is None:
            return self._value(name, index, place, is_quoted)
        sign, word = operation[0], rest[operation.end() :]
        if sign.lstrip(":") in ("-", "=", "+", "?") and sign != ":":
            has = bool(values) and (sign[0] != ":" or any(values or []))
            if sign[-1] == "+":
                return self.expanded(word, is_quoted) if has else []
            if has or sign[-1] == "?":
                return self._value(name, index, place, is_quoted)
            found = self.expanded(word, is_quoted)
            if sign[-1] == "=":
                self.variables[name] = [[(c, p) for c, p, _ in found if c]]
            return found
        if values is None:
            return self._quoted(self._without_value(name, place), is_quoted)
        changed = [self._changed(value, sign, word, place) for value in values]
        return self._joined(changed, index or "", is_quoted)

    def _changed(self, value: Text, sign: str, word: Text, place: str) -> Text:
        """Return a value without a prefix or suffix, with a replacement, a part of it, or in another case."""
        text = plain(value)
        if unknown_names(text):
            return unknown(f"${{{shown(text)}{sign}{plain(word)}}}", place)
        if sign in ("^", "^^", ",", ",,"):
            change = str.upper if sign[0] == "^" else str.lower
            cut = len(value) if len(sign) == 2 else 1
            return [(change(c), p) for c, p in value[:cut]] + value[cut:]
        if sign == ":":
            given = [self.arithmetic(part, place) for part in _split(word, ":")]
            numbers = [int(plain(part)) for part in given if re.fullmatch(r"-?\d+", plain(part))]
            if len(numbers) != len(given) or not 1 <= len(given) <= 2:
                return unknown(f"${{{text}:{plain(word)}}}", place)
            begin = numbers[0] if numbers[0] >= 0 else max(0, len(value) + numbers[0])
            end = None if len(numbers) == 1 else numbers[1] if numbers[1] < 0 else begin + numbers[1]
            return value[begin:end]
        if sign in ("/", "//"):
            given = _split(word, "/")
            old, new = plain(self.text(given[0])), self.text(given[1]) if len(given) > 1 else []
            pattern = re.compile(fnmatch.translate(old)[:-2])
            return _replaced(value, pattern, new, 0 if sign == "//" else 1) if old else value
        affix = plain(self.text(word))
        cuts = range(len(text) + 1)
        if sign[0] == "#":
            fits = [cut for cut in cuts if fnmatch.fnmatchcase(text[:cut], affix)]
            return value[(max if sign == "##" else min)(fits, default=0) :]
        fits = [cut for cut in cuts if fnmatch.fnmatchcase(text[cut:], affix)]
        return value[: (min if sign == "%%" else max)(fits, default=len(text))]

    # --- Arithmetic

    def arithmetic(self, raw: Text, place: str) -> Text:
        """Return the number that an arithmetic expression gives, or its text as a marked name."""
        text = plain(self.text(raw))
        try:
            number = self._number(text, 0)
        except (ValueError, SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError):
            for name in re.findall(r"[A-Za-z_]\w*", text, re.ASCII):
                if not unknown_names(text) and self.values(name, None) is None:
                    self.missing.setdefault(name, place)
            return unknown(f"$(({shown(text).strip()[:60]}))", place)
        return [(character, place) for character in str(number)]

    def _number(self, text: str, level: int) -> int:
        if level > 20 or len(text) > 2000 or unknown_names(text):
            raise ValueError(text)
        text = re.sub(r"\b10#0*(?=\d)", "", text.strip() or "0").replace("&&", " and ").replace("||", " or ")
        text = re.sub(r"(?<![\w.])0(\d+)", lambda found: str(int(found[1], 8)), text)
        text = re.sub(r"!(?!=)", " not ", text)
        return self._of_tree(ast.parse(text.strip(), mode="eval").body, level)

    def _of_tree(self, node: ast.expr, level: int) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            values = self.values(node.id, None)
            if values is None:
                raise ValueError(node.id)
            return self._number(plain(values[0]), level + 1)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
            return _SIGNS[type(node.op)](self._of_tree(node.operand, level))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._of_tree(node.left, level), self._of_tree(node.right, level)
            if isinstance(node.op, ast.Pow | ast.LShift) and not (0 <= right <= 64 and abs(left) < 2**64):
                raise ValueError("beyond 64 bits")
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            right = self._of_tree(node.comparators[0], level)
            return int(_COMPARISONS[type(node.ops[0])](self._of_tree(node.left, level), right))
        if isinstance(node, ast.BoolOp):
            holds = [self._of_tree(one, level) != 0 for one in node.values]
            return int(all(holds) if isinstance(node.op, ast.And) else any(holds))
        raise ValueError("not simple arithmetic")


def _divided(left: int, right: int) -> int:
    """Divide as bash and C do: towards 0."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_SIGNS: dict[type, Callable[[int], int]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: lambda one: int(not one),
    ast.Invert: operator.invert,
}  # fmt: skip
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divided,
    ast.Mod: lambda left, right: left - _divided(left, right) * right, ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}  # fmt: skip
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def _unescaped(text: str) -> str:
    signs = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
    return re.sub(r"\\(.)", lambda found: signs.get(found[1], found[0]), text)


def _alternatives(raw: Text, at: int) -> tuple[list[Text], int]:
    """Return what the brace at `at` stands for, nothing for a plain brace, and the index after its end."""
    parts: list[Text] = []
    depth, begin, here = 0, at + 1, at + 1
    while here < len(raw):
        character = raw[here][0]
        if character in "\\'\"`$":
            here = closing(raw, here)
            continue
        if character == "}" and not depth:
            parts.append(raw[begin:here])
            return (parts if len(parts) > 1 else _range(raw[begin:here])), here + 1
        if character == "," and not depth:
            parts.append(raw[begin:here])
            begin = here + 1
        depth += (character == "{") - (character == "}")
        here += 1
    return [], at + 1


def _range(inside: Text) -> list[Text]:
    """Return the numbers or letters of FIRST..LAST or FIRST..LAST..STEP, nothing for another text."""
    found = re.fullmatch(r"(-?\d{1,9}|[A-Za-z])\.\.(-?\d{1,9}|[A-Za-z])(?:\.\.(-?\d{1,9}))?", plain(inside))
    if found is None or found[1].isalpha() != found[2].isalpha():
        return []
    is_text = found[1].isalpha()
    first, last = (ord(one) if is_text else int(one) for one in (found[1], found[2]))
    step = (abs(int(found[3] or 1)) or 1) * (1 if last >= first else -1)
    if abs(last - first) // abs(step) > _MOST_OF_RANGE:
        raise KieloError(
            f"line {inside[0][1]}: {{{plain(inside)}}} has more than {_MOST_OF_RANGE:,} words. Fix: write "
            "the arguments out"
        )
    is_padded = any(re.match(r"-?0\d", one) for one in (found[1], found[2]))
    width = max(len(found[1]), len(found[2])) if is_padded else 0
    numbers = range(first, last + (1 if step > 0 else -1), step)
    words = [chr(one) if is_text else f"{one:0{width}}" for one in numbers]
    return [[(character, inside[0][1]) for character in word] for word in words]


def _split(text: Text, sign: str) -> list[Text]:
    """Cut at the first `sign` outside of quotes and expansions."""
    at = 0
    while at < len(text):
        if text[at][0] == sign:
            return [text[:at], text[at + 1 :]]
        at = closing(text, at) if text[at][0] in "\\'\"`$" else at + 1
    return [text]


def _replaced(value: Text, pattern: re.Pattern[str], new: Text, most: int) -> Text:
    text, found, at = plain(value), [], 0
    for number, match in enumerate(pattern.finditer(text)):
        if match.end() == match.start() or (most and number >= most):
            continue
        found += value[at : match.start()] + new
        at = match.end()
    return found + value[at:]
