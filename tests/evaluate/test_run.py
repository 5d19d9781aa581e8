"""Promises of the evaluate stage, on a run that the real rooms made:
tiny text, tokenizer, shards, random weights.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kielo.artifact.manifest import read_manifest, write_stage
from kielo.artifact.token_shards import TokenShard
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.hugging_face_export import export
from kielo.dataset.pack import pack
from kielo.evaluate import fluency
from kielo.evaluate.contender import load_checkpoint
from kielo.evaluate.pair_files import read_pairs
from kielo.evaluate.score import evaluate_hugging_face
from kielo.evaluate.texts import evenly, heldout_documents, training_texts, training_token_counts
from kielo.models.blocks.decoder import init_weights
from kielo.models.llama.model import Llama
from kielo.recipe.cards import cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve, resolve_to_score
from kielo.resolve.resolved import write
from kielo.resolve.software import planned
from kielo.stages.results import evaluate
from kielo.tokenizer.train import train_tokenizer
from tests.written_documents import write_documents

RECIPE = Recipe.model_validate(
    {
        "name": "tiny",
        "language": "et",
        "corpus": {"sources": [{"name": "help", "path": "help.txt"}]},
        "tokenizer": {"vocab_size": 300},
        "dataset": {"sequence_length": 32, "heldout_share": 0.2, "max_epochs": 1000},
        "model": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "tie_word_embeddings": True,
        },
        "train": {"tokens": 1024, "tokens_per_step": 128},
        "evaluate": {"sample_tokens": 5},
    }
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    words = ["Vali", "fail", "ja", "ava", "dialoog", "käsk", "Lõpeta", "žürii", "uus", "leht"]
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, 25)) + ".\nTeine rida." for _ in range(60)]
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
    model = Llama(resolved.identity.model)
    init_weights(model, seed=1)
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    checkpointer = Checkpointer(folder / "train" / "checkpoints")
    checkpointer.save(8, tensors, {})
    checkpointer.settle()
    return folder


def test_scores_are_written_and_made_once(run_folder: Path) -> None:
    """scores.json holds four finite numbers and three samples of held-out openings;
    a second call changes nothing.
    """
    scores = evaluate(RECIPE, run_folder)
    assert scores.content() == json.loads(
        (run_folder / "evaluate" / "scores.json").read_text(encoding="utf-8")
    )
    bits = scores.bits_per_byte
    assert list(bits.content()) == ["model", "unigram", "xz", "ngram"]
    assert all(0 < value < 20 for value in bits.content().values())
    # Random weights know nothing; the n-gram has learned ten words.
    assert bits.ngram < bits.unigram < bits.model
    made = read_manifest(run_folder / "evaluate")
    assert (made.kind, made.version) == ("scores", 3)  # a higher version scores finished runs again
    assert set(made.inputs) == {"tokenizer", "tokens", "corpus", "checkpoint"} and made.section["seed"] == 1
    # A key that is newer than a run is not in its section.
    assert {"made_pairs", "fluency_texts"}.isdisjoint(made.section) and "ngram_order" in made.section
    assert made.counts == {"bits_per_byte": bits.content(), "heldout_bytes": scores.heldout_bytes}
    texts = heldout_texts(run_folder)
    assert len(scores.samples) == 3
    assert all(any(text.startswith(sample.prompt) for text in texts) for sample in scores.samples)
    written = read_manifest(run_folder / "evaluate").written_at, (run_folder / "evaluate").stat().st_ino
    assert evaluate(RECIPE, run_folder) == scores
    assert written == (
        read_manifest(run_folder / "evaluate").written_at,
        (run_folder / "evaluate").stat().st_ino,
    )


def test_more_ranks_score_than_share_a_training_step(run_folder: Path) -> None:
    """A step has four sequences. What the layout itself cannot do is refused nevertheless."""
    with pytest.raises(KieloError, match="each of 8 data-parallel ranks takes one or more whole sequences"):
        resolve(RECIPE, run_folder, 8, "cpu")
    software = planned(cluster(RECIPE.cluster))
    layout = resolve_to_score(RECIPE, run_folder, 8, "cpu", None, software).placement.layout
    assert (layout.shard, layout.tensor) == (8, 1)
    odd = RECIPE.model_copy(update={"layout": RECIPE.layout.model_copy(update={"tensor": 3})})
    with pytest.raises(KieloError, match="layout"):
        resolve_to_score(odd, run_folder, 8, "cpu", None, software)


def heldout_texts(run_folder: Path) -> list[str]:
    return [document["text"] for document in heldout_documents(run_folder / "tokens")[0]]


def test_the_baselines_see_the_training_text_and_no_more(run_folder: Path) -> None:
    """Training and held-out texts are the corpus, split;
    the unigram counts just the training shards' tokens.
    """
    training, heldout = (
        training_texts(RECIPE, run_folder)[0],
        heldout_texts(run_folder),
    )
    assert not set(training) & set(heldout) and len(training) + len(heldout) == 60
    counts = training_token_counts(run_folder / "tokens", 300)
    assert counts.sum() == TokenShard(run_folder / "tokens" / "help").num_tokens
    assert counts[0] == len(training)
    assert list(evenly(range(10), 0.3)) == [0, 3, 6, 9]


def test_the_model_scores_the_tokens_that_pack_held_out(run_folder: Path) -> None:
    """The stream that is scored is the packed held-out shard, token for token;
    padding of the vocabulary is no token.
    """
    checkpoint = next((run_folder / "train" / "checkpoints").iterdir())
    resolved = resolve(RECIPE, run_folder, 1, "cpu")
    contender = load_checkpoint(checkpoint, resolved, run_folder / "tokenizer")
    model = resolved.identity.model
    assert (
        contender.logits(torch.zeros(1, 1, dtype=torch.int64), None).shape[-1]
        == model.vocab_size
        < model.vocab_rows
    )
    same = Llama(model)
    init_weights(same, seed=1)
    tokens = torch.arange(32)[None]
    assert torch.equal(contender.logits(tokens, None), same.logits(same(tokens, None)))
    assert not contender.module.training and contender.sequence_length == 32
    for kernel in ("flex", "bias"):  # on a GPU that FlexAttention does not run on, as in training
        layout = resolved.placement.layout.model_copy(update={"alibi_kernel": kernel})
        placed = resolved.placement.model_copy(update={"layout": layout})
        again = resolved.model_copy(update={"placement": placed})
        there = load_checkpoint(checkpoint, again, run_folder / "tokenizer")
        assert there.module.make_masks.makes_blocks(torch.device("meta")) == (kernel == "flex")
    assert contender.start_id == contender.end_of_text_id == resolved.placement.end_of_text_id
    shard = TokenShard(run_folder / "tokens" / "heldout")
    stream = contender.encode_documents(heldout_texts(run_folder))
    np.testing.assert_array_equal(stream, shard.read(0, shard.num_tokens))


def test_the_export_scores_like_the_checkpoint(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kielo evaluate hf/`: transformers' model of the same weights has the same bits per byte, samples,
    pairs and continuations.
    """
    checkpoint = next((run_folder / "train" / "checkpoints").iterdir())
    model = resolve(RECIPE, run_folder, 1, "cpu").identity.model
    export(checkpoint, tmp_path / "hf", model, run_folder / "tokenizer")
    monkeypatch.setattr(fluency, "LEAST_WORDS", 25)
    (pairs := tmp_path / "pairs").mkdir()
    pair = '{"sentence_good": "Vali uus fail.", "sentence_bad": "Vali fail uus."}\n'
    (pairs / "order.jsonl").write_text(2 * pair)
    asked = {"minimal_pairs": str(pairs), "made_pairs": 5, "fluency_texts": 2}
    recipe = RECIPE.model_copy(update={"evaluate": RECIPE.evaluate.model_copy(update=asked)})
    ours, theirs = evaluate(recipe, run_folder), evaluate_hugging_face(recipe, run_folder, tmp_path / "hf")
    assert theirs.bits_per_byte.content() == pytest.approx(ours.bits_per_byte.content(), rel=1e-5)
    assert theirs.samples == ours.samples
    assert theirs.fluency == ours.fluency and ours.fluency.texts == 2
    for name in ("minimal_pairs", "made_pairs"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert ours.minimal_pairs.groups["order"].pairs == 2
    # The text has no suffixes, so one rule makes all pairs; the file has what is scored.
    assert set(ours.made_pairs.groups) == {"word_order"} and ours.made_pairs.wanted == 5
    made = run_folder / "evaluate" / "made_pairs.jsonl"
    assert [pair.group for pair in read_pairs(made)] == ["word_order"] * 5
    rows = [json.loads(line) for line in made.read_text(encoding="utf-8").splitlines()]
    share = sum(row["nats_good"] > row["nats_bad"] for row in rows) / 5
    assert share == ours.made_pairs.all.likelihood
    assert "made_pairs.jsonl" in read_manifest(run_folder / "evaluate").files
    (pairs / "more.jsonl").write_text('{"sen": "fail ja", "wrong_sen": "ja fail"}')
    assert evaluate(recipe, run_folder).minimal_pairs.all.pairs == 3


def test_what_is_missing_is_named(run_folder: Path, tmp_path: Path) -> None:
    """The message says where a checkpoint, or a model in the folder, was looked for; nothing is written."""
    with pytest.raises(KieloError, match="no complete checkpoint"):
        evaluate(RECIPE, tmp_path)
    with pytest.raises(KieloError, match=r"tokenizer\.json"):
        evaluate_hugging_face(RECIPE, run_folder, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_a_model_cannot_be_scored_by_is_refused(run_folder: Path) -> None:
    """A file of the recipe that is not there, and an encoder's text for bits per byte."""
    files = RECIPE.evaluate.model_copy(update={"minimal_pairs": "gone.tsv"})
    with pytest.raises(KieloError, match=r"evaluate\.minimal_pairs = 'gone\.tsv': no such file"):
        evaluate(RECIPE.model_copy(update={"evaluate": files}), run_folder)
    train = RECIPE.train.model_copy(update={"objective": "masked_tokens"})
    with pytest.raises(KieloError, match="hf: the recipe's text is an encoder's, for which bits per byte"):
        evaluate_hugging_face(RECIPE.model_copy(update={"train": train}), run_folder, Path("hf"))
