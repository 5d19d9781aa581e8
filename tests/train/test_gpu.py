"""The same run on a GPU: what gloo and the CPU cannot show."""

from pathlib import Path

import pytest
import torch

from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from tests.started_ranks import run_ranks
from tests.train.test_train import on_rank
from tests.train.tiny_run import resolve, write_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def losses(folder: Path) -> torch.Tensor:
    return torch.tensor(
        [row.loss for row in of_kind(read_metrics(folder / "train" / "metrics.jsonl"), TrainingStep)]
    )


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-3)])
def test_a_gpu_trains_as_the_cpu_does(tmp_path, precision, tolerance):
    """20 losses on NCCL against 20 on gloo, fp32 on the CPU. fp32: sums in another order, grown over 20
    steps; bf16: 8 bits of mantissa.
    """
    write_tokens(tmp_path / "tokens")
    run_ranks(on_rank, 1, resolve(tmp_path))
    truth = losses(tmp_path)
    other = tmp_path / "gpu"
    other.mkdir()
    write_tokens(other / "tokens")
    run_ranks(on_rank, 1, resolve(other, device="cuda", precision=precision))
    assert len(truth) == 20
    torch.testing.assert_close(losses(other), truth, rtol=tolerance, atol=0)
