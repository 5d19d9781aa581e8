"""A ready tokenizer that loses text, or that other weights were trained with, is refused by its stage."""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from kielo.artifact.manifest import write_stage
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.train import save, train_on, train_tokenizer
from kielo.tokenizer.trial import (
    find_unknown,
    refuse_lossy,
    refuse_other_vocabulary,
    refuse_unknown,
)
from tests.tokenizer.test_row_map import NEW, OLD
from tests.written_documents import write_documents


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
    with pytest.raises(KieloError, match=rf"path: of 60 texts 60 do not .*{lost}.* Fix: "):
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


def with_unknown(folder: Path, kind: str) -> Path:
    """Writes a tokenizer that lacks ☃ and Я."""
    letters = sorted(set("".join(NEW)) | set("☕ ")) if kind == "drops" else sorted(set("".join(NEW)) - {" "})
    if kind == "WordPiece":
        names = ["[UNK]", "<|endoftext|>", *letters, *(f"##{letter}" for letter in letters)]
        model = models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]")
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    elif kind == "Unigram":
        names = ["<unk>", "<|endoftext|>", "▁", *letters]
        tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        names = ["<|endoftext|>", *letters]
        tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|endoftext|>", *(name for name in names[:1] if name != "<|endoftext|>")])
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "drops"])
def test_characters_that_a_tokenizer_lacks_are_counted(tmp_path, kind):
    """Texts and characters, by hand; of WordPiece all of a word. Controls that are left out are no loss."""
    tokenizer = load_tokenizer(with_unknown(tmp_path / "t", kind))
    first = NEW[0]
    texts = [first, f"{first} ☃", f"{first} Я☃ ☃", *[first] * 97]
    found = find_unknown(tokenizer, texts)
    assert (found.texts, found.of_texts, found.characters) == (2, 100, 4)
    assert found.of_characters == sum(map(len, texts)) and found.first == f"{first[-11:]} ☃"
    assert "2 of 100 texts (2.0%) have characters that this tokenizer lacks" in found.sentence()
    assert find_unknown(tokenizer, [first]) is None and find_unknown(tokenizer, []) is None
    refuse_unknown(found, 0.02, "tokenizer.path")
    with pytest.raises(KieloError, match=r"tokenizer.path: 2 of 100 .*max_unknown_share = 0.02 accepts this"):
        refuse_unknown(found, 0.01, "tokenizer.path")
    if kind == "WordPiece":
        assert find_unknown(tokenizer, ["a☃a ☃"]).characters == 4


def test_nothing_is_unknown_to_bytes(tmp_path):
    """Also with normalisers, and in SentencePiece's form with byte fallback."""
    normal = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\u200b", "")])
    texts = [*NEW, "☃ Я\u00ad 👩‍💻 ﬁ e\u0301 \u200b\t\n ﷽"]
    for number, normalizer in enumerate((None, normal)):
        tokenizer = load_tokenizer(trained(tmp_path / str(number), NEW, normalizer))
        assert find_unknown(tokenizer, texts) is None
    names = ["<unk>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    model = models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    fallback = Tokenizer(model)
    fallback.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "tokenizer.json").write_text(fallback.to_str(), encoding="utf-8")
    assert find_unknown(load_tokenizer(tmp_path), texts) is None


def test_the_stage_shows_and_refuses_unknown_characters(tmp_path, capsys):
    """160 of 400 documents: a decoder's is refused, unless the recipe accepts the share."""
    with write_stage(tmp_path / "corpus", "corpus", 1, {}, {}) as stage:
        texts = [f"{NEW[n % 60]} {n * '0'}" + " ☃" * (n % 5 < 2) for n in range(400)]
        documents = (
            {"id": str(n), "text": text, "source": "a", "metadata": {}} for n, text in enumerate(texts)
        )
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        stage.counts["bytes_kept"] = 1000
    path = with_unknown(tmp_path / "t", "Unigram")

    def run(objective: str = "next_token", **keys: float) -> str:
        recipe = Recipe(
            name="t", language="et", corpus={"sources": ["a"]}, tokenizer={"path": str(path), **keys},
            train={"objective": objective}, dataset={"heldout_share": 0.4},
        )  # fmt: skip
        train_tokenizer(recipe, tmp_path / "corpus", tmp_path / "tokenizer")
        return capsys.readouterr().err

    with pytest.raises(KieloError, match="texts .* have characters that this tokenizer lacks .*'.*☃'"):
        run()
    assert "texts (" in run(max_unknown_share=0.5)
    assert "max_unknown_share" not in (tmp_path / "tokenizer" / "manifest.json").read_text()
    assert run() == ""  # the stage is current
    shutil.rmtree(tmp_path / "tokenizer")
    assert "have characters that this tokenizer lacks" in run("masked_tokens")
