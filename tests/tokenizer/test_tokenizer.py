"""Promises of the tokenizer room."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kielo.artifact.manifest import write_stage
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import decode, encode, end_of_text_id, load_tokenizer, vocabulary_size
from kielo.tokenizer.measure import f95, measure, parity, renyi_entropy
from kielo.tokenizer.stage_inputs import is_heldout
from kielo.tokenizer.train import save, train_on, train_tokenizer
from tests.written_documents import write_documents

TEXTS = [
    f"Aasta {year}: jõgi ja mägi on ilusad, öö läheb.\n\nПривет, мир — コーヒーと漢字 {year}!"
    "\r\n\tSámi giella  'tere'   "
    for year in range(1900, 2000)
]


def recipe(**tokenizer):
    return Recipe(
        name="t", language="et", corpus={"sources": ["a.txt"]}, tokenizer={"vocab_size": 500, **tokenizer},
        dataset={"heldout_share": 0.2},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished corpus and the tokenizer trained on it."""
    folder = tmp_path_factory.mktemp("a run")
    with write_stage(folder / "corpus", "corpus", 1, {}, {}) as stage:
        documents = (
            {"id": str(n), "text": text, "source": "a", "metadata": {}} for n, text in enumerate(TEXTS)
        )
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        stage.counts["bytes_kept"] = sum(len(text.encode()) for text in TEXTS)
    train_tokenizer(recipe(), folder / "corpus", folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "tokenizer")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(tokenizer, text):
    """Round trip is exact on any Unicode text: decomposed letters, controls, spaces and unseen scripts
    included."""
    assert decode(tokenizer, encode(tokenizer, [text])) == [text]


def test_a_run_that_has_trained_keeps_its_older_tokenizer(folder, tmp_path):
    """A tokenizer of an earlier version stays below checkpoints, if its values did not change."""
    shutil.copytree(folder, tmp_path / "run")
    run, path = tmp_path / "run", tmp_path / "run" / "tokenizer" / "manifest.json"
    older = json.loads(path.read_text()) | {"version": 1}
    path.write_text(json.dumps(older))
    checkpoint = run / "train" / "checkpoints" / "step_00000005"
    checkpoint.mkdir(parents=True)
    assert train_tokenizer(recipe(), run / "corpus", run / "tokenizer").version == 1
    with pytest.raises(KieloError, match="vocab_size .was 500, is 501"):
        train_tokenizer(recipe(vocab_size=501), run / "corpus", run / "tokenizer")
    checkpoint.rmdir()
    assert train_tokenizer(recipe(), run / "corpus", run / "tokenizer").version == 2


def test_pieces_respect_digits_lines_and_marks(tokenizer):
    """No token joins two digits, or a line's end and what follows; marks stay with their letters."""
    cut = [
        text[slice(*place)] for text in ["juba 2026mир.\nkoer नमस्ते"] for _, place in pieces(tokenizer, text)
    ]
    assert cut == ["juba", " ", "2", "0", "2", "6", "mир", ".\n", "koer", " नमस्ते"]
    for token in tokenizer.whole.get_vocab():
        if token not in {"<|endoftext|>", "<|padding|>"}:
            assert sum(character.isdigit() and character.isascii() for character in token) <= 1
            assert "Ċ" not in token or set(token[token.index("Ċ") :]) <= {"Ċ", "č"}


def pieces(tokenizer, text):
    return tokenizer.whole.pre_tokenizer.pre_tokenize_str(text)


def test_hugging_face_gives_the_same_ids(folder, tokenizer):
    """AutoTokenizer reads the folder and agrees on ids, decoded text and the special token."""
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert [theirs(text)["input_ids"] for text in TEXTS] == encode(tokenizer, TEXTS)
    assert theirs.decode(encode(tokenizer, TEXTS[:1])[0]) == TEXTS[0]
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.unk_token_id == end_of_text_id(tokenizer) == 0
    assert theirs.pad_token_id == 1
    assert len(theirs) == vocabulary_size(tokenizer)


def test_text_cannot_write_an_end_of_text(tokenizer):
    """A document that spells the special token stays one document."""
    (row,) = encode(tokenizer, ["enne<|endoftext|>pärast"])
    assert 0 not in row and decode(tokenizer, [row]) == ["enne<|endoftext|>pärast"]


def test_training_is_deterministic_and_sees_no_heldout_text(folder, tmp_path):
    """The vocabulary of the stage is that of the training documents alone, learned again byte for byte."""
    training = [text for text in TEXTS if not is_heldout(text, 0.2)]
    assert 0 < len(training) < len(TEXTS)
    save(train_on(training, recipe()), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / name).read_bytes() == (folder / "tokenizer" / name).read_bytes()
    assert (
        json.loads((folder / "tokenizer" / "measure.json").read_text())["measured_on"] == "held-out documents"
    )


def test_figures_are_what_they_say(tokenizer):
    """Counted by hand on a text of ten tokens; entropies against uniform and one-token distributions."""
    figures = measure(tokenizer, ["1234 5678"])
    assert (figures["tokens"], figures["words"], figures["bytes"]) == (9, 2, 9)
    assert (
        figures["tokens_per_word"] == 4.5
        and figures["bytes_per_token"] == figures["single_byte_token_share"] == 1.0
    )
    assert (
        figures["exact_round_trip_share"] == 1.0
        and figures["vocabulary_used_share"] == 9 / figures["vocabulary_size"]
    )
    assert figures["renyi_efficiency"] == pytest.approx(np.log(9) / np.log(figures["vocabulary_size"]))
    assert renyi_entropy(np.array([3, 1]), 2.5) == pytest.approx(np.log(0.75**2.5 + 0.25**2.5) / -1.5)
    assert renyi_entropy(np.array([5, 0]), 1.0) == 0 and renyi_entropy(np.ones(8), 1.0) == pytest.approx(
        np.log(8)
    )
    with pytest.raises(KieloError, match="no text"):
        measure(tokenizer, [])


def test_f95_is_the_count_of_the_95th_of_a_hundred_tokens():
    """The 19th of 20, and the 95th of 100; ids without a token are none of them."""
    assert f95(np.arange(1, 21), 20) == 2
    assert f95(np.array([1] * 5 + [7] * 95), 100) == 7 and f95(np.array([1] * 6 + [7] * 94), 100) == 1
    assert f95(np.array([0] * 100 + [3] * 20), 20) == 3


def test_parity_is_a_ratio_of_tokens(tokenizer):
    """Digits are a token each: 8 of them against 4, over all lines; lines without a translation are none."""
    found = parity(tokenizer, ["123456", "12"], ["1", "234"])
    assert found == {"parity": 2.0, "parallel_texts": 2, "parallel_tokens": 8, "english_tokens": 4}
    for ours, theirs in ((["1"], ["1", "2"]), ([""], ["1"]), ([], [])):
        with pytest.raises(KieloError, match=r"parallel text|translations"):
            parity(tokenizer, ours, theirs)


def test_a_ready_tokenizer_is_copied_and_measured(folder, tmp_path):
    """tokenizer.path is used as it is, its end-of-text being the eos_token that it names itself."""
    ready = tmp_path / "ready"
    (ready).mkdir()
    content = json.loads(
        (folder / "tokenizer" / "tokenizer.json").read_text().replace("<|endoftext|>", "</s>")
    )
    (ready / "tokenizer.json").write_text(json.dumps(content))
    (ready / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    side = ("tokenizer.model", "vocab.json", "merges.txt", "additional_chat_templates/tool_use.jinja")
    (ready / "additional_chat_templates").mkdir()
    for name in (*side, "model.safetensors"):
        (ready / name).write_text(name)
    manifest = train_tokenizer(recipe(path=str(ready)), folder / "corpus", tmp_path / "tokenizer")
    for name in ("tokenizer.json", *side):
        assert (tmp_path / "tokenizer" / name).read_bytes() == (ready / name).read_bytes()
    assert not (tmp_path / "tokenizer" / "model.safetensors").exists()
    assert (
        end_of_text_id(load_tokenizer(tmp_path / "tokenizer")) == 0 and manifest.counts["tokens_per_word"] > 1
    )
    (ready / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    with pytest.raises(KieloError, match="no token '<eos>'"):
        train_tokenizer(recipe(path=str(ready)), folder / "corpus", tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer" / "manifest.json").exists()  # the earlier one is untouched


def test_mistakes_are_named(folder, tmp_path):
    """A vocabulary without room for the bytes, a folder without a tokenizer, a file that is none."""
    with pytest.raises(KieloError, match="vocab_size = 200: .* at least 258"):
        train_tokenizer(recipe(vocab_size=200), folder / "corpus", tmp_path / "tokenizer")
    with pytest.raises(KieloError, match="tokenizer.path = .* no tokenizer.json"):
        train_tokenizer(recipe(path=str(tmp_path)), folder / "corpus", tmp_path / "tokenizer")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(KieloError, match="tokenizer.json: not a readable tokenizer"):
        load_tokenizer(tmp_path)
