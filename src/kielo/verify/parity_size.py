"""What the parity check on ranks asks for: its options, its steps' size and the memory of both sides.

It is arithmetic, without torch.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import hash_manifest, is_current
from kielo.artifact.stage_json import read_stage_json
from kielo.artifact.verify_results import Parity
from kielo.recipe.cards import accelerator, accelerators
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout, Precision
from kielo.resolve.memory import memory_bytes, usable_bytes, workspace_bytes
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.resolved import Identity, PlannedPhase, Resolved, stored_identity
from kielo.resolve.shares import AXES, micro_batches_needed
from kielo.resolve.stages import SCHEDULES
from kielo.verify.certificate import KIND, VERSION

_STATE_BYTES = 16  # of a parameter: fp32 weight, gradient and two moments


@dataclass(frozen=True)
class RanksOptions:
    """Options of the check on ranks. sequence_length: None for the run's longest."""

    steps: int = 20
    sequences_per_step: int = 4
    tolerance: float = 1e-5  # of losses in fp32, relative
    sequence_length: int | None = None
    precision: Precision = "fp32"
    # Keys to set wrong on purpose, to check the check.
    hugging_face_overrides: JsonTable = field(default_factory=dict)

    def fitting(self, resolved: Resolved) -> "RanksOptions":
        """Return the options with a length, and with at least one sequence a rank."""
        longest = resolved.identity.longest_sequence_length
        length = min(self.sequence_length or longest, resolved.identity.model.max_position_embeddings)
        sequences = max(self.sequences_per_step, resolved.placement.world_size)
        return replace(self, sequence_length=length, sequences_per_step=sequences)

    @property
    def tokens(self) -> int:
        if self.sequence_length is None:
            raise ValueError("options that are not fitted to a run")
        return self.sequence_length

    def layout_in_words(self, resolved: Resolved) -> str:
        layout = resolved.placement.layout
        sizes = [f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
        return f"{' × '.join(sizes) or 'one rank'}, in {self.precision}"


def scaled(resolved: Resolved, options: RanksOptions) -> Resolved:
    """Return the run with AdamW in fp32 states, without dropout, in the layout that needs the least memory.

    Layers are recomputed, and give up whole weights after use if the schedule allows it. Numbers stay.
    """
    layout, train = resolved.placement.layout, resolved.identity.train
    splits = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    saving = {"zero": layout.zero if splits else 3, "recompute": "full", "recompute_every_layers": 1}
    layout = layout.model_copy(update=saving | {"compile": False})
    plain = {"precision": options.precision, "precision_changes": (), "optimiser_state": "fp32"}
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_reduce_dtype": "fp32"}
    train = train.model_copy(update=plain | no_dropout | {"optimiser": "adamw"})
    return Resolved(
        identity=resolved.identity.model_copy(update={"train": train}),
        placement=resolved.placement.model_copy(update={"layout": layout}),
    )


def phase_of(identity: Identity, options: RanksOptions, steps: int) -> PlannedPhase:
    """Return the first phase with few sequences a step, of one stream."""
    return identity.phases[0].model_copy(
        update={
            "steps": steps,
            "sequence_length": options.tokens,
            "packing": "one_stream",
            "sequences_per_step": options.sequences_per_step,
            "tokens_per_step": options.sequences_per_step * options.tokens,
            "trainable": (),
        }
    )


def step_of_parity(resolved: Resolved, options: RanksOptions) -> Resolved:
    """Return the job of one step of Kielo's side, for `rehearse`."""
    of_run = scaled(resolved, options)
    layout, phase = of_run.placement.layout, phase_of(of_run.identity, options, 1)
    sequences = -(-phase.sequences_per_step // (layout.replicate * layout.shard))
    size = {"micro_batch_sequences": 1, "micro_batches_per_step": rows_of(layout, sequences)}
    placed = of_run.placement.phases[0].model_copy(update=size)
    return Resolved(
        identity=of_run.identity.model_copy(update={"phases": (phase,)}),
        placement=of_run.placement.model_copy(update={"phases": (placed,)}),
    )


def rows_of(layout: Layout, sequences: int) -> int:
    """Return the micro-batches of one sequence that a data rank takes for its `sequences`."""
    return int(micro_batches_needed(layout, sequences, 1))


def asked_on_ranks(
    resolved: Resolved, checkpoint: Path, options: RanksOptions
) -> tuple[dict[str, str], JsonTable]:
    """Return the inputs and the section of the certificate."""
    inputs = {"tokens": resolved.identity.tokens_hash, "checkpoint": hash_manifest(checkpoint)}
    layout = resolved.placement.layout.model_dump(mode="json")
    section = {**vars(options), "layout": layout, "identity": stored_identity(resolved.identity)}
    return inputs, section


def current_on_ranks(
    resolved: Resolved, folder: Path, checkpoint: Path, options: RanksOptions
) -> Parity | None:
    """Return the certificate in `folder` if it is of the same inputs, layout and options and passed."""
    if not is_current(folder, KIND, VERSION, *asked_on_ranks(resolved, checkpoint, options)):
        return None
    certificate = read_stage_json(folder, Parity)
    return certificate if certificate is not None and certificate.passed else None


def bytes_of_sides(resolved: Resolved, options: RanksOptions) -> dict[str, int]:
    """Return the bytes that each side reserves on the fullest device: "Kielo" and "transformers"."""
    of_run = scaled(resolved, options)
    identity, placement = of_run.identity, of_run.placement
    model, layout = identity.model, placement.layout
    ranks = layout.replicate * layout.shard
    rows = rows_of(layout, -(-options.sequences_per_step // ranks))
    card = accelerator(placement.accelerator) if placement.accelerator in accelerators() else None
    precisions: list[Precision] = ["fp32", "bf16"] if options.precision == "bf16" else ["fp32"]
    chunk = placement.train.loss_chunk_tokens
    table = [
        memory_row(
            model, layout, StepSize(options.tokens, 1, rows), TrainOptions(one, loss_chunk_tokens=chunk), card
        )
        for one in precisions
    ]
    ours = memory_bytes(MemoryColumns.of(table)).peak("reserved").max()
    return {"Kielo": int(ours), "transformers": _bytes_of_transformers(of_run, options)}


def _bytes_of_transformers(resolved: Resolved, options: RanksOptions) -> int:
    """Return the bytes of states over all ranks, of one layer, of head and embedding, and of a sequence.

    Layers are recomputed, so a sequence keeps its layers' inputs, one layer's activations with whole
    attention weights, and three copies of the logits in fp32.
    """
    model, placement = resolved.identity.model, resolved.placement
    length, parameters = options.tokens, placement.parameters
    ends = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    layer = (parameters - ends) / model.num_hidden_layers
    held = _STATE_BYTES * parameters / placement.world_size
    gathered = 4 * (2 * layer + ends) * 2 if placement.world_size > 1 else 2 * (layer + ends)
    kept = 4 * length * model.hidden_size * model.num_hidden_layers
    scores = 3 * 4 * model.num_attention_heads * length**2
    a_layer = 4 * length * (16 * model.hidden_size + 4 * (model.intermediate_size or 0))
    logits = 3 * 4 * length * model.vocab_size
    passing = gathered + kept + max(scores + a_layer, logits)
    return int(held + passing + workspace_bytes(passing))


def refuse_too_large_parity(resolved: Resolved, options: RanksOptions) -> None:
    """Raise KieloError if a side does not fit the devices, before anything is loaded."""
    placement = resolved.placement
    card = accelerator(placement.accelerator) if placement.accelerator in accelerators() else None
    usable = None if card is None else usable_bytes(card)
    if card is None or usable is None:
        return
    for side, needed in bytes_of_sides(resolved, options).items():
        if needed > usable:
            raise KieloError(
                f"{side} needs {needed / 1e9:.1f} GB on each of {placement.world_size} devices for "
                f"sequences of {options.tokens:,} tokens, and {usable / 1e9:.1f} GB of a {card.name} are "
                f"usable. Fix: --sequence-length {max(1, options.tokens // 2)}, or more ranks"
            )
