"""Recipe + machine → `Resolved`: every derived number of a run, computed here once; torch-free.

Reads the manifests of the run folder's tokens and the tokenizer; refuses numbers that cannot be had, all of them
at once, each with one that can.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import Manifest, hash_manifest, read_manifest
from kielo.models.families import module, normalise_rope, read_hf_config
from kielo.plan.layout_check import layout_complaints
from kielo.plan.resolved import Identity, Placement, Resolved
from kielo.recipe.cards import Accelerator, accelerator_of_device, accelerators, cluster
from kielo.recipe.cards import accelerator as accelerator_card
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model, Recipe
from kielo.tokenizer.load import end_of_text_id, load_tokenizer, vocabulary_size


def resolve(
    recipe: Recipe, run_folder: Path | str, world_size: int, device: str, accelerator: str | None = None
) -> Resolved:
    """The whole run in numbers.

    world_size: ranks. device: "cpu" or "cuda". accelerator: a card's name or the name that the driver gives the
    device; default: the cluster card's. Raises KieloError for missing stages and with every impossible number.
    """
    run_folder = Path(run_folder)
    tokens = _finished(run_folder / "tokens", "pack")
    tokenizer = load_tokenizer(run_folder / "tokenizer")
    train, data = recipe.train, recipe.dataset
    complaints: list[str] = []

    sequences_per_step = train.tokens_per_step // data.sequence_length
    total_steps = max(1, train.tokens // train.tokens_per_step)
    replicate, shard = _axes(recipe, world_size, complaints)
    sequences_per_rank = _per_rank(recipe, sequences_per_step, replicate * shard, complaints)
    micro_batch = _largest_divisor(sequences_per_rank, train.micro_batch_sequences)
    model = _complete_model(recipe, vocabulary_size(tokenizer), complaints)
    complaints += layout_complaints(model, data.sequence_length, recipe.layout)
    mixture = _mixture(recipe, tokens, run_folder / "tokens", complaints)
    complaints += _repeated_too_often(recipe, tokens, mixture, total_steps * sequences_per_step)
    heldout_available = num_sequences(tokens.counts["heldout"]["tokens"], data.sequence_length)
    if heldout_available == 0:
        complaints.append(
            f"{run_folder / 'tokens'}: no held-out text; what would work: a larger dataset.heldout_share than "
            f"{data.heldout_share}, or more text"
        )
    if complaints:
        raise KieloError("; ".join(complaints) if len(complaints) == 1 else _listed(recipe, complaints))

    count = module(model.model_type, "count")
    count.check(model)
    warmup_steps = round(train.warmup_share * total_steps)
    card = _accelerator(recipe, device, accelerator)
    identity = Identity(
        name=recipe.name,
        language=recipe.language,
        seed=recipe.seed,
        model=model,
        sequence_length=data.sequence_length,
        mixture=mixture,
        mask_documents=data.mask_documents,
        tokens_hash=hash_manifest(run_folder / "tokens"),
        total_steps=total_steps,
        tokens_per_step=sequences_per_step * data.sequence_length,
        sequences_per_step=sequences_per_step,
        learning_rate=train.learning_rate,
        final_learning_rate=train.learning_rate * train.final_learning_rate_ratio,
        schedule=train.schedule,
        warmup_steps=warmup_steps,
        decay_steps=_decay_steps(recipe, total_steps, warmup_steps),
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        max_gradient_norm=train.max_gradient_norm,
        z_loss=train.z_loss,
        precision=train.precision,
        max_skipped_steps_in_a_row=train.max_skipped_steps_in_a_row,
        heldout_sequences=min(train.heldout_sequences, heldout_available),
        max_epochs=data.max_epochs,
    )
    placement = Placement(
        world_size=world_size,
        pipeline=recipe.layout.pipeline,
        replicate=replicate,
        shard=shard,
        context=recipe.layout.context,
        tensor=recipe.layout.tensor,
        expert=recipe.layout.expert,
        sequence_parallel=recipe.layout.sequence_parallel,
        zero=recipe.layout.zero,
        cpu_offload=recipe.layout.cpu_offload,
        context_attention=recipe.layout.context_attention,
        recompute=recipe.layout.recompute,
        recompute_every_layers=recipe.layout.recompute_every_layers,
        recompute_saved_operators=recipe.layout.recompute_saved_operators,
        micro_batch_sequences=micro_batch,
        micro_batches_per_step=sequences_per_rank // micro_batch,
        device=device,
        accelerator=card.name if card else "unknown",
        peak_tflops=card.peak_tflops.get(train.precision) if card else None,
        flops_per_token=count.flops_per_token(model, data.sequence_length),
        parameters=count.parameters(model),
        end_of_text_id=end_of_text_id(tokenizer),
        loss_chunk_tokens=train.loss_chunk_tokens,
        log_every_steps=train.log_every_steps,
        heldout_every_steps=train.heldout_every_steps,
        checkpoint_every_steps=recipe.checkpoint.every_steps,
        keep_newest=recipe.checkpoint.keep_newest,
        tensorboard=train.tensorboard,
        start_timeout_seconds=train.start_timeout_seconds,
        tokens_folder=str(run_folder / "tokens"),
        tokenizer_folder=str(run_folder / "tokenizer"),
        train_folder=str(run_folder / "train"),
    )
    return Resolved(identity=identity, placement=placement)


def consent(old: Resolved, new: Resolved) -> None:
    """Go on only with the same identity. Raises KieloError listing the keys that changed; placement may change."""
    before = _flat(old.identity.model_dump(mode="json"))
    after = _flat(new.identity.model_dump(mode="json"))
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    if changed:
        lines = "\n".join(f"  - {key}: was {before.get(key)!r}, is now {after.get(key)!r}" for key in changed)
        raise KieloError(
            f"{new.placement.train_folder}: holds a run of something else; {len(changed)} keys of what is trained "
            f"changed:\n{lines}\nGo back to the old values, give the recipe another name or folder, or move this "
            "folder away to start anew"
        )


def num_sequences(tokens: int, sequence_length: int) -> int:
    """Sequences in a stream: each has sequence_length predicted tokens, the last may be padded."""
    return max(0, math.ceil((tokens - 1) / sequence_length))


def _finished(folder: Path, stage: str) -> Manifest:
    manifest = read_manifest(folder)
    if manifest is None:
        raise KieloError(f"{folder}: the {stage} stage is not finished; `kielo run RECIPE --to {stage}` does it")
    return manifest


def _axes(recipe: Recipe, world_size: int, complaints: list[str]) -> tuple[int, int]:
    """Ranks along (replicate, shard); shard = 0 takes what is left."""
    layout = recipe.layout
    others = layout.replicate * layout.context * layout.tensor
    if world_size % others or (layout.shard and others * layout.shard != world_size):
        sizes = {axis: getattr(layout, axis) for axis in ("replicate", "shard", "context", "tensor")}
        asked = " × ".join(f"layout.{axis} = {size}" for axis, size in sizes.items() if size > 1) or "the layout"
        inner = layout.context * layout.tensor
        divisors = [str(number) for number in range(1, world_size + 1) if world_size % (number * inner) == 0]
        ways = [f"{others * (layout.shard or 1)} ranks, or a multiple with layout.shard = 0"]
        if divisors:
            ways.append(f"layout.shard = 0 with layout.replicate one of {', '.join(divisors)}")
        complaints.append(f"{asked} does not make up {world_size} ranks; what would work: {'; or '.join(ways)}")
        return 1, max(1, world_size // inner)
    return layout.replicate, world_size // others


def _per_rank(recipe: Recipe, sequences_per_step: int, data_ranks: int, complaints: list[str]) -> int:
    length = recipe.dataset.sequence_length
    step = length * data_ranks
    if recipe.train.tokens_per_step % length or sequences_per_step % data_ranks:
        below = recipe.train.tokens_per_step // step * step
        sizes = " or ".join(str(size) for size in (below, below + step) if size)
        ranks = ", ".join(str(n) for n in range(1, 2 * data_ranks) if sequences_per_step % n == 0)
        complaints.append(
            f"train.tokens_per_step = {recipe.train.tokens_per_step} is {sequences_per_step} sequences of "
            f"dataset.sequence_length = {length}, which {data_ranks} ranks cannot share evenly; what would work: "
            f"tokens_per_step {sizes}, or this many ranks: {ranks or 1}"
        )
        return 1
    return sequences_per_step // data_ranks


def _largest_divisor(number: int, at_most: int) -> int:
    return next(size for size in range(min(number, at_most), 0, -1) if number % size == 0)


def _complete_model(recipe: Recipe, tokenizer_vocab_size: int, complaints: list[str]) -> Model:
    """The model section with every derived key set; from the weights' config.json where there are weights."""
    model, length = recipe.model, recipe.dataset.sequence_length
    if model.weights is not None:
        model = _model_of_weights(model)
    multiple = model.vocab_multiple
    vocab_size = model.vocab_size or math.ceil(tokenizer_vocab_size / multiple) * multiple
    if vocab_size < tokenizer_vocab_size:
        complaints.append(
            f"model.vocab_size = {vocab_size} is less than the tokenizer's {tokenizer_vocab_size} tokens; what would "
            f"work: {tokenizer_vocab_size} or more, or the tokenizer that belongs to model.weights"
        )
    positions = model.max_position_embeddings or length
    if positions < length:
        complaints.append(
            f"dataset.sequence_length = {length} is more than model.max_position_embeddings = {positions}; what would "
            f"work: a sequence_length of at most {positions}"
        )
    base, scaling = normalise_rope(model.rope_theta, model.rope_scaling, positions)
    derived: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "num_key_value_heads": model.num_key_value_heads or model.num_attention_heads,
        "head_dim": model.head_dim or model.hidden_size // model.num_attention_heads,
        "rope_theta": base,
        "rope_scaling": scaling,
    }
    return model.model_copy(update=derived)


def _model_of_weights(model: Model) -> Model:
    assert model.weights is not None
    folder = Path(model.weights.removeprefix("hf:"))
    if not (folder / "config.json").is_file():
        raise KieloError(
            f"model.weights = {model.weights!r}: no {folder / 'config.json'}; what would work: hf:FOLDER, a folder "
            "with a Hugging Face config.json and its safetensors files"
        )
    kept = {"weights": model.weights, "vocab_multiple": model.vocab_multiple}
    return read_hf_config(folder).model_copy(update=kept)


def _mixture(recipe: Recipe, tokens: Manifest, folder: Path, complaints: list[str]) -> dict[str, float]:
    """Source → weight; by tokens where the recipe says nothing. Sources without a sequence of text fall out."""
    sources: dict[str, dict[str, int]] = tokens.counts["sources"]
    length = recipe.dataset.sequence_length
    filled = [name for name, counts in sources.items() if num_sequences(counts["tokens"], length)]
    if not filled:
        complaints.append(f"{folder}: no source has any text left to train on")
    if not recipe.dataset.mixture:
        return {name: float(sources[name]["tokens"]) for name in filled}
    for name in recipe.dataset.mixture:
        if name not in filled:
            complaints.append(f"dataset.mixture.{name}: {folder} has no such text; the sources are {', '.join(filled)}")
    return {name: weight for name, weight in recipe.dataset.mixture.items() if name in filled}


def _repeated_too_often(recipe: Recipe, tokens: Manifest, mixture: dict[str, float], samples: int) -> Iterator[str]:
    """Epochs of each source against dataset.max_epochs (Muennighoff et al. 2023, arXiv:2305.16264)."""
    total_weight, train = sum(mixture.values()), recipe.train
    for name, weight in mixture.items():
        available = num_sequences(tokens.counts["sources"][name]["tokens"], recipe.dataset.sequence_length)
        epochs = samples * weight / total_weight / available
        # One sequence of grace: quotas are whole numbers.
        if samples * weight / total_weight > recipe.dataset.max_epochs * available + 1:
            budget = int(train.tokens * recipe.dataset.max_epochs / epochs) // train.tokens_per_step * train.tokens_per_step
            yield (
                f"train.tokens = {train.tokens} would read the source {name} {epochs:.2f} times, more than "
                f"dataset.max_epochs = {recipe.dataset.max_epochs:g}; what would work: train.tokens of at most "
                f"{budget}, max_epochs of {math.ceil(epochs)}, a smaller weight of {name} in dataset.mixture, or more text"
            )


def _decay_steps(recipe: Recipe, total_steps: int, warmup_steps: int) -> int:
    """For wsd its share of the run; cosine and linear decay from the end of the warm-up on."""
    if recipe.train.schedule == "wsd":
        return min(round(recipe.train.decay_share * total_steps), total_steps - warmup_steps)
    return total_steps - warmup_steps


def _accelerator(recipe: Recipe, device: str, name: str | None) -> Accelerator | None:
    """The card whose peak MFU is measured against; None when the device is not one that a card describes."""
    if name in accelerators():
        return accelerator_card(name)
    if name is not None:
        return accelerator_of_device(name)
    card = accelerator_card("cpu" if device == "cpu" else cluster(recipe.cluster).accelerator)
    return card if card.device == device else None


def _listed(recipe: Recipe, complaints: list[str]) -> str:
    lines = "\n".join(f"  - {complaint}" for complaint in complaints)
    return f"{len(complaints)} things to put right in {recipe.name}:\n{lines}"


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in content.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values
