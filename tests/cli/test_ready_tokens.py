"""Shards that megatron-core wrote are a source, and train as the same text packed here does."""

import json
from pathlib import Path

import numpy as np
import pytest

from kielo.artifact.manifest import hash_manifest, read_manifest
from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.artifact.token_shards import TokenShard
from kielo.cli.main import main
from kielo.dataset.heldout_sets import heldout_sets
from kielo.plan.idea import with_usual_training
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.tokenizer.load import decode, load_tokenizer
from tests.cli.test_run import write_recipe
from tests.ready_tokens import WRITERS, rows_of


def _run(recipe: Path, *flags: str) -> None:
    assert main(["run", str(recipe), *flags]) == 0


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """A recipe of text that is packed."""
    recipe = write_recipe(tmp_path_factory.mktemp("text"))
    _run(recipe, "--to", "pack")
    return recipe


def write_ready(packed: Path, folder: Path, kind: str = "megatron") -> Path:
    """Writes the same recipe with the tokens of the packed one as ready files, held-out documents last."""
    tokens = packed.parent / "run" / "tokens"
    training, heldout = rows_of(TokenShard(tokens / "text")), rows_of(TokenShard(tokens / "heldout"))
    (folder / "data").mkdir(parents=True)
    half = len(training) // 2
    WRITERS[kind](folder / "data" / "0", training[:half])
    WRITERS[kind](folder / "data" / "1", training[half:] + heldout)
    counts = [sum(map(len, rows)) for rows in (training, heldout)]
    share = (counts[1] + 0.5) / sum(counts)  # the first held-out document begins in the last of these
    text = packed.read_text(encoding="utf-8")
    text = text.replace(str(packed.parent / "run"), str(folder / "run"))
    source = f'[{{name = "text", tokens = "{folder / "data"}"}}]'
    text = text.replace(f'"{packed.parent / "text.txt"}"', source)
    text = text.replace("vocab_size = 320", f'path = "{packed.parent / "run" / "tokenizer"}"')
    recipe = folder / "ready.toml"
    recipe.write_text(text.replace("heldout_share = 0.2", f"heldout_share = {share}"), encoding="utf-8")
    return recipe


@pytest.mark.parametrize("kind", WRITERS)
def test_nothing_is_copied_and_the_end_is_held_out(packed, tmp_path, kind, capsys):
    """The tokens folder has a description and the held-out documents, which are those of the packed run."""
    recipe = write_ready(packed, tmp_path, kind)
    _run(recipe, "--to", "pack")
    run, theirs = tmp_path / "run", packed.parent / "run" / "tokens"
    assert not (run / "corpus").exists() and not (run / "tokens" / "text.bin").exists()
    assert "nothing to do: all sources are ready tokens" in capsys.readouterr().out
    for name in ("heldout.bin", "heldout.idx"):
        assert (run / "tokens" / name).read_bytes() == (theirs / name).read_bytes()
    ours, expected = read_manifest(run / "tokens").counts, read_manifest(theirs).counts
    assert ours["sources"]["text"]["tokens"] == expected["sources"]["text"]["tokens"]
    assert ours["heldout"] == expected["heldout"]
    documents = None if kind == "npy" else expected["sources"]["text"]["documents"]
    assert ours["sources"]["text"]["documents"] == documents
    made = hash_manifest(run / "tokens")
    _run(recipe, "--to", "pack")
    assert hash_manifest(run / "tokens") == made


def test_each_source_of_ready_tokens_has_a_heldout_set(packed, tmp_path):
    """Its last documents, with the bytes of their decoded text; the sets add up to that of all sources."""
    recipe = write_ready(packed, tmp_path)
    text, data = recipe.read_text(encoding="utf-8"), tmp_path / "data"
    both = f'[{{name = "text", tokens = "{data}/0"}}, {{name = "more", tokens = "{data}/1"}}]'
    text = text.replace(f'[{{name = "text", tokens = "{data}"}}]', both)
    recipe.write_text(text, encoding="utf-8")
    _run(recipe, "--to", "pack")
    whole, *sets = heldout_sets(tmp_path / "run" / "tokens")
    assert [one.name for one in sets] == ["more", "text"]
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer")
    for one, file in zip(sets, "10"):
        theirs, held = rows_of(TokenShard(data / file)), rows_of(TokenShard(one.folder / one.file))
        assert held and held == theirs[-len(held) :]
        texts = decode(tokenizer, [row[:-1] for row in held])
        assert one.text_bytes == sum(len(text.encode()) + 1 for text in texts)
    assert whole.tokens == sum(one.tokens for one in sets)


def test_the_documents_of_a_step_have_file_number_and_text(packed, tmp_path, capsys):
    """`kielo data` names the same text as of the packed run, by file and number of the document."""
    recipe = write_ready(packed, tmp_path)
    _run(recipe, "--to", "pack")
    answers = []
    for path in (packed, recipe):
        capsys.readouterr()
        assert main(["data", str(path), "--step", "3", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    for theirs, ours in zip(*answers, strict=True):
        assert ours["document"].startswith(("0.bin: document ", "1.bin: document "))
        assert ours["text"] and ours | {"document": ""} == theirs | {"document": ""}
    assert main(["data", str(recipe), "--step", "3"]) == 0
    capsys.readouterr()
    assert main(["show", str(recipe)]) == 0
    assert "ready tokens" in capsys.readouterr().out
    assert main(["plan", "data", str(recipe)]) == 0
    assert "text" in capsys.readouterr().out


def test_a_plan_knows_the_tokens_before_anything_is_packed(packed, tmp_path, capsys):
    """Without train.tokens the budget is what the shards give, less the held-out share, as later."""
    recipe = write_ready(packed, tmp_path)
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("tokens = 2560\n", ""), encoding="utf-8")
    read = read_recipe(str(recipe)).recipe
    assert read.train.tokens is None
    planned, filled = with_usual_training(read)
    tokens = read_manifest(packed.parent / "run" / "tokens").counts["sources"]["text"]["tokens"]
    assert not filled and planned.train.tokens == -(-(tokens - 1) // 16) * 16 * 1000 // 128 * 128
    assert main(["show", str(recipe)]) == 0
    shown = capsys.readouterr().out
    assert f"{tokens:,} of text" in shown and "as many tokens as the text gives" not in shown
    _run(recipe, "--to", "pack")
    assert resolve(read, tmp_path / "run", 1, "cpu").identity.total_steps == planned.train.tokens // 128


def test_files_that_moved_are_the_same_text(packed, tmp_path):
    """The recipe names the new place; nothing is packed again, and the description's hash stays."""
    recipe = write_ready(packed, tmp_path)
    _run(recipe, "--to", "pack")
    before = hash_manifest(tmp_path / "run" / "tokens")
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    text = recipe.read_text(encoding="utf-8").replace(str(tmp_path / "data"), str(tmp_path / "elsewhere"))
    recipe.write_text(text, encoding="utf-8")
    _run(recipe, "--to", "pack")
    manifest = read_manifest(tmp_path / "run" / "tokens")
    assert manifest.counts["sources"]["text"]["folder"] == str(tmp_path / "elsewhere")
    assert hash_manifest(tmp_path / "run" / "tokens") == before


@pytest.mark.full
@pytest.mark.parametrize("mask", ["true", "false"])
def test_training_is_that_on_the_same_text_packed_here(packed, tmp_path, mask):
    """Losses, gradient norms and held-out loss of all twenty steps are equal, not merely near."""
    recipe = write_ready(packed, tmp_path)
    masked = ["--set", f"dataset.mask_documents={mask}", "--set", f"name=of_{mask}"]
    found = []
    for path in (packed, recipe):
        folder = path.parent / f"run_{mask}"
        flags = [*masked, "--set", f"folder={folder}", "--set", "train.log_every_steps=1"]
        _run(path, *flags, "--to", "train")
        rows = of_kind(read_metrics(folder / "train" / "metrics.jsonl"), TrainingStep)
        found.append([(row.loss, row.gradient_norm) for row in rows])
    assert len(found[0]) == 20 and np.isfinite(found[0]).all()
    assert found[0] == found[1]


@pytest.mark.full
def test_every_stage_goes_through_without_a_corpus(packed, tmp_path):
    """Scores, export and report of a run whose sources are all ready tokens."""
    recipe = write_ready(packed, tmp_path)
    _run(recipe)
    run = tmp_path / "run"
    assert "ready tokens text" in (run / "hf" / "README.md").read_text(encoding="utf-8")
    scores = json.loads((run / "evaluate" / "scores.json").read_text(encoding="utf-8"))
    assert set(scores["bits_per_byte"]) == {"model", "unigram", "xz", "ngram"}
    _run(recipe, "--to", "export")
