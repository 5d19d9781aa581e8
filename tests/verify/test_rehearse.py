"""`kielo rehearse`: what one process imagines is what ranks that are there hold, compute and send."""

import gc
import json
import re
import time
from bisect import bisect_right
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import debug
from torch.profiler import ProfilerActivity, profile, record_function

from kielo.cli.main import main
from kielo.cli.rehearse import chosen_ranks
from kielo.parallel import projection
from kielo.parallel.mesh import build_mesh
from kielo.ranks.world import start_world
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.software import schedule_complaint
from kielo.resolve.state_bytes import state_bytes
from kielo.resolve.text import imagined_text
from kielo.train.build import laid_out
from kielo.verify import rehearse as room
from kielo.verify.rank_watch import RankWatch
from kielo.verify.rehearse import WatchedStep, heaviest_phase, rehearse, rehearsed_micro_batches
from kielo.verify.torch_fakes import groups_of
from tests.started_ranks import run_ranks

TINY = [
    "model.vocab_size=4098",
    "model.vocab_multiple=2",
    "model.hidden_size=64",
    "model.intermediate_size=160",
    "model.num_hidden_layers=3",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=4",
    "dataset.sequence_length=128",
    "model.tie_word_embeddings=false",
    "train.micro_batch_sequences=1",
    "train.tokens_per_step=512",
    "train.loss_chunk_tokens=64",
]
LAYOUTS = {
    "tensor, bf16": ("layout.tensor=2", "train.precision=bf16", "train.tokens_per_step=256"),
    "shard, unequal rows": (
        "layout.zero=3",
        "layout.recompute=full",
        "model.vocab_size=4097",
        "model.vocab_multiple=1",
    ),
    "tensor x pipeline": (
        "layout.tensor=2",
        "layout.pipeline=2",
        "layout.recompute=attention",
        "train.tokens_per_step=384",
    ),
}
_NO_ZBV = schedule_complaint("zbv", torch.__version__)
STEPS = 4


def planned(ranks: int, *sets: str) -> Resolved:
    recipe = read_recipe("demo_estonian", [*TINY, *sets]).recipe
    return resolve(recipe, "no_such_folder", ranks, "cpu", text=imagined_text(recipe))


def wait_patiently() -> None:
    """Both ways to wait for a collective: torch's own, and the operator that tensor ranks call."""

    def patiently(wait):
        def patient(*words):
            done = wait(*words)
            time.sleep(0.005)
            return done

        return patient

    torch.distributed.Work.wait = patiently(torch.distributed.Work.wait)
    projection.wait = patiently(projection.wait)


def real_rank(jobs: list[Resolved]) -> list[tuple[dict, int]]:
    """Runs each job on a rank that is there: what its step counts,
    and its peak by the memory events of torch's profiler.

    A thread of gloo lets go of a gathered tensor when it next gets to run, after the wait for it has
    returned: up to a sixth of the peak would outlive its last use. So it is given time to run after each
    wait, and the lowest step counts.
    """
    wait_patiently()
    world = start_world(60, "cpu")
    found = []
    for resolved in jobs:
        index = heaviest_phase(resolved)
        many = rehearsed_micro_batches(resolved, resolved.placement.phases[index])[1]
        mesh = build_mesh(world, resolved.placement.layout)
        model = laid_out(resolved.identity, resolved.placement, mesh, resolved.identity.train.precision)
        events = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with events as profiler, RankWatch(*groups_of(mesh)) as watch:
            step = WatchedStep(resolved, index, mesh, model, world, watch)
            step.run(many)  # neighbours agree on shapes in the first step
            for number in range(STEPS):
                with record_function(f"step {number}"):
                    counts = step.run(many)
        found.append((counts, lowest_peak(profiler.profiler.kineto_results.events())))
        del step, model
        gc.collect()  # or the next job's record begins with what is given back of this one
    return found


def lowest_peak(events) -> int:
    """Return the bytes that a step begins with and the most that it adds, each the least of all steps.

    The events lack what a thread of gloo gives back, so a step may seem to begin with tensors of an earlier
    one.
    """
    begins = [
        next(event.start_ns() for event in events if event.name() == f"step {number}")
        for number in range(STEPS)
    ]
    held, levels, peaks = 0, [0] * STEPS, [0] * STEPS
    last = -1
    for event in sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()
    ):
        step = bisect_right(begins, event.start_ns()) - 1
        if step > last:
            levels[step], last = held, step
        held += event.nbytes()
        if step >= 0:
            peaks[step] = max(peaks[step], held)
    return min(levels) + min(peak - level for peak, level in zip(peaks, levels, strict=True))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "shard, unequal rows"),
        pytest.param(2, "tensor, bf16", marks=pytest.mark.full),
        pytest.param(4, "tensor x pipeline", marks=pytest.mark.full),
    ],
)
def test_a_rehearsal_holds_and_sends_what_real_ranks_do(ranks, layout):
    """Peak memory within 10 % of torch's profiler on gloo ranks; collectives and FLOPs the same to the last
    byte; and parameters, gradients and optimiser state are what `resolve/state_bytes.py` computes, exactly.
    """
    jobs = [planned(ranks, *LAYOUTS[layout])]
    found = run_ranks(real_rank, ranks, jobs)
    for number, resolved in enumerate(jobs):
        for rank in (0, ranks - 1):
            counts, peak = found[rank][number]
            rehearsal = rehearse(resolved, rank)
            assert rehearsal["rehearsed_micro_batches"] == rehearsal["micro_batches_per_step"] > 1
            assert rehearsal["state_bytes"] == rehearsal["computed_state_bytes"]
            assert rehearsal["peak_bytes"] == pytest.approx(peak, rel=0.1)
            sent = {
                (row["axis"], row["operation"]): (row["count"], row["bytes"])
                for row in rehearsal["collectives"]
            }
            assert sent == {
                what: (counts[kind, what], counts["bytes", what]) for kind, what in counts if kind == "calls"
            }
            assert rehearsal["flops"] == {
                what: counts[kind, what] for kind, what in counts if kind == "flops"
            }


@pytest.mark.parametrize(
    ("ranks", "sets"),
    [
        pytest.param(
            4,
            ("layout.pipeline=2", "layout.pipeline_schedule=zbv", "model.tie_word_embeddings=true"),
            marks=pytest.mark.skipif(_NO_ZBV is not None, reason=str(_NO_ZBV)),
        ),
        (4, ("layout.pipeline=2", "model.tie_word_embeddings=true", "layout.zero=2")),
        pytest.param(
            6, ("layout.shard=3", "layout.context=2", "train.tokens_per_step=1536"), marks=pytest.mark.full
        ),
        pytest.param(
            4,
            (
                "layout.replicate=2",
                "layout.tensor=2",
                "model.model_type=qwen3",
                "model.vocab_size=4097",
                "model.vocab_multiple=8",
            ),
            marks=pytest.mark.full,
        ),
    ],
)
def test_bytes_of_the_state_are_computed_exactly(ranks, sets):
    """They are exact also for stages in a V, tied embeddings on two stages, three shards of unequal rows,
    and padded vocabularies.
    """
    resolved = planned(ranks, *sets)
    for rank in (0, ranks - 1):
        rehearsal = rehearse(resolved, rank)
        assert rehearsal["state_bytes"] == rehearsal["computed_state_bytes"]
        assert all(rehearsal["state_bytes"].values())


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param(("layout.pipeline=2", "layout.tensor=2"), marks=pytest.mark.full),
        pytest.param(("layout.shard=4", "layout.zero=2"), marks=pytest.mark.full),
    ],
)
def test_a_long_schedule_counts_as_if_it_were_run_whole(sets, monkeypatch):
    """Eight micro-batches of which four were run, and all of them: the same collectives, FLOPs and peaks.

    The tokens and labels of all, 128 of 8 bytes each, count from the start.
    """
    resolved = planned(4, *sets, f"train.tokens_per_step={128 * 8 * (4 if 'layout.shard=4' in sets else 1)}")
    monkeypatch.setattr(room, "rehearsed_micro_batches", lambda *_: (2, 4))
    short = rehearse(resolved, 1)
    assert short["rehearsed_micro_batches"] == 4 < short["micro_batches_per_step"] == 8
    monkeypatch.setattr(room, "rehearsed_micro_batches", lambda *_: (4, 8))
    whole = rehearse(resolved, 1)
    assert short["collectives"] == whole["collectives"] and short["flops"] == whole["flops"]
    assert short["peak_bytes"] == pytest.approx(whole["peak_bytes"], rel=0.005)
    for name, peak in whole["peaks"].items():
        assert short["peaks"][name]["bytes"] == pytest.approx(peak["bytes"], abs=5000)
        assert short["peaks"][name]["kinds"]["batch"] == pytest.approx(8 * 2 * 128 * 8, abs=100)


def test_a_leak_shows(monkeypatch):
    """Broken on purpose: a pass that keeps what it made is found by the ledger, byte for byte.

    Of the sound one each kind of memory is known by hand. As much as there is fits.
    """
    more = ("dataset.mask_documents=true", "train.hidden_dropout=0.1", "checkpoint.memory_every_steps=1")
    resolved = planned(2, *more)
    kept, before = [], WatchedStep.batch
    monkeypatch.setattr(room, "usable_bytes", lambda card: 10**9)
    monkeypatch.setattr(room, "needed_bytes", lambda held, peak: 10**9)
    node = SimpleNamespace(devices_per_node=1, memory_gib_per_node=3)
    began = time.monotonic()
    whole = rehearse(resolved, 0, node)
    assert 0 < whole["seconds"] <= time.monotonic() - began
    assert whole["fits"] is True and whole["usable_bytes"] == whole["needed_bytes"] == 10**9
    held, sound = whole["state_bytes"], whole["peak_bytes"]
    assert sound == max(peak["bytes"] for peak in whole["peaks"].values())
    for peak in whole["peaks"].values():
        kinds = peak["kinds"]
        # two micro-batches of 128 tokens: tokens, labels, documents, the key of dropout; how many count
        assert kinds["batch"] == 2 * (128 * (8 + 8 + 4) + 8) + 8
        assert (kinds["parameters"], kinds["optimiser"]) == (held["parameters"], held["optimiser"])
        assert kinds["tables"] == 2 * 128 * 4 * 4  # cosines and sines of half of a head's 8 numbers
    # a save's copies, and four in memory: its own and a neighbour's, twice while new ones are written
    each = 5 * (held["parameters"] + held["optimiser"]) + sound
    assert (whole["host_bytes_per_node"], whole["usable_host_bytes_per_node"]) == (each, 3 * 2**30)

    def leaking(step, micro_batches):
        kept.append(torch.empty(1000))
        return before(step, micro_batches)

    monkeypatch.setattr(WatchedStep, "batch", leaking)
    assert rehearse(resolved, 0)["peak_bytes"] == sound + 2 * 4000


def test_a_torch_that_cannot_rehearse_is_refused_by_name(monkeypatch):
    """Another version's inside is named with its version, before anything is started."""
    missing = "_clear_fast_path_sharding_prop_cache"
    monkeypatch.delattr(debug, missing)
    with pytest.raises(KieloError, match=f"torch {re.escape(torch.__version__)}.*{missing}"):
        rehearse(planned(2), 0)


def test_70b_fits_four_lumi_nodes_and_not_two():
    """State alone: at TP8 × PP4 a rank has room left for activations,
    at TP8 × PP2 it has not even room for itself.
    """
    recipe = read_recipe("estonian_llama31_70b", ["layout.shard=1"]).recipe
    held = {}
    for nodes, pipeline in ((4, 4), (2, 2)):
        wide = recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"pipeline": pipeline})})
        resolved = resolve(wide, "no_such_folder", 8 * nodes, "cuda", text=imagined_text(wide))
        held[nodes] = max(
            state_bytes(resolved.identity.model, resolved.placement.layout, 8 * stage).total
            for stage in range(pipeline)
        )
    assert held[4] < 40e9 < 64e9 < held[2]


def test_the_words_print_a_rank_and_refuse_what_cannot_be(capsys):
    """`kielo rehearse`: JSON of every stage; and complaints about a rank that is not there, and offload."""
    words = ["rehearse", "demo_estonian", "--ranks", "2", *(word for key in TINY for word in ("--set", key))]
    layout = ["--set", "layout.pipeline=2"]
    assert main([*words, *layout, "--all-stages", "--json"]) == 0
    rehearsals = json.loads(capsys.readouterr().out)
    assert [rehearsal["rank"] for rehearsal in rehearsals] == [0, 1]
    assert [rehearsal["axes"] for rehearsal in rehearsals] == [{"pipeline": 2}] * 2
    assert [rehearsal["coordinates"] for rehearsal in rehearsals] == [{"pipeline": 0}, {"pipeline": 1}]
    assert [rehearsal["stages"] for rehearsal in rehearsals] == [{"0": [0, 2]}, {"1": []}]
    for rehearsal in rehearsals:  # two ranks a node, on which devices have no memory of their own
        held = rehearsal["state_bytes"]
        each = held["parameters"] + held["optimiser"] + rehearsal["peak_bytes"]
        assert rehearsal["host_bytes_per_node"] == 2 * each
        assert rehearsal["usable_host_bytes_per_node"] == 4 * 2**30
    assert main([*words, *layout, "--stage", "1"]) == 0
    printed = capsys.readouterr().out
    assert "computed from the tensor-parallel plan: the same" in printed
    assert "a node has 4.295 GB: it fits" in printed
    assert main([*words, "--rank", "2"]) == 1
    assert "ranks 0 to 1" in capsys.readouterr().err
    assert main([*words, "--set", "layout.cpu_offload=true"]) == 1
    assert "layout.cpu_offload = false" in capsys.readouterr().err
    with pytest.raises(KieloError, match="stages 0 to 1"):
        chosen_ranks(planned(2, "layout.pipeline=2"), None, 2, False)


@pytest.mark.full
def test_fp8_and_moments_in_bf16_are_rehearsed():
    """Multiplied natively, which no processor can: FLOPs are those of bf16; each weight of the layers is
    gathered, and held whole, in one byte instead of two; its scale is one collective more; and moments take
    half. FP8 makes copies beside them.
    """
    few = ("layout.shard=2", "train.precision=bf16")
    wide = rehearse(planned(2, *few), 0)
    narrow = rehearse(planned(2, *few, "train.precision=fp8", "train.optimiser_state=bf16"), 0)
    assert narrow["flops"] == wide["flops"]
    matrices = 3 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 160)
    sent = [
        sum(row["bytes"] for row in one["collectives"] if row["operation"] == "all-gather")
        for one in (wide, narrow)
    ]
    assert sent[0] - sent[1] == matrices
    assert narrow["state_bytes"] == narrow["computed_state_bytes"]
    assert narrow["state_bytes"]["optimiser"] == pytest.approx(wide["state_bytes"]["optimiser"] / 2, rel=1e-3)
    gathered = [one["peaks"]["forward"]["kinds"]["gathered parameters"] for one in (wide, narrow)]
    assert gathered[0] - gathered[1] == pytest.approx(matrices, rel=0.01)
    calls = [
        sum(row["count"] for row in one["collectives"] if row["operation"] == "all-reduce")
        for one in (wide, narrow)
    ]
    assert calls[1] == calls[0] + 1


@pytest.mark.full
def test_a_pipeline_holds_messages_under_way_and_at_degree_2_shards_of_gradients():
    """Receive buffers do not grow with the micro-batches of a step; gradients take 4 bytes a parameter at
    ZeRO 1, and at ZeRO 2 on four shards a fourth of that, with the buffers of the reductions of the embedding
    and of a layer.
    """
    sets = ["layout.pipeline=2", "layout.shard=4", "model.hidden_size=256", "model.intermediate_size=704",
            "model.num_hidden_layers=16"]  # fmt: skip
    shards, hidden_state = 4, 4 * 128 * 256

    def first_rank(zero: int, micro_batches: int) -> tuple[dict, int]:
        tokens = f"train.tokens_per_step={128 * shards * micro_batches}"
        report = rehearse(planned(2 * shards, *sets, f"layout.zero={zero}", tokens), 0)
        assert report["micro_batches_per_step"] == micro_batches
        return report["peaks"]["backward"]["kinds"], shards * report["state_bytes"]["parameters"]

    few, whole = first_rank(1, 4)
    many, _ = first_rank(1, 16)
    scattered, _ = first_rank(2, 4)
    assert few["receive buffers"] == many["receive buffers"] <= hidden_state
    assert few["gradients"] == many["gradients"] == pytest.approx(whole, rel=0.01)
    assert whole / shards < scattered["gradients"] < whole / 2
