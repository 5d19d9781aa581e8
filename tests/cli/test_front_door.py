"""`kielo docs`, `kielo completion`, and the time that `kielo --help` takes."""

import json
import os
import subprocess
import sys
import webbrowser

import pytest

from kielo.cli.main import main
from tests.house.checks import ROOT


def test_the_pages_are_named_and_opened(capsys, monkeypatch) -> None:
    """Those of the checkout, in which tests run; a wheel has a site."""
    page, opened = ROOT / "docs" / "start.md", []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    assert main(["docs"]) == 0 and capsys.readouterr().out == f"{page}\n" and opened == []
    assert main(["docs", "--open", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(page)} and opened == [page.as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    assert main(["docs", "--open"]) == 1 and f"Fix: open {page} yourself" in capsys.readouterr().err


def test_a_wheel_has_its_site(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").touch()
    assert main(["docs"]) == 0 and capsys.readouterr().out == f"{tmp_path}/site/index.html\n"


@pytest.mark.parametrize(("line", "found"), [
    ("kielo ch", {"checkpoint", "chat"}), ("kielo run demo_estonian_b", {"demo_estonian_bert"}),
    ("kielo plan comp", {"compare"}), ("kielo plan compare --wal", {"--wall-hours"}),
    ("kielo checkpoint show src/kielo/cli/fla", {"src/kielo/cli/flags.py"}),
    ("kielo run x --only ver", {"verify"}),
    ("kielo train x --ranks ", set()),
])  # fmt: skip
def test_bash_completes(line, found, tmp_path, capsys) -> None:
    """By bash itself: the words that the Tab key would offer."""
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    words = " ".join(f"'{word}'" for word in line.split(" "))
    script = (
        f". {tmp_path}/completion; COMP_WORDS=({words}); COMP_CWORD={len(line.split(' ')) - 1}; "
        '$(complete -p kielo | sed "s/.*-F //; s/ kielo//"); printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, text=True, capture_output=True)
    assert set(filter(None, done.stdout.splitlines())) == found, done.stderr


def test_other_shells_have_a_script(capsys) -> None:
    pytest.importorskip("shtab")
    for shell, begin in {"zsh": "#compdef kielo", "fish": "# AUTOMATICALLY GENERATED"}.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out.startswith(begin)


def test_completion_names_the_package_that_it_needs(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == "kielo: completion needs the package shtab. Fix: pip install shtab\n"


def test_the_help_is_there_at_once() -> None:
    """The bar is 0.2 s; of processor time, since other programs run beside it, the best of three."""
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "kielo", "--help"], check=True, capture_output=True)
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(seconds) < 0.2, seconds
