"""A contender of several ranks that rank 0 asks: its result on all, and the errors of each rank."""

from typing import Any

import pytest
import torch

from kielo.artifact.scores import TaskScore
from kielo.evaluate.asked_by_first import asked_by_first
from kielo.evaluate.contender import Contender
from kielo.ranks.world import world_of_job
from tests.started_ranks import run_ranks

SCORE = TaskScore(task="a", metric="acc,none", value=0.5, questions=2, shots=0)
TOKENS = torch.tensor([[1, 2, 3]])


def on_a_rank(kind: str) -> tuple[Any, list[tuple[int, Any]]]:
    """The result, and the calls of this rank's model. The ranks' answers are added up."""
    calls: list[tuple[int, Any]] = []

    def logits(tokens_bs: torch.Tensor, documents_bs: torch.Tensor | None) -> torch.Tensor:
        rank = torch.distributed.get_rank()
        calls.append((tokens_bs.tolist(), None if documents_bs is None else documents_bs.tolist()))
        if kind == "broken model" and rank == 1:
            raise RuntimeError("no memory is left")
        one = torch.tensor([10.0**rank])
        torch.distributed.all_reduce(one)
        return one

    def work(asked: Contender) -> Any:
        assert torch.distributed.get_rank() == 0
        found = [float(asked.logits(TOKENS, None)), float(asked.logits(TOKENS, TOKENS - 1))]
        if kind == "full disk":
            raise OSError(28, "No space left on device", "results/a")
        return found, SCORE

    tokenizer: Any = None  # no text is encoded
    contender = Contender("test", logits, tokenizer, 0, 0, 16, False, torch.device("cpu"))
    with world_of_job(60, "cpu"):
        return asked_by_first(contender, work), calls


def test_all_ranks_compute_and_have_the_result() -> None:
    expected = ([11.0, 11.0], SCORE), [([[1, 2, 3]], None), ([[1, 2, 3]], [[0, 1, 2]])]
    assert run_ranks(on_a_rank, 2, "good") == [expected, expected]


@pytest.mark.full
def test_an_error_of_rank_0_ends_all_ranks_with_its_reason() -> None:
    with pytest.raises(RuntimeError) as caught:
        run_ranks(on_a_rank, 3, "full disk")
    for rank in (0, 1, 2):
        said = f"[rank {rank}] kielo.recipe.errors.KieloError: rank 0: results/a: No space left on device"
        assert said in str(caught.value)


@pytest.mark.full
def test_an_error_inside_of_a_computation_is_raised_on_its_rank() -> None:
    with pytest.raises(RuntimeError, match=r"\[rank 1\] RuntimeError: no memory is left"):
        run_ranks(on_a_rank, 2, "broken model")
