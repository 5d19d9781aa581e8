"""Each check of a recipe, at its border and beyond: keys, and the whole complaint with the fix."""

from typing import Any

import pytest

from kielo.recipe.check import check
from kielo.recipe.complaints import Complaint, did_you_mean, dotted, nearest_key, refuse
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.recipe.toml_text import line_of, lines_of_keys, toml_table

SOURCES = [{"name": "a", "path": "a.txt"}, {"name": "b", "path": "b.txt"}]
TRAIN = {"tokens": 1_000_000, "tokens_per_step": 2048}


def complaints(**update: Any) -> list[tuple[tuple[str, ...], str]]:
    """Returns (keys, message) of each complaint about a small recipe with these values."""
    data = {
        "name": "x", "language": "et", "corpus": {"sources": SOURCES}, "train": TRAIN,
        "dataset": {"sequence_length": 512},
    }  # fmt: skip
    for key, value in update.items():
        data[key] = (
            data[key] | value if isinstance(value, dict) and isinstance(data.get(key), dict) else value
        )
    found = check(Recipe.model_validate(data), lambda key: "file")
    return [(one.keys, one.message.removeprefix("file: ")) for one in found]


FINE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an own card": {"cluster": "my.toml"},
    "a mixture": {"dataset": {"mixture": {"a": 1.0, "b": 2.0}, "source_max_epochs": {"a": 2}}},
    "a temperature alone": {"dataset": {"temperature": 2.0}},
    "heads of pairs": {"model": {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 8}},
    "heads of one value": {"model": {"model_type": "gpt2", "hidden_size": 24, "num_attention_heads": 8}},
    "an even head": {"model": {"head_dim": 6, "hidden_size": 10, "num_attention_heads": 8}},
    "positions of a sequence": {"model": {"max_position_embeddings": 512}},
    "a vocabulary that holds it": {"model": {"vocab_size": 300}, "tokenizer": {"vocab_size": 300}},
    "the least vocabulary": {"tokenizer": {"vocab_size": 258}},
    "a step of one sequence": {"train": {"tokens": 512, "tokens_per_step": 512}},
    "one step": {"train": {"tokens": 2048}},
    "one step skipped": {"train": {"skip_steps": [[3, 3]]}},
    "names of reserved tokens": {"tokenizer": {"reserved_tokens": ["<|tool|>", "[TOOL]", "<tool>"]}},
    "a ready tokenizer of the hub": {"tokenizer": {"path": "hf:o/n"}, "model": {"weights": "hf:o/n"}},
    "a size": {"model": {"params": 10**7}},
    "decay of the rest": {"train": {"schedule": "wsd", "warmup_share": 0.25, "decay_share": 0.75}},
    "the shares of a cosine": {"train": {"schedule": "cosine", "warmup_share": 0.5}},
    "phases": {
        "train": {"tokens": 20480}, "phases": [{"tokens": 10240}, {"tokens": 10240, "sequence_length": 256}],
    },
    "a segment of a phase": {
        "train": {"tokens": None},
        "phases": [{"tokens": 10240}, {"tokens": 10240, "learning_rate": 1e-4, "schedule": "linear"}],
    },
    "a ramp": {"train": {"batch_ramp": {
        "first_tokens_per_step": 1024, "step_tokens": 512, "tokens": 999_999,
    }}},
    "clean text in another language": {
        "corpus": {"sources": [SOURCES[0] | {"language": "fi"}]}, "evaluate": {"texts": [
            {"name": "c", "path": "c.txt", "language": "fi"}
        ]},
    },
}  # fmt: skip


@pytest.mark.parametrize("what", FINE)
def test_a_recipe_that_fits(what) -> None:
    assert complaints(**FINE[what]) == []


# What is wrong → (values, keys, the whole complaint).
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a name twice": (
        {"corpus": {"sources": [SOURCES[0], SOURCES[0], SOURCES[0]]}}, "corpus.sources",
        "corpus.sources: 'a' names 3 sources. Fix: a name for each",
    ),
    "a mixture of strangers": (
        {"dataset": {"mixture": {"a": 1.0, "c": 1.0}}}, "dataset.mixture corpus.sources",
        "dataset.mixture.c: no source has this name. Fix: a, b",
    ),
    "epochs of strangers": (
        {"dataset": {"source_max_epochs": {"c": 1}}}, "dataset.source_max_epochs corpus.sources",
        "dataset.source_max_epochs.c: no source has this name. Fix: a, b",
    ),
    "weights twice": (
        {"dataset": {"mixture": {"a": 1.0, "b": 1.0}, "temperature": 2.5}},
        "dataset.temperature dataset.mixture",
        "dataset.temperature = 2.5 derives weights from the sources' tokens, and dataset.mixture gives "
        "weights. Fix: leave one of them out",
    ),
    "tokens without a tokenizer": (
        {"corpus": {"sources": [SOURCES[0], {"name": "c", "tokens": "c"}]}}, "tokenizer.path corpus.sources",
        "corpus.sources, c: tokens are ids of a tokenizer, which is not given. Fix: tokenizer.path = FOLDER "
        "of its tokenizer.json (RUN/tokenizer of a run)",
    ),
    "a text with a source's name": (
        {"evaluate": {"texts": [{"name": "a", "path": "c.txt"}]}}, "evaluate.texts corpus.sources",
        "evaluate.texts: 'a' also names another text or a source. Fix: another name",
    ),
    "one file of two": (
        {"evaluate": {"part_of_speech": {"dev": "d"}}, "train": {"objective": "masked_tokens"},
         "model": {"model_type": "ltg_bert"}},
        "evaluate.part_of_speech.dev",
        "evaluate.part_of_speech.dev = 'd' needs a second file. Fix: evaluate.part_of_speech.train = "
        "FILE.conllu",
    ),
    "a measure of encoders": (
        {"evaluate": {"part_of_speech": {"train": "p", "dev": "p"}}},
        "evaluate.part_of_speech.train evaluate.part_of_speech.dev train.objective",
        "evaluate.part_of_speech.train = 'p' measures encoders. Fix: leave it out, or train.objective = "
        '"masked_tokens"',
    ),
    "made pairs without spaces": (
        {"evaluate": {"made_pairs": 9}, "language": "ja"}, "evaluate.made_pairs language",
        "evaluate.made_pairs = 9 needs spaces between words, and language = 'ja' is written without them. "
        "Fix: evaluate.minimal_pairs = FILE",
    ),
    "a size and a shape": (
        {"model": {"params": 10**7, "hidden_size": 48, "num_attention_heads": 8}},
        "model.params model.hidden_size model.num_attention_heads",
        "model.params = 10M makes the shape, but model.hidden_size, model.num_attention_heads is given too. "
        "Fix: leave one out",
    ),
    "heads of half a pair": (
        {"model": {"hidden_size": 72, "num_attention_heads": 8}},
        "model.hidden_size model.num_attention_heads",
        "model.hidden_size = 72 is not an even number of values for each of model.num_attention_heads = 8. "
        "Fix: hidden_size 64, or model.head_dim",
    ),
    "heads of less than a value": (
        {"model": {"model_type": "gpt2", "hidden_size": 7, "num_attention_heads": 8}},
        "model.hidden_size model.num_attention_heads",
        "model.hidden_size = 7 is not a whole number of values for each of model.num_attention_heads = 8. "
        "Fix: hidden_size 8, or model.head_dim",
    ),
    "an odd head": (
        {"model": {"head_dim": 5}}, "model.head_dim",
        "model.head_dim = 5 is odd, but rotary positions rotate pairs. Fix: make it even",
    ),
    "too few positions": (
        {"model": {"max_position_embeddings": 511}}, "model.max_position_embeddings dataset.sequence_length",
        "model.max_position_embeddings = 511 is less than dataset.sequence_length = 512. Fix: leave it out, "
        "or 512 or more",
    ),
    "a small vocabulary of the model": (
        {"model": {"vocab_size": 299}, "tokenizer": {"vocab_size": 300}},
        "model.vocab_size tokenizer.vocab_size",
        "model.vocab_size = 299 cannot hold tokenizer.vocab_size = 300. Fix: leave it out, or 300 or more",
    ),
    "too small a vocabulary": (
        {"tokenizer": {"vocab_size": 256}}, "tokenizer.vocab_size",
        "tokenizer.vocab_size = 256 cannot hold 256 bytes, end-of-text and padding. Fix: 258 or more",
    ),
    "no tokenizer there": (
        {"tokenizer": {"path": "nowhere"}}, "tokenizer.path",
        "tokenizer.path = 'nowhere': no tokenizer.json in this folder. Fix: the folder of a Hugging Face "
        "tokenizer, or leave the key out to learn one",
    ),
    "a recipe before without weights": (
        {"follows": "first"}, "follows model.weights",
        "follows = 'first' makes weights, but model.weights is not given. Fix: model.weights = hf:FOLDER, "
        "the folder hf of its run",
    ),
    "rows of no weights": (
        {"model": {"transplant": "mean"}}, "model.transplant",
        "model.transplant = 'mean' takes rows from model.weights, which is not given. Fix: "
        "model.weights = hf:FOLDER, or leave the key out",
    ),
    "weights of nobody": (
        {"model": {"weights": "hf:"}}, "model.weights",
        "model.weights = 'hf:' does not fit. Fix: hf:hf:",
    ),
    "weights without their vocabulary": (
        {"model": {"weights": "hf:o/n"}}, "model.weights tokenizer.path",
        "model.weights = 'hf:o/n' come with their own vocabulary. Fix: tokenizer.path = hf:o/n or another "
        'folder or hub name of their tokenizer.json, or model.transplant = "mean" for the vocabulary that '
        "this recipe learns or extends",
    ),
    "vectors of nobody": (
        {"model": {"weights": "hf:o/n", "transplant": "focus"}}, "model.transplant model.transplant_vectors",
        'model.transplant = "focus" weights old rows by vectors of the new tokens. Fix: '
        'model.transplant_vectors = FILE (.vec or .npz), or model.transplant = "mean"',
    ),
    "vectors for nobody": (
        {"model": {"weights": "hf:o/n", "transplant": "mean", "transplant_vectors": "v"}},
        "model.transplant model.transplant_vectors",
        "model.transplant_vectors = 'v' is only read with model.transplant = \"focus\". Fix: set it, or "
        "leave the key out",
    ),
    "moments of no weights": (
        {"model": {"weights": "hf:o/n"}, "tokenizer": {"path": "hf:o/n"},
         "train": {"optimiser_from_weights": True}},
        "train.optimiser_from_weights model.weights",
        "train.optimiser_from_weights = true with model.weights = 'hf:o/n': only Megatron's checkpoints have "
        "moments. Fix: model.weights = megatron:FOLDER, or train.optimiser_from_weights = false",
    ),
    "moments of a part of the model": (
        {"model": {"weights": "megatron:m"}, "tokenizer": {"path": "hf:o/n"},
         "train": {"optimiser_from_weights": True, "trainable": ["head"]}},
        "train.optimiser_from_weights train.trainable",
        "train.optimiser_from_weights = true cannot be combined with train.trainable = ['head']: its moments "
        "are of AdamW, of all parameters and all tokens. Fix: train.optimiser_from_weights = false",
    ),
    "merges of a unigram": (
        {"tokenizer": {"model": "unigram", "min_frequency": 3}}, "tokenizer.min_frequency tokenizer.model",
        'tokenizer.min_frequency is for merges; tokenizer.model = "unigram" has none. Fix: leave it out',
    ),
    "a reserved token twice": (
        {"tokenizer": {"reserved_tokens": ["<|a|>", "<|b|>", "<|b|>"]}}, "tokenizer.reserved_tokens",
        "tokenizer.reserved_tokens: '<|b|>' does not fit. Fix: names such as <|tool|> or [TOOL], each once",
    ),
    "a word as a reserved token": (
        {"tokenizer": {"reserved_tokens": ["tool"]}}, "tokenizer.reserved_tokens",
        "tokenizer.reserved_tokens: 'tool' does not fit. Fix: names such as <|tool|> or [TOOL], each once",
    ),
    "reserved tokens of a ready one": (
        {"tokenizer": {"path": "hf:o/n", "reserved_tokens": ["<|a|>"]}},
        "tokenizer.reserved_tokens tokenizer.path",
        "tokenizer.reserved_tokens belong to a learned vocabulary, but tokenizer.path names a ready one. "
        "Fix: leave one of the keys out",
    ),
    "kept and extended": (
        {"tokenizer": {"path": "hf:o/n", "extend": "hf:o/n"}}, "tokenizer.path tokenizer.extend",
        "tokenizer.path keeps a tokenizer as it is, and tokenizer.extend gives it more tokens. Fix: one of "
        "them",
    ),
    "unchanged beside nothing": (
        {"tokenizer": {"unchanged_sources": ["a"]}}, "tokenizer.unchanged_sources",
        "tokenizer.unchanged_sources keep their encoding by tokenizer.extend, which is not given. Fix: "
        "tokenizer.extend, or leave the key out",
    ),
    "unchanged strangers": (
        {"tokenizer": {"extend": "hf:o/n", "unchanged_sources": ["c", "a"]}},
        "tokenizer.unchanged_sources corpus.sources",
        "tokenizer.unchanged_sources: no source has the name 'c'. Fix: a, b",
    ),
    "all unchanged": (
        {"tokenizer": {"extend": "hf:o/n", "unchanged_sources": ["b", "a"]}}, "tokenizer.unchanged_sources",
        "tokenizer.unchanged_sources has all sources: no text for new tokens. Fix: leave one out",
    ),
    "a step of part of a sequence": (
        {"train": {"tokens_per_step": 1500}}, "train.tokens_per_step dataset.sequence_length",
        "train.tokens_per_step = 1500 is no multiple of dataset.sequence_length = 512. Fix: 1024 or 1536",
    ),
    "a step of less than a sequence": (
        {"train": {"tokens_per_step": 100}}, "train.tokens_per_step dataset.sequence_length",
        "train.tokens_per_step = 100 is no multiple of dataset.sequence_length = 512. Fix: 512",
    ),
    "less than a step": (
        {"train": {"tokens": 2047}}, "train.tokens train.tokens_per_step",
        "train.tokens = 2047 is less than one step of train.tokens_per_step = 2048. Fix: 2048 or more",
    ),
    "another sum": (
        {"train": {"tokens": 20_000}, "phases": [{"tokens": 10240}, {"tokens": 10240}]},
        "train.tokens phases",
        "train.tokens = 20000 is not the sum of the phases' tokens, 20480. Fix: leave train.tokens out",
    ),
    "lengths that do not divide": (
        {"train": {"tokens": None}, "dataset": {"sequence_length": 1024},
         "phases": [{"tokens": 10240, "sequence_length": 384, "tokens_per_step": 768}, {"tokens": 10240}]},
        "phases.1.sequence_length dataset.sequence_length",
        "phases.1.sequence_length = 384 does not divide the longest of the run, dataset.sequence_length = "
        "1024, so text would be lost between phases. Fix: dataset.sequence_length = 768 or 1152",
    ),
    "a phase of strangers": (
        {"train": {"tokens": None}, "phases": [{"tokens": 10240}, {"tokens": 10240, "mixture": {"c": 1.0}}]},
        "phases.2.mixture corpus.sources",
        "phases.2.mixture.c: no source has this name. Fix: a, b",
    ),
    "a schedule of no segment": (
        {"train": {"tokens": None}, "phases": [{"tokens": 10240}, {"tokens": 10240, "warmup_share": 0.1}]},
        "phases.2.warmup_share phases",
        "phases.2.warmup_share belongs to a new segment of the learning rate, but phases.2 begins none. "
        "Fix: phases.2.learning_rate, or leave the key out",
    ),
    "more than a segment": (
        {"train": {"schedule": "wsd", "warmup_share": 0.25, "decay_share": 0.8}},
        "train.decay_share train.warmup_share",
        "train.warmup_share = 0.25 and train.decay_share = 0.8 are more than the whole segment. Fix: a "
        "decay_share of at most 0.75",
    ),
    "a ramp of parts": (
        {"train": {"batch_ramp": {"first_tokens_per_step": 1024, "step_tokens": 500, "tokens": 9999}}},
        "train.batch_ramp.step_tokens dataset.sequence_length",
        "train.batch_ramp.step_tokens = 500 is no multiple of dataset.sequence_length = 512. Fix: 512",
    ),
    "a ramp that does not arrive": (
        {"train": {"batch_ramp": {"first_tokens_per_step": 512, "step_tokens": 1024, "tokens": 9999}}},
        "train.batch_ramp.step_tokens train.tokens_per_step",
        "train.batch_ramp grows from 512 by 1024 tokens a step and does not arrive at train.tokens_per_step "
        "= 2048. Fix: train.tokens_per_step = 1536",
    ),
    "a ramp that does not grow": (
        {"train": {"batch_ramp": {"first_tokens_per_step": 2048, "step_tokens": 512, "tokens": 9999}}},
        "train.batch_ramp.step_tokens train.tokens_per_step",
        "train.batch_ramp grows from 2048 by 512 tokens a step and does not arrive at train.tokens_per_step "
        "= 2048. Fix: train.tokens_per_step = 2560",
    ),
    "a ramp that does not end": (
        {"train": {"batch_ramp": {"first_tokens_per_step": 1024, "step_tokens": 512, "tokens": 10**6}}},
        "train.batch_ramp.tokens train.tokens",
        "train.batch_ramp.tokens = 1000000 does not end before train.tokens = 1000000 does. Fix: fewer "
        "tokens of the ramp, or more of the phase",
    ),
    "steps backwards": (
        {"train": {"skip_steps": [[3, 4], [9, 8]]}}, "train.skip_steps",
        "train.skip_steps: [9, 8] ends before it begins. Fix: [8, 9]",
    ),
    "every step passed over": (
        {"train": {"skip_steps": [[3, 500], [1, 1], [2, 9]]}}, "train.skip_steps train.tokens",
        "train.skip_steps: skips all 488 steps of the run, so nothing is trained. Fix: ranges that leave a "
        "step",
    ),
    "steps after the last": (
        {"train": {"skip_steps": [[2, 489]]}}, "train.skip_steps train.tokens",
        "train.skip_steps: [2, 489] goes beyond the run's last step. Fix: steps up to 488",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_recipe_that_does_not_fit(what) -> None:
    """One complaint, no other, for no other key."""
    update, keys, message = WRONG[what]
    assert complaints(**update) == [(tuple(keys.split()), message)]


def test_a_complaint_names_the_origin_that_a_person_can_change_now() -> None:
    """--set, if any of the keys is from there; else the file of the first."""
    data = {"name": "x", "language": "et", "corpus": {"sources": SOURCES}, "train": {"tokens_per_step": 100}}
    for given, where in (((), "file of train.tokens_per_step"), (("dataset.sequence_length",), "--set")):
        told = check(
            Recipe.model_validate(data),
            lambda key, given=given: "--set" if key in given else f"file of {key}",
        )
        assert told[0].message.startswith(f"{where}: train.tokens_per_step = 100 is no multiple")


def test_several_complaints_are_one_message() -> None:
    """Each once; of one there is no list."""
    one, two = Complaint(("a",), "f: one"), Complaint(("b",), "f: two")
    refuse("f", [])
    with pytest.raises(KieloError, match="^f: one$"):
        refuse("f", [one, one])
    with pytest.raises(KieloError, match="^2 things to put right in f:\n  - f: one\n  - f: two$"):
        refuse("f", [one, two, one])


def test_names_of_keys() -> None:
    """Entries of lists by their number from 0, phases from 1; a nearest key by several rules."""
    assert dotted(("corpus", "sources", 0, "path")) == "corpus.sources[0].path"
    assert dotted(("phases", 0, "tokens")) == "phases.1.tokens" and dotted(("a", 2)) == "a[2]"
    nearest = {
        "train.tokns": "train.tokens", "train.lr": "train.learning_rate",
        "batch_size": "train.tokens_per_step",
        "model.layers": "model.num_hidden_layers", "train.hidden_size": "model.hidden_size", "qqqq": None,
        "gpus": "layout.shard", "train.dtype": "train.precision",
    }  # fmt: skip
    assert {key: nearest_key(key, Recipe) for key in nearest} == nearest
    known = {"lumi_g": [], "fi": ["Finnish"], "nn": ["Norwegian Nynorsk"]}
    meant = {"LUMI_G": "lumi_g", "lum": "lumi_g", "finish": "fi", "nynorsk": "nn", "zzz": None, "": None}
    for given, name in meant.items():
        assert did_you_mean(given, known) == (f"; did you mean {name}?" if name else "")


CARD = 'a = 1\nb = [\n  1,\n  2,\n]\n\n[t]\nc = 2\n[t.u]\nd = """\nx\n"""\n[[l]]\ne = 1\n'


def test_lines_of_keys() -> None:
    """Of values of several lines the first; of a key that is not there the nearest above it."""
    lines = lines_of_keys(CARD)
    assert lines == {"a": 1, "b": 2, "t": 7, "t.c": 8, "t.u": 9, "t.u.d": 10, "l": 13}
    asked = {"t.u.d": 10, "t.u.x": 9, "t.x.y": 7, "l[0].e": 13, "b[1]": 2, "zz": None}
    assert {key: line_of(key, lines) for key in asked} == asked


def test_toml_as_it_is_written() -> None:
    """Plain values first, then tables, then lists of tables; what is None is left out; text is escaped."""
    content = {
        "t": {"x": 1, "deep": {"y": [1, 2]}}, "l": [{"k": "v"}, {}], "n": None, "b": [True, False], "f": 1e-5,
        "empty": [], "a key": 'q"\\\n\x7fõ', "o": [[{"z-1": 2, "w w": 3}]],
    }  # fmt: skip
    assert toml_table("", content) == (
        'b = [true, false]\nf = 1e-05\nempty = []\n"a key" = "q\\"\\\\\\u000a\\u007fõ"\n'
        'o = [[{z-1 = 2, "w w" = 3}]]\n\n[t]\nx = 1\n\n[t.deep]\ny = [1, 2]\n\n[[l]]\nk = "v"\n\n[[l]]\n'
    )
    with pytest.raises(TypeError, match="no TOML for object"):
        toml_table("", {"a": object()})
