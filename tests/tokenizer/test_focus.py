"""FOCUS: rows weighted by the similarity of auxiliary vectors, against dense arithmetic."""

from pathlib import Path

import numpy as np
import pytest

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TextTokenizer, load_tokenizer
from kielo.tokenizer.make_row_map import (
    example_ids,
    make_row_map,
    read_token_vectors,
    row_in_words,
    row_map_in_words,
    sparsemax,
)
from kielo.tokenizer.spelling import TokenNames
from kielo.tokenizer.train import save, train_on
from tests.tokenizer.test_row_map import NEW, OLD


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory) -> tuple[TextTokenizer, TextTokenizer]:
    """An English and an Estonian one, of 340 and 360 tokens."""
    made = []
    for name, texts, size in (("old", OLD, 340), ("new", NEW, 360)):
        folder = tmp_path_factory.mktemp(name)
        recipe = Recipe(name="t", language="et", corpus={"sources": ["a"]}, tokenizer={"vocab_size": size})
        save(train_on(texts, recipe), folder)
        made.append(load_tokenizer(folder))
    return made[0], made[1]


def vectors_of(new: TextTokenizer) -> np.ndarray:
    """Random ones, none for every fifth token."""
    vectors = np.random.default_rng(7).normal(size=(new.whole.get_vocab_size(), 12)).round(4)
    vectors[::5] = 0
    return vectors


def write_vec(path: Path, new: TextTokenizer, vectors: np.ndarray) -> Path:
    lines = [
        f"{new.whole.id_to_token(number)} {' '.join(map(str, vector))} "
        for number, vector in enumerate(vectors)
        if vector.any()
    ]
    path.write_text("\n".join([f"{len(lines)} {vectors.shape[1]}", *lines]) + "\n", encoding="utf-8")
    return path


def on_simplex(scores: np.ndarray) -> np.ndarray:
    """The weights max(score - t, 0) that sum to 1, with t by bisection."""
    low, high = scores.min() - 1, scores.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(scores - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(scores - low, 0)


def test_sparsemax_is_the_nearest_point_of_the_simplex():
    """Against bisection; and by hand: (0.6, 0.2, -1) gives (0.7, 0.3, 0)."""
    assert sparsemax(np.array([[0.6, 0.2, -1.0], [3.0, 0, 0]])) == pytest.approx(
        np.array([[0.7, 0.3, 0], [1, 0, 0]])
    )
    scores = np.random.default_rng(3).uniform(-1, 1, (40, 60))
    assert sparsemax(scores) == pytest.approx(np.array([on_simplex(row) for row in scores]), abs=1e-12)


def test_rows_are_those_of_dense_arithmetic(tmp_path, vocabularies):
    """Copied tokens are the anchors; each other one with a vector is the sum of all anchors' rows by the
    sparsemax of cosines: the whole matrices multiplied in fp64, to the rounding of fp32 weights. Tokens
    without a vector are as with `mean`.
    """
    old, new = vocabularies
    vectors = vectors_of(new)
    made = make_row_map(old, new, "focus", write_vec(tmp_path / "a.vec", new, vectors))
    plain = make_row_map(old, new, "mean")
    table = np.random.default_rng(1).normal(size=(old.whole.get_vocab_size(), 8))
    control = new.whole.token_to_id("<|endoftext|>")
    anchors = [
        number
        for number, row in enumerate(plain.rows)
        if len(row) == 1 and number != control and vectors[number].any()
    ]
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1), 1e-300)[:, None]
    compared = 0
    for number, row in enumerate(plain.rows):
        if len(row) == 1 or not vectors[number].any():
            assert made.rows[number] == row and str(number) not in made.weights
            continue
        expected = on_simplex(unit[anchors] @ unit[number]) @ table[[plain.rows[one][0] for one in anchors]]
        found = np.array(made.weights[str(number)]) @ table[made.rows[number]]
        assert found == pytest.approx(expected, abs=2e-6)
        assert made.rows[number] == sorted(set(made.rows[number]))
        compared += 1
    assert compared == len(made.weights) > 20
    assert f"{compared} of them weighted by similarity" in row_map_in_words(made)
    names = TokenNames(old)
    assert any("0." in row_in_words(made, new_id, names) for new_id in example_ids(made, 100))


def test_both_formats_give_the_same_rows(tmp_path, vocabularies):
    old, new = vocabularies
    vectors = vectors_of(new)
    np.savez(tmp_path / "a.npz", vectors=vectors)
    by_name = make_row_map(old, new, "focus", write_vec(tmp_path / "a.vec", new, vectors))
    assert make_row_map(old, new, "focus", tmp_path / "a.npz") == by_name


def test_files_that_hold_no_vectors_are_refused(tmp_path, vocabularies):
    """Missing, headless, a short line, text that is none, other ids, no token of this vocabulary, NaN."""
    old, new = vocabularies
    path = tmp_path / "a.vec"

    def complaint(content: str | bytes) -> str:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(KieloError) as error:
            make_row_map(old, new, "focus", path)
        return str(error.value)

    assert "line 1" in complaint("maja 0.1 0.2\n")
    assert "line 3 is not a token and 2 numbers" in complaint("2 2\nmaja 0.1 0.2\njõgi 0.1\n")
    assert "not UTF-8" in complaint(b"1 2\n\xff\xfe 0.1 0.2\n")
    assert "no vector of a token of" in complaint("1 2\nzzzz 0.1 0.2\n")
    assert "NaN" in complaint("1 2\nm nan 0.2\n")
    assert "line 2 is not a token and 1 numbers" in complaint("1 1\nm x\n")
    assert "line 1 is '1 0'" in complaint("1 0\nm\n") and "no vector of a token of" in complaint("0 3\n")
    path.write_text("1 1\nm -0.5\n")
    found = read_token_vectors(path, new)
    assert found.shape == (287, 1) and found[found != 0].tolist() == [-0.5]
    with pytest.raises(KieloError, match="no such file"):
        make_row_map(old, new, "focus", tmp_path / "gone.vec")
    np.savez(tmp_path / "b.npz", vectors=np.array([None]))  # nothing is unpickled
    with pytest.raises(KieloError, match="the array `vectors` cannot be read .Object arrays cannot be"):
        make_row_map(old, new, "focus", tmp_path / "b.npz")
    np.savez(tmp_path / "b.npz", vectors=np.ones((5, 3)))
    with pytest.raises(KieloError, match="a row of floating-point numbers for each of the 287 ids"):
        make_row_map(old, new, "focus", tmp_path / "b.npz")
