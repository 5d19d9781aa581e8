"""Texts of Kielo's own are known by their last line; anything else under their name is refused."""

import os
from pathlib import Path

import pytest
import xxhash

from kielo.artifact.durable import (
    HASH_COMMENT,
    is_own_text,
    marked,
    refuse_other_json,
    refuse_other_text,
    write_own_text,
)
from kielo.recipe.errors import KieloError


def test_a_text_of_kielos_own(tmp_path) -> None:
    """Its last line has the checksum of all before it; a link, a folder and a change are not its own."""
    path, text = tmp_path / "a.md", "one\ntwo\n"
    path.write_text(marked(text))
    line = "written by kielo, which replaces this file while the text above has the xxh3_128 "
    assert path.read_text() == f"{text}<!-- {line}{xxhash.xxh3_128_hexdigest(text.encode())} -->\n"
    assert is_own_text(path) and marked("", "# {}").startswith("# written by kielo")
    refuse_other_text(path)
    refuse_other_text(tmp_path / "gone")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "empty").write_text(marked(""))
    assert (
        not is_own_text(tmp_path / "link") and not is_own_text(tmp_path) and is_own_text(tmp_path / "empty")
    )
    for wrong in (marked(text).replace("two", "tow"), marked(text) + "more\n", marked(text)[:-1], "", text):
        path.write_text(wrong)
        assert not is_own_text(path)
        with pytest.raises(KieloError, match="a.md: exists, and Kielo did not write it or"):
            refuse_other_text(path)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(KieloError, match="a symbolic link that leads nowhere"):
        refuse_other_text(tmp_path / "dangling")
    for content, is_fine in (
        ('{"key": 1}', True),
        ('{"other": 1}', False),
        ("[1]", False),
        ("5", False),
        ("{", False),
    ):
        path.write_text(content)
        if is_fine:
            refuse_other_json(path, "key")
        else:
            with pytest.raises(KieloError, match="Kielo did not write it"):
                refuse_other_json(path, "key")
    refuse_other_json(tmp_path / "gone", "key")


def test_a_text_of_more_than_64_mebibytes_is_not_read(tmp_path, monkeypatch) -> None:
    """One of that size is, and is known by its mark."""
    path, original = tmp_path / "a.md", Path.stat
    path.write_text(marked("text\n"))
    for size, is_own in ((67_108_864, True), (67_108_865, False)):

        def stat(self: Path, size: int = size, **options: bool) -> os.stat_result:
            fields = list(original(self, **options))
            fields[6] = size
            return os.stat_result(fields)

        monkeypatch.setattr(Path, "stat", stat)
        assert is_own_text(path) is is_own
        monkeypatch.undo()


def test_a_text_with_another_comment_is_written_and_replaced(tmp_path) -> None:
    path = tmp_path / "a.toml"
    for text in ("a = 1\n", "b = 2\n"):
        write_own_text(path, text, HASH_COMMENT)
        assert path.read_text() == marked(text, "# {}") and path.read_text().startswith(text)
    path.write_text("mine\n")
    with pytest.raises(KieloError, match=r"a\.toml: exists"):
        write_own_text(path, "c = 3\n", HASH_COMMENT)
    assert path.read_text() == "mine\n"
    (tmp_path / "link.toml").symlink_to(path)
    with pytest.raises(KieloError, match=r"link\.toml: exists"):
        refuse_other_text(tmp_path / "link.toml")
    refuse_other_json(tmp_path / "gone", "key")
    (tmp_path / "dangling").symlink_to("gone")
    with pytest.raises(KieloError, match="dangling: exists, and Kielo did not write it. Fix: move it away"):
        refuse_other_json(tmp_path / "dangling", "key")
