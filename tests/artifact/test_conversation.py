"""Messages are joined to a text, and cut out of it again by their turns."""

from kielo.artifact.documents import join_messages, messages_of, split_messages

MESSAGES = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "Tere!\nõ"},
    {"role": "assistant", "content": "Jah."},
]


def test_messages_and_their_text() -> None:
    """Characters are counted, not bytes; an empty message has a line too."""
    text, turns = join_messages(MESSAGES)
    assert text == "\nTere!\nõ\nJah." and turns == [["system", 0], ["user", 7], ["assistant", 4]]
    assert split_messages(text, turns) == MESSAGES
    assert messages_of({"text": text, "metadata": {"turns": turns}}) == MESSAGES
    assert messages_of({"text": text, "metadata": {}}) is None
    assert join_messages([]) == ("", []) and messages_of({"text": "", "metadata": {"turns": []}}) == []
