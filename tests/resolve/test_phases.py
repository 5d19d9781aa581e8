"""The arithmetic of phases: Megatron's batch ramp, ranges of skipped steps,
and every complaint with the fix.
"""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases, ramp_steps
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import BatchRamp
from kielo.resolve.planned_phases import (
    epochs,
    first_difference,
    merged,
    plan_learning_rates,
    plan_phases,
)
from kielo.resolve.resolve import resolve
from tests.resolve.test_resolve import finish_pack, finish_tokenizer, recipe, refusal

RECIPE = """
name = "small"
language = "et"
corpus.sources = ["a.txt", "b.txt"]
dataset = { sequence_length = 64, max_epochs = 4 }
model = { hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2, num_attention_heads = 4 }
train = { tokens_per_step = 1536 }
"""


def megatron(first: int, increment: int, ramp_samples: int, full: int, samples: int) -> list[int]:
    """Batch sizes until `samples`, step by step, as
    RampupBatchsizeNumMicroBatchesCalculator.update has them.
    """
    per_increment = ramp_samples / ((full - first) // increment)
    sizes, consumed = [], 0
    while consumed < samples:
        if consumed > ramp_samples:
            sizes.append(full)
        else:
            sizes.append(min(full, first + int(consumed / per_increment) * increment))
        consumed += sizes[-1]
    return sizes


@pytest.mark.parametrize(
    ("first", "increment", "ramp_samples", "full"),
    # BLOOM-176B's script; its smaller sisters'; and shares that a single step overshoots.
    [(192, 16, 9_765_625, 2048), (192, 32, 9_765_625, 512), (32, 32, 2_000_000, 256), (4, 4, 40, 40)],
)
def test_the_batch_ramp_is_megatrons(first: int, increment: int, ramp_samples: int, full: int) -> None:
    """Step for step the sizes that Megatron-LM trains with, past the ramp's end."""
    ramp = BatchRamp(
        first_tokens_per_step=first * 2048, step_tokens=increment * 2048, tokens=ramp_samples * 2048
    )
    levels = ramp_steps(ramp, full * 2048)
    ours = [size // 2048 for size, steps in levels for _ in range(steps)]
    theirs = megatron(first, increment, ramp_samples, full, ramp_samples + 10 * full)
    assert ours == theirs[: len(ours)] and set(theirs[len(ours) :]) == {full}
    if full == 2048:
        assert len(levels) == 116 and len(ours) == 12_658


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), max_size=5),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), max_size=5),
    st.integers(0, 40),
)
def test_ranges_are_the_steps_that_they_hold(starts, others, last_step):
    """Merging keeps the set of steps and leaves no two that touch; the first difference is that
    of the sets.
    """
    ranges = [[(first, first + more) for first, more in pairs] for pairs in (starts, others)]
    held = [{step for first, last in some for step in range(first, last + 1)} for some in ranges]
    joined = [merged(some) for some in ranges]
    for some, steps in zip(joined, held):
        assert [step for first, last in some for step in range(first, last + 1)] == sorted(steps)
        assert all(after[0] > before[1] + 1 for before, after in zip(some, some[1:]))
    different = [step for step in held[0] ^ held[1] if step <= last_step]
    assert first_difference(*joined, last_step) == min(different, default=None)


def complaint(tmp_path, *sets: str) -> str:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE, encoding="utf-8")
    with pytest.raises(KieloError) as caught:
        read_recipe(path, sets)
    return str(caught.value)


def test_complaints_of_the_recipe_name_the_phase(tmp_path) -> None:
    """Sums, divisors, sources, segments, ramps and ranges that do not fit, each with the fix."""
    two = "phases=[{tokens=15360}, {tokens=15360, %s}]"
    expected = {
        (two % "tokens_per_step=100",): [
            "phases.2.tokens_per_step = 100 is no multiple of dataset.sequence_length = 64",
            "Fix: 64 or 128"],
        (two % "tokens_per_step=30720",): [
            "phases.2.tokens = 15360 is less than one step of phases.2.tokens_per_step = 30720"],
        (two % "sequence_length=96",): [
            "dataset.sequence_length = 64 does not divide the longest of the run, "
            "phases.2.sequence_length = 96",
            "Fix: phases.2.sequence_length = 64 or 128"],
        (two % "mixture={c=1}",): ["phases.2.mixture.c: no source has this name. Fix: a, b"],
        (two % "warmup_share=0.1",): [
            "phases.2.warmup_share belongs to a new segment", "Fix: phases.2.learning_rate"],
        (two % 'learning_rate=1e-4, schedule="wsd", warmup_share=0.9, decay_share=0.2',): [
            "phases.2.warmup_share = 0.9 and phases.2.decay_share = 0.2 are more than the whole segment"],
        (two % "sequence_length=128", "model.max_position_embeddings=64"): [
            "model.max_position_embeddings = 64 is less than phases.2.sequence_length = 128"],
        (two % "tokns_per_step=64",): [
            "unknown key phases.2.tokns_per_step; the nearest known key is phases.2.tokens_per_step"],
        (two % "sequence_length=64", "train.tokens=1000000"): [
            "train.tokens = 1000000 is not the sum of the phases' tokens, 30720. Fix: leave train.tokens "
            "out"],
        ("train.batch_ramp={first_tokens_per_step=512, step_tokens=100, tokens=3072}",): [
            "train.batch_ramp.step_tokens = 100 is no multiple of dataset.sequence_length = 64. "
            "Fix: 64 or 128"],
        ("train.batch_ramp={first_tokens_per_step=512, step_tokens=640, tokens=3072}",): [
            "does not arrive at train.tokens_per_step = 1536. Fix: train.tokens_per_step = 1152"],
        ("train.batch_ramp={first_tokens_per_step=512, step_tokens=512, tokens=15360}",
         two % "sequence_length=64"): [
            "train.batch_ramp.tokens = 15360 does not end before phases.1.tokens = 15360 does"],
        ("train.skip_steps=[[5, 3]]",): [
            "train.skip_steps: [5, 3] ends before it begins. Fix: [3, 5]"],
    }  # fmt: skip
    for sets, parts in expected.items():
        text = complaint(tmp_path, *sets)
        assert all(part in text for part in parts), text
        assert "\n" not in text or "schedule" in sets[0], text


def test_complaints_of_the_plan_name_the_phase(tmp_path) -> None:
    """Ranks that cannot share a phase's or the ramp's steps, lengths that do not split, text read too often
    over all phases together, ranges beyond the end.
    """
    finish_tokenizer(tmp_path / "tokenizer", 300)
    finish_pack(tmp_path / "tokens", {"a": 64 * 300 + 1, "b": 64 * 100 + 1}, heldout=640)
    step = 64 * 24

    def phases(**second) -> dict:
        return {"phases": [{"tokens": step * 10}, {"tokens": step * 10} | second]}

    text = refusal(recipe(**phases(tokens_per_step=64 * 3)), tmp_path, 4, "cpu")
    assert (
        "phases.2.tokens_per_step = 192 is 3 sequences of dataset.sequence_length = 64, but each of 4" in text
    )
    assert "Fix: tokens_per_step 256, or at most 3 data-parallel ranks" in text
    ramp = {"first_tokens_per_step": 64 * 6, "step_tokens": 64 * 6, "tokens": step * 2}
    resolved = resolve(recipe(train={"batch_ramp": ramp}), tmp_path, 8, "cpu")
    assert [
        (phase.sequences_per_step, placed.micro_batch_sequences * placed.micro_batches_per_step)
        for phase, placed in zip(resolved.identity.phases, resolved.placement.phases)
    ] == [(6, 1), (12, 2), (18, 3), (24, 3)]  # a ramp may begin with fewer sequences than ranks
    text = refusal(
        recipe(layout={"context": 4}, **phases(sequence_length=4, tokens_per_step=96)), tmp_path, 4, "cpu"
    )
    assert "phases.2.sequence_length = 4 does not split into 2 × layout.context = 8" in text
    # 400 sequences in all; each phase alone passes, both together read them 4.8 times.
    thousand = {"phases": [{"tokens": step * 40}, {"tokens": step * 40}]}
    assert resolve(recipe(phases=thousand["phases"][:1]), tmp_path, 1, "cpu").identity.total_steps == 40
    text = refusal(recipe(**thousand), tmp_path, 1, "cpu")
    assert (
        "the phases' tokens = 122880 would read the source a 4.80 times" in text
        and "source b 4.80 times" in text
    )
    assert (
        resolve(recipe(dataset={"max_epochs": 4.8}, **thousand), tmp_path, 1, "cpu").identity.total_steps
        == 80
    )
    text = refusal(recipe(train={"skip_steps": [(3, 5), (9, 11)]}), tmp_path, 1, "cpu")
    assert text.startswith("train.skip_steps: [9, 11] goes beyond the run's last step. Fix: steps up to 10")
    resolved = resolve(recipe(train={"skip_steps": [(7, 9), (3, 5), (6, 6)]}), tmp_path, 1, "cpu")
    assert resolved.identity.train.skip_steps == ((3, 9),)


def numbers(*phases: str, ramp: BatchRamp | None = None, tokens: dict[str, int] | None = None):
    """The phases of a recipe with sequences of 64, read from 300 and 100 sequences of text."""
    text = ", ".join(phases)
    asked = full_phases(read_recipe("own_text", [
        "corpus.sources=a.txt,b.txt", "dataset.sequence_length=64", "train.tokens_per_step=1536",
        f"phases=[{text}]",
    ]).recipe)  # fmt: skip
    tokens = tokens or {"a": 64 * 300, "b": 64 * 100}
    mixtures = [phase.mixture or {"a": 3.0, "b": 1.0} for phase in asked]
    return asked, plan_phases(asked, mixtures, ramp, 7, lambda name, length: tokens[name])


def test_phases_follow_each_other_in_steps_and_samples() -> None:
    """A ramp's sizes are entries of the first phase; a later phase begins where the text of the one before
    ended; and tokens that do not fill a step are left out.
    """
    ramp = BatchRamp(first_tokens_per_step=512, step_tokens=512, tokens=2048)
    second = "{tokens=3000, sequence_length=32, tokens_per_step=960, mixture={b=1}, trainable=['embed']}"
    asked, phases = numbers("{tokens=6144}", second, ramp=ramp)
    keys = ("number", "first_step", "steps", "first_sample", "sequence_length", "sequences_per_step",
            "tokens_per_step", "order_first_sample")  # fmt: skip
    assert [tuple(getattr(phase, key) for key in keys) for phase in phases] == [
        (1, 1, 2, 0, 64, 8, 512, 0), (1, 3, 1, 16, 64, 16, 1024, 0), (1, 4, 2, 32, 64, 24, 1536, 0),
        (2, 6, 3, 80, 32, 30, 960, 80),
    ]  # fmt: skip
    assert [phase.offsets for phase in phases[:3]] == [{}, {}, {}]
    # 80 sequences of 64 tokens, three of four from a
    assert phases[3].offsets == {"a": 60 * 64, "b": 20 * 64}
    assert phases[3].mixture == {"b": 1} and phases[3].trainable == ("embed",) and not phases[0].trainable
    assert [phase.last_step for phase in phases] == [2, 3, 5, 8]
    assert numbers("{tokens=1536}")[1][0].steps == 1 and numbers("{tokens=3071}")[1][0].steps == 1
    one_more = numbers("{tokens=3584}", ramp=ramp)[1]
    assert [(one.tokens_per_step, one.steps) for one in one_more] == [(512, 2), (1024, 1), (1536, 1)]
    # a ramp that takes nearly all tokens leaves no full step
    whole = BatchRamp(first_tokens_per_step=512, step_tokens=512, tokens=2048)
    assert [(one.tokens_per_step, one.steps) for one in numbers("{tokens=3583}", ramp=whole)[1]] == [
        (512, 2), (1024, 1),
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.data())
def test_a_phase_with_a_ramp_trains_at_most_its_tokens(first: int, growth: int, sizes: int, data) -> None:
    """Step for step Megatron's sizes, as far as the phase's tokens reach, and no step more."""
    full = first + growth * sizes
    total = data.draw(st.integers(full, 40 * full))
    ramp_sequences = data.draw(st.integers(1, total - 1))
    ramp = BatchRamp(first_tokens_per_step=first * 64, step_tokens=growth * 64, tokens=ramp_sequences * 64)
    (asked,) = full_phases(read_recipe("own_text", [
        "corpus.sources=a.txt", "dataset.sequence_length=64", f"train.tokens_per_step={full * 64}",
        f"train.tokens={total * 64}",
    ]).recipe)  # fmt: skip
    phases = plan_phases([asked], [{"a": 1.0}], ramp, 7, lambda name, length: 64 * 10**6)
    ours = [one.sequences_per_step for one in phases for _ in range(one.steps)]
    theirs, done = [], 0
    while (size := min(full, first + done * sizes // ramp_sequences * growth)) + done <= total:
        theirs, done = [*theirs, size], done + size
    assert ours == theirs and sum(ours) <= total


def test_packed_documents_begin_a_new_epoch_where_the_length_changes() -> None:
    """Of as many epochs as were begun, each as long as the new length makes it; else text goes on."""
    packed = 'packing="best_fit"'
    tokens = {"a": {64: 640, 32: 672}, "b": {64: 6400, 32: 6464}}

    def offsets(length: int, first: int):
        asked = full_phases(read_recipe("own_text", [
            "corpus.sources=a.txt,b.txt", "dataset.sequence_length=64", "train.tokens_per_step=1536",
            f"dataset.{packed}", f"phases=[{{tokens={first}}}, {{tokens=3072, sequence_length={length}}}]",
        ]).recipe)  # fmt: skip
        mixtures = [{"a": 1.0, "b": 1.0}] * 2
        return plan_phases(asked, mixtures, None, 7, lambda name, long: tokens[name][long])[1].offsets

    # 12 sequences of each: a has ten in an epoch, so that two are begun; b one of a hundred
    assert offsets(64, 1536) == {"a": 12 * 64, "b": 12 * 64}
    assert offsets(32, 1536) == {"a": 2 * 672, "b": 6464}


@pytest.mark.parametrize(
    ("others", "offset"),
    [
        ((), 12 * 64),
        ((("32", "b"),), 12 * 64),
        ((("32", "b"), ("16", "b")), 12 * 64),
        ((("64", "b"), ("32", "b")), 12 * 64),
        ((("32", "ab"),), 4 * 640),  # 24 of 21 in an epoch of 32: two more are begun
        ((("32", "ab"), ("64", "b")), 4 * 640),
    ],
)
def test_a_source_goes_on_where_no_phase_of_another_length_read_it(others: tuple, offset: int) -> None:
    """Its first 12 sequences are of two epochs of ten. Phases of other lengths come before it is read again;
    where they read it, it goes on with a new epoch, else in the middle of its own.
    """
    lengths = ["64", *(length for length, _ in others), "64"]
    phases = ", ".join(f"{{tokens=1536, sequence_length={length}}}" for length in lengths)
    asked = full_phases(read_recipe("own_text", [
        "corpus.sources=a.txt,b.txt", "train.tokens_per_step=1536", 'dataset.packing="best_fit"',
        f"phases=[{phases}]",
    ]).recipe)  # fmt: skip
    mixtures = [dict.fromkeys(names, 1.0) for names in ("ab", *(names for _, names in others), "ab")]
    tokens = {"a": {64: 640, 32: 672, 16: 688}, "b": {64: 6400, 32: 6464, 16: 6480}}
    found = plan_phases(asked, mixtures, None, 7, lambda name, length: tokens[name][length])
    assert found[-1].offsets["a"] == offset


def test_learning_rates_are_segments_of_whole_steps() -> None:
    """Warm-up and decay are multiples of what divides all steps; a segment ends where the next begins."""
    rates = "learning_rate=1e-3, final_learning_rate_ratio=0.25, schedule='wsd'"
    third = f"{{tokens=15360, {rates}, warmup_share=0.1, decay_share=0.25}}"
    first = "{tokens=15360, learning_rate=1e-2, warmup_share=0.24, schedule='cosine'}"
    asked, phases = numbers(first, "{tokens=7680, tokens_per_step=1024}", third)
    one, two = plan_learning_rates(asked, phases)
    assert (one.first_token, one.tokens, one.peak, one.schedule) == (0, 15_360 + 7168, 0.01, "cosine")
    assert (one.warmup_tokens, one.decay_tokens) == (11 * 512, 22_528 - 11 * 512)  # 0.24 × 44 units of 512
    assert (two.first_token, two.tokens, two.peak, two.final) == (22_528, 15_360, 0.001, 0.00025)
    assert (two.warmup_tokens, two.decay_tokens) == (1536, 2 * 1536)  # 0.25 × 10 steps, to even


def test_epochs_are_counted_in_sequences() -> None:
    """The last sequence of a source is padded; each phase may read one more of each by whole quotas."""
    _, phases = numbers("{tokens=6144}", "{tokens=3072, mixture={a=1}}", tokens={"a": 64 * 9 + 1, "b": 64})
    found = epochs(phases, lambda name, length: {"a": 64 * 9 + 1, "b": 64}[name])
    assert found == {
        "a": (Fraction(96 * 3, 4 * 10) + Fraction(48, 10), Fraction(2, 10)), "b": (Fraction(24), Fraction(1)),
    }  # fmt: skip
    ramp = BatchRamp(first_tokens_per_step=512, step_tokens=512, tokens=2048)
    _, ramped = numbers("{tokens=6144}", ramp=ramp)
    assert epochs(ramped, lambda name, length: 640)["b"] == (Fraction(80, 4 * 10), Fraction(1, 10))


@pytest.mark.parametrize(
    ("tokens", "full", "levels"),
    [
        (1025, 1024, [(512, 3)]), (1024, 1024, [(512, 2)]),  # the third step begins below 1,025
        (600, 2048, [(512, 1), (1536, 1)]),  # shares end at 200, 400 and 600; the first step passes two
        (3072, 2048, [(512, 2), (1024, 1), (1536, 1)]),
    ],
)  # fmt: skip
def test_a_ramps_steps_by_hand(tokens: int, full: int, levels: list[tuple[int, int]]) -> None:
    """A size whose share is over has no step, and is not there."""
    ramp = BatchRamp(first_tokens_per_step=512, step_tokens=512, tokens=tokens)
    assert ramp_steps(ramp, full) == levels
