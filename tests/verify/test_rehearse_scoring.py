"""Evaluation's forward pass as one process imagines it: what real ranks hold, and what was counted."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kielo.cli.main import main
from kielo.evaluate.score_on_ranks import bytes_of_scoring
from kielo.parallel.mesh import data_ranks
from kielo.ranks.world import start_world
from kielo.recipe.cards import accelerator
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Precision
from kielo.resolve.memory import usable_bytes
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.shares import rank_of_stage
from kielo.resolve.state_bytes import state_bytes
from kielo.resolve.text import imagined_text
from kielo.train.laid_out_model import LaidOutModel
from kielo.verify.rehearse import rehearse
from kielo.verify.rehearse_scoring import rehearse_scoring
from tests.started_ranks import run_ranks
from tests.verify.test_rehearse import LAYOUTS, STEPS, TINY, lowest_peak, planned, wait_patiently

FULL = pytest.mark.full


def real_pass(resolved: Resolved, precision: Precision, asks_tasks: bool) -> int:
    """The peak of a pass by the memory events of torch's profiler, as in `test_rehearse.py`."""
    wait_patiently()
    world = start_world(60, "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        laid = LaidOutModel.of(resolved, world, precision)
        length = resolved.identity.longest_sequence_length
        # 8,192 tokens of each rank, or of all ranks for questions
        rows = 8192 // length * (1 if asks_tasks else data_ranks(laid.mesh))
        tokens_bs = torch.zeros(rows, length, dtype=torch.int64)
        for number in range(STEPS):
            with record_function(f"step {number}"):
                if asks_tasks:
                    laid.logits(tokens_bs, None)
                else:
                    laid.losses(tokens_bs, None, tokens_bs)
    return lowest_peak(profiler.profiler.kineto_results.events())


@FULL
@pytest.mark.parametrize(
    ("layout", "asks_tasks"),
    [
        ("shard, unequal rows", False),
        ("shard, unequal rows", True),
        ("tensor, bf16", False),
        ("tensor, bf16", True),
        ("tensor x pipeline", True),
    ],
)
def test_a_rehearsed_pass_holds_what_real_ranks_do(layout: str, asks_tasks: bool) -> None:
    """Within 10 %. Not compared: windows of text in such a small pipeline, whose MB differ by up to 20 %."""
    precision: Precision = "bf16" if "bf16" in layout else "fp32"
    resolved = planned(4 if "pipeline" in layout else 2, *LAYOUTS[layout])
    ranks = resolved.placement.world_size
    found = run_ranks(real_pass, ranks, resolved, precision, asks_tasks, timeout_seconds=300)
    for rank in (0, ranks - 1):
        rehearsed = rehearse_scoring(resolved, rank, precision, asks_tasks)
        assert rehearsed["peak_bytes"] == pytest.approx(found[rank], rel=0.1)


def test_whole_logits_are_of_the_questions_and_not_of_rows_that_fill_up() -> None:
    """Three tensors of one sequence on four shards: a rank's own, all ranks' and their sum."""
    sets = ("layout.zero=3", "dataset.sequence_length=8192", "train.tokens_per_step=32768")
    resolved = planned(4, *sets)
    rehearsed = rehearse_scoring(resolved, 3, "fp32", True)
    logits = 4 * 8192 * 4098
    assert rehearsed["rows"] == 1
    assert 3 * logits < rehearsed["peak_bytes"] < 3.1 * logits
    held = state_bytes(resolved.identity.model, resolved.placement.layout, 3)
    assert rehearsed["held_bytes"] == held.parameters
    with pytest.raises(KieloError, match="ranks 0 to 3"):
        rehearse_scoring(resolved, 4, "fp32", True)


@FULL
@pytest.mark.parametrize(
    ("name", "ranks", "card"),
    [("estonian_llama31_8b", 8, "a100_64"), ("estonian_llama31_70b", 32, "mi250x_gcd")],
)
def test_evaluation_needs_less_than_training_and_no_more_than_was_counted(
    name: str, ranks: int, card: str
) -> None:
    """It holds for the first and the last pipeline rank, at the run's sequence length, in both precisions,
    of which one is asked tasks.
    """
    recipe = read_recipe(name).recipe
    resolved = resolve(recipe, run_folder(recipe), ranks, "cuda", card, text=imagined_text(recipe))
    layout = resolved.placement.layout
    for rank in {rank_of_stage(layout, 0), rank_of_stage(layout, layout.pipeline - 1)}:
        training = rehearse(resolved, rank)["needed_bytes"]
        works: list[tuple[Precision, bool]] = [("fp32", True), ("bf16", False)]
        for precision, asks_tasks in works:
            needed = rehearse_scoring(resolved, rank, precision, asks_tasks)["needed_bytes"]
            counted = bytes_of_scoring(resolved, layout, precision, asks_tasks)
            assert needed <= training <= usable_bytes(accelerator(card))
            assert needed <= 1.05 * counted


@FULL
def test_the_verb_rehearses_evaluation_and_parity(capsys) -> None:
    """The bytes of each, also as a share of the training's; an encoder is scored by one process."""
    words = ["rehearse", "demo_estonian", "--ranks", "2", "--evaluation"]
    words += [word for key in TINY for word in ("--set", key)]
    assert main([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    works = [
        f"{what} in {precision}" for precision in ("fp32", "bf16") for what in ("text", "tasks", "parity")
    ]
    assert list(found["evaluation_bytes"]) == works
    resolved = planned(2)
    expected = rehearse_scoring(resolved, 0, "bf16", True)["needed_bytes"]
    assert found["evaluation_bytes"]["tasks in bf16"] == expected
    assert main(words) == 0
    share = 100 * found["evaluation_bytes"]["text in fp32"] / found["needed_bytes"]
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("text in fp32"))
    assert row.endswith(f"\t{share:.0f} %")
    assert main(["rehearse", "demo_estonian_bert", "--ranks", "1", "--evaluation"]) == 1
    assert "one process scores an encoder" in capsys.readouterr().err
