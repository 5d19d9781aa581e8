"""A ready tokenizer that loses text, or that other weights were trained with, is refused by its stage."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from kielo.artifact.documents import write_documents
from kielo.artifact.manifest import write_stage
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.ready_check import refuse_lossy, refuse_other_vocabulary
from kielo.tokenizer.train import save, train_on, train_tokenizer
from tests.tokenizer.test_row_map import NEW, OLD


def trained(folder: Path, texts: list[str], normalizer=None) -> Path:
    recipe = Recipe(name="t", language="et", corpus={"sources": ["a"]}, tokenizer={"vocab_size": 300})
    tokenizer: Tokenizer = train_on(texts, recipe)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    save(tokenizer, folder)
    return folder


@pytest.mark.parametrize(
    ("normalizer", "lost"),
    [
        (normalizers.Lowercase(), r"'Majajajõgi0:.*' becomes 'majajajõgi0:"),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "becomes 'Majajajogi0:"),
        (normalizers.NFKC(), None),
        (normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace("  ", " ")]), None),
        (None, None),
    ],
)
def test_what_is_lost(tmp_path, normalizer, lost):
    """Capitals and accents are; spaces and compatibility forms may be normalised."""
    tokenizer = load_tokenizer(trained(tmp_path / "new", NEW, normalizer))
    if lost is None:
        return refuse_lossy(tokenizer, NEW, "tokenizer.path")
    with pytest.raises(KieloError, match=rf"path: of 60 texts 60 do not .*{lost}.* What would work"):
        refuse_lossy(tokenizer, NEW, "tokenizer.path")
    mostly_kept = [text.lower().encode("ascii", "ignore").decode() for text in NEW[:31]] + NEW[31:]
    refuse_lossy(tokenizer, mostly_kept, "tokenizer.path")


def test_the_vocabulary_of_other_weights(tmp_path):
    """The same one with a later control token passes; another one is named with its first other token."""
    ours, theirs = trained(tmp_path / "ours", NEW), trained(tmp_path / "theirs", OLD)
    more = load_tokenizer(ours).whole
    more.add_special_tokens(["<|call|>"])
    save(more, tmp_path / "more")
    refuse_other_vocabulary(tmp_path / "more", ours, "tokenizer.path")
    refuse_other_vocabulary(ours, tmp_path, "tokenizer.path")  # weights without a tokenizer
    with pytest.raises(KieloError, match=r"such as 258: .* here, .* in ") as error:
        refuse_other_vocabulary(ours, theirs, "tokenizer.path")
    assert f'tokenizer.path = "{theirs}"' in str(error.value) and "model.transplant" in str(error.value)


def test_the_stage_refuses_them(tmp_path):
    with write_stage(tmp_path / "corpus", "corpus", 1, {}, {}) as stage:
        documents = (
            {"id": str(n), "text": text, "source": "a", "metadata": {}} for n, text in enumerate(NEW)
        )
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        stage.counts["bytes_kept"] = 1000
    of_weights = trained(tmp_path / "weights", OLD)
    (of_weights / "config.json").write_text("{}")
    (of_weights / "model.safetensors").write_bytes(b"")

    def run(path: Path, **train: str) -> None:
        recipe = Recipe(
            name="t", language="et", corpus={"sources": ["a"]}, tokenizer={"path": str(path)},
            model={"weights": f"hf:{of_weights}"}, train=train,
        )  # fmt: skip
        train_tokenizer(recipe, tmp_path / "corpus", tmp_path / "tokenizer")

    lower = trained(tmp_path / "lower", OLD, normalizers.Lowercase())
    with pytest.raises(KieloError, match="do not come back"):
        run(lower)
    with pytest.raises(KieloError, match="is not the vocabulary of model.weights"):
        run(trained(tmp_path / "other", NEW))
    run(lower, objective="masked_tokens")  # the same ids, and an encoder writes no text
    run(of_weights)
