"""Each key's default and the borders of its numbers, as docs/recipe.md tells them to people."""

from ast import literal_eval
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kielo.models.families import complete
from kielo.recipe.cards import Jobs
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import (
    BatchRamp,
    EvaluationText,
    Layout,
    Model,
    Phase,
    Recipe,
    Section,
    Source,
    Tokenizer,
)

NUMBERS = """
seed 1 >=0 whole
corpus.line_language_threshold None >=0 <=1
corpus.document_language_threshold None >=0 <=1
corpus.max_foreign_character_share 0.3 >=0 <=1
corpus.min_line_characters 10 >=0 whole
corpus.min_document_characters 100 >=0 whole
corpus.max_document_bytes 10_000_000 >0 whole
corpus.max_bad_share 0.01 >=0 <=1
corpus.workers 2 >0 whole
corpus.code.max_line_characters 1000 >0 whole
corpus.code.max_mean_line_characters 100.0 >0
corpus.code.min_alphanumeric_share 0.25 >=0 <=1
tokenizer.vocab_size 8192 >0 whole
tokenizer.min_frequency 2 >0 whole
tokenizer.max_sample_bytes 200_000_000 >0 whole
tokenizer.temperature 1.0 >=1 <=1000
dataset.sequence_length 512 >0 whole
dataset.heldout_share 0.02 >0 <0.5
dataset.temperature 1.0 >=1 <=1000
dataset.max_epochs 4.0 >0
model.params None >0 whole
model.hidden_size 256 >0 whole
model.intermediate_size 704 >0 whole
model.num_hidden_layers 6 >0 <=10_000 whole
model.num_attention_heads 8 >0 whole
model.num_key_value_heads None >0 whole
model.head_dim None >0 whole
model.vocab_size None >0 whole
model.vocab_multiple 64 >0 whole
model.max_position_embeddings None >0 whole
model.rms_norm_eps 0.00001 >0
model.rope_theta 10_000.0 >0
model.rope_local_base_freq 10_000.0 >0
model.rotary_pct 1.0 >0 <=1
model.layer_norm_epsilon 0.00001 >0
model.sliding_window None >0 whole
model.query_pre_attn_scalar None >0
model.attn_logit_softcapping None >0
model.final_logit_softcapping None >0
model.position_bucket_size 32 >0 whole
model.initializer_range 0.02 >0
layout.pipeline 1 >0 whole
layout.pipeline_stages_per_rank None >0 whole
layout.replicate 1 >=0 whole
layout.shard 0 >=0 whole
layout.context 1 >0 whole
layout.tensor 1 >0 whole
layout.expert 1 >=1 <=1 whole
layout.zero 1 >=1 <=3 whole
layout.recompute_every_layers 1 >0 whole
train.tokens None >0 whole
train.tokens_per_step 16384 >0 whole
train.micro_batch_sequences None >0 whole
train.learning_rate 0.001 >0
train.final_learning_rate_ratio 0.1 >=0 <=1
train.warmup_share 0.02 >=0 <1
train.decay_share 0.2 >=0 <=1
train.masking_rate 0.3 >0 <1
train.final_masking_rate 0.15 >0 <1
train.causal_share 0.0 >=0 <1
train.weight_decay 0.1 >=0
train.adam_beta1 0.9 >0 <1
train.adam_beta2 0.95 >0 <1
train.adam_epsilon 0.00000001 >0
train.hidden_dropout 0.0 >=0 <1
train.attention_dropout 0.0 >=0 <1
train.max_gradient_norm 1.0 >0
train.z_loss 0.0 >=0
train.max_skipped_steps_in_a_row 3 >0 whole
train.heldout_sequences 64 >0 whole
train.loss_chunk_tokens None >0 whole
train.log_every_steps 10 >0 whole
train.heldout_every_steps 100 >0 whole
train.compare_replicas_every_steps 100 >=0 whole
train.collect_garbage_every_steps 50 >0 whole
train.start_timeout_seconds None >=1 <=604_800
train.step_timeout_seconds 600.0 >=1 <=604_800
train.hang_seconds 20.0 >=1 <=604_800
train.fp8.watch_steps 50 >0 <=100_000 whole
train.fp8.max_loss_rise 0.02 >0
train.fp8.max_gradient_norm_rise 1.0 >0
train.fp8.probe_every_steps 0 >=0 whole
train.spikes.window_steps 128 >=8 <=100_000 whole
train.spikes.threshold 6.0 >0
train.spikes.wait_steps 30 >=3 <=100_000 whole
train.spikes.max_tries 3 >0 whole
train.spikes.learning_rate_factor 1.0 >0 <=1
checkpoint.every_steps 500 >0 whole
checkpoint.keep_newest 2 >=2 whole
checkpoint.keep_every_steps None >=0 whole
checkpoint.memory_every_steps 0 >=0 whole
verify.parity_steps 20 >0 whole
verify.parity_sequences_per_step 4 >0 whole
verify.parity_sequence_length 128 >0 whole
verify.tolerance 0.00001 >0
evaluate.ngram_order 6 >0 whole
evaluate.sample_tokens 80 >0 whole
evaluate.temperature 0.7 >=0
evaluate.top_k 50 >0 whole
evaluate.pseudo_tokens 2048 >0 whole
evaluate.made_pairs 0 >=0 whole
evaluate.fluency_texts 0 >=0 whole
evaluate.part_of_speech.from_layer None >0 whole
evaluate.shots None >=0 whole
evaluate.task_limit None >0 whole
evaluate.task_seed 1234 >=0 whole
"""
# Of what has no defaults: phases, ramps of the batch and sources.
OTHER_NUMBERS = """
tokens - >0 whole
tokens_per_step None >0 whole
sequence_length None >0 whole
micro_batch_sequences None >0 whole
learning_rate None >0
final_learning_rate_ratio None >=0 <=1
warmup_share None >=0 <1
decay_share None >=0 <=1
"""
SWITCHES = {
    "corpus.deduplicate_lines": True, "corpus.deduplicate_documents": True, "dataset.mask_documents": False,
    "model.use_parallel_residual": True, "layout.sequence_parallel": True, "layout.cpu_offload": False,
    "train.fp8.head": False, "train.fp8.gathered_in_fp8": True, "train.fp8.emulate": False,
    "train.deterministic": False, "train.tensorboard": True,
}  # fmt: skip


def whole_recipe() -> Recipe:
    return Recipe(name="x", language="et", corpus={"sources": ["a.txt"]})


def at(section: Any, key: str) -> Any:
    for part in key.split("."):
        section = getattr(section, part)
    return section


def around(borders: list[str]) -> Iterator[tuple[float, bool]]:
    """Yields numbers at each border and beside it, each with whether it fits."""
    beside = 1 if "whole" in borders else 0.001
    for border in borders:
        sign, number = border.rstrip("0123456789._"), border.lstrip("<>=").replace("_", "")
        if not number.replace(".", "").isdecimal():
            continue
        here = int(number) if "whole" in borders else float(number)
        inside = -beside if "<" in sign else beside
        yield here, "=" in sign
        yield (here - inside, False) if "=" in sign else (here + inside, True)


def check_borders(kind: type[BaseModel], other: dict[str, Any], field: str, borders: list[str]) -> None:
    for number, fits in around(borders):
        if fits:
            assert getattr(kind.model_validate(other | {field: number}), field) == number
        else:
            with pytest.raises(
                ValidationError, match=rf"(?s)^1 validation error for {kind.__name__}\n{field}"
            ):
                kind.model_validate(other | {field: number})


def test_numbers_have_their_defaults_and_borders() -> None:
    recipe, seen = whole_recipe(), set()
    for line in NUMBERS.strip().splitlines():
        key, default, *borders = line.split()
        assert repr(at(recipe, key)) == repr(literal_eval(default)), key
        section, _, field = key.rpartition(".")
        owner = at(recipe, section) if section else recipe
        given = owner.model_dump(exclude_unset=True) if section in ("", "corpus") else {}
        check_borders(type(owner), given, field, borders)
        seen.add(key)
    assert len(seen) == len(NUMBERS.strip().splitlines())
    for key, default in SWITCHES.items():
        assert at(recipe, key) is default, key


def test_numbers_of_phases_and_ramps_have_their_borders() -> None:
    for line in OTHER_NUMBERS.strip().splitlines():
        field, default, *borders = line.split()
        check_borders(Phase, {"tokens": 5}, field, borders)
        assert default == "-" or getattr(Phase(tokens=5), field) is None
    ramp = {"first_tokens_per_step": 5, "step_tokens": 6, "tokens": 7}
    for field in ramp:
        check_borders(BatchRamp, ramp, field, [">0", "whole"])
    pair = {"path": "a.tsv", "kind": "parallel", "language": ["et", "fi"]}
    check_borders(Source, pair, "reverse_share", [">=0", "<=1"])
    check_borders(Source, {"path": "a.txt"}, "max_documents", [">0", "whole"])
    source = Source(path="a.txt")
    assert (source.reverse_share, source.clean, source.max_documents) == (0.5, True, None)


def test_names_have_a_hundred_characters_at_most() -> None:
    for kind, given in (
        (Source, {"path": "a"}), (EvaluationText, {"path": "a"}),
        (Recipe, {"language": "et", "corpus": {"sources": ["a.txt"]}}),
    ):  # fmt: skip
        assert kind.model_validate(given | {"name": "x" * 100}).name == "x" * 100
        with pytest.raises(ValidationError, match="at most 100 characters"):
            kind.model_validate(given | {"name": "x" * 101})
    with pytest.raises(ValidationError, match="at least 1 item"):
        Recipe(name="x", language="et", corpus={"sources": []})


def test_numbers_fit_64_bits() -> None:
    """Torch and numpy hold no others; either sign."""

    class Own(Section):
        number: int = 0

    for number in (2**63 - 1, 1 - 2**63):
        assert Own(number=number).number == number
    for number in (2**63, -(2**63)):
        with pytest.raises(
            ValidationError, match=r"a number below 2\*\*63, because torch and numpy hold 64 bits"
        ):
            Own(number=number)


def test_rows_of_the_vocabulary_are_a_multiple() -> None:
    rows = {129: 192, 128: 128, 127: 128}
    assert {size: complete(Model(vocab_size=size), 64).vocab_rows for size in rows} == rows
    assert complete(Model(vocab_size=10, vocab_multiple=7), 64).vocab_rows == 14


def test_properties_join_what_the_keys_say() -> None:
    recipe = whole_recipe()
    assert recipe.train.has_dropout is False
    for key in ("hidden_dropout", "attention_dropout"):
        assert type(recipe.train)(**{key: 0.1}).has_dropout is True
    assert Layout().recomputed == frozenset()
    assert Layout(recompute="attention+norms").recomputed == {"attention", "norms"}
    for good in ("norms+activations", "attention+norms+activations", "activations", "operators", "full"):
        assert Layout(recompute=good).recompute == good
    with pytest.raises(ValidationError, match="Input should be 'none', 'attention', 'norms'"):
        Layout(recompute="norms+attention")
    assert (Tokenizer(path="a").ready, Tokenizer(path="a").ready_key) == ("a", "tokenizer.path")
    assert (Tokenizer(extend="b").ready, Tokenizer(extend="b").ready_key) == ("b", "tokenizer.extend")
    mixed = Recipe(
        name="x", language="et",
        corpus={"sources": ["a.txt", {"name": "t", "tokens": "t"}], "workers": 3},
    ).corpus  # fmt: skip
    assert [one.name for one in mixed.token_sources] == ["t"]
    assert [one.name for one in mixed.of_raw_text.sources] == ["a"] and mixed.of_raw_text.workers == 3


def test_families_are_as_transformers_has_them() -> None:
    """Which ones rotate heads, see later tokens, have terms of distances, and are in transformers."""
    with_rope = {"llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gemma2", "gemma3_text", "gpt_neox"}
    with_rope.add("modernbert")
    assert {name for name, family in FAMILIES.items() if family.has_rope} == with_rope
    assert [name for name, one in FAMILIES.items() if one.is_encoder] == ["ltg_bert", "modernbert"]
    assert [name for name, one in FAMILIES.items() if one.has_relative_positions] == ["ltg_bert"]
    assert [name for name, one in FAMILIES.items() if not one.in_transformers] == ["ltg_bert"]
    assert len(FAMILIES) == 14


def test_jobs_of_a_card_have_defaults() -> None:
    jobs = Jobs(partitions=[{"name": "a"}], sources={"partitions": "x"})
    assert (jobs.architecture, jobs.cpu_bind, jobs.node_folder) == ("x86_64", "cores", "/tmp")
    assert (jobs.options, jobs.setup, jobs.container, jobs.squash) == ((), (), (), ())
