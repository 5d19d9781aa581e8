"""Conversations through a tokenizer's chat template: messages → token ids, and which of them are answers.

The template is Hugging Face's: `chat_template.jinja` of the folder, or `chat_template` in its
tokenizer_config.json, rendered in jinja2's sandbox. Marks that the template writes become control tokens;
what a message spells stays text. Answers are found by rendering twice, with and without signs around the
assistant's messages: without its signs the second text must be the first one. So a template needs no
`{% generation %}` block, and one that drops, repeats or changes an answer is refused. An answer with more
than text (tool calls, reasoning) is what the template writes after its generation prompt.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from tokenizers import Encoding

from kielo.artifact.documents import ANSWERS, WEIGHT, Message, carries_loss
from kielo.recipe.errors import KieloError
from kielo.tokenizer.control_tokens import CHAT_TEMPLATE_FILE, CONFIG_FILES, read_object
from kielo.tokenizer.load import CONFIG_FILE, TextTokenizer, panics_told, special_token

TURN_BEGINS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
MOST_RICH = 1000
# Of the tokenizers that Kielo trains: ChatML, which the programs that serve models know. The block
# `generation` marks for transformers and TRL (`assistant_only_loss`) what `ChatTemplate` finds by itself.
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
    """A conversation as it is trained on.

    text: as the template writes it. ids: its tokens, without the end-of-text after it. is_answer: bool
    [ids + 1], True for the tokens of answers and those that end their turns; the last is for end-of-text.
    """

    text: str
    ids: list[int]
    is_answer: np.ndarray


class ChatTemplate:
    """The chat template of a tokenizer. Raises KieloError for a tokenizer without one that can be read."""

    def __init__(self, tokenizer: TextTokenizer):
        self._folder, self._tokenizer = tokenizer.folder, tokenizer
        self._text_only = tokenizer.for_text
        added = {token.content for token in tokenizer.whole.get_added_tokens_decoder().values()}
        # A mark that is not an added token is text to Hugging Face too.
        self._hidden = {
            name: self._text_only.hidden_names[name]
            for name in self._text_only.control_tokens.values()
            if name in added
        }
        control = self._text_only.control_tokens
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
        """Lay out (place, messages) each; errors begin with the place. tools: of each conversation.

        Raises KieloError where the template fails or does not give the answers back.
        """
        given = tools or [None] * len(conversations)
        rendered = [
            self._rendered(place, messages, of)
            for (place, messages), of in zip(conversations, given, strict=True)
        ]
        with panics_told(self._folder):
            encodings = self._text_only.tokenizer.encode_batch(
                [one.text for one in rendered], add_special_tokens=False
            )
        return [
            self._laid_out(place, one, encoding)
            for (place, _), one, encoding in zip(conversations, rendered, encodings, strict=True)
        ]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to the beginning of the next answer."""
        words: dict[str, str] = {}
        disguised = [self._disguised(message, words) for message in messages]
        text = self._of_template("the conversation", disguised, None, add_generation_prompt=True)
        text = self._disguise.take_off(words, self._marks.sub(self._hide, text))
        with panics_told(self._folder):
            return self._text_only.tokenizer.encode(text, add_special_tokens=False).ids

    def _rendered(self, place: str, messages: Sequence[Message], tools: Any) -> "Rendered":
        words: dict[str, str] = {}
        learned = [carries_loss(message) for message in messages]
        messages = [
            self._disguised({key: one[key] for key in one if key != WEIGHT}, words) for one in messages
        ]
        tools = self._disguised(tools, words)
        text = self._of_template(place, messages, tools)
        rich = self._rich_answers(place, messages, tools, text)
        if rich or learned != [message["role"] == ANSWERS for message in messages]:
            return self._by_spans(place, messages, tools, text, words, rich, learned)
        return self._plain(place, messages, tools, text, words)

    def _disguised(self, value: Any, words: dict[str, str]) -> Any:
        """Return a message, or what is in one, with all its texts in disguise."""
        if isinstance(value, str):
            return self._disguise.put_on(value, words)
        if isinstance(value, list):
            return [self._disguised(one, words) for one in value]
        if isinstance(value, dict):
            return {key: one if key == "role" else self._disguised(one, words) for key, one in value.items()}
        return value

    def _plain(
        self, place: str, messages: list[Message], tools: Any, text: str, words: dict[str, str]
    ) -> "Rendered":
        # A template may strip white space around answers: then the signs must be inside of it.
        answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
        pieces = self._answers(place, messages, tools, text, answers)
        final = [self._disguise.take_off(words, self._marks.sub(self._hide, piece)) for piece in pieces]
        return Rendered(self._disguise.take_off(words, text), final)

    def _answers(
        self, place: str, messages: list[Message], tools: Any, text: str, numbers: Collection[int]
    ) -> list[str]:
        """Return the text in turns of what is no answer, and an answer, of those with these `numbers`."""
        attempts = (self._pieces(place, messages, tools, numbers, whether) for whether in (False, True))
        pieces = next((pieces for pieces in attempts if pieces and "".join(pieces) == text), None)
        if pieces is None:
            raise KieloError(
                f"{place}: the chat template of {self._folder} does not write each answer once, as it is, so "
                "its tokens cannot be told from the others. Fix: a template that does, in its "
                f"{CHAT_TEMPLATE_FILE}"
            )
        return pieces

    def _rich_answers(self, place: str, messages: list[Message], tools: Any, text: str) -> set[int]:
        """Return the numbers of answers of which the template writes more than the content."""
        more = [
            number
            for number, message in enumerate(messages)
            if message["role"] == ANSWERS and message.keys() > {"role", "content"}
        ]
        if len(more) > MOST_RICH:  # each takes three renderings of all before it
            if self._of_template(place, _bare(messages, more), tools) == text:
                return set()
            raise KieloError(
                f"{place}: {len(more):,} answers of {len(messages):,} messages have more than text (tool "
                f"calls, reasoning), and at most {MOST_RICH:,} are laid out. Fix: several "
                "conversations"
            )
        return {
            number for number in more if self._of_template(place, _bare(messages, [number]), tools) != text
        }

    def _by_spans(
        self,
        place: str,
        messages: list[Message],
        tools: Any,
        text: str,
        words: dict[str, str],
        rich: set[int],
        learned: list[bool],
    ) -> "Rendered":
        """Cut the text at the answers that carry loss, each with the end of its turn."""
        answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
        plain = [number for number in answers if number not in rich]
        cut = self._answers(place, messages, tools, text, plain)
        turn_end = re.compile(rf"\s*(?:{self._marks.pattern})")
        spans = dict(zip(plain, Rendered("", cut).answers(turn_end), strict=True))
        spans |= {number: self._after_prompt(place, messages, number, tools, text) for number in rich}
        learned_spans = [spans[number] for number in answers if learned[number]]
        borders = [0, *(border for span in learned_spans for border in span), len(text) + 1]
        pieces = [text[first:last] for first, last in pairwise(borders)]
        final = [self._disguise.take_off(words, self._marks.sub(self._hide, piece)) for piece in pieces]
        has_end = bool(learned_spans) and learned_spans[-1][1] > len(text)
        return Rendered(self._disguise.take_off(words, text), final, is_whole=True, has_end=has_end)

    def _after_prompt(
        self, place: str, messages: list[Message], number: int, tools: Any, text: str
    ) -> tuple[int, int]:
        """Return where an answer begins, after the generation prompt, and where its turn ends."""
        prompt = self._of_template(place, messages[:number], tools, add_generation_prompt=True)
        whole = self._of_template(place, messages[: number + 1], tools)
        is_last = number + 1 == len(messages)
        if not (whole.startswith(prompt) and text.startswith(whole.rstrip())):
            raise KieloError(
                f"{place}: message {number + 1} has more than text, and the chat template of {self._folder} "
                "does not write it after its generation prompt, or in another way where more follows. "
                "Fix: a template that does, or the conversation without that"
            )
        marks = list(self._marks.finditer(whole, len(prompt)))
        if marks:
            return len(prompt), marks[-1].end()
        return len(prompt), len(text) + 1 if is_last else len(whole.rstrip())

    def _pieces(
        self, place: str, messages: Sequence[Message], tools: Any, numbers: Collection[int], is_stripped: bool
    ) -> list[str]:
        """Return the template's text cut at the answers: what is none, an answer, what is none, …

        [] where a sign around an answer is not just where it should be.
        """
        signed: list[Message] = []
        signs: list[str] = []
        of = set(numbers)
        for number, message in enumerate(messages):
            if number in of:
                content = message["content"]
                core = content.strip() if is_stripped else content
                before, _, after = content.partition(core) if core else ("", "", content)
                signs += (pair := [f"{self._sign}-{len(signs) + side};" for side in (0, 1)])
                message = message | {"content": f"{before}{pair[0]}{core}{pair[1]}{after}"}
            signed.append(message)
        pieces = self._signs.split(self._of_template(place, signed, tools))
        return pieces[::2] if pieces[1::2] == signs else []

    def _hide(self, mark: re.Match[str]) -> str:
        return self._hidden[mark[0]]

    def _of_template(
        self, place: str, messages: list[Message], tools: Any, add_generation_prompt: bool = False
    ) -> str:
        try:
            return self._render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._roles,
            )
        except KieloError as problem:
            raise KieloError(f"{place}: the chat template of {self._folder} fails: {problem}") from None

    def _laid_out(self, place: str, one: "Rendered", encoding: Encoding) -> LaidOut:
        marks = len(self._hidden_marks.findall(one.text))
        if np.isin(encoding.ids, self._hidden_ids).sum() != marks:
            raise KieloError(
                f"{place}: {self._folder} does not read a mark of its own chat template as one token; its "
                "tokenizer.json and its template do not belong together"
            )
        is_answer = np.zeros(len(encoding.ids) + 1, dtype=bool)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        # Answers follow one another: of those that end after a token begins, the first begins first.
        firsts, lasts = np.array([*one.answers(self._turn_end)], dtype=np.int64).reshape(-1, 2).T
        following = np.searchsorted(lasts, starts, side="right")
        beyond = np.append(firsts, len(one.text) + 1)  # where no answer follows
        is_answer[:-1] = beyond[following] < np.maximum(ends, starts + 1)
        is_answer[-1] = bool((lasts > len(one.text)).any())
        return LaidOut(one.spelled, encoding.ids, is_answer)


def _bare(messages: Sequence[Message], numbers: Collection[int]) -> list[Message]:
    bare = list(messages)
    for number in numbers:
        bare[number] = {"role": bare[number]["role"], "content": bare[number]["content"]}
    return bare


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation. spelled: the template's text; pieces: in turns what is no answer, and an
    answer, with hidden names for the marks. is_whole: answers have the ends of their turns; has_end: the last
    one has that of the conversation, too.
    """

    spelled: str
    pieces: list[str]
    is_whole: bool = False
    has_end: bool = False

    @cached_property
    def text(self) -> str:
        return "".join(self.pieces)

    def answers(self, turn_end: re.Pattern[str]) -> Iterator[tuple[int, int]]:
        """Yield (first character, character after the last) of each answer with the end of its turn.

        That is white space and a mark after it, as `turn_end` finds them; without a mark the white space, and
        at the end of the conversation one character more, for end-of-text.
        """
        start = len(self.pieces[0])
        for answer, after in zip(self.pieces[1::2], self.pieces[2::2], strict=True):
            end = start + len(answer)
            is_last = end + len(after) == len(self.text)
            if self.is_whole:
                yield start, end + (is_last and self.has_end)
            elif found := turn_end.match(after):
                yield start, end + found.end()
            elif is_last and not after.strip():
                yield start, len(self.text) + 1
            else:
                yield start, end + len(after) - len(after.lstrip())
            start = end + len(after)


class Disguise:
    """Put random words in place of what messages spell of control tokens: whole names, and at the ends of a
    message parts of one, so that a template cannot join them to a mark.

    A word is 32 random hexadecimal digits, the same for all, and 8 that number it.
    """

    def __init__(self, names: list[str]):
        self._sign = token_hex(16)
        self._word = re.compile(rf"{self._sign}[0-9a-f]{{8}}")
        self._names, self._whole = names, _any_of(names)
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}
        self._endings = {name[start:] for name in names for start in range(1, len(name))}
        self._longest = max(map(len, names), default=0)

    def put_on(self, content: str, words: dict[str, str]) -> str:
        """Return the content in disguise; add each random word, and what it stands for, to `words`."""

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
        """Return a text with what the random words stand for."""
        return self._word.sub(lambda found: words.get(found[0], found[0]), text)


def _compiled(folder: Path) -> Callable[..., str]:
    from kielo.tokenizer.jinja_template import compile_template

    if (found := _template(folder)) is None:
        raise KieloError(
            f'{folder}: this tokenizer has no chat template, by which a source of kind = "instructions" is '
            f"laid out. Fix: a {CHAT_TEMPLATE_FILE} in a copy of the folder (docs/text.md has "
            "one that needs no control tokens), or a tokenizer that Kielo trains (no tokenizer.path)"
        )
    place, template = found
    try:
        return compile_template(template)
    except KieloError as problem:
        raise KieloError(f"{place}, {problem}") from None


def end_of_answers(tokenizer: TextTokenizer) -> int | None:
    """Return the id of the control token by which the chat template ends the last answer.

    None without a chat template, and for a template that ends answers by text. Raise KieloError for a
    template that does not lay out one question with its answer.
    """
    if not has_chat_template(tokenizer.folder):
        return None
    question, answer = Message(role="user", content="1"), Message(role=ANSWERS, content="2")
    template = ChatTemplate(tokenizer)
    (laid_out,) = template.lay_out([("one question and its answer", [question, answer])])
    ids = [number for number, is_answer in zip(laid_out.ids, laid_out.is_answer, strict=False) if is_answer]
    return ids[-1] if ids and ids[-1] in tokenizer.for_text.control_tokens else None


def has_chat_template(folder: Path) -> bool:
    """Return True for a tokenizer's folder with a chat template."""
    return _template(folder) is not None


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
        for key in read_object(folder / file)
        if key.endswith("_token") and not isinstance(read_object(folder / file)[key], bool)
    }
    return {key: name for key, name in roles.items() if name is not None}


def _any_of(names: Any) -> re.Pattern[str]:
    """Return a pattern of any of the names, the longest that fits; of none it finds nothing."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
