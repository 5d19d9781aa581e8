"""Conversations: a record's list of messages → one document, and the checks that a conversation is complete.

A record has `messages` of {role, content}, ShareGPT's `conversations` of {from, value}, Alpaca's
`instruction`, `input` and `output`, or `prompt` with `completion`. Contents stay unchanged, and other keys of
a message (tool_calls, reasoning_content, name, …) go to the chat template.
"""

import json
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import orjson

from kielo.artifact.documents import ANSWERS, TURNS, WEIGHT, Message, split_messages
from kielo.artifact.json_object import JsonTable
from kielo.corpus.raw_record import BAD_MESSAGES, BadRecord
from kielo.corpus.step import DocumentFilter, SplitDocument

_ROLES = {  # the names in other formats: OpenAI's developer, ShareGPT's others
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant gpt bot model function_call",
    "tool": "tool observation function",
}
ROLES = {name: role for role, names in _ROLES.items() for name in names.split()}
FIELDS_OF_MESSAGES = (("role", "content"), ("from", "value"))
_SPELLINGS = {name for fields in FIELDS_OF_MESSAGES for name in fields}
# Fields of records without a list of messages, and beside one.
QUESTIONS = (("instruction", "output"), ("instruction", "response"), ("prompt", "completion"))
OTHER_FIELDS = ("tools", "system", "history", "input", *dict.fromkeys(chain.from_iterable(QUESTIONS)))
# Role → the roles that may come before it; None is the beginning.
MAY_FOLLOW = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def read_conversation(
    where: str, fields: JsonTable, names: Sequence[str]
) -> tuple[list[Message], list[Any] | None]:
    """Return a record's messages, of the first of `names` that it has or QUESTIONS, and its tools or None."""
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None and (pair := _pair(fields)):
        messages = _of_pair(where, fields, *pair)
    else:
        messages = _listed(where, fields, name or names[0])
    system = fields.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = _tools(where, fields.get("tools"))
    try:
        orjson.dumps([[[messages, tools]]])  # as deep as in the metadata of a document
    except TypeError as problem:
        raise _bad(f"{where}: cannot be stored as JSON ({problem}). Fix: correct or remove it") from None
    return messages, tools


def has_questions(present: Sequence[str]) -> bool:
    return _pair(dict.fromkeys(present, "")) is not None


def _pair(fields: JsonTable) -> tuple[str, str] | None:
    return next((pair for pair in QUESTIONS if all(fields.get(name) is not None for name in pair)), None)


def _listed(where: str, fields: JsonTable, name: str) -> list[Message]:
    if not isinstance(messages := fields.get(name), list):
        found = "is missing" if name not in fields else f"is a {type(messages).__name__}"
        known = ", ".join(fields)[:200] or "none"
        raise _bad(
            f"{where}: the field {name!r} {found} and no list of messages (its fields are {known}). "
            "Fix: the source's text_field"
        )
    return [_message(f"{where}, message {number}", entry) for number, entry in enumerate(messages, start=1)]


def _of_pair(where: str, fields: JsonTable, question: str, answer: str) -> list[Message]:
    """Return the messages of `history`, a question and its answer, which may be lists (TRL's form)."""
    messages: list[Message] = []
    history = fields.get("history") or []
    for earlier in history if isinstance(history, list) else [history]:
        match earlier:
            case [str(asked), str(answered)]:
                messages += [{"role": "user", "content": asked}, {"role": ANSWERS, "content": answered}]
            case _:
                raise _bad(f"{where}: its 'history' is no list of questions and answers")
    for role, name in (("user", question), (ANSWERS, answer)):
        value = fields[name]
        if isinstance(value, list):
            messages += _listed(where, fields, name)
        elif isinstance(value, str):
            more = _input(where, fields) if name == "instruction" else ""
            messages.append({"role": role, "content": f"{value}\n{more}" if more else value})
        else:
            raise _bad(f"{where}: its {name!r} is no text")
    return messages


def _input(where: str, fields: JsonTable) -> str:
    """Return Alpaca's input, a number as JSON has it."""
    match fields.get("input"):
        case str(text):
            return text
        case None:
            return ""
        case float() as number if math.isnan(number):  # pandas' missing value
            return ""
        case float() as number if math.isinf(number):
            raise _bad(f"{where}: its 'input' is infinite")
        case int() | float() as number if not isinstance(number, bool):
            return str(number)
        case other:
            raise _bad(f"{where}: its 'input' is a {type(other).__name__} and no text")


def _bad(message: str) -> BadRecord:
    return BadRecord(BAD_MESSAGES, message)


def _message(where: str, entry: Any) -> Message:
    for role_field, content_field in FIELDS_OF_MESSAGES:
        if isinstance(entry, dict) and role_field in entry:
            role = entry[role_field]
            if not isinstance(role, str) or role not in ROLES:
                raise _bad(f"{where}: unknown role {str(role)[:40]!r}. Fix: one of {', '.join(ROLES)}")
            # Tables have all keys in all messages, and null for missing values.
            more = {key: value for key, value in entry.items() if value is not None}
            more = {key: more[key] for key in more if key not in _SPELLINGS}
            content = _content(where, content_field, entry.get(content_field), more)
            if role == "function_call":
                content, more = "", more | {"tool_calls": _called(where, content)}
            return {"role": ROLES[role], "content": content} | _with_weight(where, more)
    raise _bad(f"{where}: is no object with 'role' and 'content', or 'from' and 'value'")


def _content(where: str, name: str, content: Any, more: JsonTable) -> str:
    """Return the text of a message, which may be in parts, or nothing if it calls tools."""
    if content is None and (more.get("tool_calls") or more.get("function_call")):
        return ""
    if isinstance(content, list):
        parts = [one if isinstance(one, dict) else {"type": type(one).__name__} for one in content]
        texts = [
            one["text"] for one in parts if one.get("type") == "text" and isinstance(one.get("text"), str)
        ]
        if len(texts) == len(parts):
            return "".join(texts)
        kinds = {str(one.get("type")) for one in parts}
        raise _bad(f"{where}: its {name!r} has parts of {', '.join(sorted(kinds))}, and not only text")
    if not isinstance(content, str):
        raise _bad(f"{where}: its {name!r} is no text")
    return content


def _with_weight(where: str, more: JsonTable) -> JsonTable:
    """Return the keys of a message, with its weight only if that is 0. `train` means the same."""
    weight = more.pop(WEIGHT, 1) if "train" not in more else more.pop("train")
    if weight not in (0, 1):
        raise _bad(f"{where}: its weight is {str(weight)[:40]}. Fix: 0 or 1")
    return more | ({} if weight else {WEIGHT: 0})


def _called(where: str, content: str) -> list[Any]:
    """Return the calls of a ShareGPT message of the role function_call, whose text is JSON."""
    try:
        calls = json.loads(content)
    except (ValueError, RecursionError):
        raise _bad(f"{where}: the text of a function_call is no JSON") from None
    calls = calls if isinstance(calls, list) else [calls]
    return [{"type": "function", "function": call} for call in calls]


def _tools(where: str, tools: Any) -> list[Any] | None:
    if isinstance(tools, str):  # in tables
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise _bad(f"{where}: its 'tools' are no JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise _bad(f"{where}: its 'tools' are no list")
    return tools or None


class WholeConversations(DocumentFilter):
    """A filter of conversations without an answer, or with an empty answer."""

    name = "conversations"

    def judge(self, document: SplitDocument) -> str | None:
        messages = split_messages("\n".join(document.lines), document.metadata[TURNS])
        answers = [message for message in messages if message["role"] == ANSWERS]
        if not answers:
            return "no answer"
        calls = ("tool_calls", "function_call")
        is_whole = all(one["content"].strip() or any(map(one.get, calls)) for one in answers)
        return None if is_whole else "an answer is empty"


class AlternatingTurns(DocumentFilter):
    """A filter of conversations in which user and assistant do not alternate. Tools may come between."""

    name = "turns"

    def judge(self, document: SplitDocument) -> str | None:
        roles = [role for role, *_ in document.metadata[TURNS]]
        pairs = zip([None, *roles], roles, strict=False)
        alternate = all(before in MAY_FOLLOW[role] for before, role in pairs)
        return None if alternate else "turns do not alternate"
