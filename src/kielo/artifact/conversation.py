"""A conversation as a document: messages ↔ its text and the turns in its metadata.

The text is the contents of the messages, a line end after each but the last; `metadata["turns"]` lists the
role and the characters of each message, so that they can be cut out of the text again, and what else a
message has: the tools that it calls, its reasoning. `metadata["tools"]` are the tools that there are.
"""

from collections.abc import Sequence
from typing import Any

TURNS, TOOLS = "turns", "tools"
ANSWERS = "assistant"  # the role whose messages are the answers
WEIGHT = "weight"  # of a message: 0 where it carries no loss

Message = dict[str, Any]  # {"role", "content"}, and what else the template is given
Turns = list[list[Any]]  # [role, characters] of each message, and {key: value} where there is more


def join_messages(messages: Sequence[Message]) -> tuple[str, Turns]:
    """Returns the text of a conversation and its turns."""
    turns: Turns = []
    for message in messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        turns.append([message["role"], len(message["content"]), *([more] if more else [])])
    return "\n".join(message["content"] for message in messages), turns


def split_messages(text: str, turns: Turns) -> list[Message]:
    """Returns the messages of a conversation."""
    messages, start = [], 0
    for role, characters, *more in turns:
        content = {"role": role, "content": text[start : start + characters]}
        messages.append(content | (more[0] if more else {}))
        start += characters + 1
    return messages


def messages_of(document: dict[str, Any]) -> list[Message] | None:
    """Returns the messages of a document; None where it is no conversation."""
    turns = document["metadata"].get(TURNS)
    return None if turns is None else split_messages(document["text"], turns)


def carries_loss(message: Message) -> bool:
    """Returns True for an answer that the model is to learn."""
    return message["role"] == ANSWERS and message.get(WEIGHT, 1) != 0
