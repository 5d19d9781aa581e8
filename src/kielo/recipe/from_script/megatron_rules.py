"""Megatron-LM's and Megatron-DeepSpeed's arguments to keys of a recipe: what has no key of the same value."""

import json
import re
from collections.abc import Callable, Sequence
from math import cos, pi
from pathlib import Path
from typing import Any

from kielo.recipe.from_script.bash_reader import read_script
from kielo.recipe.from_script.deepspeed_settings import fill, read_deepspeed
from kielo.recipe.from_script.script_arguments import (
    TRANSLATED,
    Machine,
    TranslatedScript,
    Translation,
    read_launcher,
    split_command,
    table,
    text_of_file,
    training_command,
)
from kielo.recipe.from_script.token_blends import put_blend, weighted_splits
from kielo.recipe.from_script.tokenizer_places import put_tokenizer

_SMALLEST_RATE = 1e-12
_LLAMA_3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_megatron(path: Path, variables: dict[str, str], model_type: str | None = None) -> TranslatedScript:
    """Translate the training command of a script. Raise KieloError for what contradicts itself.

    variables: values that win over the script's. model_type: a family in place of the arguments' own.
    """
    script, arguments = read_script(path, variables), table("megatron")
    command = training_command(script, arguments, path)
    launcher, words = split_command(command)
    to = Translation(path, script, arguments, "Megatron")
    machine = read_launcher(launcher, to)
    to.read(words)
    to.finish()
    settings = read_deepspeed(to, "--deepspeed_config")
    _require(to)
    to.finish()
    to.take_same()
    fill(to, settings)
    _model(to, model_type)
    _vocabulary(to)
    _batch(to, machine)
    _optimiser(to)
    _layout(to, machine, settings)
    _recomputation(to)
    _precision(to, settings)
    to.finish()
    phases = _schedule(to)
    _data(to)
    _run(to)
    to.finish()
    return TranslatedScript(
        to.keys, to.comments, to.rows(), machine, script.sbatch.get("partition", ""), phases
    )


def _require(to: Translation) -> None:
    """Refuse a script without a shape, and arguments that contradict each other."""
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--lr"):
        if not to.has(name):
            to.refuse(f"{name} is missing. Fix: give it in the script")
    both = [
        ("--bf16", "--fp16"),
        ("--train-iters", "--train-samples"),
        ("--train-iters", "--rampup-batch-size"),
        ("--train-iters", "--lr-decay-samples"),
        ("--train-iters", "--lr-warmup-samples"),
        ("--train-samples", "--lr-decay-iters"),
        ("--train-samples", "--lr-warmup-iters"),
        ("--lr-warmup-fraction", "--lr-warmup-iters"),
        ("--lr-warmup-fraction", "--lr-warmup-samples"),
        ("--rampup-batch-size", "--step-batch-size-schedule"),
        ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    ]
    for first, second in both:
        if to.has(first) and to.has(second) and not {to.value(first), to.value(second)} & {0}:
            to.refuse("contradict each other. Fix: leave one of them out", first, second)
    if not (to.has("--train-iters") or to.has("--train-samples") or to.has("--train-tokens")):
        to.refuse("--train-iters and --train-samples are missing. Fix: give one of them in the script")


def _must_divide(to: Translation, whole: int, part: int, *names: str) -> None:
    if part <= 0 or whole % part:
        to.refuse(f"{whole} is no multiple of {part}. Fix: numbers that divide", *names)


# --- The model


def _model(to: Translation, model_type: str | None) -> None:
    width, heads = to.value("--hidden-size"), to.value("--num-attention-heads")
    if not to.has("--kv-channels"):
        _must_divide(to, width, heads, "--hidden-size", "--num-attention-heads")
    gated = to.is_on("--swiglu") or to.value("--glu-activation") == "swiglu"
    family = model_type or _family(to, gated)
    said = ("--position-embedding-type", "--use-rotary-position-embeddings", "--normalization", "--swiglu",
            "--glu-activation", "--qk-layernorm", "--window-size")  # fmt: skip
    to.put("model.model_type", family, *said)
    if to.has("--ffn-hidden-size"):
        inner = to.value("--ffn-hidden-size")
    else:
        inner = width * 4 * 2 // 3 // 64 * 64 if gated else 4 * width
    to.put("model.intermediate_size", inner, "--ffn-hidden-size")
    groups = to.value("--num-key-value-heads")  # Megatron-DeepSpeed's
    if to.has("--group-query-attention"):
        groups = to.value("--num-query-groups", 1)
    if groups is not None:
        of_groups = ("--num-query-groups", "--group-query-attention", "--num-key-value-heads")
        _must_divide(to, heads, groups, "--num-attention-heads", *of_groups)
        to.put("model.num_key_value_heads", groups, *of_groups)
    is_bloom_like = family in ("bloom", "gpt2", "gpt_neox", "opt")
    key = "layer_norm_epsilon" if is_bloom_like else "rms_norm_eps"
    to.put(f"model.{key}", to.value("--norm-epsilon", 1e-5), "--norm-epsilon")
    to.put("model.initializer_range", to.value("--init-method-std", 0.02), "--init-method-std")
    tied = not to.has("--untie-embeddings-and-output-weights")
    to.put("model.tie_word_embeddings", tied, "--untie-embeddings-and-output-weights")
    _biases(to, family)
    _positions(to, family)
    if family == "bloom" and not to.has("--embed-layernorm"):
        to.add_default(
            "--embed-layernorm", "changes the model: a bloom always has a norm after the embedding"
        )
    elif family == "bloom":
        to.say("--embed-layernorm", TRANSLATED, "a bloom always has it")
    else:
        to.drop("--embed-layernorm", f"changes the model: a {family} has no norm after the embedding")
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads"):
        if to.value(name) <= 0:
            to.refuse("is not above 0. Fix: a number above 0", name)
    length, positions = to.value("--seq-length"), to.value("--max-position-embeddings")
    if positions is not None and positions < length:
        to.refuse(
            f"{length} tokens have only {positions} positions", "--seq-length", "--max-position-embeddings"
        )


def _family(to: Translation, gated: bool) -> str:
    """Return the family that positions, norms and activation make."""
    positions = to.value("--position-embedding-type", "learned_absolute")
    if to.has("--use-rotary-position-embeddings") or positions == "rotary":
        positions = "rope"
    norm = to.value("--normalization", "LayerNorm")
    kind = (positions, norm.lower(), gated)
    if kind == ("rope", "rmsnorm", True):
        if to.is_on("--qk-layernorm"):
            return "qwen3"
        if to.is_on("--add-qkv-bias") and to.is_on("--disable-bias-linear"):
            return "qwen2"
        return "mistral" if to.has("--window-size") else "llama"
    families = {
        ("rope", "layernorm", False): "gpt_neox",
        ("alibi", "layernorm", False): "bloom",
        ("learned_absolute", "layernorm", False): "gpt2",
    }
    if kind in families:
        return families[kind]
    names = ("--position-embedding-type", "--use-rotary-position-embeddings", "--normalization", "--swiglu",
             "--glu-activation")  # fmt: skip
    to.refuse(
        f"no family of Kielo has {positions} positions, {norm} and {'a gated' if gated else 'no gated'} MLP. "
        "There are rope, RMSNorm and a gated MLP (llama); rope, alibi or learned_absolute positions with "
        "LayerNorm and no gate (gpt_neox, bloom, gpt2). Fix: --model-type llama for the nearest",
        *names,
    )
    return "llama"


def _biases(to: Translation, family: str) -> None:
    has_bias = not to.has("--disable-bias-linear")
    is_usual = family in ("gpt2", "gpt_neox", "bloom", "opt")
    attention = has_bias or to.is_on("--add-qkv-bias")
    if family in ("llama", "mistral", "qwen2", "qwen3"):
        if family != "qwen2":
            to.put("model.attention_bias", attention, "--disable-bias-linear", "--add-qkv-bias")
        to.put("model.mlp_bias", has_bias, "--disable-bias-linear")
    elif is_usual and not has_bias:
        to.drop("--disable-bias-linear", f"changes the model: a {family} has biases")
    to.drop(
        "--add-qkv-bias", f"a {family} has it" if family == "qwen2" or is_usual else "as model.attention_bias"
    )


def _positions(to: Translation, family: str) -> None:
    is_rotary = family not in ("bloom", "gpt2", "opt")
    for name in ("--rotary-base", "--rotary-percent", "--use-rope-scaling", "--rope-scaling-factor",
                 "--rotary-seq-len-interpolation-factor"):  # fmt: skip
        if not is_rotary:
            to.drop(name, f"a {family} has no rotary positions")
    to.drop(
        "--no-position-embedding",
        "rotary positions need no table" if is_rotary else f"a {family} has positions",
    )
    if family == "mistral" and (found := re.findall(r"\d+", to.value("--window-size"))):
        to.put("model.sliding_window", int(found[0]) + 1, "--window-size")
    if not is_rotary:
        return
    if to.has("--rotary-base"):
        to.put("model.rope_theta", to.value("--rotary-base"), "--rotary-base")
    share = to.value("--rotary-percent", 1.0)
    if family == "gpt_neox":
        to.put("model.rotary_pct", share, "--rotary-percent")
        to.put("model.use_parallel_residual", False, "--position-embedding-type")
    elif share == 1:
        to.say("--rotary-percent", TRANSLATED, "whole heads rotate") if to.has("--rotary-percent") else None
    else:
        to.drop("--rotary-percent", f"changes the model: a {family} rotates whole heads")
    if to.is_on("--use-rope-scaling"):
        factor = to.value("--rope-scaling-factor", 8.0)
        scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA_3_ROPE}
        to.put("model.rope_scaling", scaling, "--use-rope-scaling", "--rope-scaling-factor")
    elif to.has("--rotary-seq-len-interpolation-factor"):
        factor = float(to.value("--rotary-seq-len-interpolation-factor"))
        to.put(
            "model.rope_scaling",
            {"rope_type": "linear", "factor": factor},
            "--rotary-seq-len-interpolation-factor",
        )


def _vocabulary(to: Translation) -> None:
    types = {"GPT2BPETokenizer": "--vocab-file", "HuggingFaceTokenizer": "--tokenizer-model"}
    kind = to.value("--tokenizer-type", "GPT2BPETokenizer" if to.has("--vocab-file") else "")
    name = types.get(kind, "--tokenizer-model")
    name = next((one for one in (name, "--tokenizer-name-or-path", "--vocab-file") if to.has(one)), "")
    size = to.value("--pad-vocab-size-to") or to.value("--vocab-size")
    put_tokenizer(to, to.value(name) if name else "", size, name, "--tokenizer-type", "--merge-file")
    for one in ("--pad-vocab-size-to", "--vocab-size"):
        if to.has(one):
            to.say(one, TRANSLATED, f"model.vocab_size = {size}")
    multiple = to.value("--make-vocab-size-divisible-by", 128) * to.value("--tensor-model-parallel-size", 1)
    if to.has("--pad-vocab-size-to") and size % multiple:
        to.drop("--make-vocab-size-divisible-by", "--pad-vocab-size-to gives the rows")
    else:
        to.put("model.vocab_multiple", multiple, "--make-vocab-size-divisible-by")


# --- Batch and schedule


def _batch(to: Translation, machine: Machine) -> None:
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


def _schedule(to: Translation) -> list[dict[str, Any]]:
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


def _optimiser(to: Translation) -> None:
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


# --- Layout, recomputation and precision


def _layout(to: Translation, machine: Machine, settings: dict[str, Any]) -> None:
    layers, stages = to.value("--num-layers"), to.value("--pipeline-model-parallel-size", 1)
    tensor = to.value("--tensor-model-parallel-size", 1)
    if tensor > 1:
        _must_divide(
            to,
            to.value("--num-attention-heads"),
            tensor,
            "--num-attention-heads",
            "--tensor-model-parallel-size",
        )
        to.put("layout.sequence_parallel", to.has("--sequence-parallel"), "--sequence-parallel")
    else:
        to.drop("--sequence-parallel", "it needs --tensor-model-parallel-size above 1")
    if stages > 1:
        _stages(to, layers, stages)
    for name in ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
                 "--pp-partition-method"):  # fmt: skip
        if stages == 1:
            to.drop(name, "it needs --pipeline-model-parallel-size above 1")
    zero = None
    if to.is_on("--use-torch-fsdp2"):
        zero = 3
    elif to.is_on("--use-megatron-fsdp"):
        strategies = {"no_shard": 1, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        zero = strategies.get(to.value("--data-parallel-sharding-strategy", "optim_grads_params"), 3)
    elif to.has("--zero-stage") or settings.get("zero") is not None:
        stage, own = to.value("--zero-stage"), settings.get("zero")
        if stage is not None and own is not None and stage != own:
            to.refuse(f"DeepSpeed's file has stage {own}. Fix: one stage", "--zero-stage")
        zero = max(1, stage if stage is not None else own or 0)
        if not stage and not own:
            to.say(
                "--zero-stage",
                TRANSLATED,
                "optimiser state is always split, as BF16Optimizer does at stage 0",
            )
    elif to.is_on("--use-distributed-optimizer"):
        zero = 1
    names = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "--zero-stage",
             "--use-distributed-optimizer")  # fmt: skip
    if zero is not None:
        to.put("layout.zero", zero, *names)
    to.drop("--data-parallel-sharding-strategy", "it needs --use-megatron-fsdp")
    to.drop("--deepspeed", "Kielo is the engine")
    if machine.nodes:
        to.add_row(
            "", "the job", TRANSLATED, f"{machine.nodes} nodes of {machine.devices_per_node or '?'} devices"
        )


def _stages(to: Translation, layers: int, stages: int) -> None:
    per_rank = to.value("--num-virtual-stages-per-pipeline-rank")
    name = "--num-virtual-stages-per-pipeline-rank"
    if to.has("--num-layers-per-virtual-pipeline-stage"):
        name = "--num-layers-per-virtual-pipeline-stage"
        _must_divide(
            to,
            layers,
            stages * max(1, to.value(name)),
            "--num-layers",
            name,
            "--pipeline-model-parallel-size",
        )
        per_rank = max(1, layers // (stages * max(1, to.value(name))))
    if per_rank and per_rank > 1:
        to.put("layout.pipeline_schedule", "interleaved_1f1b", name)
        to.put("layout.pipeline_stages_per_rank", per_rank, name)
    elif per_rank:
        to.drop(name, "one stage a rank")
    first, last = (
        to.value("--decoder-first-pipeline-num-layers"),
        to.value("--decoder-last-pipeline-num-layers"),
    )
    ends = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    method = to.value("--pp-partition-method", "")
    if first is not None or last is not None:
        inner = stages - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        _must_divide(to, rest, max(1, inner), "--num-layers", *ends)
        sizes = [first] * (first is not None) + [rest // max(1, inner)] * inner + [last] * (last is not None)
        to.put("layout.pipeline_layers", sizes, *ends)
    elif "embed" in method.lower() and (layers + 2) % stages == 0 and stages > 1:
        size = (layers + 2) // stages
        to.put(
            "layout.pipeline_layers", [size - 1, *[size] * (stages - 2), size - 1], "--pp-partition-method"
        )
    elif method:
        to.drop("--pp-partition-method", "Kielo splits layers among stages by cost")
    elif (not per_rank or per_rank == 1) and not to.is_on("--deepspeed"):
        _must_divide(to, layers, stages, "--num-layers", "--pipeline-model-parallel-size")


def _recomputation(to: Translation) -> None:
    granularity = to.value(
        "--recompute-granularity", "selective" if to.is_on("--recompute-activations") else ""
    )
    if to.is_on("--checkpoint-activations"):
        granularity = "full"
    names = ("--recompute-activations", "--recompute-granularity", "--checkpoint-activations")
    if granularity == "selective":
        parts = {"layernorm": "norms", "mlp": "activations", "moe_act": "activations"}
        modules = to.value("--recompute-modules", ("core_attn",))
        kept = sorted({parts[one] for one in modules if one in parts}, key=("norms", "activations").index)
        to.put("layout.recompute", "+".join(kept) or "none", *names, "--recompute-modules")
        if "core_attn" in modules:
            for name in (*names, "--recompute-modules"):
                if to.has(name):
                    to.say(name, TRANSLATED, "attention stores no scores that could be recomputed")
    elif granularity == "full":
        to.put("layout.recompute", "full", *names)
        _layers_recomputed(to)
        to.drop("--recompute-modules", "they are of selective recomputation")
    for name in (
        "--recompute-method",
        "--recompute-num-layers",
        "--checkpoint-num-layers",
        "--recompute-modules",
    ):
        if granularity != "full":
            to.drop(name, "layers are recomputed only with full recomputation")


def _layers_recomputed(to: Translation) -> None:
    number = to.value("--recompute-num-layers") or to.value("--checkpoint-num-layers") or 1
    names = ("--recompute-method", "--recompute-num-layers", "--checkpoint-num-layers")
    per_stage = max(1, to.value("--num-layers") // to.value("--pipeline-model-parallel-size", 1))
    if to.value("--recompute-method") == "block" and 0 < number < per_stage:
        every = max(1, round(per_stage / number))
        to.put("layout.recompute_every_layers", every, *names)
        for name in names:
            if to.has(name):
                to.say(
                    name, TRANSLATED, f"every {every}. layer in place of the first {number} of {per_stage}"
                )
        return
    for name in names:
        to.drop(name, "all layers are recomputed, one at a time")


def _precision(to: Translation, settings: dict[str, Any]) -> None:
    if (
        to.is_on("--bf16")
        and settings.get("precision") == "fp16"
        or to.is_on("--fp16")
        and settings.get("precision") == "bf16"
    ):
        to.refuse("DeepSpeed's file has another precision. Fix: one precision", "--bf16", "--fp16")
    names = ["--bf16", "--fp8-format"]
    half = to.is_on("--fp16") or settings.get("precision") == "fp16"
    if to.has("--fp8-format"):
        to.put("train.precision", "fp8", *names)
        _fp8(to)
    elif to.is_on("--bf16") or half or settings.get("precision") == "bf16":
        to.put("train.precision", "bf16", *names)
    else:
        to.put("train.precision", "fp32")
    to.drop("--fp16", "changes the run: there is no fp16; the recipe trains in bf16")
    to.drop("--fp8-recipe", "it needs --fp8-format")
    for name in ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"):
        to.drop(name, "it needs --fp8-format")
    dtype = "bf16" if to.is_on("--grad-reduce-in-bf16") else "fp32"
    to.put(
        "train.gradient_reduce_dtype", dtype, "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"
    )


def _fp8(to: Translation) -> None:
    recipe = to.value("--fp8-recipe", "delayed")
    if recipe == "tensorwise":
        to.put("train.fp8.scaling", "tensorwise", "--fp8-recipe")
    elif to.has("--fp8-recipe"):
        to.drop(
            "--fp8-recipe",
            f"changes the run: there is no {recipe} scaling; scales are of each tensor, of this step alone",
        )
    else:
        to.add_default(
            "--fp8-recipe delayed", "changes the run: scales are of each tensor, of this step alone"
        )
    if to.is_on("--first-last-layers-bf16"):
        layers = to.value("--num-layers")
        first, last = to.value("--num-layers-at-start-in-bf16", 1), to.value("--num-layers-at-end-in-bf16", 1)
        kept = [f"layers.{number}" for number in (*range(first), *range(layers - last, layers))]
        to.put("train.fp8.kept_in_bf16", kept, "--first-last-layers-bf16", "--num-layers-at-start-in-bf16",
               "--num-layers-at-end-in-bf16")  # fmt: skip


# --- Text and run


def _data(to: Translation) -> None:
    readers: dict[str, Callable[[str], list[str]]] = {
        "--data-args-path": str.split,
        "--per-split-data-args-path": lambda text: list(map(str, json.loads(text)["train"])),
        "--train-weighted-split-paths-path": weighted_splits,
    }
    blends = [name for name in ("--data-path", "--train-data-path") if to.has(name)]
    if to.has("--train-weighted-split-paths"):
        put_blend(
            to,
            "--train-weighted-split-paths",
            weighted_splits(" ".join(to.value("--train-weighted-split-paths"))),
        )
    for name in blends:
        put_blend(to, name, to.value(name))
    for name, read in readers.items():
        if not to.has(name):
            continue
        text = text_of_file(to.script, to.path, to.value(name))
        if text is None:
            to.drop(name, "this file is not here: name its sources in [[corpus.sources]]")
            continue
        try:
            put_blend(to, name, read(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            to.refuse("this file is no list of weights and prefixes. Fix: another file", name)
    if to.has("--split"):
        _split(to)
    masks = [name for name in ("--reset-attention-mask", "--reset-position-ids") if to.is_on(name)]
    if "--reset-attention-mask" in masks:
        to.put("dataset.mask_documents", True, *masks)
    else:
        to.drop(
            "--reset-position-ids", "positions restart only with dataset.mask_documents, which is not set"
        )


def _split(to: Translation) -> None:
    shares = [
        float(one) for one in re.findall(r"[\d.]+", to.value("--split")) if re.fullmatch(r"\d*\.?\d+", one)
    ]
    held, total = shares[1] if len(shares) > 1 else 0.0, sum(shares)
    if not total or not 0 <= held / total < 0.5:
        to.refuse("is no split. Fix: 969,30,1", "--split")
    elif not held:
        to.drop("--split", "text is always held out: dataset.heldout_share, by default 2 %")
    else:
        to.put("dataset.heldout_share", float(f"{held / total:.6g}"), "--split")
        if len(shares) > 2 and shares[2]:
            to.say("--split", TRANSLATED, "there is no test split")


def _run(to: Translation) -> None:
    if to.has("--eval-iters"):
        size = to.keys["train.tokens_per_step"][0] // to.value("--seq-length")
        if to.value("--eval-iters") > 0:
            to.put("train.heldout_sequences", to.value("--eval-iters") * size, "--eval-iters")
        else:
            to.drop("--eval-iters", "held-out text is always scored: train.heldout_sequences, by default 64")
    save, load = (
        to.given[name].text.partition(" ")[2] if to.has(name) else "" for name in ("--save", "--load")
    )
    if save and "$" in save:
        to.drop("--save", "only a job knows this path; a run is stored in runs/NAME (folder)")
    elif save:
        to.comments.setdefault("", []).append(f'folder = "{save}/kielo"  # {to.given["--save"].text}')
        to.drop("--save", "Kielo's run needs a folder of its own: runs/NAME, or the line `folder`")
    if load and load == save and not to.is_on("--finetune"):
        to.drop("--load", "the same command resumes a run")
    names = [name for name in ("--load", "--pretrained-checkpoint", "--finetune") if to.has(name)]
    weights = next((to.given[name].text.partition(" ")[2] for name in names if name != "--finetune"), "")
    if weights and (weights != save or to.is_on("--finetune")):
        to.comments.setdefault("model", []).append(
            f'weights = "megatron:{weights}"  # begins from these weights'
        )
        for name in names:
            to.drop(name, "a new run begins; the line `weights` in [model] begins from these weights")
    else:
        to.drop("--finetune", "the recipe begins at step 0")
    to.say("--tensorboard-dir", TRANSLATED, "train.tensorboard is on by default") if to.has(
        "--tensorboard-dir"
    ) else None
