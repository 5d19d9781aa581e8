"""Conversations: a record's list of messages → one document, and the checks that a conversation is whole.

Read are `messages` of {role, content} and ShareGPT's `conversations` of {from, value}. Contents stay as they
are, character by character.
"""

from typing import Any

from kielo.artifact.conversation import ANSWERS, TURNS, Message, split_messages
from kielo.corpus.raw_record import BAD_MESSAGES, BadRecord
from kielo.corpus.split_document import SplitDocument
from kielo.corpus.step import DocumentFilter

ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant",  # ShareGPT's
}  # fmt: skip
FIELDS_OF_MESSAGES = (("role", "content"), ("from", "value"))
# Role → the roles that may come before it; None is the beginning.
MAY_FOLLOW = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def read_messages(where: str, fields: dict[str, Any], names: tuple[str, ...]) -> list[Message]:
    """Returns the messages in the first of the fields `names` that a record has.

    Raises BadRecord, which begins with `where`, for what is no list of messages with known roles and text.
    """
    name = next((name for name in names if name in fields), names[0])
    if not isinstance(messages := fields.get(name), list):
        found = "no such field" if name not in fields else f"a {type(messages).__name__}"
        raise BadRecord(
            BAD_MESSAGES,
            f"{where}: {found} where the field {name!r} should hold a list of messages; its fields are "
            f"{', '.join(fields)[:200] or 'none'}. Set the source's text_field",
        )
    return [_message(f"{where}, message {number}", entry) for number, entry in enumerate(messages, start=1)]


def _message(where: str, entry: Any) -> Message:
    for role_field, content_field in FIELDS_OF_MESSAGES:
        if isinstance(entry, dict) and role_field in entry:
            role, content = entry[role_field], entry.get(content_field)
            if not isinstance(role, str) or role not in ROLES:
                raise BadRecord(
                    BAD_MESSAGES, f"{where}: unknown role {str(role)[:40]!r}; known are {', '.join(ROLES)}"
                )
            if not isinstance(content, str):
                raise BadRecord(BAD_MESSAGES, f"{where}: its {content_field!r} is no text")
            return {"role": ROLES[role], "content": content}
    raise BadRecord(BAD_MESSAGES, f"{where}: is no object with 'role' and 'content', or 'from' and 'value'")


class WholeConversations(DocumentFilter):
    """Drops conversations without an answer, and those with an empty one."""

    name = "conversations"

    def judge(self, document: SplitDocument) -> str | None:
        messages = split_messages("\n".join(document.lines), document.metadata[TURNS])
        answers = [message["content"] for message in messages if message["role"] == ANSWERS]
        if not answers:
            return "no answer"
        return None if all(answer.strip() for answer in answers) else "an answer is empty"


class AlternatingTurns(DocumentFilter):
    """Drops conversations in which user and assistant do not take turns, after an optional system message.

    Results of tools may stand between an answer and the next one.
    """

    name = "turns"

    def judge(self, document: SplitDocument) -> str | None:
        roles = [role for role, _ in document.metadata[TURNS]]
        alternate = all(
            before in MAY_FOLLOW[role] for before, role in zip([None, *roles], roles, strict=False)
        )
        return None if alternate else "turns do not alternate"
