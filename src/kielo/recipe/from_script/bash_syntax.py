"""The syntax of bash: the text of a script to a tree of its commands. Words stay as they are written.

Each character keeps its place, so that a word of a command that several variables built has a line.
"""

import re
from dataclasses import dataclass, field
from typing import NoReturn

from kielo.recipe.errors import KieloError

Text = list[tuple[str, str]]  # characters, each with its place: "12", or "other.sh:12" of a file it reads

_METACHARACTERS = " \t\n;|&()<>"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.ASCII)
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_REDIRECT = re.compile(r"(\d*|&)(<<<|<<-|<<|<>|<&|<|>>|>\||>&|>)")
_MOST_LEVELS = 60


@dataclass(frozen=True)
class Assignment:
    """NAME=value, NAME+=value, NAME[index]=value, or NAME=(values)."""

    name: str
    index: str | None
    appends: bool
    value: Text
    values: list[Text] | None = None


@dataclass(frozen=True)
class Redirect:
    """An operator, its target, and the text of a here-document. is_literal: nothing in it is expanded."""

    operator: str
    target: Text
    body: Text = field(default_factory=list)
    is_literal: bool = False


@dataclass(frozen=True)
class Simple:
    """Assignments, words and redirections of one command."""

    place: str
    assignments: list[Assignment]
    words: list[Text]
    redirects: list[Redirect]


@dataclass(frozen=True)
class Test:
    """[[ words ]], or (( text ))."""

    place: str
    words: list[Text]
    is_arithmetic: bool = False


@dataclass(frozen=True)
class Commands:
    """Commands with the operators before them: ; && || |."""

    items: list[tuple[str, "Node"]]


@dataclass(frozen=True)
class If:
    """Conditions with their commands. The last may have no condition."""

    place: str
    branches: list[tuple["Node | None", "Node"]]


@dataclass(frozen=True)
class For:
    place: str
    name: str
    words: list[Text]
    body: "Node"


@dataclass(frozen=True)
class While:
    place: str
    condition: "Node"
    body: "Node"
    is_until: bool


@dataclass(frozen=True)
class Case:
    place: str
    subject: Text
    branches: list[tuple[list[Text], "Node"]]


@dataclass(frozen=True)
class Function:
    name: str
    body: "Node"


@dataclass(frozen=True)
class Negated:
    command: "Node"


@dataclass(frozen=True)
class Subshell:
    """( commands ), which change no variable outside."""

    body: "Node"


Node = Simple | Test | Commands | If | For | While | Case | Function | Negated | Subshell


def placed(text: str, file: str = "") -> Text:
    """Return the characters of a file with their lines. file: "" for the script itself."""
    before, line, found = f"{file}:" if file else "", 1, []
    for character in text.replace("\r\n", "\n"):
        found.append((character, f"{before}{line}"))
        line += character == "\n"
    return found


def plain(text: Text) -> str:
    return "".join(character for character, _ in text)


def closing(text: Text, at: int) -> int:
    """Return the index after the quote, expansion or escape that begins at `at`."""
    here, following = text[at][0], plain(text[at + 1 : at + 3])
    if here == "\\":
        return min(at + 2, len(text))
    if here == "'" or (here == "$" and following[:1] == "'"):
        return _quote_end(text, at + (here == "$"), is_ansi=here == "$")
    if here in '"`':
        return _nested_end(text, at, at + 1, here)
    if here == "$" and following[:1] == "$":
        return at + 2
    if here == "$" and following == "((":
        return _nested_end(text, at, at + 2, ")")
    if here == "$" and following[:1] in ("(", "{", '"'):
        return _nested_end(text, at, at + 2, {"(": ")", "{": "}", '"': '"'}[following[0]])
    return at + 1


def _quote_end(text: Text, at: int, is_ansi: bool) -> int:
    begin = at
    at += 1
    while at < len(text) and text[at][0] != "'":
        at += 2 if is_ansi and text[at][0] == "\\" else 1
    if at >= len(text):
        _unclosed(text, begin)
    return at + 1


def _nested_end(text: Text, begin: int, at: int, end: str) -> int:
    depth = 1
    while at < len(text):
        character = text[at][0]
        if character == end:
            depth -= 1
            if not depth:
                return at + 1
            at += 1
        elif end == ")" and character == "(":
            depth += 1
            at += 1
        elif (
            character == "'"
            and end in '"`'
            or character == "$"
            and end == '"'
            and plain(text[at + 1 : at + 2]) == '"'
        ):
            at += 1
        elif character in "\\'\"`$":
            at = closing(text, at)
        else:
            at += 1
    _unclosed(text, begin)


def _unclosed(text: Text, begin: int) -> NoReturn:
    sign = plain(text[begin : begin + 2]).strip()
    raise KieloError(f"line {text[begin][1]}: {sign} has no end. Fix: close it, as `bash -n` asks")


class BashParser:
    """A parser of one text. `script` returns its tree."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._at = 0
        self._waiting: list[tuple[str, bool, list[Redirect]]] = []  # here-documents whose text follows
        self._levels = 0

    def script(self) -> Commands:
        found = self._commands(())
        if self._at < len(self._text):
            self._refuse(f"{self._peek(1)!r} without a beginning")
        return found

    # --- Lists and compounds

    def _commands(self, ends: tuple[str, ...]) -> Commands:
        """Read commands up to a reserved word or sign in `ends`, which stays."""
        self._levels += 1
        if self._levels > _MOST_LEVELS:
            self._refuse(f"commands in more than {_MOST_LEVELS} levels")
        items: list[tuple[str, Node]] = []
        operator = ";"
        while True:
            self._lines()
            if self._at >= len(self._text) or self._reserved() in ends or self._peek(2) == ";;":
                break
            if self._peek(1) == ")":
                break
            items.append((operator, self._command()))
            self._blanks()
            operator = ";"
            for sign in ("&&", "||", "|&", "|", ";", "&"):
                if self._peek(len(sign)) == sign and self._peek(2) != ";;":
                    self._at += len(sign)
                    operator = {"|&": "|", "&": ";"}.get(sign, sign)
                    break
            else:
                if self._at < len(self._text) and self._peek(1) not in "\n);":
                    self._refuse(f"{self._peek(1)!r} is not understood")
        self._levels -= 1
        return Commands(items)

    def _command(self) -> Node:
        place, word = self._place(), self._reserved()
        if self._peek(2) == "((":
            begin = self._at
            self._at = _nested_end(self._text, begin, begin + 1, ")")
            return Test(place, [self._text[begin + 2 : self._at - 2]], is_arithmetic=True)
        if self._peek(1) == "(":
            self._at += 1
            return self._with_redirects(Subshell(self._closed((")",))))
        reads = {
            "{": self._group, "if": self._if, "for": self._for, "select": self._for, "while": self._while,
            "until": self._while, "case": self._case, "function": self._function, "[[": self._double,
        }  # fmt: skip
        if word == "!":
            self._take("!")
            self._blanks()
            return Negated(self._command())
        if word in reads:
            return self._with_redirects(reads[word](place))
        return self._simple(place)

    def _with_redirects(self, node: Node) -> Node:
        while True:
            self._blanks()
            if not self._redirect([]):
                return node

    def _closed(self, ends: tuple[str, ...]) -> Commands:
        found = self._commands(ends)
        if self._at >= len(self._text):
            self._refuse(f"{ends[0]} is missing")
        self._at += len(ends[0])
        return found

    def _group(self, place: str) -> Node:
        self._take("{")
        return self._closed(("}",))

    def _if(self, place: str) -> Node:
        branches: list[tuple[Node | None, Node]] = []
        self._take("if")
        while True:
            condition = self._closed(("then",))
            body = self._commands(("elif", "else", "fi"))
            branches.append((condition, body))
            word = self._reserved()
            self._take(word or "fi")
            if word == "else":
                branches.append((None, self._closed(("fi",))))
            if word != "elif":
                return If(place, branches)

    def _for(self, place: str) -> Node:
        self._take(self._reserved())
        self._blanks()
        words: list[Text] = []
        if self._peek(2) == "((":
            self._at = _nested_end(self._text, self._at, self._at + 1, ")")
            name = ""
        else:
            name = plain(self._word())
            self._lines()
            if self._reserved() == "in":
                self._take("in")
                words = self._words("\n;")
        self._lines(";")
        self._take("do")
        return For(place, name, words, self._closed(("done",)))

    def _while(self, place: str) -> Node:
        word = self._reserved()
        self._take(word)
        condition = self._closed(("do",))
        return While(place, condition, self._closed(("done",)), word == "until")

    def _case(self, place: str) -> Node:
        self._take("case")
        self._blanks()
        subject = self._word()
        self._lines()
        self._take("in")
        branches: list[tuple[list[Text], Node]] = []
        while True:
            self._lines()
            if self._reserved() == "esac":
                self._take("esac")
                return Case(place, subject, branches)
            self._at += self._peek(1) == "("
            patterns = []
            while self._peek(1) != ")":
                self._blanks()
                begin = self._at
                patterns.append(self._word())
                self._blanks()
                self._at += self._peek(1) == "|"
                if self._at == begin:
                    self._refuse("a pattern of `case` is not understood")
            self._at += 1
            branches.append((patterns, self._commands(("esac",))))
            while self._peek(1) and self._peek(1) in ";&":
                self._at += 1

    def _function(self, place: str) -> Node:
        self._take("function")
        self._blanks()
        name = plain(self._word())
        self._blanks()
        if self._peek(2) == "()":
            self._at += 2
        self._lines()
        return Function(name, self._command())

    def _double(self, place: str) -> Node:
        self._take("[[")
        words: list[Text] = []
        while True:
            self._lines()
            if self._at >= len(self._text):
                self._refuse("]] is missing")
            begin = self._at
            if self._peek(2) in ("&&", "||"):
                self._at += 2
            elif self._peek(1) in ("(", ")", "<", ">"):
                self._at += 1
            else:
                self._word()
                if plain(self._text[begin : self._at]) == "]]":
                    return Test(place, words)
            if self._at == begin:
                self._refuse(f"{self._peek(1)!r} in [[ ]] is not understood")
            words.append(self._text[begin : self._at])

    # --- One command

    def _simple(self, place: str) -> Node:
        assignments: list[Assignment] = []
        words: list[Text] = []
        redirects: list[Redirect] = []
        while True:
            self._blanks()
            if self._redirect(redirects):
                continue
            if self._at >= len(self._text) or self._peek(1) in "\n;|&()":
                break
            declares = bool(words) and plain(words[0]) in _DECLARES
            if (not words or declares) and (found := self._assignment()):
                assignments.append(found)
                continue
            begin = self._at
            words.append(self._word())
            if self._at == begin:
                self._refuse(f"{self._peek(1)!r} is not understood")
            if len(words) == 1 and not assignments:
                self._blanks()
                if self._peek(1) == "(":
                    return self._short_function(plain(words[0]))
        return Simple(place, assignments, words, redirects)

    def _short_function(self, name: str) -> Node:
        self._at += 1
        self._blanks()
        self._take(")")
        self._lines()
        return Function(name, self._command())

    def _assignment(self) -> Assignment | None:
        end = self._at
        while end < len(self._text) and self._text[end][0] not in " \t\n;|&()<>'\"":
            end += 1
            if self._text[end - 1][0] == "=":
                break
        found = _ASSIGNMENT.fullmatch(plain(self._text[self._at : end]))
        if found is None:
            return None
        self._at = end
        name, index, plus = found.groups()
        if self._peek(1) != "(":
            return Assignment(name, index, bool(plus), self._word())
        self._at += 1
        values = self._words(")")
        self._take(")")
        return Assignment(name, index, bool(plus), [], values)

    def _words(self, ends: str) -> list[Text]:
        found: list[Text] = []
        while True:
            self._lines() if "\n" not in ends else self._blanks()
            if self._at >= len(self._text) or self._peek(1) in ends:
                return found
            begin = self._at
            found.append(self._word())
            if self._at == begin:
                self._refuse(f"{self._peek(1)!r} is not understood")

    def _redirect(self, found: list[Redirect]) -> bool:
        sign = _REDIRECT.match(self._peek(6))
        if sign is None or plain(self._text[self._at + sign.end() :][:1]) == "(" and sign[2] in "<>":
            return False
        self._at += sign.end()
        self._blanks()
        operator, target = sign[2], self._word()
        if operator == "<<<":
            found.append(Redirect(operator, [], target))
        elif operator in ("<<", "<<-"):
            end = re.sub(r"[\\'\"]", "", plain(target))
            self._waiting.append((end, operator == "<<-", found))
            found.append(Redirect(operator, [], is_literal=end != plain(target)))
        else:
            found.append(Redirect(sign[1].replace("1", "") + operator, target))
        return True

    def _here_documents(self) -> None:
        for end, strips, redirects in self._waiting:
            body: Text = []
            while True:
                if self._at >= len(self._text):
                    self._refuse(f"the here-document has no line {end}")
                stop = self._at
                while stop < len(self._text) and self._text[stop][0] != "\n":
                    stop += 1
                line, self._at = self._text[self._at : stop + 1], min(stop + 1, len(self._text))
                while strips and line and line[0][0] == "\t":
                    line = line[1:]
                if plain(line).removesuffix("\n") == end:
                    break
                body += line
            number = next(n for n, one in enumerate(redirects) if one.operator[:2] == "<<" and not one.body)
            redirects[number] = Redirect("<<", [], body, redirects[number].is_literal)
        self._waiting = []

    # --- Characters

    def _peek(self, number: int) -> str:
        return plain(self._text[self._at : self._at + number])

    def _place(self) -> str:
        return self._text[min(self._at, len(self._text) - 1)][1] if self._text else "1"

    def _refuse(self, what: str) -> NoReturn:
        raise KieloError(f"line {self._place()}: {what}. Fix: a script that `bash -n` accepts")

    def _reserved(self) -> str:
        """Return the plain word that follows, which can be a reserved word."""
        end = self._at
        while end < len(self._text) and self._text[end][0] not in _METACHARACTERS:
            end += 1
        return plain(self._text[self._at : end])

    def _take(self, word: str) -> None:
        if self._peek(len(word)) != word:
            self._refuse(f"{word} is missing")
        self._at += len(word)

    def _blanks(self) -> None:
        while True:
            two = self._peek(2)
            if two[:1] in (" ", "\t"):
                self._at += 1
            elif two == "\\\n":
                self._at += 2
            elif two[:1] == "#":
                while self._at < len(self._text) and self._peek(1) != "\n":
                    self._at += 1
            else:
                return

    def _lines(self, besides: str = "") -> None:
        """Skip blanks, comments and ends of lines, and read the here-documents that follow them."""
        while True:
            self._blanks()
            if self._peek(1) == "\n":
                self._at += 1
                self._here_documents()
            elif self._peek(1) and self._peek(1) in besides:
                self._at += 1
            else:
                return

    def _word(self) -> Text:
        begin = self._at
        while self._at < len(self._text):
            character = self._text[self._at][0]
            if character in "<>" and plain(self._text[self._at + 1 : self._at + 2]) == "(":
                self._at = _nested_end(self._text, self._at, self._at + 2, ")")
            elif character in _METACHARACTERS:
                break
            elif character in "\\'\"`$":
                self._at = closing(self._text, self._at)
            else:
                self._at += 1
        return self._text[begin : self._at]
