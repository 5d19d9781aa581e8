"""Megatron's arguments of batch, learning rate and optimiser to [train] and [[phases]]."""

import re
from collections.abc import Sequence
from math import cos, pi
from typing import Any

from kielo.recipe.from_script.script_arguments import TRANSLATED, Machine, Translation

_SMALLEST_RATE = 1e-12


def put_batch(to: Translation, machine: Machine) -> None:
    """Set tokens_per_step and its ramp. Refuse numbers that do not divide."""
    length, micro = to.value("--seq-length"), to.value("--micro-batch-size", 1)
    ranks = 1
    axes = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    for name in axes:
        ranks *= to.value(name, 1)
    replicas = None
    if machine.devices:
        if machine.devices % ranks:
            to.refuse(
                f"{machine.devices} devices of the job are no multiple of {ranks} ranks. Fix: other numbers",
                *axes,
            )
            return
        replicas = machine.devices // ranks
    if not to.has("--global-batch-size") and replicas is None:
        to.refuse("--global-batch-size is missing, and the devices are not known. Fix: give it in the script")
        return
    size = to.value("--global-batch-size", micro * (replicas or 1))
    if replicas and size % (micro * replicas):
        to.refuse(
            f"{size} sequences are no multiple of {micro} × {replicas} data-parallel ranks. Fix: a batch of "
            f"{max(1, size // (micro * replicas)) * micro * replicas}",
            "--global-batch-size",
            "--micro-batch-size",
        )
    elif size % micro:
        to.refuse(
            f"{size} is no multiple of {micro}. Fix: numbers that divide",
            "--global-batch-size",
            "--micro-batch-size",
        )
    to.put("train.tokens_per_step", size * length, "--global-batch-size")
    if to.has("--rampup-batch-size"):
        _ramp(to, size, length)


def _ramp(to: Translation, size: int, length: int) -> None:
    given = [one for word in to.value("--rampup-batch-size") for one in word.replace(",", " ").split()]
    numbers = [int(one) for one in given if re.fullmatch(r"\d[\d_]*", one)]
    if len(numbers) != 3 or len(given) != 3:
        to.refuse("takes three numbers. Fix: FIRST STEP SAMPLES", "--rampup-batch-size")
        return
    first, step, samples = numbers
    if first > size or step <= 0 or (size - first) % step:
        to.refuse(
            f"{first} sequences with steps of {step} do not arrive at {size}. Fix: a step that divides "
            f"{size - first}",
            "--rampup-batch-size",
            "--global-batch-size",
        )
        return
    ramp = {"first_tokens_per_step": first * length, "step_tokens": step * length, "tokens": samples * length}
    to.put("train.batch_ramp", ramp, "--rampup-batch-size")


def _sequences(to: Translation, samples: str, iters: str, tokens: str = "") -> int | None:
    """Return a length of the run in sequences. Megatron-DeepSpeed takes tokens before the others."""
    if tokens and to.has(tokens):
        return to.value(tokens) // to.value("--seq-length")
    if to.has(samples):
        return to.value(samples)
    if to.has(iters):
        return to.value(iters) * (to.keys["train.tokens_per_step"][0] // to.value("--seq-length"))
    return None


def _budget(to: Translation) -> int:
    """Return the sequences of the run. It ends at the first limit of tokens, samples and iterations."""
    limits = (
        _sequences(to, "--train-samples", "--train-iters"),
        _sequences(to, "--train-samples", "--train-iters", "--train-tokens"),
    )
    return min((limit for limit in limits if limit is not None), default=0)


def put_schedule(to: Translation) -> list[dict[str, Any]]:
    """Set budget, warm-up and decay. Return the phases, none if the run has one part."""
    length, step = to.value("--seq-length"), to.keys["train.tokens_per_step"][0]
    total = _budget(to)
    sizes = _step_schedule(to, total)
    if sizes:
        total = sum(tokens for tokens, _ in sizes) // length
    budget = ("--train-iters", "--train-samples", "--train-tokens")
    decay = _sequences(to, "--lr-decay-samples", "--lr-decay-iters", "--lr-decay-tokens") or total
    warm = _sequences(to, "--lr-warmup-samples", "--lr-warmup-iters", "--lr-warmup-tokens") or 0
    warm = warm or round(to.value("--lr-warmup-fraction", 0.0) * decay)
    if total * length < step or decay <= 0 or not 0 <= warm < decay:
        to.refuse(
            f"a run of {total} sequences, {warm} of them in the warm-up and {decay} in the decay", *budget
        )
        return []
    peak, least = to.value("--lr"), to.value("--min-lr", 0.0)
    if least > peak or peak <= 0:
        to.refuse("the final rate is above the peak. Fix: a smaller --min-lr", "--lr", "--min-lr")
        return []
    segment = min(decay, total)
    names = ("--lr-warmup-samples", "--lr-warmup-iters", "--lr-warmup-fraction", "--lr-warmup-tokens")
    to.put("train.warmup_share", float(f"{warm / segment:.10g}"), *names)
    ratio = _shape(to, total, decay, warm)
    decays = ("--lr-decay-samples", "--lr-decay-iters", "--lr-decay-tokens")
    rest = (total - decay) * length
    is_split = (
        rest >= step and least > _SMALLEST_RATE and to.value("--lr-decay-style", "linear") != "constant"
    )
    for name in decays:
        if to.has(name):
            to.say(name, TRANSLATED, _decay_said(decay, total, least, is_split))
    to.put("train.final_learning_rate_ratio", float(f"{ratio:.10g}"), "--min-lr")
    phases = sizes or [(total * length, step)]
    if not is_split:
        tokens = decay * length if rest >= step and least <= _SMALLEST_RATE and ratio < 1 else total * length
        if len(phases) == 1:
            to.put("train.tokens", tokens, *budget)
            return []
    for name in budget:
        if to.has(name):
            to.say(name, TRANSLATED, f"{total * length:_} tokens in the phases")
    found = _phases(phases, decay * length if is_split else total * length, least, step)
    if to.has("--step-batch-size-schedule"):
        to.say("--step-batch-size-schedule", TRANSLATED, f"{len(sizes)} phases with their tokens_per_step")
    return found


def _decay_said(decay: int, total: int, least: float, is_split: bool) -> str:
    if is_split:
        return f"a first phase decays, a second keeps {least:g}"
    if decay > total:
        return "the run ends before the decay does: the final rate is the rate at its end"
    if decay < total and least <= _SMALLEST_RATE:
        return "the run ends with the decay: at a rate of 0 nothing is learnt"
    return "the decay ends with the run"


def _phases(parts: Sequence[tuple[int, int]], decay: int, least: float, full: int) -> list[dict[str, Any]]:
    """Cut the parts at the end of the decay, after which a segment keeps the least rate."""
    found: list[dict[str, Any]] = []
    done, is_after = 0, False
    for tokens, step in parts:
        cut = round(max(0, min(tokens, decay - done)) / step) * step
        for part in (cut, tokens - cut):
            if part < step:
                continue
            phase: dict[str, Any] = {"tokens": part}
            if step != full:
                phase["tokens_per_step"] = step
            if done >= decay - step and found and not is_after:
                phase |= {"learning_rate": least, "final_learning_rate_ratio": 1, "warmup_share": 0}
                is_after = True
            done += part
            found.append(phase)
    return found


def _step_schedule(to: Translation, total: int) -> list[tuple[int, int]]:
    """Return (tokens, tokens per step) of --step-batch-size-schedule, none without it."""
    if not to.has("--step-batch-size-schedule"):
        return []
    length = to.value("--seq-length")
    units = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    steps = []
    for one in " ".join(to.value("--step-batch-size-schedule")).replace(",", " ").split():
        found = re.fullmatch(r"([\d.]+)([KMBT]?):(\d+)", one)
        if found is None or not int(found[3]):
            to.refuse(f"{one!r} is no THRESHOLD:BATCH. Fix: 0:768 250B:1536", "--step-batch-size-schedule")
            return []
        steps.append((round(float(found[1]) * units[found[2]]), int(found[3]) * length))
    parts = []
    for (begin, size), (end, _) in zip(steps, steps[1:], strict=False):
        if end <= begin:
            to.refuse("its thresholds do not grow", "--step-batch-size-schedule")
            return []
        parts.append((-(-(end - begin) // size) * size, size))
    last = steps[-1][1]
    if to.has("--train-samples"):
        rest = total * length - sum(tokens for tokens, _ in parts)
    else:
        rest = (to.value("--train-iters", 0) - sum(tokens // size for tokens, size in parts)) * last
    return [*parts, (rest // last * last, last)] if rest >= last else parts


def _shape(to: Translation, total: int, decay: int, warm: int) -> float:
    """Set the schedule, and return the final rate as a share of the peak."""
    style, least = to.value("--lr-decay-style", "linear"), to.value("--min-lr", 0.0) / to.value("--lr")
    done = (total - warm) / (decay - warm) if decay > total else 1.0
    if style == "constant":
        to.put("train.schedule", "linear", "--lr-decay-style")
        return 1.0
    if style == "WSD":
        return _wsd(to, total, decay, least)
    if style == "linear":
        to.put("train.schedule", "linear", "--lr-decay-style")
        return least + (1 - least) * (1 - done)
    if style == "cosine":
        to.put("train.schedule", "cosine", "--lr-decay-style")
    else:
        to.keys["train.schedule"] = ("cosine", "Kielo's default")
        to.drop("--lr-decay-style", f"changes the schedule: there is no {style}")
    if style == "cosine" and done < 1:
        to.say(
            "--lr-decay-style",
            TRANSLATED,
            "to the rate that a longer cosine has there; its shape differs a little",
        )
    return least + (1 - least) * 0.5 * (1 + cos(pi * done))


def _wsd(to: Translation, total: int, decay: int, least: float) -> float:
    """Set a schedule whose last part decays, and return the final rate as a share of the peak."""
    names = ("--lr-wsd-decay-samples", "--lr-wsd-decay-iters")
    part = _sequences(to, *names) or 0
    inside = max(0, part - max(0, decay - total))
    if not inside:
        to.put("train.schedule", "linear", "--lr-decay-style")
        for name in (*names, "--lr-wsd-decay-style"):
            if to.has(name):
                to.say(name, TRANSLATED, "the run ends before this decay begins: the rate stays")
        return 1.0
    to.put("train.schedule", "wsd", "--lr-decay-style")
    to.put("train.decay_share", float(f"{inside / min(decay, total):.10g}"), *names)
    form, done = to.value("--lr-wsd-decay-style", "exponential"), inside / part
    if form == "linear":
        to.drop("--lr-wsd-decay-style", "the decay is linear")
    elif to.has("--lr-wsd-decay-style"):
        to.drop("--lr-wsd-decay-style", f"changes the schedule: the decay is linear, not {form}")
    else:
        to.add_default("--lr-wsd-decay-style", "changes the schedule: the decay is linear, not exponential")
    rates = {
        "exponential": 2 * 0.5**done - 1,
        "cosine": 0.5 * (1 + cos(pi * done)),
        "minus_sqrt": 1 - done**0.5,
    }
    return least + (1 - least) * rates.get(form, 1 - done)


def put_optimiser(to: Translation) -> None:
    """Set the optimiser, dropout, z-loss and skipped steps."""
    kind = to.value("--optimizer", "adam")
    if kind == "adam":
        to.put("train.optimiser", "adamw", "--optimizer")
    else:
        to.drop("--optimizer", f"changes the training: there is no {kind}; the recipe has AdamW")
    share = to.value("--attention-dropout", 0.1)
    why = "changes the training: decoders have no dropout of attention's weights"
    if share:
        to.drop("--attention-dropout", why) if to.has("--attention-dropout") else to.add_default(
            "--attention-dropout 0.1", f"{why}, which is Megatron's default"
        )
    else:
        to.drop("--attention-dropout", "decoders have none")
    if to.is_on("--use-z-loss") and not to.has("--z-loss-strength"):
        to.put("train.z_loss", 1e-4, "--use-z-loss")
    elif to.has("--use-z-loss"):
        to.say("--use-z-loss", TRANSLATED, "train.z_loss has its weight")
    skipped: list[list[int]] = []
    for name in ("--iterations-to-skip", "--skip-train-iteration-range"):
        for word in to.value(name, ()):
            found = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
            if found is None:
                to.refuse(f"{word!r} is no range. Fix: 101-200", name)
            else:
                skipped.append([int(found[1]), int(found[2] or found[1])])
    if skipped:
        to.put("train.skip_steps", skipped, "--iterations-to-skip", "--skip-train-iteration-range")
