"""The check before a run is called finished: its weights and its held-out loss must be finite."""

import math

import torch
import torch.distributed as dist
from torch import nn

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.materialise import local
from kielo.recipe.errors import KieloError
from kielo.train.parts import Run

_WAY_BACK = "; move the newest checkpoints out of train/checkpoints, and the run goes on from one before"


def refuse_unsound_end(run: Run) -> None:
    """Raise KieloError on every rank, naming a weight that is not finite, or the held-out loss.

    A last step that was skipped is accepted: the weights are those of the sound step before it.
    """
    refuse_unsound_weights(run.current.model, run.device)
    loss = run.current.heldout.loss_at(run.state)
    if loss is not None and not math.isfinite(loss):
        raise KieloError(
            f"step {run.state.step}, the last: the held-out loss is {loss}, so the run is not "
            f"finished{_WAY_BACK}"
        )


@torch.no_grad()
def refuse_unsound_weights(model: nn.Module, device: torch.device) -> None:
    """Raise KieloError on every rank, naming weights that hold NaN or infinities.

    Each rank checks its shards, without memory of their size; one number is reduced over the ranks.
    """
    shards = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    shards = {name: shard for name, shard in shards.items() if shard.numel()}
    # aminmax returns NaN for both ends where there is one
    ends = [torch.stack(shard.aminmax()).float().to(device) for shard in shards.values()]
    bad = (
        ~torch.stack(ends).isfinite().all(dim=1) if ends else torch.zeros(0, dtype=torch.bool, device=device)
    )
    num_bad = bad.sum().float()
    if dist.is_initialized():
        dist.all_reduce(num_bad)
    if not num_bad:
        return
    ours = [name for name, is_bad in zip(shards, bad.tolist()) if is_bad]
    names = list(dict.fromkeys(name for of_rank in Agreement().gather(ours) for name in of_rank))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise KieloError(
        f"the weights hold NaN or infinities: {names[0]}{more}; so the run is not finished{_WAY_BACK}"
    )
