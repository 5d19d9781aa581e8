"""Measures of encoders, each against a simpler truth, on a tiny run with random weights."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from kielo.artifact.manifest import write_stage
from kielo.artifact.scores import MaskedScores
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.dataset.masking import MaskingVocabulary
from kielo.dataset.pack import pack
from kielo.evaluate.contender import load_checkpoint
from kielo.evaluate.encoder import Encoder, fill_prompts, open_encoder
from kielo.evaluate.masked_tokens import TokenBaselines
from kielo.evaluate.part_of_speech import read_sentences, score_part_of_speech, word_states
from kielo.evaluate.pseudo_likelihood import (
    hidden_in_turn,
    pseudo_bits_per_byte,
    pseudo_log_likelihoods,
    read_pairs,
    score_minimal_pairs,
)
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.recipe.check import check
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import PartOfSpeech, Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import write
from kielo.stages.results import evaluate
from kielo.tokenizer.load import TextTokenizer
from kielo.tokenizer.train import train_tokenizer
from tests.written_documents import write_documents

SETTINGS = {
    "name": "tiny",
    "language": "et",
    "corpus": {"sources": [{"name": "help", "path": "help.txt"}]},
    "tokenizer": {"vocab_size": 300},
    "dataset": {"sequence_length": 48, "heldout_share": 0.2, "max_epochs": 1000},
    "model": {
        "model_type": "ltg_bert",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "position_bucket_size": 8,
    },
    "train": {"tokens": 1024, "tokens_per_step": 192, "objective": "masked_tokens"},
    "evaluate": {"pseudo_tokens": 50},
}
RECIPE = Recipe.model_validate(SETTINGS)
# fp32 sums of about ten terms of size 1 to 10, in batches of another shape.
CLOSE = {"rel": 1e-5, "abs": 1e-5}
TREEBANK = """# text = Ava käsk dialoogis.
1\tAva\tavama\tVERB\t_\t_\t0\troot\t_\t_
2\tkäsk\tkäsk\tNOUN\t_\t_\t1\tobj\t_\t_
3-4\tdialoogis\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
3\tdialoog\tdialoog\tNOUN\t_\t_\t1\tobl\t_\t_
4\tis\tis\tADP\t_\t_\t3\tcase\t_\t_
4.1\tsee\tsee\tPRON\t_\t_\t_\t_\t_\t_
5\t.\t.\tPUNCT\t_\t_\t1\tpunct\t_\t_

1\tuus\tuus\tADJ\t_\t_\t0\troot\t_\t_
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    words = ["Vali", "fail", "ja", "ava", "dialoog", "käsk", "Lõpeta", "žürii", "uus", "leht"]
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, 12)) + ".\nTeine rida." for _ in range(60)]
    documents = [
        {"id": str(i), "text": text, "source": "help", "metadata": {}} for i, text in enumerate(texts)
    ]
    with write_stage(folder / "corpus", "corpus", 1, {}, {}) as stage:
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        stage.counts["documents_kept"] = len(documents)
    train_tokenizer(RECIPE, folder / "corpus", folder / "tokenizer")
    pack(RECIPE, folder / "corpus", folder / "tokenizer", folder / "tokens")
    resolved = resolve(RECIPE, folder, 1, "cpu")
    write(resolved, folder / "resolved.toml")
    model = families.build_model(resolved.identity.model)
    init_weights(model, seed=1)
    tensors = {f"model/{name}": parameter.detach() * 3 for name, parameter in model.named_parameters()}
    checkpointer = Checkpointer(folder / "train" / "checkpoints")
    checkpointer.save(8, tensors, {})
    checkpointer.settle()
    return folder


@pytest.fixture(scope="module")
def encoder(run_folder: Path) -> Encoder:
    checkpoint = next((run_folder / "train" / "checkpoints").glob("step_*"))
    contender = load_checkpoint(checkpoint, resolve(RECIPE, run_folder, 1, "cpu"), run_folder / "tokenizer")
    return open_encoder(contender, RECIPE)


def nats_one_by_one(encoder: Encoder, ids: list[int], word_of: list[int] | None = None) -> list[float]:
    """Each token's log-probability by a forward of its own, through all logits of the sequence."""
    found = []
    words = word_of or list(range(len(ids)))
    for place, token in enumerate(ids):
        hidden = [
            encoder.mask_id if other >= place and words[other] == words[place] else one
            for other, one in enumerate(ids)
        ]
        with torch.inference_mode():
            logits = encoder.contender.logits(torch.tensor([[2, *hidden, 3]]), None)
        found.append(torch.log_softmax(logits[0, place + 1], -1)[token].item())
    return found


def test_each_token_in_turn_is_hidden_and_predicted_from_the_others(encoder: Encoder) -> None:
    """Texts of different lengths in batches = one forward a token; the empty text has no nats."""
    texts = ["Vali fail", "ava uus leht", "", "Vali leht", "žürii"]
    rows = encoder.encode(texts)
    for found, ids in zip(pseudo_log_likelihoods(encoder, rows), rows, strict=True):
        assert found.tolist() == pytest.approx(nats_one_by_one(encoder, ids), **CLOSE)
    assert len({round(float(found.sum()), 4) for found in pseudo_log_likelihoods(encoder, rows)}) == 5


def test_within_a_word_the_later_tokens_are_hidden_too(encoder: Encoder) -> None:
    """Words of many tokens, cut by their spaces: the mask is on the rest of each."""
    (ids,) = encoder.encode(["žžx qä, žq"])
    texts = [encoder.contender.tokenizer.whole.decode([one]) for one in ids]
    word_of, word = [], 0
    for before, text in zip(["", *texts], texts):
        word += text.startswith(" ") or text == "," or before == " "  # a space that is a token is no word's
        word_of.append(word)
    assert len(set(word_of)) == 6 and len(ids) > 9
    (found,) = pseudo_log_likelihoods(encoder, [ids], within_word=True)
    assert found.tolist() == pytest.approx(nats_one_by_one(encoder, ids, word_of), **CLOSE)
    (alone,) = pseudo_log_likelihoods(encoder, [ids])
    assert abs(found - alone).max() > 0.01
    first = hidden_in_turn(encoder, ids, within_word=True)[0]
    assert (first == encoder.mask_id).sum() == word_of.count(0)


def test_pseudo_bits_are_counted_by_the_bytes_of_what_was_scored(encoder: Encoder) -> None:
    """Documents until enough tokens are hidden; a long one up to the end of a word that fits a sequence."""
    long = "žürii " * 40
    text = encoder.beginning(long)
    (ids,) = encoder.encode([text])
    assert 30 < len(ids) <= encoder.most_tokens == 46 and long.startswith(text) and text.endswith("žürii")
    bits = pseudo_bits_per_byte(encoder, ["Vali fail", long, "ava"], 20)
    rows = encoder.encode(["Vali fail", text])
    nats = -sum(sum(nats_one_by_one(encoder, row)) for row in rows)
    assert (bits.texts, bits.tokens) == (2, sum(map(len, rows)))
    assert bits.bytes == len(f"Vali fail{text}".encode())
    assert bits.token == pytest.approx(nats / math.log(2) / bits.bytes, rel=1e-5)
    assert bits.perplexity == pytest.approx(math.exp(nats / bits.tokens), rel=1e-4)
    with pytest.raises(KieloError, match="no token"):
        pseudo_bits_per_byte(encoder, ["", " "], 20)


def test_baselines_are_those_of_counted_pairs(tmp_path: Path, run_folder: Path) -> None:
    """Unigram, bigram and the chain of two bigrams against a Counter; what is hidden is not known."""
    stream = training_stream(run_folder)
    size = 300
    is_control = np.arange(size) < 5
    baselines = TokenBaselines(run_folder / "tokens", MaskingVocabulary(4, is_control, np.arange(5, size)))
    counts, pairs = Counter(stream), Counter(zip(stream, stream[1:]))
    ordinary = [one for one in counts if not is_control[one]]
    assert counts[baselines.unigram] == max(counts[one] for one in ordinary)
    random = np.random.default_rng(1)
    before, after = random.choice(stream, 300), random.choice(stream, 300)
    bigram, between = baselines.bigram(before), baselines.neighbours(before, after)
    was_between = 0
    for left, right, one, both in zip(*(part.tolist() for part in (before, after, bigram, between))):
        followers = {x: pairs[left, x] for x in ordinary if (left, x) in pairs}
        if not followers:
            assert one == baselines.unigram
            continue
        assert followers[one] == max(followers.values())
        chain = {x: pairs[left, x] * pairs[x, right] / counts[x] for x in followers}
        if max(chain.values()):
            was_between += 1
            assert chain[both] == pytest.approx(max(chain.values()), rel=1e-12)
        else:
            assert both == one
    assert was_between > 100
    token = np.array([stream[7]])
    hidden = np.array([4])
    assert baselines.bigram(hidden) == baselines.unigram == baselines.neighbours(hidden, hidden)
    assert baselines.neighbours(token, hidden) == baselines.bigram(token)
    preceding = int(baselines.neighbours(hidden, token)[0])
    of_token = {x: pairs[x, stream[7]] for x in ordinary}
    assert of_token[preceding] == max(of_token.values())


def training_stream(run_folder: Path) -> list[int]:
    from kielo.artifact.token_shards import TokenShard

    shard = TokenShard(run_folder / "tokens" / "help")
    return np.asarray(shard.read(0, shard.num_tokens)).tolist()


def test_a_pair_is_right_where_the_good_sentence_is_likelier(encoder: Encoder, tmp_path: Path) -> None:
    """By sums of nats over all tokens; a tie is a miss. Both kinds of file, with and without phenomena."""
    file = tmp_path / "pairs.jsonl"
    sentences = [("Vali fail.", "Vali leht."), ("ava uus leht", "ava ava leht"), ("ja", "ja")]
    lines = [
        {"sentence_good": good, "sentence_bad": bad, "UID": "ties" if good == bad else "others"}
        for good, bad in sentences
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    scores = score_minimal_pairs(encoder, file)
    right = [
        sum(nats_one_by_one(encoder, good)) > sum(nats_one_by_one(encoder, bad)) + 1e-6
        for good, bad in (encoder.encode(pair) for pair in sentences)
    ]
    assert scores.all.pairs == 3 and scores.all.token == pytest.approx(sum(right) / 3)
    assert (scores.groups["ties"].token, scores.groups["ties"].within_word) == (0, 0)
    assert scores.groups["others"].token == pytest.approx(sum(right) / 2)
    swapped = tmp_path / "pairs.tsv"
    rows = ["sen\twrong_sen\tverb", *(f"{bad}\t{good}\tx" for good, bad in sentences)]
    swapped.write_text("\n".join(rows))
    backwards = score_minimal_pairs(encoder, swapped)
    assert backwards.all.token == pytest.approx((2 - sum(right)) / 3) and backwards.groups == {}


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.jsonl", '{"sen": "ja", "wrong_sen": "ei"}\n{"sen": "ja"}\n', "line 2: not a minimal pair"),
        ("a.jsonl", '{"sentence_good": \n', "line 1: not JSON"),
        ("a.jsonl", "[]\n", "line 1: not a minimal pair"),
        ("a.tsv", "good\tbad\nja\tei\n", "line 2: not a minimal pair"),
        ("a.tsv", "sen\twrong_sen\nja\t\n", "line 2: not a minimal pair"),
        ("a.jsonl", "\n", "has no minimal pair"),
        ("a.tsv", b"sen\twrong_sen\n\xff\tja\n", "line 2: not UTF-8"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_pairs_is_named_with_its_line(
    tmp_path: Path, name: str, text: str | bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(KieloError, match=rf"{name}.*{complaint}"):
        read_pairs(tmp_path / name)


def test_a_treebank_gives_words_their_tags_and_places(tmp_path: Path) -> None:
    """Words of a range share its place; empty nodes are none; SpaceAfter=No joins."""
    (tmp_path / "a.conllu").write_text(TREEBANK, encoding="utf-8")
    first, second = read_sentences(tmp_path / "a.conllu")
    assert first.text == "Ava käsk dialoogis." and second.text == "uus"
    assert first.words == ["Ava", "käsk", "dialoog", "is", "."]
    assert first.tags == ["VERB", "NOUN", "NOUN", "ADP", "PUNCT"] and second.tags == ["ADJ"]
    texts = [first.text[begin:end] for begin, end in first.places]
    assert texts == ["Ava", "käsk", "dialoogis", "dialoogis", "."]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("2\tkäsk\tkäsk", "2\tkäsk käsk", "line 3: damaged CoNLL-U: 9 columns"),
        ("2\tkäsk", "3\tkäsk", "line 3: damaged CoNLL-U: word 3 after word 1"),
        ("2\tkäsk", "zwei\tkäsk", "line 3: damaged CoNLL-U: 'zwei' is not the number"),
        ("käsk\tNOUN", "käsk\t_", "line 3: damaged CoNLL-U: no universal part of speech"),
        ("\n\n", "\n", "line 9: damaged CoNLL-U: word 1 after word 5"),
    ],
)
def test_a_damaged_treebank_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    (tmp_path / "a.conllu").write_text(TREEBANK.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(KieloError, match=rf"a\.conllu, {complaint}"):
        read_sentences(tmp_path / "a.conllu")


@pytest.mark.parametrize("pieces", ["first", "mean"])
def test_words_have_the_states_of_their_tokens(encoder: Encoder, tmp_path: Path, pieces: str) -> None:
    """The states of a forward by hand, cut by decoded texts; a sentence longer than a sequence in parts."""
    (tmp_path / "a.conllu").write_text(TREEBANK, encoding="utf-8")
    sentences = read_sentences(tmp_path / "a.conllu")
    found = word_states(encoder, sentences, 1, pieces)
    (ids,) = encoder.encode([sentences[0].text])
    model = encoder.contender.module
    with torch.inference_mode():
        tokens = torch.tensor([[2, *ids, 3]])
        mask = model.make_relative_mask(None, tokens.shape[1], tokens.device)
        relative = model.relative_norm(model.relative_table.weight)
        embedded = model.embed_norm(model.embed(tokens))
        states = model.layers["0"](embedded, relative, mask, None)[0, 1:-1].numpy()
    texts = [encoder.contender.tokenizer.whole.decode([one]) for one in ids]
    of_word: dict[int, list[np.ndarray]] = {}
    word = 0
    for text, state in zip(texts, states):
        word += text.startswith(" ") or text == "."
        if text != " ":  # which is in no word's place
            of_word.setdefault(word, []).append(state)
    assert len(of_word) == 4 and max(map(len, of_word.values())) > 1
    expected = [of_word[one][0] if pieces == "first" else np.mean(of_word[one], 0) for one in (0, 1, 2, 2, 3)]
    np.testing.assert_allclose(found[:5], expected, atol=1e-5)
    assert found.shape == (6, 16)
    long = read_sentences(tmp_path / "a.conllu")[1:]
    for _ in range(59):
        long[0].places.append((len(long[0].text) + 1, len(long[0].text) + 4))
        long[0].text += " uus"
        long[0].words.append("uus")
    assert len(encoder.encode([long[0].text])[0]) > encoder.most_tokens
    assert np.abs(word_states(encoder, long, 1, pieces)).sum(1).min() > 0


def test_a_classifier_of_states_tags_words_that_it_never_saw(encoder: Encoder, tmp_path: Path) -> None:
    """Tags follow from a word's last letter, which is in its tokens; a list of words does not know it."""
    pytest.importorskip("sklearn")
    random = np.random.default_rng(0)

    def treebank(name: str) -> str:
        lines = []
        for _ in range(120):
            for number in (1, 2, 3):
                tag, end = (("VERB", "q"), ("NOUN", "x"))[random.integers(2)]
                word = "".join(random.choice(list("bcdfghjkmn"), 3)) + end
                lines.append(f"{number}\t{word}\t_\t{tag}" + "\t_" * 6)
            lines.append("")
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    settings = PartOfSpeech(train=treebank("train.conllu"), dev=treebank("dev.conllu"), from_layer=1)
    scores = score_part_of_speech(encoder, settings)
    assert scores.accuracy > 0.8 > 0.65 > scores.baseline
    assert (scores.words, scores.training_words, scores.tags, scores.layer) == (360, 360, 2, 1)
    with pytest.raises(KieloError, match="from_layer = 3: the model has 2 layers. Fix: 1 to 2"):
        score_part_of_speech(encoder, settings.model_copy(update={"from_layer": 3}))
    with pytest.raises(KieloError, match="only the tag"):
        (tmp_path / "train.conllu").write_text("1\tuus\t_\tADJ" + "\t_" * 6)
        score_part_of_speech(encoder, settings)


def test_without_scikit_learn_its_extra_is_named(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.linear_model", None)
    with pytest.raises(KieloError, match=r"pip install 'kielo\[tagging\]'"):
        score_part_of_speech(encoder, PartOfSpeech(train="a.conllu", dev="b.conllu"))


def test_a_hidden_word_gets_the_likeliest_tokens(encoder: Encoder) -> None:
    """Of a text with [MASK]: the five largest of the softmax at its place, whose space is in the token."""
    (filled,) = fill_prompts(encoder, ["Vali [MASK] leht"])
    ids = [2, *encoder.encode(["Vali"])[0], 4, *encoder.encode([" leht"])[0], 3]
    with torch.inference_mode():
        logits = encoder.contender.logits(torch.tensor([ids]), None)[0, ids.index(4)]
    values, tokens = torch.softmax(logits, -1).topk(5)
    assert [one.probability for one in filled.fillings] == pytest.approx(values.tolist(), rel=1e-4)
    texts = [encoder.contender.tokenizer.whole.decode([token], skip_special_tokens=False) for token in tokens]
    assert [one.text for one in filled.fillings] == [text.strip() or repr(text) for text in texts]
    (spaced,) = fill_prompts(replace_logits(encoder, encoder.encode([" "])[0][0]), ["Vali [MASK] leht"])
    assert spaced.fillings[0].text == "' '"
    assert (filled.truth, filled.sentence()) == (None, "Vali ____ leht")
    for prompt in ("Vali leht", "[MASK] [MASK]"):
        with pytest.raises(KieloError, match=r"\[MASK\] once"):
            fill_prompts(encoder, [prompt])


def test_a_mask_that_takes_no_space_in_is_written_without(encoder: Encoder) -> None:
    """As of a ready tokenizer: a space before it is refused with the text that has the ids of training."""
    whole = encoder.contender.tokenizer.whole
    content = json.loads(whole.to_str())
    for token in content["added_tokens"]:
        token["lstrip"] = False
    ready = TextTokenizer(
        Tokenizer.from_str(json.dumps(content)), encoder.contender.tokenizer.folder, "[SEP]"
    )
    of_ready = replace(encoder, contender=replace(encoder.contender, tokenizer=ready))
    with pytest.raises(KieloError, match=r"lstrip in tokenizer.json.* Fix: 'Vali\[MASK\] leht'"):
        fill_prompts(of_ready, ["Vali [MASK] leht"])
    (found,) = fill_prompts(of_ready, ["Vali[MASK] leht"])
    assert found.fillings == fill_prompts(encoder, ["Vali [MASK] leht"])[0].fillings
    assert fill_prompts(of_ready, ["[MASK] leht"]) == fill_prompts(encoder, ["[MASK] leht"])


def replace_logits(encoder: Encoder, token: int) -> Encoder:
    """The encoder with a model that always finds one token the likeliest."""
    one_hot = torch.zeros(300).index_fill(0, torch.tensor(token), 1.0)
    contender = replace(encoder.contender, logits=lambda tokens, _: one_hot.expand(*tokens.shape, 300))
    return replace(encoder, contender=contender)


def test_evaluate_has_all_measures_and_follows_a_file_that_changed(run_folder: Path, tmp_path: Path) -> None:
    """masked_scores.json holds what evaluate returns; hidden words are of held-out lines."""
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("sen\twrong_sen\nVali fail.\tVali Vali.\n")
    recipe = RECIPE.model_copy(
        update={"evaluate": RECIPE.evaluate.model_copy(update={"minimal_pairs": str(pairs)})}
    )
    scores = evaluate(recipe, run_folder)
    written = json.loads((run_folder / "evaluate" / "masked_scores.json").read_text())
    assert scores.content() == written and MaskedScores.model_validate(written) == scores
    assert set(written["accuracy"]) == {"model", "unigram", "bigram", "neighbours"}
    assert 0 < scores.pseudo_bits_per_byte.token < 20 and scores.pseudo_bits_per_byte.tokens >= 50
    assert scores.minimal_pairs.all.pairs == 1 and scores.part_of_speech is None
    assert len(scores.filled_masks) == 6
    for filled in scores.filled_masks:
        assert len(filled.truth) > 3 and (filled.before + filled.truth + filled.after).endswith(".")
        assert len(filled.fillings) == 5
    assert evaluate(recipe, run_folder) == scores
    pairs.write_text("sen\twrong_sen\nVali fail.\tVali Vali.\nja uus\tuus ja\n")
    assert evaluate(recipe, run_folder).minimal_pairs.all.pairs == 2
    pairs.unlink()
    with pytest.raises(KieloError, match=r"evaluate\.minimal_pairs = .*no such file"):
        evaluate(recipe, run_folder)


@pytest.mark.parametrize(
    ("objective", "settings", "complaint"),
    [
        ("next_token", {"minimal_pairs": "a.tsv", "made_pairs": 5, "fluency_texts": 5}, None),
        ("next_token", {"part_of_speech": {"train": "a", "dev": "b"}}, "train = 'a' measures encoders"),
        ("masked_tokens", {"made_pairs": 5}, "made_pairs = 5 has no effect"),
        ("masked_tokens", {"part_of_speech": {"train": "a"}}, "evaluate.part_of_speech.dev = FILE"),
        ("masked_tokens", {"part_of_speech": {"dev": "a"}}, "evaluate.part_of_speech.train = FILE"),
        ("masked_tokens", {"minimal_pairs": "a", "part_of_speech": {"train": "a", "dev": "b"}}, None),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_told(objective: str, settings: dict, complaint: str | None) -> None:
    train = SETTINGS["train"] | {"objective": objective}
    recipe = Recipe.model_validate(SETTINGS | {"train": train, "evaluate": settings})
    complaints = check(recipe, lambda _: "recipe.toml")
    found = [one.message for one in complaints if "evaluate" in one.message]
    assert (complaint is None and not found) or (len(found) == 1 and complaint in found[0])
