"""Check: five steps of training on the run's mesh have the losses, gradients and weights of one process.

The model is a tiny model of the run's family with the run's layout. Each rank first trains it alone on its
CPU, without any layout. Everything is in fp32, in which both must agree to rounding. So layouts, collectives
and the device's kernels are compared with the CPU's at once. Kernels of bf16 and FP8 are not checked.
"""

import math
from collections.abc import Sequence

from kielo.recipe.sections import Layout
from kielo.resolve.stages import num_stages
from kielo.train.precision import settle_matrix_products
from kielo.verify.layouts_cases import Case
from kielo.verify.layouts_rank import differences, train_laid_out
from kielo.verify.layouts_subject import Sizes, subject, train_plainly
from kielo.verify.preflight.job import STEPS, Finding, Job
from kielo.verify.screens import Worst

# Of the certificate of layouts on CPUs; ten times that between a GPU and a CPU, which sum in other orders (a
# guess: not measured on GPUs).
BARS = {
    "cpu": {"loss": 1e-5, "norm": 1e-5, "gradient": 2e-5, "weight": 2e-5},
    "cuda": {"loss": 1e-4, "norm": 1e-4, "gradient": 2e-4, "weight": 2e-4},
}


def measure(job: Job) -> dict[str, Worst]:
    layout = job.resolved.placement.layout
    # Layers are not compiled: that takes a minute, and training compiles its own.
    section = layout.model_dump(exclude={"pipeline_layers"}) | {"compile": False}
    case = Case(section, micro_batches_of(layout))
    of = subject(job.recipe, {}, sizes_of(layout))
    settle_matrix_products("fp32")
    truth = train_plainly(of, STEPS)
    outcome = train_laid_out(of, case, STEPS, job.world, job.mesh)
    return differences({name: tensor.cpu() for name, tensor in outcome.items()}, truth)


def micro_batches_of(layout: Layout) -> int:
    """Return the micro-batches of a rank's step: two, or enough for every schedule of a pipeline."""
    return 2 if layout.pipeline == 1 else num_stages(layout)


def sizes_of(layout: Layout) -> Sizes:
    """Return sizes that the layout's axes divide, at least as large as in the layouts' certificate."""
    inside, smallest = layout.tensor * layout.context, Sizes()
    ranks = layout.replicate * layout.shard
    return Sizes(
        sequences=_multiple(ranks * micro_batches_of(layout), smallest.sequences),
        length=_multiple(2 * inside, smallest.length),
        layers=max(smallest.layers, num_stages(layout)),
        key_value_heads=_multiple(inside, smallest.key_value_heads),
        intermediate_size=math.lcm(smallest.intermediate_size, layout.tensor),
        vocabulary_rows=math.lcm(smallest.vocabulary_rows, layout.tensor),
    )


def _multiple(of: int, least: int) -> int:
    return -(-least // of) * of


def judge(found: Sequence[dict[str, Worst]], job: Job) -> list[Finding]:
    """Refuse the job, of which any rank may be the cause: losses and norms are sums over all."""
    bars = BARS[job.world.device.type]
    findings = []
    for what, bar in bars.items():
        rank = max(range(len(found)), key=lambda rank: found[rank][what]["value"])
        worst = found[rank][what]
        if not worst["value"] <= bar:
            place = f"{worst['at']}; largest on rank {rank}"
            said = f"{what} is {worst['value']:.1e} off one process's ({place}); {bar:.0e} is allowed"
            findings.append(Finding(None, said))
    return findings


def summarise(found: Sequence[dict[str, Worst]], job: Job) -> str:
    worst = {what: max(one[what]["value"] for one in found) for what in found[0]}
    said = ", ".join(f"{what} {value:.1e}" for what, value in worst.items())
    return f"{STEPS} steps, largest differences from one process: {said}"
