"""Every key of docs/recipe.md does something: another value of it changes the run, or is refused by name.

A key whose other value changes no number but its own must be in `READ_BY_EVERY_RUN`, with what reads it. A
new key that is read under a condition fails here until `recipe/without_effect.py`, a table of a family or a
rule refuses it where the condition does not hold; and then a recipe of `CONTEXTS` must take it.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tokenizers import Tokenizer, models

from kielo.artifact.run_format import write_run_recipe
from kielo.models.families import keys_of_family
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model, Phase, Recipe, Source
from kielo.recipe.toml_text import toml_table
from kielo.recipe.without_effect import CONDITIONS, OF_A_SEGMENT, layout_in_force
from kielo.resolve.resolve import flat, resolve
from kielo.resolve.text import imagined_text

BASE = {
    "name": '"small"', "language": '"et"', "corpus.sources": '"a.txt"', "tokenizer.vocab_size": "300",
    "dataset.sequence_length": "64", "model.hidden_size": "64", "model.intermediate_size": "256",
    "model.num_hidden_layers": "4", "model.num_attention_heads": "4", "train.tokens": "65536",
    "train.tokens_per_step": "1024",
}  # fmt: skip
TWO = '[{name = "a", path = "a.txt"}, {name = "b", path = "b.txt", language = "fi"}]'
# Recipes in which keys are in force that the small one refuses; "ranks" is their number.
CONTEXTS: list[dict[str, str]] = [
    {"train.schedule": '"wsd"'},
    {"corpus.near_copies": '"hplt"'},
    {"layout.pipeline": "2", "ranks": "2"},
    {"layout.pipeline": "2", "layout.pipeline_schedule": '"interleaved_1f1b"', "ranks": "2"},
    {"layout.tensor": "2", "ranks": "2"},
    {"layout.context": "2", "ranks": "2"},
    {"ranks": "2"},
    {"layout.recompute": '"operators"'},
    {"train.precision": '"fp8"', "train.fp8.emulate": "true"},
    {"train.precision": '"bf16"', "train.precision_changes": '[[8, "fp8"]]'},
    {"corpus.sources": TWO},
    {"dataset.mixture": "{a = 1}"},
    {"dataset.mask_documents": "true", "model.model_type": '"gpt2"'},
    {"corpus.sources": '[{path = "a.py", kind = "code"}]'},
    {"corpus.sources": '[{name = "a", tokens = "a.npy"}]', "tokenizer.path": '"TOKENIZER"'},
    {"tokenizer.path": '"TOKENIZER"'},
    {"tokenizer.extend": '"TOKENIZER"', "corpus.sources": TWO},
    {"model.model_type": '"modernbert"', "train.objective": '"masked_tokens"'},
    {
        "model.model_type": '"modernbert"', "train.objective": '"masked_tokens"',
        "evaluate.part_of_speech.train": '"a.conllu"', "evaluate.part_of_speech.dev": '"b.conllu"',
    },
    {"evaluate.tasks": '["xcopa_et"]'},
    {"model.weights": '"hf:o/n"', "model.transplant": '"focus"', "model.transplant_vectors": '"a.vec"'},
    {"model.hidden_size": "", "model.intermediate_size": "", "model.num_hidden_layers": "",
     "model.num_attention_heads": ""},
    *(
        {"model.model_type": f'"{name}"', "train.objective": '"masked_tokens"' if family.is_encoder else ""}
        | ({"model.sliding_window": "32"} if "layer_types" in keys_of_family(name) else {})
        for name, family in FAMILIES.items()
    ),
]  # fmt: skip

# Another value of keys for which a number beside the default's, or any text, is none.
OTHERS: dict[str, list[str]] = {
    "language": ['"fi"'], "cluster": ['"lumi_g"'], "nodes": ["[2]"], "corpus.sources": ['"b.txt"'],
    "corpus.code.languages": ['["Python"]'], "tokenizer.temperature": ["2"],
    "tokenizer.reserved_tokens": ['["<|tool|>"]'], "tokenizer.path": ['"TOKENIZER"'],
    "tokenizer.extend": ['"TOKENIZER"'], "tokenizer.unchanged_sources": ['["a"]'],
    "dataset.temperature": ["2"], "dataset.mixture": ["{a = 2}"], "dataset.source_max_epochs": ["{a = 9}"],
    "dataset.sequence_length": ["32"], "model.params": ['"1M"'], "model.vocab_size": ["400"],
    "model.hidden_size": ["32"], "model.num_attention_heads": ["2"], "model.head_dim": ["32"],
    "model.max_position_embeddings": ["128"], "model.position_bucket_size": ["16"],
    "model.rope_scaling": ['{rope_type = "linear", factor = 2.0}'], "model.sliding_window": ["16"],
    "model.layer_types": ['["full_attention", "sliding_attention", "sliding_attention", "full_attention"]'],
    "model.query_pre_attn_scalar": ["64"], "model.weights": ['"hf:o/n"'],
    "model.transplant_vectors": ['"other.vec"'],
    "layout.pipeline_stages_per_rank": ["2"], "layout.pipeline_layers": ["[1, 3]"],
    "layout.recompute_saved_operators": ['["mm"]'], "train.tokens": ["131072"], "train.warmup_share": ["0.5"],
    "train.batch_ramp": ["{first_tokens_per_step = 512, step_tokens = 512, tokens = 4096}"],
    "train.trainable": ['["embed", "layers"]'], "train.skip_steps": ["[[3, 4]]"],
    "train.precision_changes": ['[[8, "bf16"]]'], "train.fp8.kept_in_bf16": ['["layers.0"]'],
    "train.start_timeout_seconds": ["90"], "train.loss_chunk_tokens": ["1024"],
    "layouts": ['[{cluster = "lumi_g", nodes = 2, layout = {tensor = 2}}]'],
    "phases": ["[{tokens = 32768}, {tokens = 32768, sequence_length = 32}]"],
    "evaluate.texts": ['[{name = "t", path = "t.txt"}]'], "evaluate.prompts": ['["Tere"]'],
    "corpus.language_identifier": ["lid176"],
    "evaluate.part_of_speech.from_layer": ["2"], "checkpoint.memory_every_steps": ["100"],
    "checkpoint.copy_to": ["s3://bucket/run"],
    "corpus.mask_personal_data": ['["email"]'],
    "corpus.damage": ['["loops"]'],
}  # fmt: skip

# What reads the key in every run, whatever the other keys say → the keys.
READ_BY_EVERY_RUN = {
    "the folder of a run, and what people read of it": (
        "name", "folder", "description", "report.license", "report.text_license",
    ),
    "first weights, order and samples, by the seed": ("seed",),
    "plans": ("cluster", "machine", "nodes"),
    "the corpus stage: cards, filters and limits of a source of raw text": (
        "language", "corpus.language_identifier", "corpus.line_language_threshold",
        "corpus.document_language_threshold", "corpus.max_foreign_character_share",
        "corpus.min_line_characters", "corpus.min_document_characters", "corpus.deduplicate_lines",
        "corpus.deduplicate_documents", "corpus.max_document_bytes", "corpus.max_bad_share",
        "corpus.words", "corpus.workers", "corpus.engine", "corpus.quality", "corpus.repair_encoding",
        "corpus.mask_personal_data", "corpus.near_copies", "corpus.damage", "corpus.decontaminate",
        "corpus.own_steps",
    ),
    "the tokenizer stage, which learns a vocabulary": (
        "tokenizer.model", "tokenizer.min_frequency", "tokenizer.max_sample_bytes",
        "tokenizer.reserved_tokens", "tokenizer.extend", "tokenizer.bos", "tokenizer.eos",
    ),
    "packing": ("dataset.heldout_share",),
    "the attention mask": ("dataset.mask_documents",),
    "the rules: a run that reads a source more often is refused": (
        "dataset.max_epochs", "dataset.source_max_epochs",
    ),
    "the model of every llama": (
        "model.rms_norm_eps", "model.rope_theta", "model.rope_scaling", "model.initializer_range",
        "model.vocab_multiple", "model.max_position_embeddings",
    ),
    "each step": (
        "layout.cpu_offload", "layout.compile", "layout.recompute", "layout.zero", "train.skip_steps",
        "train.optimiser", "train.weight_decay", "train.adam_beta1", "train.adam_beta2",
        "train.adam_epsilon", "train.hidden_dropout", "train.max_gradient_norm", "train.z_loss",
        "train.precision", "train.precision_changes", "train.optimiser_state", "train.loss_chunk_tokens",
        "train.gradient_reduce_dtype", "train.max_skipped_steps_in_a_row", "train.deterministic",
    ),
    "the watch for spikes": tuple(
        f"train.spikes.{name}"
        for name in (
            "response", "window_steps", "threshold", "wait_steps", "max_tries", "learning_rate_factor",
        )
    ),
    "what happens every so many steps, and limits of time": (
        "train.heldout_sequences", "train.log_every_steps", "train.heldout_every_steps",
        "train.compare_replicas_every_steps", "train.wandb",
        "train.tensorboard", "train.collect_garbage_every_steps", "train.start_timeout_seconds",
        "train.step_timeout_seconds", "train.hang_seconds", "checkpoint.keep_newest",
        "checkpoint.keep_every_steps", "checkpoint.memory_every_steps", "checkpoint.copy_to",
    ),
    "the stages after training": (
        "verify.parity_steps", "verify.parity_sequences_per_step", "verify.parity_sequence_length",
        "verify.tolerance", "evaluate.texts", "evaluate.ngram_order", "evaluate.prompts",
        "evaluate.minimal_pairs", "evaluate.made_pairs", "evaluate.fluency_texts",
        "evaluate.sample_tokens", "evaluate.temperature", "evaluate.top_k", "evaluate.tasks",
    ),
}  # fmt: skip
# Other values that say what is so without them: a family's default, or a choice that the small run makes.
AS_IT_IS = {
    ("layouts", '[{cluster = "lumi_g", nodes = 2, layout = {tensor = 2}}]'),  # of jobs on that cluster
    ("model.model_type", '"mistral"'),  # a llama without a window
    ("model.tie_word_embeddings", "false"), ("model.attention_bias", "false"), ("model.mlp_bias", "false"),
    ("model.hidden_act", '"silu"'), ("layout.compile", "false"), ("train.precision", '"fp32"'),
}  # fmt: skip
# Keys that no recipe here can have in force.
NEEDS_FILES = {
    "follows": "the recipe of another run",
    "model.weights": "a folder of weights", "model.transplant": "a folder of weights",
    "model.transplant_vectors": "a folder of weights",
    "train.optimiser_from_weights": "a checkpoint of Megatron",
}  # fmt: skip


def keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from keys(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


KEYS = dict(keys())


def others(key: str) -> list[str]:
    """Other plausible values of the key in TOML: each other choice, a smaller or larger number, any text."""
    default, kinds, found = KEYS[key].get_default(call_default_factory=True), [KEYS[key].annotation], []
    if key in OTHERS:
        return OTHERS[key]
    while kinds:
        kind = kinds.pop()
        if get_origin(kind) is Literal:
            found += [json.dumps(choice) for choice in get_args(kind) if choice != default]
        elif kind is bool:
            found += ["true", "false"] if default is None else [json.dumps(not default)]
        elif kind in (int, float):
            found.append(str(2 * default if kind is int and default else default / 2 if default else 0.5))
            found[-1] = "2" if kind is int and not default else found[-1]
        elif kind is str:
            found.append('"other"')
        elif get_origin(kind) is tuple:
            found.append('["other"]')
        else:
            kinds += get_args(kind)
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {"<|endoftext|>": 0} | {f"t{number}": number for number in range(1, 310)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    return str(folder)


@cache
def numbers(tokenizer: str, *given: tuple[str, str]) -> dict[str, Any] | str:
    """Every number of the small run with these values, or why it is refused."""
    values = BASE | dict(given)
    ranks = int(values.pop("ranks", "1"))
    if "tokenizer.path" in values:
        del values["tokenizer.vocab_size"]
    sets = [f"{key}={value.replace('TOKENIZER', tokenizer)}" for key, value in values.items() if value]
    try:
        recipe = read_recipe(None, sets).recipe
        found = resolve(recipe, "nowhere", ranks, "cpu", text=imagined_text(recipe))
    except KieloError as error:
        return str(error)
    return flat(found.model_dump(mode="json"))


def changed(key: str, before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The numbers that differ, without the key's own place: its sections are copied whole."""
    differ = {name for name in before | after if before.get(name) != after.get(name)}
    return differ if key == "phases" else {name for name in differ if f".{key}." not in f".{name}."}


def why_ignored(tokenizer: str, key: str, value: str) -> str:
    """Why the key is accepted and ignored, or refused for ever; "" if it is neither."""
    small, found = numbers(tokenizer), numbers(tokenizer, (key, value))
    if isinstance(found, dict):
        is_known = any(key in keys for keys in READ_BY_EVERY_RUN.values()) or (key, value) in AS_IT_IS
        return "" if is_known or changed(key, small, found) else f"{key} = {value} changes nothing"
    if key.rpartition(".")[2] not in found:
        return f"{key} = {value} is refused without its name: {found}"
    accepts = (numbers(tokenizer, *context.items(), (key, value)) for context in CONTEXTS)
    if key in NEEDS_FILES or any(isinstance(one, dict) for one in accepts):
        return ""
    return f"{key} = {value} is refused everywhere: {found}"


def ignored(tokenizer: str) -> list[str]:
    found = (why_ignored(tokenizer, key, value) for key in KEYS for value in others(key))
    return [reason for reason in found if reason]


def test_every_key_changes_the_run_or_is_refused(tokenizer) -> None:
    assert isinstance(numbers(tokenizer), dict), numbers(tokenizer)
    assert ignored(tokenizer) == []


def test_a_key_whose_condition_is_forgotten_is_caught(tokenizer, monkeypatch) -> None:
    """Broken on purpose: without the rows, each key is named that the small run does not read."""
    keys_of_rows = [key for row in CONDITIONS for key in row.keys]
    refused = {key for key in keys_of_rows if isinstance(numbers(tokenizer, set_of(key)), str)}
    assert {"train.masking", "train.decay_share", "layout.pipeline_schedule"} <= refused
    monkeypatch.setattr("kielo.recipe.without_effect.CONDITIONS", ())
    numbers.cache_clear()
    named = {key for key in refused if why_ignored(tokenizer, *set_of(key))}
    numbers.cache_clear()
    # A rule on layouts refuses the first too, for plans; the last is another weight of the one source.
    of_a_pipeline = {"layout.pipeline_stages_per_rank", "layout.pipeline_layers"}
    assert refused - named == {*of_a_pipeline, "dataset.temperature"}


def set_of(key: str) -> tuple[str, str]:
    return key, others(key)[0]


def test_every_condition_is_described(tokenizer) -> None:
    """docs/recipe.md says of each such key when it is in force."""
    keys_of_rows = {key for row in CONDITIONS for key in row.keys}
    described = {key: " ".join((KEYS[key].description or "").split()) for key in keys_of_rows}
    assert [key for key, text in described.items() if "Only with" not in text] == []


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_of_another_family_is_refused(tokenizer, model_type) -> None:
    """Also with the value of its default, which a person gave for a reason."""
    context = next(one for one in CONTEXTS if one.get("model.model_type") == f'"{model_type}"')
    assert isinstance(numbers(tokenizer, *context.items()), dict)
    theirs = set().union(*map(keys_of_family, FAMILIES)) - keys_of_family(model_type)
    assert theirs
    for key in theirs:
        default = Model.model_fields[key].default
        values = [others(f"model.{key}")[0]] if default is None else [json.dumps(default)]
        for value in values:
            found = numbers(tokenizer, *context.items(), (f"model.{key}", value))
            assert isinstance(found, str) and f"model.{key} " in found and "leave the key out" in found


SHARED = {
    "tokens_per_step": "1024", "sequence_length": "64", "mixture": "{a = 1}", "micro_batch_sequences": "2",
    "learning_rate": "1e-3", "final_learning_rate_ratio": "0.1", "schedule": '"wsd"', "warmup_share": "0.1",
    "decay_share": "0.2", "max_gradient_norm": "0.5", "trainable": '["embed", "layers"]',
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_a_key_that_each_phase_has_itself_is_refused(tokenizer, name) -> None:
    """One phase that leaves it out reads it; of the learning rate only one that begins a segment."""
    assert set(SHARED) == set(Phase.model_fields) - {"tokens"}
    key = f"{'dataset' if name in ('sequence_length', 'mixture') else 'train'}.{name}"
    rates = {"learning_rate": "1e-3", "schedule": '"wsd"'}
    own = "".join(f", {one} = {value}" for one, value in (rates | {name: SHARED[name]}).items())
    rest = "".join(f", {one} = {value}" for one, value in rates.items() if one != name)
    level = '"cosine"' if name == "schedule" else SHARED[name]

    def answer(second: str) -> dict[str, Any] | str:
        phases = f"[{{tokens = 32768{own}}}, {{tokens = 32768{second}}}]"
        return numbers(tokenizer, ("dataset.sequence_length", ""), ("phases", phases), (key, level))

    assert f"{key} = " in answer(own) and "has no effect" in answer(own)
    is_of_segment = name in ("learning_rate", *OF_A_SEGMENT)
    if name != "learning_rate":
        assert isinstance(answer(rest), dict)
    assert isinstance(answer(""), str) == is_of_segment


def test_every_key_of_a_phase_changes_the_run_or_is_refused(tokenizer) -> None:
    """In the second phase; keys of a segment of the learning rate need one that begins there."""
    values = SHARED | {
        "tokens_per_step": "2048", "sequence_length": "32", "mixture": "{a = 2}", "schedule": '"linear"',
        "learning_rate": "1e-4", "final_learning_rate_ratio": "0.3", "warmup_share": "0.3",
    }  # fmt: skip

    def answer(second: str) -> dict[str, Any] | str:
        return numbers(tokenizer, ("phases", f"[{{tokens = 32768}}, {{tokens = 32768{second}}}]"))

    for name, value in values.items():
        found = answer(f", {name} = {value}")
        if isinstance(found, str):
            assert f"phases.2.{name}" in found
            segment = ", learning_rate = 2e-4" + ', schedule = "wsd"' * (name == "decay_share")
            found, before = answer(f"{segment}, {name} = {value}"), answer(segment)
        else:
            before = answer("")
        assert isinstance(found, dict) and (found != before or value == "0.2"), name


# Keys of any source of text at `path`; the others are refused there.
OF_A_PATH = {
    "name", "path", "text_field", "kind", "language", "clean", "encoding", "leave_out", "documents",
    "licence", "address", "max_documents", "min_language_score", "min_document_score",
}  # fmt: skip
OTHER_SOURCES = {
    "debian_package": '"wfinnish"', "huggingface_dataset": '"o/n"', "huggingface_subset": '"fi"',
    "tokens": '"b.npy"', "tokens_dtype": '"uint16"', "pair_fields": '["a", "b"]',
    "templates": '["{source} {target}"]', "reverse_share": "0.2", "loss": '"answers"', "too_long": '"drop"',
}  # fmt: skip


def test_a_key_of_another_source_is_refused(tokenizer) -> None:
    assert set(Source.model_fields) == OF_A_PATH | set(OTHER_SOURCES)
    for key, value in OTHER_SOURCES.items():
        found = numbers(tokenizer, ("corpus.sources", f'[{{path = "a.txt", {key} = {value}}}]'))
        assert isinstance(found, str) and key in found, key
    elsewhere = {
        'debian_package = "aaa", encoding = "utf-8"': "encoding",
        'debian_package = "aaa", documents = "files"': "documents",
        'debian_package = "aaa", leave_out = "*.md"': "leave_out",
        'tokens = "a.npy", clean = false': "clean",
    }
    for source, key in elsewhere.items():
        found = numbers(tokenizer, ("corpus.sources", f"[{{{source}}}]"))
        assert isinstance(found, str) and key in found


def test_what_a_layer_below_gives_is_no_mistake(tmp_path: Path) -> None:
    """A recipe that extends another, or --set, may put inherited keys out of force; not the reverse."""
    lines = [f"{key} = {value}" for key, value in BASE.items()]
    below = [*lines, 'train.schedule = "wsd"', "train.decay_share = 0.4", "layout.pipeline = 2"]
    (tmp_path / "below.toml").write_text("\n".join([*below, 'layout.pipeline_schedule = "gpipe"']))
    (tmp_path / "own.toml").write_text('extends = "below.toml"\ntrain.schedule = "cosine"\n')
    own = tmp_path / "own.toml"
    recipe = read_recipe(own, ["layout.pipeline=1"]).recipe
    # Kielo writes them all, for stages are compared with them, and reads what it wrote.
    assert write_run_recipe(recipe, tmp_path)
    for written in (tmp_path, tmp_path / "recipe.toml"):
        again = read_recipe(written).recipe
        assert (again.train.decay_share, again.layout.pipeline_schedule) == (0.4, "gpipe")
        assert again.model_copy(update={"folder": recipe.folder}) == recipe
    (tmp_path / "copy.toml").write_text(toml_table("", recipe.model_dump(mode="json", exclude_defaults=True)))
    with pytest.raises(KieloError, match="train.decay_share = 0.4 has no effect"):
        read_recipe(tmp_path / "copy.toml")  # a person's
    assert layout_in_force(recipe) == {}
    one_rank = ["layout.pipeline=1", "layout.pipeline_schedule=zbv"]
    for given, named in (
        (["train.decay_share=0.3"], "--set: train.decay_share = 0.3 has no effect"),
        (one_rank, 'layout.pipeline_schedule = "zbv" has no effect'),
    ):
        with pytest.raises(KieloError) as caught:
            read_recipe(own, given)
        assert named in str(caught.value) and "leave the key out" in str(caught.value)
    assert read_recipe(own, ["layout.pipeline_schedule=1f1b"]).recipe.layout.pipeline == 2
