"""Tokenizers whose vocabularies are written by hand: facts, figures, refusals and samples."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kielo.artifact.manifest import hash_file, write_stage
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer import measure, stage_inputs, train, trial
from kielo.tokenizer.chat_template import DEFAULT_TEMPLATE
from kielo.tokenizer.control_tokens import control_tokens, read_object, without_control_tokens
from kielo.tokenizer.learn_vocabulary import covered_characters, covered_parts, extend, learn_merges
from kielo.tokenizer.load import (
    decode,
    encode,
    end_of_text,
    end_of_text_id,
    load_tokenizer,
    role_id,
    special_token,
    tokenizer_facts,
    tokenizer_hash,
    vocabulary_size,
)
from kielo.tokenizer.make_row_map import RowMap, example_ids, make_row_map, row_in_words, row_map_in_words
from kielo.tokenizer.spelling import ALPHABET, word_pieces
from kielo.tokenizer.stage_inputs import decoded_documents, is_heldout, place_by_hash
from kielo.tokenizer.train import (
    TrainingSample,
    texts_to_measure,
    train_on,
    train_tokenizer,
    unfilled_vocabulary,
)
from tests.written_documents import write_documents

END = "<|endoftext|>"


def by_hand(folder: Path, *tokens: str, merges=(), special=(END,), gap: int = 0, **config) -> Path:
    """Writes a byte-level tokenizer with these tokens from id 0 on, the last one `gap` ids later."""
    vocabulary = {token: number for number, token in enumerate([*special, *tokens])}
    vocabulary[tokens[-1]] += gap
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]} | config))
    return folder


def test_figures_of_a_text_by_hand(tmp_path):
    """Four texts in two batches: a, b, ab, c and the space, of which c stands three ids after the others."""
    tokenizer = load_tokenizer(by_hand(tmp_path, "a", "b", "Ġ", "ab", "c", merges=[("a", "b")], gap=3))
    assert vocabulary_size(tokenizer) == 9 and end_of_text_id(tokenizer) == 0
    texts = ["ab ab a", "c", "", "a b"]  # ab, Ġ, ab, Ġ, a; c; nothing; a, Ġ, b
    assert encode(tokenizer, texts) == [[4, 3, 4, 3, 1], [8], [], [1, 3, 2]]
    found = measure.measure(tokenizer, iter(texts))
    counts = np.array([2, 2, 3, 1, 1])
    shares = counts / 9
    assert found == {
        "vocabulary_size": 6, "tokens_per_word": 9 / 6, "bytes_per_token": 11 / 9,
        "characters_per_token": 11 / 9,
        "exact_round_trip_share": 1.0, "vocabulary_used_share": 5 / 6, "single_byte_token_share": 7 / 9,
        "renyi_efficiency": pytest.approx(np.log((shares**2.5).sum()) / -1.5 / np.log(6)),
        "shannon_efficiency": pytest.approx(-(shares * np.log(shares)).sum() / np.log(6)),
        "f95": 0, "texts": 4, "words": 6, "bytes": 11, "tokens": 9,
    }  # fmt: skip
    many = measure.measure(tokenizer, ["a"] * 513)
    assert (many["texts"], many["tokens"], many["words"]) == (513, 513, 513)
    assert measure.measure(tokenizer, ["a", "A"])["exact_round_trip_share"] == 0.5  # an A is lost
    signs = measure.measure(tokenizer, [" "])
    assert signs["tokens_per_word"] == 1.0 and signs["words"] == 0


def test_an_end_of_text_is_found_by_its_role(tmp_path):
    """In either file, as text or object, eos_token before sep_token; a value that is no name is refused."""
    folder = by_hand(tmp_path / "a", "a", "b", special=("<s>", "</s>", "[SEP]"))
    files = [folder / "tokenizer_config.json", folder / "special_tokens_map.json"]

    def found(*contents: dict) -> str:
        for path, content in zip(files, contents):
            path.write_text(json.dumps(content))
        return end_of_text(folder)

    assert found({}, {}) == END and found({"sep_token": "[SEP]"}, {}) == "[SEP]"
    assert found({"sep_token": "[SEP]"}, {"eos_token": "</s>"}) == "</s>"
    assert found({"eos_token": {"content": "<s>"}}, {"eos_token": "</s>"}) == "<s>"
    assert found({"eos_token": ""}, {"eos_token": "</s>"}) == "</s>"
    tokenizer = load_tokenizer(folder)
    assert end_of_text_id(tokenizer) == 1 and role_id(tokenizer, "eos_token") == 1
    assert role_id(tokenizer, "mask_token") is None
    files[0].write_text(json.dumps({"mask_token": "[MASK]", "bad": 7, "none": None}))
    assert role_id(load_tokenizer(folder), "mask_token") is None and special_token(files[0], "none") is None
    with pytest.raises(KieloError, match="bad = 7 does not fit"):
        special_token(files[0], "bad")
    with pytest.raises(KieloError, match="no token .* to end documents with"):
        end_of_text_id(load_tokenizer(by_hand(tmp_path / "b", "a", eos_token="x")))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(KieloError, match="not a JSON object, but a list"):
        read_object(tmp_path / "list.json")
    assert read_object(tmp_path / "none.json") == {}
    padded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    padded.enable_padding(length=9)
    padded.enable_truncation(1)
    (folder / "tokenizer.json").write_text(padded.to_str())
    assert encode(load_tokenizer(folder), ["ab", "a"]) == [[3, 4], [3]]


def test_text_is_not_joined_to_or_with_a_control_token(tmp_path):
    """Merges that make it, or have it on either side, are none for texts; the others stay."""
    merges = [("a", "b"), ("ab", "c"), ("c", "ab"), ("c", "d")]
    folder = by_hand(tmp_path, "a", "b", "c", "d", "abc", "cab", "cd", merges=merges, special=(END, "ab"))
    tokenizer = load_tokenizer(folder)
    assert encode(tokenizer, ["ab", "abc", "cab", "cd"]) == [[2, 3], [2, 3, 4], [4, 2, 3], [8]]


def test_tokens_that_are_no_text(tmp_path):
    """By their flag, role, form or the chat template; bytes and single characters are always text."""
    folder = by_hand(
        tmp_path, "a", special=("</s>",), pad_token="<pad>", add_bos_token=True,
        extra_special_tokens={"x": "<x>"}, additional_special_tokens=["<y>", {"content": "<z>"}, ""],
        unk_token="?", bos_token={"content": "<0x0A>"},
        added_tokens_decoder={"7": {"content": "<w>", "special": True}, "8": {"content": "<v>"}, "9": "u"},
        chat_template="[INST]{{ x }}<own>", other="<t>", image_token=None, model_special_tokens="<no>",
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ["[INST]", "<own>", "INST", "<|odd|>", "<｜odd｜>", "<unused>", "<|a", "[OUT]"]
    tokenizer.add_tokens([AddedToken(name) for name in names])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    expected = {"</s>", "<pad>", "<x>", "<y>", "<z>", "<w>", "[INST]", "<own>", "<|odd|>", "<｜odd｜>"}
    assert control_tokens(folder, "</s>") == expected
    (folder / "chat_template.jinja").write_text("[OUT]")
    assert control_tokens(folder, "a") == expected | {"[OUT]"}
    with pytest.raises(KieloError, match="the token 'a', which ends documents, is an ordinary character"):
        without_control_tokens(tokenizer, folder, "a")
    made = without_control_tokens(tokenizer, folder, "</s>")
    ids = {tokenizer.token_to_id(name): name for name in expected | {"[OUT]"}}
    assert made.control_tokens == {number: name for number, name in ids.items() if number is not None}
    assert made.hidden_names.keys() == expected | {"[OUT]"} and len(set(made.hidden_names.values())) == 11
    assert made.tokenizer.token_to_id("</s>") is None
    assert made.tokenizer.token_to_id(made.hidden_names["</s>"]) == 0


def test_facts_are_read_from_a_manifest_that_is_true(tmp_path, monkeypatch):
    """If it lists the files as they are, and has the largest id; else the tokenizer is loaded."""
    folder, loads = tmp_path / "t", []
    monkeypatch.setattr(
        "kielo.tokenizer.load.load_tokenizer", lambda place: loads.append(place) or load_tokenizer(place)
    )

    def write(**counts) -> None:
        with write_stage(folder, "tokenizer", 1, {}, {}) as stage:
            by_hand(stage.folder, "a", "b")
            (stage.folder / "special_tokens_map.json").write_text("{}")
            stage.counts.update(counts)

    write(largest_id=41, end_of_text_id=7)
    found = tokenizer_facts(folder)
    assert (found.vocabulary_size, found.end_of_text_id, loads) == (42, 7, [])
    assert found.hash == tokenizer_hash(folder) != found.file_hash
    for name in ("special_tokens_map.json", "tokenizer_config.json", "tokenizer.json"):
        kept = (folder / name).read_text()
        (folder / name).write_text(kept + " ")
        loads.clear()
        changed = tokenizer_facts(folder)
        assert (changed.vocabulary_size, changed.end_of_text_id, loads) == (3, 0, [folder])
        assert (changed.hash == found.hash) is (name != "tokenizer.json")
        if name.startswith("special"):
            (folder / name).unlink()
            assert tokenizer_facts(folder).vocabulary_size == 3
        (folder / name).write_text(kept)
    assert tokenizer_facts(folder) == found
    write(end_of_text_id=7)
    assert tokenizer_facts(folder).vocabulary_size == 3
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "manifest.json").unlink()
    assert tokenizer_facts(tmp_path / "bare").vocabulary_size == 3
    with pytest.raises(KieloError, match="tokenizer.json: no such file"):
        tokenizer_facts(tmp_path)


def test_half_of_the_texts_may_be_lost(tmp_path, monkeypatch):
    """Of the first 256; the message shows 24 characters around the first that is lost."""
    letters = "abcdefghijklmnopqrstuvwxyzĠ"
    tokenizer = load_tokenizer(by_hand(tmp_path, *letters))
    good, lost = "abc", "a b c d e f g h i j k l m n o p q r s t u v w X y z a b c"
    assert trial.refuse_lossy(tokenizer, [good, lost], "k") is None
    assert trial.refuse_lossy(tokenizer, [], "k") is None
    with pytest.raises(KieloError) as refusal:
        trial.refuse_lossy(tokenizer, [good, lost, lost], "the key")
    assert "the key: of 3 texts 2 do not come back from this tokenizer: 'lmnopqrstuvwXyzabc' becomes " in str(
        refusal.value
    )
    with pytest.raises(KieloError, match="'abX' becomes 'ab' "):
        trial.refuse_lossy(tokenizer, ["a bX"], "k")
    with pytest.raises(KieloError, match="of 256 texts 129 do not"):
        trial.refuse_lossy(tokenizer, [lost] * 129 + [good] * 127 + [good] * 99, "k")
    assert trial.refuse_lossy(tokenizer, [lost] * 128 + [good] * 128 + [lost] * 99, "k") is None


def test_a_tenth_of_the_ids_may_be_others(tmp_path):
    """Nine of ten alike pass; the first other one is named."""
    letters = "abcdefghi"
    ours = by_hand(tmp_path / "ours", *letters)
    for others, is_taken in (("abcdefghX", True), ("abcdefgYX", False)):
        theirs = by_hand(tmp_path / "theirs", *others)
        if is_taken:
            assert trial.refuse_other_vocabulary(ours, theirs, "k") is None
        else:
            told = "k: .*: 2 of its 10 ids are other tokens there, such as 8: 'h' here, 'Y' in"
            with pytest.raises(KieloError, match=told):
                trial.refuse_other_vocabulary(ours, theirs, "k")
    (theirs / "tokenizer.json").unlink()
    assert trial.refuse_other_vocabulary(ours, theirs, "k") is None
    assert trial.refuse_other_vocabulary(theirs, ours, "k") is None


# --- What the stage reads ---


def recipe(*sources: dict, **sections) -> Recipe:
    named = list(sources) or [{"name": "a", "path": "a.txt"}]
    return Recipe(name="t", language="et", corpus={"sources": named}, **sections)


def test_ready_files_weights_and_vectors_are_asked_for(tmp_path, monkeypatch):
    """Folders at once; names of the hub only without a network, or where the weights are here."""
    ready, weights = by_hand(tmp_path / "ready", "a"), by_hand(tmp_path / "weights", "a")
    asked = []
    monkeypatch.setattr(stage_inputs, "resolve_tokenizer", lambda name: asked.append(name) or Path(name))
    monkeypatch.setattr(stage_inputs, "resolve_weights", lambda name: asked.append(name) or weights)
    monkeypatch.setattr(stage_inputs, "is_on_hub", lambda name: name.startswith("hf:") or "own" in name)
    here, offline = set(), [None]
    monkeypatch.setattr(stage_inputs, "weights_here", lambda name: name in here)
    monkeypatch.setattr(stage_inputs, "prefetched_folder", lambda: offline[0])

    def asks(**keys) -> list[str]:
        asked.clear()
        model = {key: keys.pop(key) for key in ("weights", "transplant") if key in keys}
        stage_inputs.check_inputs(recipe(tokenizer=keys, model=model))
        return list(asked)

    assert asks() == [] and asks(path=str(ready)) == [str(ready)]
    assert asks(path="own/name") == [] and asks(path="gpt2") == []
    with pytest.raises(KieloError, match="tokenizer.path = .*: no tokenizer.json there"):
        asks(path=str(tmp_path))
    assert asks(path=str(ready), weights="hf:x") == [str(ready)]
    here.add("hf:x")
    assert asks(path=str(ready), weights="hf:x") == [str(ready), "hf:x"]
    transplant = {"weights": "hf:x", "transplant": "mean"}
    assert asks(**transplant) == ["hf:x", "hf:x"]
    (weights / "tokenizer.json").rename(weights / "kept")
    with pytest.raises(KieloError, match="weights has no tokenizer.json, and model.transplant needs"):
        asks(**transplant)
    (weights / "kept").rename(weights / "tokenizer.json")
    here.clear()
    assert asks(weights="hf:x") == []
    offline[0] = tmp_path
    assert asks(path=str(ready), weights="hf:x") == [str(ready), "hf:x"]
    with pytest.raises(KieloError, match="'gpt2': no tokenizer.json there"):
        asks(path="gpt2")
    assert stage_inputs.tokenizer_of_weights(recipe(model=transplant)) == weights
    assert stage_inputs.tokenizer_of_weights(recipe()) is None
    names = ["tokenizer.json", "tokenizer_config.json"]
    for name in ("added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "model.safetensors"):
        (ready / name).write_text("{}")
    names += ["special_tokens_map.json", "added_tokens.json", "chat_template.jinja"]
    assert stage_inputs.ready_files(ready, "k") == [ready / name for name in names]
    vectors = tmp_path / "v.vec"
    focus = recipe(model=transplant | {"transplant": "focus", "transplant_vectors": str(vectors)})
    for check in (stage_inputs.check_vectors, stage_inputs.transplant_vectors):
        with pytest.raises(KieloError, match="v.vec'?: no such file. Fix: vectors"):
            check(focus)
    vectors.write_text("no head\n")
    with pytest.raises(KieloError, match="line 1 is 'no head'"):
        stage_inputs.check_vectors(focus)
    vectors.write_text("1 2\na 0.5 1\n")
    assert stage_inputs.check_vectors(focus) is None and stage_inputs.transplant_vectors(focus) == vectors
    assert stage_inputs.check_vectors(recipe()) is None


def test_the_last_documents_of_ready_tokens_are_decoded(tmp_path):
    """So many bytes of each source, shared out evenly; ids beyond the vocabulary are named."""
    by_hand(tmp_path / "t", "a", "b", "Ġ", "a" * 8)
    rows = [[1, 2, 0], [2, 2, 2, 0], [1, 0], [1, 3, 2, 0]]  # ab, bbb, a, "a b"
    places = {}
    for name in ("x", "y"):
        np.concatenate(rows).astype("<u2").tofile(tmp_path / f"{name}.npy")
        places[name] = str(tmp_path / f"{name}.npy")

    def texts(most: int, *names: str) -> list[str]:
        sources = [{"name": name, "tokens": places[name]} for name in names]
        asked = recipe(*sources, tokenizer={"path": str(tmp_path / "t")})
        return list(decoded_documents(asked, load_tokenizer(tmp_path / "t"), most))

    # From the first document on that begins in the last bytes / 2 of the 13 tokens, at 0, 3, 7 and 9.
    assert texts(26, "x") == texts(99, "x") == ["ab", "bbb", "a", "a b"]
    assert texts(25, "x") == texts(20, "x") == ["bbb", "a", "a b"]
    assert texts(19, "x") == texts(12, "x") == ["a", "a b"]
    assert texts(11, "x") == texts(8, "x") == ["a b"] and texts(7, "x") == []
    assert texts(40, "x", "y") == ["bbb", "a", "a b"] * 2 and texts(15, "x", "y") == []
    np.array([4, 0] * 3, "<u2").tofile(tmp_path / "y.npy")  # of 8 bytes each
    assert [len(texts(most, "y")) for most in (24, 23, 16, 15)] == [3, 2, 2, 1]
    rows[3] = [1, 5, 2, 0]
    np.concatenate(rows).astype("<u2").tofile(tmp_path / "x.npy")
    with pytest.raises(KieloError, match="x: .*x.npy: token 9 has ids 0 to 5, and the tokenizer has 0 to 4"):
        texts(100, "x")


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Of a (et) 30 documents of 20 bytes, of b (fi) 10; c has as many as a, of et too."""
    documents = [
        {"id": f"{name}{n}", "source": name, "text": f"{name} {n:017d}.", "metadata": {}}
        for name, number in (("a", 30), ("b", 10), ("c", 30))
        for n in range(number)
    ]
    with write_stage(tmp_path / "corpus", "corpus", 1, {}, {}) as stage:
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        sizes = {"a": 600, "b": 200, "c": 600}
        others = {"origin": "", "files": 1, "documents_in": 0, "bytes_in": 0, "documents_kept": 0}
        stage.counts["sources"] = [
            others | {"name": name, "bytes_kept": size} for name, size in sizes.items()
        ]
        stage.counts["bytes_kept"] = 1400
    return tmp_path / "corpus"


SOURCES = [
    {"name": "a", "path": "a"},
    {"name": "b", "path": "b", "language": ["fi"]},
    {"name": "c", "path": "c"},
]


def expected_sample(corpus: Path, rates: dict[str, float], share: float) -> list[str]:
    """Each training document as often as its rate says, by its place in the split."""
    texts = []
    for name, number in (("a", 30), ("b", 10), ("c", 30)):
        for n in range(number):
            text = f"{name} {n:017d}."
            place, rate = place_by_hash(text), rates.get(name, 0)
            if place >= share:
                part = place < share + (1 - share) * (rate % 1)
                texts += [text] * (int(rate) + part)
    return texts


@pytest.mark.parametrize(
    "settings, rates",
    [
        ({}, {"a": 1.0, "b": 1.0, "c": 1.0}),
        ({"max_sample_bytes": 700}, {"a": 0.5, "b": 0.5, "c": 0.5}),
        # Of 1,400 bytes √1200 : √200 = 2.449 : 1, of 1,200 and 200 bytes.
        ({"temperature": 2.0}, {"a": 994.1 / 1200, "b": 405.9 / 200, "c": 994.1 / 1200}),
        (
            {"temperature": 2.0, "max_sample_bytes": 700},
            {"a": 497.05 / 1200, "b": 202.95 / 200, "c": 497.05 / 1200},
        ),
    ],
)
def test_the_sample_that_is_learned_from(corpus, settings, rates):
    """Document by document, by its place in the split and its language's rate; of the sources asked for."""
    asked = recipe(*SOURCES, tokenizer={"vocab_size": 300} | settings, dataset={"heldout_share": 0.2})
    sample = TrainingSample(asked, corpus, {"a", "b", "c"})
    assert sample.rates() == pytest.approx(rates, rel=1e-3)
    assert list(sample) == list(sample) == expected_sample(corpus, sample.rates(), 0.2)
    own = {"b": rates["b"]}
    assert list(TrainingSample(asked, corpus, {"b"})) == expected_sample(corpus, own, 0.2)
    assert len(expected_sample(corpus, rates, 0.2)) > 20


def test_a_document_at_the_border_of_the_split(corpus):
    """One whose place is the share itself is trained on, and one just below is held out."""
    texts = [f"a {n:017d}." for n in range(30)]
    text = min((one for one in texts if place_by_hash(one) > 0.1), key=place_by_hash)
    place = place_by_hash(text)
    above = float(np.nextafter(place, 1))
    assert not is_heldout(text, place) and is_heldout(text, above) and not is_heldout(text, 0)
    for share, is_there in ((place, True), (above, False)):
        asked = recipe(*SOURCES, tokenizer={"vocab_size": 300}, dataset={"heldout_share": share})
        assert (text in list(TrainingSample(asked, corpus, {"a"}))) is is_there


def test_all_of_a_text_of_unknown_size_is_learned_from(tmp_path):
    """Its manifest does not say how many bytes there are."""
    with write_stage(tmp_path / "corpus", "corpus", 1, {}, {}):
        pass
    asked = recipe(*SOURCES, tokenizer={"vocab_size": 300, "max_sample_bytes": 700})
    assert TrainingSample(asked, tmp_path / "corpus", {"a"}).rates() == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_texts_to_measure_on(corpus, monkeypatch):
    """Held-out ones up to the limit and over it by one; training ones where nothing is held out."""
    texts = [f"{name} {n:017d}." for name, number in (("a", 30), ("b", 10), ("c", 30)) for n in range(number)]
    held = [text for text in texts if is_heldout(text, 0.3)]
    of = {share: recipe(*SOURCES, dataset={"heldout_share": share}) for share in (0.3, 1e-9)}
    assert texts_to_measure(of[0.3], corpus) == ("held-out documents", held)
    assert texts_to_measure(of[1e-9], corpus) == ("training documents", texts)
    for limit, number in ((40, 2), (41, 3), (60, 3)):
        monkeypatch.setattr(train, "MEASURED_BYTES", limit)
        assert texts_to_measure(of[0.3], corpus) == ("held-out documents", held[:number])
        assert texts_to_measure(of[1e-9], corpus) == ("training documents", texts[:number])
    monkeypatch.undo()  # two megabytes
    large = [{"text": f"{n}" * 500_000} for n in range(6)]
    monkeypatch.setattr(train, "read_documents", lambda folder: iter(large))
    for share, told, number in ((1e-9, "training documents", 4), (0.49, "held-out documents", None)):
        found, texts = texts_to_measure(recipe(*SOURCES, dataset={"heldout_share": share}), corpus)
        assert found == told and len(texts) == (number or sum(is_heldout(one["text"], 0.49) for one in large))
    assert place_by_hash("a") == xxhash.xxh3_64_intdigest(b"a") / 2**64


def test_files_that_are_saved(tmp_path):
    """The configurations of a decoder, of chats with reserved tokens, and of an encoder, key by key."""
    learnt = Tokenizer.from_file(str(by_hand(tmp_path / "t", "a") / "tokenizer.json"))
    plain = dict.fromkeys(["bos_token", "eos_token", "pad_token", "unk_token"], END)
    same = {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "add_eos_token": False,
        "clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip
    roles = dict(train.ENCODER_TOKENS)
    ends = {"bos_token": "[CLS]", "eos_token": "[SEP]"} | roles
    marks = ["<|im_start|>", "<|im_end|>"]
    for number, (arguments, tokens, more) in enumerate([
        ((), plain, {}), ((None, None, ["<r>"]), plain, {"additional_special_tokens": ["<r>"]}),
        ((DEFAULT_TEMPLATE, {}, ["<r>", "<|im_end|>"]), plain,
         {"chat_template": DEFAULT_TEMPLATE, "additional_special_tokens": [*marks, "<r>"]}),
        ((None, roles), ends, {}),
    ]):  # fmt: skip
        folder = tmp_path / f"{number}"
        train.save(learnt, folder, *arguments)
        assert json.loads((folder / "tokenizer_config.json").read_text()) == same | tokens | more
        assert json.loads((folder / "special_tokens_map.json").read_text()) == tokens
        assert (folder / "tokenizer.json").read_text() == learnt.to_str(pretty=True)
    train.save(learnt, tmp_path / "deep" / "er")
    assert load_tokenizer(tmp_path / "deep" / "er").whole.to_str() == learnt.to_str()
    assert roles == {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
                     "mask_token": "[MASK]"}  # fmt: skip


def test_byte_pairs_are_learned_in_silence(monkeypatch):
    """Nothing is shown of it; the settings of the recipe and the bytes are the trainer's."""
    asked, trainer = [], train.trainers.BpeTrainer
    monkeypatch.setattr(train.trainers, "BpeTrainer", lambda **keys: asked.append(keys) or trainer(**keys))
    made = train_on(["ab ab"], recipe(tokenizer={"vocab_size": 259, "min_frequency": 2}))
    assert made.get_vocab_size() == 259 and made.token_to_id("ab") == 258
    alphabet = sorted(ALPHABET.values())
    control = [(one.content, one.special, one.lstrip) for one in asked[0].pop("special_tokens")]
    assert control == [(END, True, False), ("<|padding|>", True, False)]
    assert asked == [
        {"vocab_size": 259, "min_frequency": 2, "initial_alphabet": alphabet, "show_progress": False}
    ]


def test_words_that_were_added_beside_the_model(tmp_path):
    """They have ids after its vocabulary, are counted, stay text, and are no part of a new token."""
    folder = by_hand(tmp_path, *"abc", "Ġ")
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole.add_tokens(["bbb", "z"])
    (folder / "tokenizer.json").write_text(whole.to_str())
    tokenizer = load_tokenizer(folder)
    assert vocabulary_size(tokenizer) == 7 and encode(tokenizer, ["abbbz"]) == [[1, 5, 6]]
    found = measure.measure(tokenizer, ["abbbz"])
    assert (found["vocabulary_size"], found["vocabulary_used_share"]) == (7, 3 / 7)
    assert found["single_byte_token_share"] == 2 / 3  # a and z
    assert word_pieces(tokenizer).begins_inside.tolist() == [False, True, True, True, False, False, False]
    made = extend(tokenizer, ["ac ac z"] * 3, 9)
    assert {token: number for token, number in made.get_vocab().items() if number > 3} == {
        "Ġ": 4, "bbb": 5, "z": 6, "ac": 7, "Ġac": 8
    }  # fmt: skip
    rows = make_row_map(tokenizer, tokenizer, "mean").rows
    assert rows == [[number] for number in range(7)]


def test_what_a_vocabulary_follows_from_is_in_its_manifest(corpus, tmp_path):
    """Settings that were made, marks of chats, roles of encoders, hashes of files; the same ones change
    nothing, and later keys at their defaults are left out.
    """
    shares = {"heldout_share": 0.2}
    chats = {"name": "d", "path": "d.jsonl", "kind": "instructions"}

    def section(*sources, **sections):
        asked = recipe(*SOURCES, *sources, dataset=shares, **sections)
        made = train_tokenizer(asked, corpus, tmp_path / "tokenizer")
        written = (tmp_path / "tokenizer" / "manifest.json").stat().st_mtime_ns
        assert train_tokenizer(asked, corpus, tmp_path / "tokenizer") == made
        assert (tmp_path / "tokenizer" / "manifest.json").stat().st_mtime_ns == written
        return made

    own = {"vocab_size": 300}
    plain = section(tokenizer=own)
    assert list(plain.inputs) == ["corpus"] and plain.section["heldout_share"] == 0.2
    assert (plain.kind, plain.version) == ("tokenizer", 2)  # another number would train all of them again
    assert (
        not {"extend", "unchanged_sources", "model", "temperature", "reserved_tokens"} & plain.section.keys()
    )
    later = section(tokenizer=own | {"temperature": 2.0, "reserved_tokens": ["<r>"]}).section
    assert later == plain.section | {"temperature": 2.0, "reserved_tokens": ["<r>"]}
    assert section(chats, tokenizer=own).section == plain.section | {
        "chat_tokens": ["<|im_start|>", "<|im_end|>"]
    }
    encoder = section(tokenizer=own, train={"objective": "masked_tokens"})
    assert encoder.section == plain.section | {"encoder_tokens": train.ENCODER_TOKENS}
    ready = by_hand(tmp_path / "ready", *"abc0123456789.Ġ")
    of_ready = section(tokenizer={"path": str(ready)})
    hashes = {name: hash_file(ready / name) for name in ("tokenizer.json", "tokenizer_config.json")}
    assert of_ready.inputs == plain.inputs | hashes and of_ready.counts["largest_id"] == 15
    assert of_ready.version == 1


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_vocabularies_at_their_smallest(model):
    """The bytes and the control tokens fit exactly; one less is refused with what they are."""
    chats = {"name": "c", "path": "c.jsonl", "kind": "instructions"}
    encoder = {"objective": "masked_tokens"}
    for sources, reserved, sections, control, told in (
        ([], [], {}, [END, "<|padding|>"], "258 .256 bytes and end-of-text, padding.$"),
        ([chats], ["<r>"], {}, [END, "<|im_start|>", "<|im_end|>", "<r>", "<|padding|>"],
         "261 .256 bytes and end-of-text, padding and the marks of chats and reserved tokens"),
        ([], [], {"train": encoder}, list(train.ENCODER_TOKENS.values()),
         "261 .256 bytes and 5 tokens of encoders"),
    ):  # fmt: skip
        size = 256 + len(control)
        for vocab_size in (size - 1, size):
            own = {"vocab_size": vocab_size, "reserved_tokens": reserved, "model": model}
            asked = recipe({"name": "a", "path": "a"}, *sources, tokenizer=own, **sections)
            if vocab_size < size:
                with pytest.raises(KieloError, match=f"vocab_size = {vocab_size}: .* at least {told}"):
                    train_on(["ab"], asked)
            else:
                made = train_on(["ab ab"], asked)
                assert made.get_vocab_size() == size
                assert [made.token_to_id(name) for name in control] == list(range(len(control)))
    with pytest.raises(KieloError, match="no training text to learn a vocabulary from"):
        train_on([], asked)


def test_a_vocabulary_that_the_text_does_not_fill_is_told(corpus, tmp_path):
    """With the size that there is; not where it is full, nor of a ready one."""
    own = {"vocab_size": 400, "min_frequency": 60}
    asked = recipe(*SOURCES, tokenizer=own, dataset={"heldout_share": 0.2})
    made = train_tokenizer(asked, corpus, tmp_path / "tokenizer")
    size = made.counts["largest_id"] + 1
    told = unfilled_vocabulary(asked, made)
    assert (
        told.startswith(f"the text gives {size} of the 400 tokens")
        and f"Fix: tokenizer.vocab_size = {size} " in told
    )
    assert "no other pair occurs 60 times (tokenizer.min_frequency)" in told
    for changes, is_told in (
        ({"vocab_size": size}, False), ({"vocab_size": size + 1}, True), ({"path": "x/y"}, False)
    ):  # fmt: skip
        other = recipe(*SOURCES, tokenizer=(own | changes) if "path" not in changes else changes)
        assert bool(unfilled_vocabulary(other, made)) is is_told
    other = recipe(*SOURCES, tokenizer={"vocab_size": 400, "model": "unigram"})
    assert "no other piece occurs in two words" in unfilled_vocabulary(other, made)


# --- Merges, pieces and rows ---


def test_merges_by_hand():
    """The most frequent pair first, of equal ones the lower ids; refused ones stay, rare ones are none."""
    words = {(1, 2, 1, 2): 3, (1, 2, 3): 2, (3, 3, 3): 2, (4, 5): 1}  # 1 2: 8, 2 1: 3, 2 3: 2, 3 3: 4
    asked = []

    def allowed(pair):
        asked.append(pair)
        return pair != (3, 3)

    # 1 2 makes 10: then 10 10: 3, 10 3: 2; 3 3 is refused; 10 10 makes 11, 10 3 makes 12.
    assert learn_merges(words, 10, 9, allowed) == [(1, 2), (10, 10), (10, 3)]
    assert asked == [(1, 2), (3, 3), (10, 10), (10, 3)]
    assert learn_merges(words, 10, 2, lambda pair: True) == [(1, 2), (3, 3)]
    assert learn_merges(words, 10, 9, lambda pair: True, 3) == [(1, 2), (3, 3), (10, 10)]
    assert learn_merges(words, 10, 9, lambda pair: True, 1)[-1] == (4, 5)
    assert learn_merges({(7, 8): 2, (5, 9): 2, (6,): 9}, 10, 9, lambda pair: True) == [(5, 9), (7, 8)]
    assert learn_merges({}, 10, 9, lambda pair: True) == [] == learn_merges(words, 10, 0, lambda pair: True)
    # Of 1 1 1 the first two are joined; its words lose other pairs.
    assert learn_merges({(1, 1, 1): 2, (1, 1, 1, 1): 1}, 10, 3, lambda pair: True) == [(1, 1), (10, 1)]


def test_an_extended_vocabulary_by_hand(tmp_path):
    """New tokens after the largest id, by frequency; none in unchanged text, none twice."""
    old = load_tokenizer(by_hand(tmp_path, *"abcd", "Ġ", "ab", merges=[("a", "b")]))
    texts = ["abc abc abd", "dd"] * 3

    def learned(size: int, *unchanged: str, frequency: int = 2) -> dict[str, int]:
        made = extend(old, texts, size, frequency, unchanged)
        return {token: number for token, number in made.get_vocab().items() if number >= 7}

    # Words are "abc", " abc", " abd" and "dd", three times each. Ġ ab and ab c are 6 times there, of which
    # the first has lower ids; then d d, ab c, Ġab c and Ġab d are 3 times.
    assert learned(99) == {"Ġab": 7, "dd": 8, "abc": 9, "Ġabc": 10, "Ġabd": 11}
    assert learned(8) == {"Ġab": 7} == learned(99, frequency=4) and learned(9) == {"Ġab": 7, "dd": 8}
    assert learned(99, "add") == {"Ġab": 7, "abc": 8, "Ġabc": 9, "Ġabd": 10}
    assert learned(99, "ad", "da") == learned(99)
    assert learned(99, " ab") == {"abc": 7, "dd": 8, "Ġabc": 9, "abd": 10, "Ġabd": 11}
    with pytest.raises(
        KieloError,
        match="vocab_size = 7 counts old tokens too, and .* has 7. Fix: .* = 8199, for",
    ):
        learned(7)
    with pytest.raises(KieloError, match="no training text to learn new tokens from"):
        extend(old, [], 9)
    assert extend(old, ["a"], 9).get_vocab_size() == 7
    assert [extend(old, ["dd"] * times, 9).get_vocab_size() for times in (1, 2)] == [7, 8]
    assert decode(old, [[6, 3]]) == ["abc"]


def test_characters_that_pieces_are_made_of():
    """The most frequent up to 99.95 % of the text, in their order; a text is cut at others."""
    texts = ["a" * 1000 + "b" * 1000, "c" * 999 + "d"]
    assert covered_characters(texts, 9) == [
        "a",
        "b",
        "c",
    ]  # d is 1 of 3,000, and 2,999 are over 99.95 %
    assert covered_characters([*texts, "d"], 9) == ["a", "b", "c", "d"]
    assert covered_characters(texts, 2) == ["a", "b"] and covered_characters([], 3) == []
    assert covered_characters(["ba"], 9) == [
        "a",
        "b",
    ] and covered_characters(["a" * 1999 + "b"], 9) == ["a"]
    assert list(covered_parts(["abxyab", "ab", "x", "xa]y"], set("ab"))) == [
        "ab",
        "ab",
        "ab",
        "a",
    ]


def test_rows_in_words():
    """Shares and means by hand; examples are evenly spread; the four heaviest rows of a weighted one."""
    rows = [[5], [1, 2], [3, 4, 5], [], [7], [1, 2, 3, 4, 5]]
    made = RowMap(
        method="focus", old_tokenizer="h", old_vocabulary_size=9, rows=rows, control_tokens={},
        weights={"5": [0.1, 0.4, 0.2, 0.05, 0.25]},
    )  # fmt: skip
    assert row_map_in_words(made) == (
        "6 rows of the new vocabulary: 2 (33.3%) are rows of the same text or role, 3 (50.0%) are means of "
        "3.3 old rows (1 of them weighted by similarity), 1 (16.7%) are random"
    )
    name = "t{}".format
    assert row_in_words(made, 2, name) == "t3 + t4 + t5" and row_in_words(made, 0, name) == "t5"
    four = made.model_copy(update={"weights": {"2": [0.5, 0.3, 0.2]}, "rows": [[], [], [3, 4, 5], [6] * 4]})
    assert row_in_words(four, 2, name) == "0.50 t3 + 0.30 t4 + 0.20 t5"
    four.weights["3"] = [0.25] * 4
    assert row_in_words(four, 3, name) == " + ".join(["0.25 t6"] * 4)
    assert row_in_words(made, 5, name) == "0.40 t2 + 0.25 t5 + 0.20 t3 + 0.10 t1 and 1 more"
    assert [example_ids(made, number) for number in (0, 1, 2, 3, 9)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 5],
        [1, 2, 5],
    ]
    many = made.model_copy(update={"rows": [[1, 2]] * 10, "weights": {}})
    assert example_ids(many, 3) == [0, 3, 6] and example_ids(many, 4) == [0, 2, 4, 6]
    empty = made.model_copy(update={"rows": [], "weights": {}})
    assert row_map_in_words(empty).startswith("0 rows of the new vocabulary: 0 (0.0%)")


def test_tokens_that_go_on_with_a_word(tmp_path):
    """Letters, digits and bytes of characters, in either spelling; control tokens and signs are outside."""
    tokens = ["a", "Ġb", "c.", ".d", "1", ALPHABET[0x80], "Ċ", "Ġ"]
    found = word_pieces(load_tokenizer(by_hand(tmp_path / "bytes", *tokens)))
    assert found.begins_inside.tolist() == [False, True, False, True, False, True, True, False, False]
    assert found.ends_inside.tolist() == [False, True, True, False, True, True, True, False, False]
    row = np.array([[1, 3, 1, 2, 1, 4, 5, 0, 1]])
    assert found.go_on(row).tolist() == [[True, False, False, True, False, True, False, False]]
    whole = Tokenizer(
        models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "##.": 3, "▁c": 4, "##": 5}, unk_token="[UNK]")
    )
    whole.decoder = decoders.WordPiece("##")
    whole.normalizer = normalizers.Lowercase()
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text(whole.to_str())
    found = word_pieces(load_tokenizer(tmp_path / "words"))
    assert found.begins_inside.tolist() == [False, False, True, True, False, True]  # "a" begins a word
    assert found.ends_inside.tolist() == [False, True, True, False, True, False]
