"""Conversations through a tokenizer's chat template: messages → token ids, and which of them are answers.

The template is Hugging Face's, rendered in jinja2's sandbox. Marks that it writes become control tokens. What
a message spells stays text. Answers are found by rendering twice, with and without signs around them: without
its signs the second text must equal the first. So a template needs no `{% generation %}` block, and a
template that changes an answer is refused. An answer with more than text (tool calls, reasoning) is what the
template writes after its generation prompt.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from kielo.artifact.documents import ANSWERS, WEIGHT, Message, carries_loss
from kielo.recipe.errors import KieloError
from kielo.tokenizer.control_tokens import CHAT_TEMPLATE_FILE, CONFIG_FILES, read_object
from kielo.tokenizer.load import CONFIG_FILE, TextTokenizer, panics_told, special_token

TURN_BEGINS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
MOST_RICH = 1000
# Of tokenizers that Kielo trains: ChatML, which servers of models know. The block `generation` marks answers
# for transformers and TRL (`assistant_only_loss`). `ChatTemplate` finds them by itself.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{TURN_BEGINS}' + message['role'] + '\\n' }}}}"
    "{% if message['role'] == 'assistant' %}"
    f"{{% generation %}}{{{{ message['content'] + '{TURN_ENDS}' }}}}{{% endgeneration %}}"
    f"{{% else %}}{{{{ message['content'] + '{TURN_ENDS}' }}}}{{% endif %}}"
    "{{ '\\n' }}{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{TURN_BEGINS}assistant\\n' }}}}{{% endif %}}"
)


@dataclass(frozen=True)
class LaidOut:
    text: str  # as the template writes it
    ids: list[int]  # without end-of-text
    is_answer: np.ndarray  # bool [ids + 1], True for answers and ends of their turns; the last: end-of-text


class ChatTemplate:
    """The chat template of a tokenizer. Raises KieloError if there is none, or if it cannot be read."""

    def __init__(self, tokenizer: TextTokenizer):
        self._folder, self._tokenizer = tokenizer.folder, tokenizer
        self._text_only = tokenizer.for_text
        added = {token.content for token in tokenizer.whole.get_added_tokens_decoder().values()}
        control, names = self._text_only.control_tokens, self._text_only.hidden_names
        # A mark that is not an added token is text to Hugging Face too.
        self._hidden = {name: names[name] for name in control.values() if name in added}
        self._hidden_ids = [number for number, name in control.items() if name in self._hidden]
        self._marks, self._hidden_marks = _any_of(self._hidden), _any_of(self._hidden.values())
        self._turn_end = re.compile(rf"\s*(?:{self._hidden_marks.pattern})")
        self._disguise = Disguise(list(self._hidden))
        self._sign = token_hex(16)
        self._signs = re.compile(rf"({self._sign}-\d+;)")
        self._render, self._roles = _compiled(self._folder), _special_tokens(self._folder)

    def lay_out(
        self, conversations: Sequence[tuple[str, Sequence[Message]]], tools: Sequence[Any] = ()
    ) -> list[LaidOut]:
        """Lay out each (place, messages), with its tools. Raises KieloError, which begins with the place."""
        given = zip(conversations, tools or [None] * len(conversations), strict=True)
        rendered = [self._rendered(place, messages, of) for (place, messages), of in given]
        with panics_told(self._folder):
            encodings = self._text_only.tokenizer.encode_batch(
                [one.text for one in rendered], add_special_tokens=False
            )
        return [
            self._laid_out(place, one, encoding)
            for (place, _), one, encoding in zip(conversations, rendered, encodings, strict=True)
        ]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        words: dict[str, str] = {}
        chat = _Chat("the conversation", self._disguised(list(messages), words), None)
        text = self._text(chat, add_generation_prompt=True)
        text = self._disguise.take_off(words, self._with_hidden_marks(text))
        with panics_told(self._folder):
            return self._text_only.tokenizer.encode(text, add_special_tokens=False).ids

    def _rendered(self, place: str, messages: Sequence[Message], tools: Any) -> "Rendered":
        words: dict[str, str] = {}
        bare = [{key: one[key] for key in one if key != WEIGHT} for one in messages]
        chat = _Chat(place, self._disguised(bare, words), self._disguised(tools, words))
        text = self._text(chat)
        rich = self._rich_answers(chat, text)
        answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
        plain = [number for number in answers if number not in rich]
        learned = {number for number, message in enumerate(messages) if carries_loss(message)}
        pieces, is_whole, has_end = self._plain_answers(chat, text, plain), False, False
        if rich or learned != set(answers):
            is_whole, turn_end = True, re.compile(rf"\s*(?:{self._marks.pattern})")
            spans = dict(zip(plain, Rendered("", pieces).answers(turn_end), strict=True))
            spans |= {number: self._after_prompt(chat, text, number) for number in rich}
            with_loss = [spans[number] for number in answers if number in learned]
            borders = [0, *(border for span in with_loss for border in span), len(text) + 1]
            pieces = [text[first:last] for first, last in pairwise(borders)]
            has_end = bool(with_loss) and with_loss[-1][1] > len(text)
        final = [self._disguise.take_off(words, self._with_hidden_marks(piece)) for piece in pieces]
        return Rendered(self._disguise.take_off(words, text), final, is_whole, has_end)

    def _with_hidden_marks(self, text: str) -> str:
        return self._marks.sub(lambda mark: self._hidden[mark[0]], text)

    def _disguised(self, value: Any, words: dict[str, str]) -> Any:
        if isinstance(value, str):
            return self._disguise.put_on(value, words)
        if isinstance(value, list):
            return [self._disguised(one, words) for one in value]
        if isinstance(value, dict):
            return {key: one if key == "role" else self._disguised(one, words) for key, one in value.items()}
        return value

    def _plain_answers(self, chat: "_Chat", text: str, numbers: Collection[int]) -> list[str]:
        # A template may strip white space around answers. Then the signs must be inside it.
        attempts = (self._pieces(chat, numbers, is_stripped) for is_stripped in (False, True))
        pieces = next((pieces for pieces in attempts if pieces and "".join(pieces) == text), None)
        if pieces is None:
            raise KieloError(
                f"{chat.place}: the chat template of {self._folder} does not write each answer once and "
                "unchanged, so it is not known which tokens are answers. Fix: a template that does, in its "
                f"{CHAT_TEMPLATE_FILE}"
            )
        return pieces

    def _rich_answers(self, chat: "_Chat", text: str) -> set[int]:
        answers = ((number, one) for number, one in enumerate(chat.messages) if one["role"] == ANSWERS)
        more = [number for number, message in answers if message.keys() > {"role", "content"}]
        # The template may write more of these answers than the content.
        if len(more) <= MOST_RICH:  # each needs three renderings of all messages before it
            return {number for number in more if self._text(_bare(chat, [number])) != text}
        if self._text(_bare(chat, more)) == text:
            return set()
        raise KieloError(
            f"{chat.place}: {len(more):,} answers of {len(chat.messages):,} messages have more than text "
            f"(tool calls, reasoning), and at most {MOST_RICH:,} are laid out. Fix: split the conversation"
        )

    def _after_prompt(self, chat: "_Chat", text: str, number: int) -> tuple[int, int]:
        """Return where an answer begins, after the generation prompt, and where its turn ends."""
        prompt = self._text(chat._replace(messages=chat.messages[:number]), add_generation_prompt=True)
        whole = self._text(chat._replace(messages=chat.messages[: number + 1]))
        if not (whole.startswith(prompt) and text.startswith(whole.rstrip())):
            raise KieloError(
                f"{chat.place}: message {number + 1} has tool calls or reasoning, and the chat template of "
                f"{self._folder} does not write it after its generation prompt, or changes it if messages "
                "follow. Fix: another template, or messages of text alone"
            )
        if marks := list(self._marks.finditer(whole, len(prompt))):
            return len(prompt), marks[-1].end()
        is_last = number + 1 == len(chat.messages)
        return len(prompt), len(text) + 1 if is_last else len(whole.rstrip())

    def _pieces(self, chat: "_Chat", numbers: Collection[int], is_stripped: bool) -> list[str]:
        """Return the text cut at the answers: other text, an answer, …, or [] if a sign is misplaced."""
        signed, signs = list(chat.messages), list[str]()
        for number in sorted(numbers):
            content = signed[number]["content"]
            core = content.strip() if is_stripped else content
            before, _, after = content.partition(core) if core else ("", "", content)
            signs += (pair := [f"{self._sign}-{len(signs) + side};" for side in (0, 1)])
            signed[number] = signed[number] | {"content": f"{before}{pair[0]}{core}{pair[1]}{after}"}
        pieces = self._signs.split(self._text(chat._replace(messages=signed)))
        return pieces[::2] if pieces[1::2] == signs else []

    def _text(self, chat: "_Chat", add_generation_prompt: bool = False) -> str:
        given = {"messages": chat.messages, "tools": chat.tools, "documents": None, **self._roles}
        try:
            return self._render(**given, add_generation_prompt=add_generation_prompt)
        except KieloError as problem:
            raise KieloError(f"{chat.place}: the chat template of {self._folder} fails: {problem}") from None

    def _laid_out(self, place: str, one: "Rendered", encoding: Encoding) -> LaidOut:
        marks = len(self._hidden_marks.findall(one.text))
        if np.isin(encoding.ids, self._hidden_ids).sum() != marks:
            raise KieloError(
                f"{place}: {self._folder} does not read a mark of its own chat template as one token. Fix: a "
                "tokenizer.json and a template that belong together"
            )
        is_answer = np.zeros(len(encoding.ids) + 1, dtype=bool)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        # Answers are in order: of the answers that end after a token begins, the first begins first.
        firsts, lasts = np.array([*one.answers(self._turn_end)], dtype=np.int64).reshape(-1, 2).T
        following = np.searchsorted(lasts, starts, side="right")
        beyond = np.append(firsts, len(one.text) + 1)  # if no answer follows
        is_answer[:-1] = beyond[following] < np.maximum(ends, starts + 1)
        is_answer[-1] = bool((lasts > len(one.text)).any())
        return LaidOut(one.spelled, encoding.ids, is_answer)


class _Chat(NamedTuple):
    """A conversation for the template, its texts in disguise. Errors name its `place`."""

    place: str
    messages: list[Message]
    tools: Any


def _bare(chat: _Chat, numbers: Collection[int]) -> _Chat:
    bare = list(chat.messages)
    for number in numbers:
        bare[number] = {"role": bare[number]["role"], "content": bare[number]["content"]}
    return chat._replace(messages=bare)


@dataclass(frozen=True)
class Rendered:
    spelled: str  # the template's text
    pieces: list[str]  # in turns other text and an answer, with hidden names for the marks
    is_whole: bool = False  # answers have the ends of their turns
    has_end: bool = False  # the last answer has the end of the conversation too

    @cached_property
    def text(self) -> str:
        return "".join(self.pieces)

    def answers(self, turn_end: re.Pattern[str]) -> Iterator[tuple[int, int]]:
        """Yield (first character, character after the last) of each answer with the end of its turn."""
        start = len(self.pieces[0])
        for answer, after in zip(self.pieces[1::2], self.pieces[2::2], strict=True):
            end = start + len(answer)
            is_last = end + len(after) == len(self.text)
            if self.is_whole:
                yield start, end + (is_last and self.has_end)
            elif found := turn_end.match(after):
                yield start, end + found.end()
            elif is_last and not after.strip():
                yield start, len(self.text) + 1  # with end-of-text
            else:
                yield start, end + len(after) - len(after.lstrip())
            start = end + len(after)


class Disguise:
    """Random words in place of control tokens that messages spell, and of parts of them at their ends."""

    def __init__(self, names: list[str]):
        self._sign = token_hex(16)  # of all words, before 8 digits that number each
        self._word = re.compile(rf"{self._sign}[0-9a-f]{{8}}")
        self._names, self._whole = names, _any_of(names)
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}
        self._endings = {name[start:] for name in names for start in range(1, len(name))}
        self._longest = max(map(len, names), default=0)

    def put_on(self, content: str, words: dict[str, str]) -> str:
        """Return the content in disguise. Add each random word, and what it stands for, to `words`."""

        def word(spelled: str) -> str:
            words[chosen := f"{self._sign}{len(words):08x}"] = spelled
            return chosen

        if not (core := content.strip()):
            return content
        before, _, after = content.partition(core)
        if any(core in name for name in self._names):
            return before + word(core) + after
        core = self._whole.sub(lambda mark: word(mark[0]), core)
        sizes = range(min(self._longest, len(core)), 0, -1)
        if size := next((size for size in sizes if core[:size] in self._endings), 0):
            core = word(core[:size]) + core[size:]
        if size := next((size for size in sizes if core[-size:] in self._beginnings), 0):
            core = core[:-size] + word(core[-size:])
        return before + core + after

    def take_off(self, words: dict[str, str], text: str) -> str:
        return self._word.sub(lambda found: words.get(found[0], found[0]), text)


def _compiled(folder: Path) -> Callable[..., str]:
    from kielo.tokenizer.jinja_template import compile_template

    if (found := _template(folder)) is None:
        raise KieloError(
            f'{folder}: this tokenizer has no chat template, which a source of kind = "instructions" needs. '
            f"Fix: a {CHAT_TEMPLATE_FILE} in a copy of the folder (docs/text.md has a template that needs no "
            "control tokens), or a tokenizer that Kielo trains (no tokenizer.path)"
        )
    place, template = found
    try:
        return compile_template(template)
    except KieloError as problem:
        raise KieloError(f"{place}, {problem}") from None


def end_of_answers(tokenizer: TextTokenizer) -> int | None:
    """Return the control token by which the chat template ends an answer, or None. Raises KieloError."""
    if not has_chat_template(tokenizer.folder):
        return None
    question, answer = Message(role="user", content="1"), Message(role=ANSWERS, content="2")
    template = ChatTemplate(tokenizer)
    (laid_out,) = template.lay_out([("one question and its answer", [question, answer])])
    ids = [number for number, is_answer in zip(laid_out.ids, laid_out.is_answer, strict=False) if is_answer]
    return ids[-1] if ids and ids[-1] in tokenizer.for_text.control_tokens else None


def has_chat_template(folder: Path) -> bool:
    return _template(folder) is not None


def template_of(folder: Path) -> str | None:
    found = _template(folder)
    return found and found[1]


def _template(folder: Path) -> tuple[Path, str] | None:
    path = folder / CHAT_TEMPLATE_FILE
    if path.is_file():
        return path, path.read_text(encoding="utf-8", errors="replace")
    found = read_object(folder / CONFIG_FILE).get("chat_template")
    if isinstance(found, list):  # of {"name", "template"}
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[-1].get("template") if named else None
    return (folder / CONFIG_FILE, found) if isinstance(found, str) else None


def _special_tokens(folder: Path) -> dict[str, str]:
    roles = {
        key: special_token(folder / file, key)
        for file in reversed(CONFIG_FILES)
        for key, value in read_object(folder / file).items()
        if key.endswith("_token") and not isinstance(value, bool)
    }
    return {key: name for key, name in roles.items() if name is not None}


def _any_of(names: Any) -> re.Pattern[str]:
    """Return a pattern of any of the names, the longest first. Without names it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
