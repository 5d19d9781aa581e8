"""Parity with Hugging Face over several ranks: Kielo in the run's layout, then transformers under accelerate.

The two sides run in turn, so that a model is checked which fits the devices only once: what the first side
found is on disk while the second runs. In bf16 the mathematics are compared in fp32 first, by the first
step's weights, logits and gradients. Then both train in bf16, and losses may part by a multiple of what
rounding to bf16 does to transformers beside itself.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console

from kielo.artifact.lease import held
from kielo.artifact.manifest import Stage, write_stage
from kielo.artifact.stage_json import write_json
from kielo.artifact.verify_results import (
    FirstDifference,
    GradientNorms,
    Losses,
    Parity,
    Settings,
    loss_limits,
)
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.read_checkpoint import Verification
from kielo.dataset.batches import Batches
from kielo.parallel.mesh import Mesh, data_rank, data_ranks
from kielo.ranks.world import World, world_of_job
from kielo.recipe.sections import Precision
from kielo.resolve.resolved import Resolved, filled
from kielo.train.build import positions_of_rank
from kielo.verify.accelerate_ranks import AccelerateRanks
from kielo.verify.certificate import KIND, VERSION, print_parity
from kielo.verify.kielo_ranks import KieloRanks
from kielo.verify.parity import TRAININGS, relative_loss_difference
from kielo.verify.parity_size import (
    RanksOptions,
    asked_on_ranks,
    current_on_ranks,
    phase_of,
    refuse_too_large_parity,
    rows_of,
    scaled,
)
from kielo.verify.side_record import SideRecord, SideText, run_side
from kielo.verify.sketch import farthest, norm_of
from kielo.verify.trace import differing, relative_difference

# Relative, in fp32. Rounding was seen to move weights by 0, logits by 1e-6 and gradients by 1e-5.
WEIGHT_TOLERANCE, LOGITS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-4, 2e-4


@dataclass(frozen=True)
class Job:
    """The job that both sides run in: the run, scaled down, and what is asked of it."""

    resolved: Resolved
    checkpoint: Path
    options: RanksOptions
    world: World
    ranks: Agreement

    def kielo(self, precision: Precision, steps: int, is_traced: bool) -> SideRecord:
        """Run Kielo's side. Each data rank has its own sequences."""
        side = KieloRanks(self.resolved, self.world, self.checkpoint, precision)
        text = self._text(steps, side.mesh)
        return run_side(side, text, steps, is_traced)

    def accelerate(
        self, precision: Precision, steps: int, is_traced: bool, nudge_seed: int | None = None
    ) -> SideRecord:
        """Run transformers' side. Each rank has its own sequences."""
        identity, overrides = self.resolved.identity, self.options.hugging_face_overrides
        side = AccelerateRanks(identity, self.world, self.checkpoint, precision, overrides, nudge_seed)
        try:
            text = self._text(steps, None)
            return run_side(side, text, steps, is_traced)
        finally:
            side.close()

    def _text(self, steps: int, mesh: Mesh | None) -> SideText:
        """Return this rank's text, of a mesh or, without it, of ranks that all have other sequences."""
        identity, placement = self.resolved.identity, self.resolved.placement
        phase, end = phase_of(identity, self.options, steps), placement.end_of_text_id
        length, documents = phase.sequence_length, identity.dataset.mask_documents
        rank, size, positions = self.world.rank, self.world.size, None
        if mesh is not None:
            rank, size = data_rank(mesh), data_ranks(mesh)
            positions = positions_of_rank(length, mesh)
        rows = -(-phase.sequences_per_step // size)
        return SideText(
            batches=Batches(Path(placement.tokens_folder), identity.seed, phase, length, end, documents),
            end_of_text_id=end,
            last_step=phase.last_step,
            data_rank=rank,
            data_ranks=size,
            rows=rows if mesh is None else rows_of(placement.layout, rows),
            device=self.world.device,
            gather=self.ranks.gather,
            positions_s=positions,
        )


def verify_parity_on_ranks(
    resolved: Resolved,
    folder: Path,
    checkpoint: Callable[[], Path],
    options: RanksOptions,
    console: Console | None = None,
) -> Parity | None:
    """Compare both sides and write `folder`/parity.json. All ranks call it, and rank 0 gets the certificate.

    resolved: in the placement of this job. checkpoint: finds it, on rank 0. A certificate that passed and is
    current is returned. `console` prints the table.
    """
    train, device = resolved.placement.train, resolved.placement.device
    seconds = filled(train.start_timeout_seconds)
    with world_of_job(seconds, device, train.step_timeout_seconds) as world, ExitStack() as until_the_end:
        ranks = Agreement()
        ranks.on_first(lambda: until_the_end.enter_context(held(folder.parent)))
        found = ranks.on_first(checkpoint)
        options = options.fitting(resolved)
        refuse_too_large_parity(resolved, options)
        current = ranks.on_first(lambda: current_on_ranks(resolved, folder, found, options))
        if current is not None:
            if console is not None and world.rank == 0:
                print_parity(current, console)
            return current if world.rank == 0 else None
        made: list[Stage] = []  # on rank 0
        writing = write_stage(folder, KIND, VERSION, *asked_on_ranks(resolved, found, options))
        ranks.on_first(lambda: made.append(until_the_end.enter_context(writing)))
        Verification(ranks).require(found)
        job = Job(scaled(resolved, options), found, options, world, ranks)
        certificate = _compare(job, made[0].folder if made else None)
        if certificate is None:
            return None
        write_json(made[0].folder, certificate)
        made[0].counts.update(
            steps=options.steps,
            passed=certificate.passed,
            max_relative_loss_difference=certificate.max_relative_loss_difference,
        )
        if console is not None:
            print_parity(certificate, console)
        return certificate


def _compare(job: Job, folder: Path | None) -> Parity | None:
    """Run the sides in turn. folder: of the stage, on rank 0, which gets the certificate."""
    options = job.options
    parts: list[tuple[Precision, int, bool]] = [("fp32", options.steps, True)]
    if options.precision == "bf16":
        parts = [("fp32", 1, True), ("bf16", options.steps, False)]
    for name, run in (("kielo", job.kielo), ("accelerate", job.accelerate)):
        for precision, steps, is_traced in parts:
            record = run(precision, steps, is_traced)
            if folder is not None:
                record.write(folder, f"{name}_{precision}")
            del record
            _free(job.world)
    verdict = None if folder is None else _Verdict.of(folder, options)
    needs_rounding = job.ranks.on_first(lambda: verdict is not None and verdict.needs_rounding)
    rounding = _rounding(job, verdict) if needs_rounding else None
    return None if verdict is None else verdict.certificate(job, rounding)


def _rounding(job: Job, verdict: "_Verdict | None") -> list[float]:
    """Return the largest relative difference up to each step between transformers and itself, nudged."""
    theirs = job.ranks.on_first(lambda: verdict.theirs.steps.losses if verdict else [])
    largest = [0.0] * len(theirs)
    for seed in range(TRAININGS):
        nudged = job.accelerate(job.options.precision, job.options.steps, False, nudge_seed=seed)
        pairs = zip(nudged.steps.losses, theirs, strict=True)
        largest = [
            max(one, relative_loss_difference(*pair)) for one, pair in zip(largest, pairs, strict=True)
        ]
        _free(job.world)
    return list(accumulate(largest, max))


@dataclass(frozen=True)
class _Verdict:
    """Both sides' records: in fp32 with the first step's tensors, and in the precision of the steps."""

    options: RanksOptions
    ours: SideRecord
    theirs: SideRecord
    our_trace: SideRecord
    their_trace: SideRecord

    @staticmethod
    def of(folder: Path, options: RanksOptions) -> "_Verdict":
        ours, theirs, our_trace, their_trace = (
            SideRecord.read(folder, f"{name}_{precision}")
            for precision in (options.precision, "fp32")
            for name in ("kielo", "accelerate")
        )
        return _Verdict(options, ours, theirs, our_trace, their_trace)

    @property
    def differences(self) -> list[float]:
        pairs = zip(self.ours.steps.losses, self.theirs.steps.losses, strict=True)
        return [relative_loss_difference(*pair) for pair in pairs]

    @property
    def weight(self) -> tuple[str, float]:
        return farthest(self.our_trace.steps.weights, self.their_trace.steps.weights)

    @property
    def gradient(self) -> tuple[str, float]:
        """Return the gradient that differs most. One that is truly zero is nothing but rounding."""
        theirs = self.their_trace.steps.gradients
        floor = 1e-3 * max(map(norm_of, theirs.values()))
        return farthest(self.our_trace.steps.gradients, theirs, floor)

    @property
    def logits(self) -> tuple[float, float]:
        """Return the largest absolute and the relative difference of the first logits."""
        ours, theirs = self.our_trace.logits, self.their_trace.logits
        if ours is None or theirs is None:
            raise ValueError("a side was not traced")
        return (ours - theirs).abs().max().item(), relative_difference(ours, theirs)

    @property
    def settings(self) -> Settings:
        ours, theirs = (_with_rates(one) for one in (self.ours, self.theirs))
        # Compared as JSON, because the disk has turned tuples into lists.
        return Settings(ours=ours, theirs=theirs, differing=differing(ours, theirs))

    @property
    def first_loss(self) -> float:
        """Return the relative difference of the first step's losses in fp32."""
        return relative_loss_difference(self.our_trace.steps.losses[0], self.their_trace.steps.losses[0])

    @property
    def is_equal_at_first(self) -> bool:
        return (
            self.weight[1] <= WEIGHT_TOLERANCE
            and self.gradient[1] <= GRADIENT_TOLERANCE
            and self.logits[1] <= LOGITS_TOLERANCE
            and self.first_loss <= self.options.tolerance
            and not self.settings.differing
        )

    @property
    def needs_rounding(self) -> bool:
        return self.is_equal_at_first and not max(self.differences) <= self.options.tolerance

    def certificate(self, job: Job, rounding: list[float] | None) -> Parity:
        options = self.options
        limits = loss_limits(options.tolerance, rounding or [0.0] * options.steps)
        over = [not value <= limit for value, limit in zip(self.differences, limits, strict=True)]
        first_step = over.index(True) + 1 if any(over) else None
        passed = self.is_equal_at_first and first_step is None
        weight, gradient, settings = self.weight, self.gradient, self.settings
        is_logits_far = self.logits[1] > LOGITS_TOLERANCE
        first = FirstDifference(
            layer="head" if is_logits_far else None,
            where="the first logits, in fp32" if is_logits_far else None,
            relative_difference=self.logits[1] if is_logits_far else None,
            settings=settings.differing,
            weight=weight[0] if weight[1] > WEIGHT_TOLERANCE else None,
            gradient=gradient[0] if gradient[1] > GRADIENT_TOLERANCE else None,
            step=1 if self.first_loss > options.tolerance else first_step,
        )
        norms = GradientNorms(ours=self.ours.steps.gradient_norms, theirs=self.theirs.steps.gradient_norms)
        measured = {} if rounding is None else {"rounding_differences": rounding}
        ours, theirs = self.ours.steps.losses, self.theirs.steps.losses
        return Parity(
            passed=passed,
            max_relative_loss_difference=max(self.differences),
            logits_max_difference=self.logits[0],
            gradient_max_relative_difference=gradient[1],
            settings=settings,
            losses=Losses(ours=ours, theirs=theirs, relative_differences=self.differences, **measured),
            gradient_norms=norms,
            first_difference=None if passed else first,
            weights=str(job.checkpoint),
            layout=options.layout_in_words(job.resolved),
            **asdict(options),
        )


def _with_rates(record: SideRecord) -> dict[str, object]:
    steps = record.steps
    pairs = zip(steps.clipped_norms, steps.gradient_norms, strict=True)
    clipped = next((after for after, before in pairs if after < 0.999 * before), "never clipped")
    return steps.settings | {
        "learning rate of each step": steps.learning_rates,
        "clipping, norm let through": clipped,
    }


def _free(world: World) -> None:
    gc.collect()  # hooks and modules hold each other
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
