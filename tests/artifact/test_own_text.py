"""Texts of Kielo's own are known by their last line; anything else under their name is refused."""

import pytest
import xxhash

from kielo.artifact.own_text import is_own_text, marked, refuse_other_json, refuse_other_text
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
        with pytest.raises(KieloError, match="a.md: is there already, and Kielo did not write it or"):
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
