"""The list of `make mutants` is current, and its script changes what it says."""

import ast
import shutil

import mutants
import pytest
from mutant_sites import add_probes, draw

from tests.house.checks import PACKAGE, ROOT


def test_each_known_change_is_possible_and_has_its_test():
    """Its text is once in its file, what comes of it is Python, and the test that catches it is there."""
    known = mutants.known_mutants()
    for mutant in known:
        ast.parse(mutant.apply((PACKAGE / mutant.file).read_bytes()))
        file, _, name = mutant.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), mutant
    assert len(known) > 70


def test_a_text_that_is_gone_is_named(tmp_path, monkeypatch):
    """A change whose text was edited away would be tried no more without a word."""
    planted = (
        '[[mutant]]\nfile = "train/loop.py"\nold = "no such line"\nnew = "pass"\ntest = "tests/x.py::y"\n'
    )
    (tmp_path / "planted.toml").write_text(planted)
    monkeypatch.setattr(mutants, "LISTS", tmp_path)
    with pytest.raises(ValueError, match=r"planted.toml: train/loop.py has 'no such line' 0 times, not once"):
        mutants.known_mutants()


def test_the_seed_draws_changes_and_each_has_its_probe(tmp_path):
    """The same seed draws the same changes, each of another function; each file stays Python, probed too."""
    drawn = draw(PACKAGE, 40, 7, ("plan/cost",))
    assert drawn == draw(PACKAGE, 40, 7, ("plan/cost",)) != draw(PACKAGE, 40, 8, ("plan/cost",))
    for mutant in drawn:
        before = (PACKAGE / mutant.file).read_bytes()
        assert ast.dump(ast.parse(mutant.apply(before))) != ast.dump(ast.parse(before)), mutant
    shutil.copytree(PACKAGE / "plan", tmp_path / "plan")
    add_probes(tmp_path, drawn, lambda number: f"probe({number})")
    probed = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.py"))
    assert len(drawn) > 5 and all(f"probe({number})" in probed for number in range(len(drawn)))
