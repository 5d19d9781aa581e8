"""resolve: every derived number once; impossible ones refused with those that work;
identity apart from placement.
"""

import json
import math
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from kielo.artifact.manifest import hash_manifest, write_stage
from kielo.recipe import cards
from kielo.recipe.cards import clusters
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import consent, resolve
from kielo.resolve.resolved import read, write
from kielo.resolve.software import Software, file_stall_seconds
from kielo.resolve.text import num_sequences
from kielo.tokenizer import load

VOCABULARY = 300
CARDS = Path(cards.__file__).parents[1] / "cards" / "clusters"


def recipe(**sections) -> Recipe:
    given_keys = {
        "name": "small",
        "language": "et",
        "corpus": {"sources": ["a.txt"]},
        "dataset": {"sequence_length": 64, "max_epochs": 4},
        "model": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "train": {"tokens": 64 * 24 * 10, "tokens_per_step": 64 * 24, "micro_batch_sequences": 5},
    }
    for name, values in sections.items():
        given_keys[name] = given_keys.get(name, {}) | values if isinstance(values, dict) else values
    return Recipe.model_validate(given_keys)


def finish_pack(folder, sources: dict[str, int], heldout: int) -> None:
    with write_stage(folder, "tokens", 1, {}, {}) as stage:
        stage.counts["sources"] = {
            name: {"tokens": n, "documents": 1, "bytes": n} for name, n in sources.items()
        }
        stage.counts["heldout"] = {"tokens": heldout, "documents": 1, "bytes": heldout}


def finish_tokenizer(folder, vocab_size: int, **counts: int) -> None:
    with write_stage(folder, "tokenizer", 1, {}, {}) as stage:
        stage.counts.update(counts)
        vocabulary = {"<|endoftext|>": 0} | {f"t{number}": number for number in range(1, vocab_size)}
        Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(stage.folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder up to pack: 300 tokens of vocabulary, two sources, 10 held-out sequences of 64."""
    folder = tmp_path_factory.mktemp("run")
    finish_tokenizer(folder / "tokenizer", VOCABULARY)
    finish_pack(folder / "tokens", {"a": 64 * 300 + 1, "b": 64 * 100 + 1}, heldout=640)
    return folder


def refusal(*arguments, **keywords) -> str:
    with pytest.raises(KieloError) as caught:
        resolve(*arguments, **keywords)
    return str(caught.value)


def test_the_cluster_says_how_long_a_start_takes(run_folder):
    """LUMI's card has the hour of its largest jobs; the recipe's own limit comes first."""
    given = {"train": {"start_timeout_seconds": 90.0}}
    for sections, seconds in (
        ({}, 1800.0),
        ({"cluster": "lumi_g"}, 3600.0),
        ({"cluster": "lumi_g"} | given, 90.0),
    ):
        resolved = resolve(recipe(**sections), run_folder, 1, "cpu")
        assert resolved.placement.train.start_timeout_seconds == seconds


def test_the_cluster_says_how_long_files_may_stall(run_folder, tmp_path):
    """Two minutes where nodes share a file system, as all shipped cards with a scheduler do."""
    own = tmp_path / "own.toml"
    own.write_text("file_stall_seconds = 45\n" + (CARDS / "lumi_g.toml").read_text())
    for name, seconds in (("laptop", 18.0), ("lumi_g", 120.0), (str(own), 45.0)):
        resolved = resolve(recipe(cluster=name), run_folder, 1, "cpu")
        assert resolved.placement.file_stall_seconds == seconds
    alone = {name for name in clusters() if file_stall_seconds(recipe(cluster=name)) == 18.0}
    assert alone == {"laptop"}


def test_every_derived_number(run_folder):
    """Steps, micro-batches, schedule, the complete model, mixture by tokens, FLOPs."""
    resolved = resolve(
        recipe(train={"schedule": "wsd", "warmup_share": 0.2, "decay_share": 0.3}), run_folder, 4, "cpu"
    )
    identity, placement = resolved.identity, resolved.placement
    (phase,), (rate,), (placed,) = identity.phases, identity.learning_rates, placement.phases
    assert (identity.total_steps, phase.sequences_per_step, phase.tokens_per_step) == (10, 24, 1536)
    assert (rate.tokens, rate.warmup_tokens, rate.decay_tokens) == (10 * 1536, 2 * 1536, 3 * 1536)
    assert rate.final == pytest.approx(rate.peak * 0.1)
    assert phase.mixture == {"a": 64 * 300 + 1, "b": 64 * 100 + 1}
    assert identity.train.heldout_sequences == 10 and identity.tokens_hash == hash_manifest(
        run_folder / "tokens"
    )
    model = identity.model
    assert (model.vocab_size, model.max_position_embeddings, model.num_key_value_heads, model.head_dim) == (
        300,
        64,
        4,
        16,
    )
    # 6 sequences a rank; 5 asked for do not divide them, 3 do.
    assert (placed.micro_batch_sequences, placed.micro_batches_per_step) == (3, 2)
    assert (placement.layout.replicate, placement.layout.shard, placement.end_of_text_id) == (1, 4, 0)
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert placement.parameters == 2 * 300 * 64 + 2 * layer + 64
    assert placed.flops_per_token == 6 * (placement.parameters - 300 * 64) + 6 * 2 * 64 * 64


@pytest.mark.parametrize(("every_steps", "asked", "expected"), [
    (500, None, 5000), (3, None, 30), (2, None, 24), (1, None, 24), (10, 0, 0), (10, 30, 30),
    (2**62, None, 2**63 - 1),
])  # fmt: skip
def test_every_tenth_checkpoint_is_kept_and_at_most_ten(run_folder, every_steps, asked, expected):
    """A run of 240 steps keeps these. A number that is asked for stands, and so does 0."""
    asking = {"every_steps": every_steps, "keep_every_steps": asked}
    resolved = resolve(recipe(train={"tokens_per_step": 64}, checkpoint=asking), run_folder, 1, "cpu")
    assert resolved.identity.total_steps == 240 and resolved.placement.checkpoint.keep_every_steps == expected


def test_the_vocabulary_is_the_tokenizers_and_its_rows_are_padded(run_folder, tmp_path):
    """4,001 tokens lie in 4,032 rows; weights keep their number of tokens and take the recipe's multiple."""
    (tmp_path / "tokens").symlink_to(run_folder / "tokens")
    finish_tokenizer(tmp_path / "tokenizer", 4001)
    model = resolve(recipe(layout={"tensor": 4}), tmp_path, 4, "cpu").identity.model
    assert (model.vocab_size, model.vocab_rows) == (4001, 4032)
    config = {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 6, "vocab_size": 50257, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for multiple, rows in ((64, 50304), (1000, 51000)):
        weights = {"weights": f"hf:{tmp_path}", "vocab_multiple": multiple}
        model = resolve(recipe(model=weights), tmp_path, 1, "cpu").identity.model
        assert (model.vocab_size, model.vocab_rows) == (50257, rows)


def test_the_file_reads_back(run_folder, tmp_path):
    """resolved.toml is TOML that any reader takes, and gives the same values, odd names included."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    resolved = resolve(
        recipe(model={"rope_scaling": scaling}, train={"adam_epsilon": 1e-12}), run_folder, 2, "cpu"
    )
    mixture = {'uudised "2024"\n': 0.1, "b.c": 1e-7, "õ": 3.0}
    phase = resolved.identity.phases[0].model_copy(update={"mixture": mixture})
    train = resolved.identity.train.model_copy(update={"skip_steps": ((2, 3), (5, 5))})
    identity = resolved.identity.model_copy(update={"phases": (phase, phase), "train": train})
    resolved = resolved.model_copy(update={"identity": identity})
    path = tmp_path / "resolved.toml"
    write(resolved, path)
    assert read(path) == resolved
    assert tomllib.loads(path.read_text(encoding="utf-8"))["identity"]["phases"][1]["mixture"] == mixture
    assert resolved.identity.model.rope_scaling["original_max_position_embeddings"] == 64
    path.write_text(path.read_text(encoding="utf-8").replace("first_step", "frst_step"), encoding="utf-8")
    with pytest.raises(KieloError, match=r"resolved.toml: .*identity.phases.0.first_step"):
        read(path)


def test_another_world_is_the_same_run(run_folder):
    """Ranks, layout and log intervals are placement;
    a learning rate is identity, and its change is refused by name.
    """
    alone = resolve(recipe(), run_folder, 1, "cpu")
    many = resolve(recipe(layout={"replicate": 2}, train={"log_every_steps": 3}), run_folder, 8, "cpu")
    assert alone.identity == many.identity
    assert (many.placement.layout.replicate, many.placement.layout.shard) == (2, 4)
    consent(alone.identity, many)
    other = resolve(recipe(train={"learning_rate": 5e-4}, model={"rope_theta": 5e5}), run_folder, 1, "cpu")
    with pytest.raises(KieloError) as caught:
        consent(alone.identity, other)
    assert "learning_rates.1.peak: was 0.001, is now 0.0005" in str(caught.value)
    assert "model.rope_theta: was 10000.0, is now 500000.0" in str(caught.value)


def test_precisions_may_change_later_and_only_where_they_can_be(run_folder):
    """Other precisions are no other run; steps beyond the end, twice,
    or on a device without FP8 are refused.
    """
    alone = resolve(recipe(), run_folder, 1, "cpu")
    changed = {"train": {"precision_changes": [[8, "bf16"], [4, "fp8"]], "fp8": {"emulate": True}}}
    later = resolve(recipe(**changed), run_folder, 1, "cpu")
    consent(alone.identity, later)
    identity = later.identity
    assert [identity.next_steps(step).last_step for step in (1, 4, 8)] == [3, 7, identity.phases[0].last_step]
    beyond = refusal(
        recipe(train={"precision_changes": [[10**6, "bf16"], [3, "fp32"], [3, "bf16"]]}), run_folder, 1, "cpu"
    )
    assert "step 1000000 is beyond the run's last step" in beyond and "step 3 occurs 2 times" in beyond
    without = refusal(recipe(train={"precision": "fp8"}), run_folder, 1, "cuda", "a100_80")
    assert '"fp8" on a100_80: its card has no fp8 peak' in without
    uneven = recipe(train={"precision": "fp8", "micro_batch_sequences": 1}, dataset={"sequence_length": 40})
    assert "micro-batches of 40 tokens" in refusal(uneven, run_folder, 1, "cuda", "h200")
    forgetful = recipe(train={"optimiser_state": "bf16", "adam_beta2": 0.999})
    assert "train.adam_beta2 = 0.999" in refusal(forgetful, run_folder, 1, "cpu")


def test_layers_are_compiled_on_gpus_where_they_can_be(run_folder):
    """Unset: on GPUs, where a compiler is there and no schedule splits the backward."""
    shared = {"tensor": 2, "recompute": "full"}
    split = {"pipeline": 2, "pipeline_schedule": "interleaved_zero_bubble"}
    for layout, device, software, compiles in (
        ({}, "cuda", None, True),
        ({}, "cpu", None, False),
        ({"compile": True}, "cpu", None, True),
        ({}, "cuda", Software("2.13.0", "no compiler"), False),
        (shared, "cuda", None, True),
        (split, "cuda", None, False),
    ):
        asked = recipe(layout=layout, model={"num_hidden_layers": 4}, train={"micro_batch_sequences": 1})
        resolved = resolve(asked, run_folder, 2, device, "h200", software=software)
        assert resolved.placement.layout.compile == compiles, (layout, software)


def test_attention_that_must_be_compiled_is_refused_without_a_compiler(run_folder):
    """On a GPU, masks of documents, windows and ALiBi need FlexAttention; nothing else needs a compiler."""
    without = Software("2.13.0", "no compiler. Fix: install it")
    documents, plain = recipe(dataset={"mask_documents": True}), recipe()
    said = refusal(documents, run_folder, 1, "cuda", "h200", software=without)
    assert "dataset.mask_documents = true on a GPU" in said and "install it" in said
    resolve(plain, run_folder, 1, "cuda", "h200", software=without)
    resolve(documents, run_folder, 1, "cuda", "h200", software=Software("2.13.0"))
    resolve(documents, run_folder, 1, "cpu", software=without)


@settings(max_examples=60, deadline=None)
@given(sequences=st.integers(1, 96), ranks=st.integers(1, 16), asked=st.integers(1, 12))
def test_micro_batches_make_up_the_step(run_folder, sequences, ranks, asked):
    """micro_batch × micro_batches × ranks is the step, filled up where ranks do not divide it, for all sizes;
    fewer sequences than ranks are refused.
    """
    asked_recipe = recipe(
        train={"tokens": 64 * sequences, "tokens_per_step": 64 * sequences, "micro_batch_sequences": asked}
    )
    if sequences < ranks:
        assert "one or more whole sequences. Fix" in refusal(asked_recipe, run_folder, ranks, "cpu")
        return
    placed = resolve(asked_recipe, run_folder, ranks, "cpu").placement.phases[0]
    each = -(-sequences // ranks)
    assert placed.micro_batch_sequences * placed.micro_batches_per_step == each
    larger = range(placed.micro_batch_sequences + 1, min(asked, each) + 1)
    assert placed.micro_batch_sequences <= asked and all(each % size for size in larger)


def test_replicas_reduce_in_bf16_only_what_is_scattered_once(run_folder):
    """Their sums over micro-batches would be in bf16. Each way out that the complaint names is one."""
    layout, train = {"replicate": 2, "zero": 2}, {"gradient_reduce_dtype": "bf16"}
    assert "would sum the gradients of micro-batches in bf16" in refusal(
        recipe(layout=layout, train=train), run_folder, 4, "cpu"
    )
    for changes in (
        {"layout": {"zero": 1}}, {"layout": {"replicate": 1}}, {"train": {"micro_batch_sequences": 6}},
        {"train": {"gradient_reduce_dtype": "fp32"}},
    ):  # fmt: skip
        asked = recipe(layout=layout | changes.get("layout", {}), train=train | changes.get("train", {}))
        resolved = resolve(asked, run_folder, 4, "cpu")
    consent(
        resolved.identity,
        resolve(recipe(layout=layout, train=train | {"micro_batch_sequences": 6}), run_folder, 4, "cpu"),
    )


def test_impossible_numbers_come_with_those_that_work(run_folder):
    """All at once; each suggestion is tried."""
    text = refusal(
        recipe(layout={"replicate": 3}, model={"vocab_size": 256}, train={"tokens": 64 * 24 * 100}),
        run_folder,
        5,
        "cpu",
    )
    assert text.startswith("4 things to put right in small")
    assert "layout.replicate = 3 does not make up 5 ranks" in text and "one of 1, 5" in text
    assert "model.vocab_size = 256 is less than the tokenizer's 300 tokens" in text
    assert "would read the source a 6.00 times, more than dataset.max_epochs = 4" in text
    text = refusal(recipe(train={"tokens_per_step": 1300, "tokens": 13000}), run_folder, 5, "cpu")
    assert "is 20.3125 sequences" in text and "tokens_per_step 1280 or 1344" in text
    for tokens_per_step in (1280, 1344):
        resolve(recipe(train={"tokens_per_step": tokens_per_step, "tokens": 12800}), run_folder, 5, "cpu")


def test_the_epoch_cap_is_exact(run_folder):
    """The suggested budget passes and one step more does not; the cap holds for each source by its weight."""
    text = refusal(recipe(train={"tokens": 64 * 24 * 1000}), run_folder, 1, "cpu")
    budget = int(text.split("train.tokens of at most ")[1].split(",")[0])
    resolve(recipe(train={"tokens": budget}), run_folder, 1, "cpu")
    refusal(recipe(train={"tokens": budget + 64 * 24}), run_folder, 1, "cpu")
    # Source b holds 100 sequences: half of the samples go there, four times 100 are allowed.
    even = {"dataset": {"mixture": {"a": 1, "b": 1}}}
    resolve(recipe(**even, train={"tokens": 64 * 24 * 33}), run_folder, 1, "cpu")
    assert "source b" in refusal(recipe(**even, train={"tokens": 64 * 24 * 34}), run_folder, 1, "cpu")


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 0), (1, 0), (2, 1), (65, 1), (66, 2), (129, 2)])
def test_sequences_of_a_stream(tokens, sequences):
    """Each sequence predicts sequence_length tokens from the one before; the last may be padded."""
    assert num_sequences(tokens, 64) == sequences


def test_the_peak_comes_from_the_card(run_folder):
    """MFU is measured against the device that runs, not the one that the recipe hoped for;
    unknown peaks stay open.
    """
    on_lumi, bf16 = {"cluster": "lumi_g"}, {"train": {"precision": "bf16"}}
    found = {
        key: resolve(recipe(**sections), run_folder, 1, device, accelerator).placement
        for key, sections, device, accelerator in [
            ("lumi", on_lumi | bf16, "cuda", None),
            ("lumi fp32", on_lumi | {"train": {"precision": "fp32"}}, "cuda", None),
            ("lumi login", on_lumi | bf16, "cpu", None),
            ("laptop's GPU", bf16, "cuda", None),
            ("named", bf16, "cuda", "h200"),
            ("by driver", bf16, "cuda", "NVIDIA H100 80GB HBM3"),
        ]
    }
    assert {
        key: (placement.accelerator, placement.peak_tflops.get("bf16")) for key, placement in found.items()
    } == {
        "lumi": ("mi250x_gcd", 191.5),
        "lumi fp32": ("mi250x_gcd", 191.5),
        "lumi login": ("cpu", None),
        "laptop's GPU": ("unknown", None),
        "named": ("h200", 989),
        "by driver": ("h100_80", 989),
    }
    assert found["named"].peak_tflops["fp8"] == 1979 and "fp32" not in found["lumi fp32"].peak_tflops


def test_weights_bring_their_model(run_folder, tmp_path):
    """config.json of the weights replaces the model's keys;
    a folder without one, or too small a vocabulary, is refused.
    """
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {"model": {"weights": f"hf:{tmp_path}"}}
    model = resolve(recipe(**weights), run_folder, 1, "cpu").identity.model
    assert {key: getattr(model, key) for key in config if key in type(model).model_fields} == {
        key: value for key, value in config.items() if key in type(model).model_fields
    }
    assert (model.head_dim, model.weights) == (8, f"hf:{tmp_path}")
    text = refusal(
        recipe(**weights, dataset={"sequence_length": 256}, train={"tokens_per_step": 1024}),
        run_folder,
        1,
        "cpu",
    )
    assert "a sequence_length of at most 128" in text
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 256}))
    assert "less than the tokenizer's 300 tokens" in refusal(recipe(**weights), run_folder, 1, "cpu")
    assert "Fix: hf:FOLDER" in refusal(recipe(model={"weights": "hf:nowhere"}), run_folder, 1, "cpu")


def test_weights_of_the_hub_are_kept_by_their_commit(run_folder, tmp_path, monkeypatch):
    """A repository's model is that of its snapshot, and its commit is part of what is trained."""
    import huggingface_hub

    commit = "89abcdef0123456789abcdef0123456789abcdef"
    snapshot = tmp_path / "snapshots" / commit
    snapshot.mkdir(parents=True)
    config = {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 6, "vocab_size": 1000, "max_position_embeddings": 128,
    }  # fmt: skip
    (snapshot / "config.json").write_text(json.dumps(config))
    (snapshot / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(snapshot))
    for reference in ("hf:org/model", "hf:org/model@main", f"hf:org/model@{commit}"):
        model = resolve(recipe(model={"weights": reference}), run_folder, 1, "cpu").identity.model
        assert (model.weights, model.hidden_size) == (f"hf:org/model@{commit}", 48)


def test_the_tokenizer_is_loaded_only_where_its_manifest_says_too_little(run_folder, tmp_path, monkeypatch):
    """Not at all if the stage wrote it; once if its manifest has no largest id or a file is another since."""
    loads = []

    def counted(path):
        loads.append(path)
        return Tokenizer.from_file(path)

    monkeypatch.setattr(load, "Tokenizer", SimpleNamespace(from_file=counted))
    (tmp_path / "tokens").symlink_to(run_folder / "tokens")
    finish_tokenizer(tmp_path / "tokenizer", 4001, largest_id=4000, end_of_text_id=0)
    known = resolve(recipe(), tmp_path, 1, "cpu")
    assert not loads and known.identity.model.vocab_size == 4001 and known.placement.end_of_text_id == 0
    (tmp_path / "tokenizer" / "special_tokens_map.json").write_text('{"eos_token": "t7"}')
    changed = resolve(recipe(), tmp_path, 1, "cpu")
    assert len(loads) == 1 and changed.placement.end_of_text_id == 7
    assert changed.placement.tokenizer_hash != known.placement.tokenizer_hash
    shutil.rmtree(tmp_path / "tokenizer")
    finish_tokenizer(tmp_path / "tokenizer", 4001)
    assert resolve(recipe(), tmp_path, 1, "cpu") == known and len(loads) == 2


def test_unfinished_or_empty_stages_are_named(run_folder, tmp_path):
    """The message names what is missing, and the command that makes it."""
    assert "tokens: the pack stage is not finished. Fix: `kielo run RECIPE --to pack`" in refusal(
        recipe(), tmp_path, 1, "cpu"
    )
    (tmp_path / "tokenizer").symlink_to(run_folder / "tokenizer")
    finish_pack(tmp_path / "tokens", {"a": 64 * 300, "b": 1}, heldout=0)
    text = refusal(recipe(dataset={"mixture": {"a": 1, "b": 1}}), tmp_path, 1, "cpu")
    assert "no held-out text" in text and "dataset.mixture.b" in text
    finish_pack(tmp_path / "tokens", {"a": 64 * 300, "b": 1}, heldout=65)
    assert resolve(recipe(), tmp_path, 1, "cpu").identity.phases[0].mixture == {"a": 64 * 300}
    assert math.isclose(resolve(recipe(), tmp_path, 1, "cpu").identity.train.heldout_sequences, 1)


def test_a_pipeline_may_have_a_quarter_of_empty_micro_batches(run_folder):
    """Four stages need four: with three sequences one is empty, and with two there would be half."""
    layout = {"pipeline": 4, "pipeline_schedule": "1f1b"}

    def of(sequences: int) -> Recipe:
        train = {"tokens_per_step": 64 * sequences, "tokens": 640 * sequences, "micro_batch_sequences": 1}
        return recipe(layout=layout, model={"num_hidden_layers": 4}, train=train)

    (placed,) = resolve(of(3), run_folder, 4, "cpu").placement.phases
    assert (placed.micro_batch_sequences, placed.micro_batches_per_step) == (1, 4)
    assert refusal(of(2), run_folder, 4, "cpu").startswith(
        "1f1b needs at least one micro-batch a step for each stage, but there are 2 for 4. Fix:"
    )
    assert "there are 2 for 4" in refusal(of(4), run_folder, 8, "cpu")  # each of two data-parallel ranks
    assert resolve(of(6), run_folder, 8, "cpu").placement.phases[0].micro_batches_per_step == 4


def test_a_model_that_its_family_cannot_have_is_refused(run_folder):
    with pytest.raises(
        KieloError, match="num_attention_heads = 4 is no multiple of model.num_key_value_heads"
    ):
        resolve(recipe(model={"num_key_value_heads": 3}), run_folder, 1, "cpu")


@pytest.mark.parametrize(
    ("layout", "ranks", "told"),
    [
        ({"tensor": 2, "shard": 3}, 8,
         "layout.shard = 3 × layout.tensor = 2 does not make up 8 ranks. Fix: 6 ranks, or a "
         "multiple with layout.shard = 0; or layout.shard = 0 with layout.replicate one of 1, 2, 4"),
        ({"replicate": 3, "tensor": 2}, 4,
         "layout.replicate = 3 × layout.tensor = 2 does not make up 4 ranks. Fix: 6 ranks, or a "
         "multiple with layout.shard = 0; or layout.shard = 0 with layout.replicate one of 1, 2"),
        ({"tensor": 2, "context": 2}, 6,
         "layout.context = 2 × layout.tensor = 2 does not make up 6 ranks. Fix: 4 ranks, or a "
         "multiple with layout.shard = 0"),
        ({"tensor": 4}, 2,
         "layout.tensor = 4 does not make up 2 ranks. Fix: 4 ranks, or a multiple with "
         "layout.shard = 0"),
        ({"shard": 1}, 2,
         "the layout does not make up 2 ranks. Fix: 1 ranks, or a multiple with layout.shard = "
         "0; or layout.shard = 0 with layout.replicate one of 1, 2"),
    ],
)  # fmt: skip
def test_axes_that_do_not_make_up_the_ranks_come_with_those_that_would(run_folder, layout, ranks, told):
    """Alone, and the whole sentence."""
    inner = layout.get("tensor", 1) * layout.get("context", 1)
    tokens = 64 * max(1, ranks // inner)  # a sequence for each rank that sees other samples
    train = {"tokens_per_step": tokens, "tokens": 10 * tokens}
    assert refusal(recipe(layout=layout, train=train), run_folder, ranks, "cpu") == told


def test_a_run_has_from_one_to_a_million_ranks(run_folder):
    for number in (0, 1_000_001, -1):
        assert refusal(recipe(), run_folder, number, "cpu") == (
            f"--ranks {number} does not fit. Fix: 1 to 1,000,000"
        )
    assert "data-parallel ranks" in refusal(recipe(), run_folder, 1_000_000, "cpu")


def test_steps_are_refused_with_the_sizes_on_both_sides(run_folder):
    """Whole sequences, one or more on each rank: at 23 sequences of 24 ranks, and at 20.3 of five."""
    short = recipe(train={"tokens_per_step": 64 * 23, "tokens": 64 * 230})
    assert refusal(short, run_folder, 24, "cpu") == (
        "train.tokens_per_step = 1472 is 23 sequences of dataset.sequence_length = 64, but each of 24 "
        "data-parallel ranks takes one or more whole sequences. Fix: tokens_per_step 1536, or at "
        "most 23 data-parallel ranks"
    )
    odd = recipe(train={"tokens_per_step": 1300, "tokens": 13_000})
    assert refusal(odd, run_folder, 20, "cpu").endswith("Fix: tokens_per_step 1280 or 1344")
    assert refusal(odd, run_folder, 21, "cpu").endswith(
        "Fix: tokens_per_step 1344, or at most 20 data-parallel ranks"
    )
    assert resolve(recipe(), run_folder, 24, "cpu").placement.phases[0].micro_batches_per_step == 1


def test_fp8_takes_16_of_a_ranks_own_tokens(run_folder):
    """Two context ranks have 24 of 48 tokens each, and 32 of 64."""
    train = {"precision": "fp8", "fp8": {"emulate": True}, "micro_batch_sequences": 1}

    def of(length: int) -> Recipe:
        sizes = {"tokens_per_step": 4 * length, "tokens": 40 * length}
        return recipe(layout={"context": 2}, dataset={"sequence_length": length}, train=train | sizes)

    assert refusal(of(48), run_folder, 2, "cpu") == (
        "dataset.sequence_length = 48 makes micro-batches of 24 tokens on a rank, but FP8 multiplies 16 at a "
        "time. Fix: a sequence_length in multiples of 32"
    )
    assert resolve(of(64), run_folder, 2, "cpu").identity.train.precision == "fp8"


@pytest.mark.parametrize(
    ("schedule", "pipeline", "is_refused"),
    [("zbv", 2, False), ("interleaved_zero_bubble", 2, False), ("1f1b", 2, True), ("zbv", 1, True)],
)
def test_a_split_backward_sends_gradients_once(run_folder, schedule, pipeline, is_refused):
    """So that replicas may reduce in bf16 what is scattered only at the end of a step."""
    layout = {"pipeline": pipeline, "pipeline_schedule": schedule, "replicate": 2, "zero": 2}
    train = {"gradient_reduce_dtype": "bf16", "micro_batch_sequences": 3}
    asked = recipe(layout=layout, model={"num_hidden_layers": 4}, train=train)
    if is_refused:
        assert refusal(asked, run_folder, 4, "cpu").startswith('train.gradient_reduce_dtype = "bf16" with')
    else:
        assert resolve(asked, run_folder, 4, "cpu").placement.phases[0].micro_batches_per_step == 4


def test_micro_batches_of_a_ramp_are_no_larger_than_those_after_it(run_folder):
    """Nine sequences are three of three; eight before them are four of two, not two of four."""
    ramp = {"first_tokens_per_step": 64 * 8, "step_tokens": 64, "tokens": 64 * 8}
    sizes = {"tokens_per_step": 64 * 9, "tokens": 64 * 98, "batch_ramp": ramp, "micro_batch_sequences": None}
    placed = resolve(recipe(train=sizes), run_folder, 1, "cpu").placement.phases
    assert [(one.micro_batch_sequences, one.micro_batches_per_step) for one in placed] == [(2, 4), (3, 3)]
