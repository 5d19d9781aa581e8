"""A run that is made longer: the last phase and the level part of its learning rate can grow.

(two descriptions of a run, the step of a checkpoint) → whether its steps are steps of the longer run too.
With warm-up, stable, decay (Hu et al. 2024) they are, while the rate is at its peak.
"""

from kielo.resolve.resolved import Identity


def is_longer(old: Identity, new: Identity) -> bool:
    """Return True if only the number of steps of the last phase, and with it the learning rate, grew."""
    return (
        new.total_steps > old.total_steps
        and _without_length(old) == _without_length(new)
        and len(old.learning_rates) == len(new.learning_rates)
        and old.learning_rates[:-1] == new.learning_rates[:-1]
    )


def _without_length(identity: Identity) -> list[object]:
    first, last = identity.phases[:-1], identity.phases[-1]
    return [*first, last.model_copy(update={"steps": 1})]


def last_level_step(identity: Identity) -> int:
    """Return the last step before the decay of the last segment, or 0 if no part of it is level."""
    segment = identity.learning_rates[-1]
    if segment.schedule != "wsd":
        return 0
    end = segment.first_token + segment.tokens - segment.decay_tokens
    below, above = 0, identity.total_steps
    while below < above:  # the last step whose tokens do not exceed `end`
        middle = (below + above + 1) // 2
        below, above = (middle, above) if identity.tokens_after(middle) <= end else (below, middle - 1)
    return below


def goes_on_level(old: Identity, new: Identity, step: int) -> bool:
    """Return True if steps 1 to `step` have the same learning rates in the longer run as in the run."""
    before, after = old.learning_rates[-1], new.learning_rates[-1]
    changes = {"tokens": 1, "decay_tokens": 0}
    same = before.model_copy(update=changes) == after.model_copy(update=changes)
    return same and not _masks_fade(old) and step <= min(last_level_step(old), last_level_step(new))


def _masks_fade(identity: Identity) -> bool:
    """Return True if the masking rate changes up to the end, so that a step's rate depends on the length."""
    train = identity.train
    return train.objective == "masked_tokens" and train.masking_rate != train.final_masking_rate


def way_to_go_on(old: Identity, new: Identity, step: int) -> str:
    """Return the fix for a person who asked for a longer run of which step `step` is no part."""
    before, after = old.learning_rates[-1], new.learning_rates[-1]
    level = last_level_step(old)
    again = (
        "train the longer run from the start under another name, or begin with the weights of this run: "
        "--set name=OTHER --set model.weights=hf:RUN/hf --set tokenizer.path=RUN/tokenizer"
    )
    if before.schedule != "wsd" or after.schedule != "wsd":
        return f'only train.schedule = "wsd" has a level part, which can grow; {again}'
    if _masks_fade(old):
        return f"train.masking_rate changes to train.final_masking_rate over the whole run; {again}"
    if step > level:
        return (
            f"step {step} is in the decay, which began after step {level}: move the checkpoints after step "
            f"{level} away, if an earlier one is kept, and resume from that; or {again}"
        )
    if before.warmup_tokens != after.warmup_tokens:
        return (
            "train.warmup_share is a share of the whole run; the same warm-up is "
            f"--set train.warmup_share={before.warmup_tokens / after.tokens:.9g}"
        )
    return f"the new rate would decay before step {step}: a smaller decay_share, or more tokens; or {again}"
