"""A conversation as a document: messages ↔ its text and the turns in its metadata.

The text is the contents of the messages, a line end after each but the last; `metadata["turns"]` lists the
role and the characters of each message, so that they can be cut out of the text again.
"""

from collections.abc import Sequence
from typing import Any

TURNS = "turns"
ANSWERS = "assistant"  # the role whose messages are the answers

Message = dict[str, str]  # {"role", "content"}
Turns = list[list[Any]]  # [role, characters] of each message


def join_messages(messages: Sequence[Message]) -> tuple[str, Turns]:
    """Returns the text of a conversation and its turns."""
    turns = [[message["role"], len(message["content"])] for message in messages]
    return "\n".join(message["content"] for message in messages), turns


def split_messages(text: str, turns: Turns) -> list[Message]:
    """Returns the messages of a conversation."""
    messages, start = [], 0
    for role, characters in turns:
        messages.append({"role": role, "content": text[start : start + characters]})
        start += characters + 1
    return messages


def messages_of(document: dict[str, Any]) -> list[Message] | None:
    """Returns the messages of a document; None where it is no conversation."""
    turns = document["metadata"].get(TURNS)
    return None if turns is None else split_messages(document["text"], turns)
