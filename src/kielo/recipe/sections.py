"""The sections of a recipe, frozen and typed. A key is declared here and nowhere else.

Units are in the names. Every field is read by some room (a house test checks that), and every default is the
value that a newcomer should have. `[model]` keys are those of a Hugging Face `config.json`.

`resolve` copies sections whole into `resolved.toml`: those with identity (what is trained: stored in each
checkpoint, and a change of it is refused) and those with placement (where and how it runs: may change for
every attempt). A section of both kinds is made of base classes, one of each kind, so that a key's class says
which it is: `TrainIdentity`, `TrainPlacement`, and `TrainSchedule`, of which `resolve` makes steps. A new key
is an entry in the right class here, and the line that uses it.
"""

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.recipe.model_types import FAMILIES

Part = TypeVar("Part", bound="Section")


class Section(BaseModel):
    """One frozen table of a recipe or a card. Refuses unknown keys, NaN and infinities."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("what would work: a number below 2**63, for torch and numpy hold 64 bits")
        return value

    def part(self, kind: type[Part]) -> Part:
        """Returns the values of the fields that `kind`, a base class of this section, declares."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})


class Source(Section):
    """One body of raw text, in exactly one place: `path`, or `debian_package` and/or `huggingface_dataset`.

    `debian_package` is fetched with apt-get into the run folder; where apt is missing, `huggingface_dataset`
    is used instead.
    """

    name: str = Field(
        "",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=100,
        description="short name, also of its token files; default: the file's stem or the package's name",
    )
    path: str | None = Field(
        None,
        description="file, folder or glob: .txt (one document a line), .jsonl[.gz|.zst], .parquet, .html",
    )
    debian_package: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9+.-]+$",  # Debian policy 5.6.1
        description="Debian package whose HTML pages are the text",
    )
    huggingface_dataset: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?$",
        description="dataset on the Hugging Face hub: OWNER/NAME",
    )
    huggingface_subset: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$",
        description="its subset (configuration), e.g. 20231101.et",
    )
    text_field: str = Field("text", description="field or column that holds the text")
    max_documents: PositiveInt | None = Field(None, description="read no more than this many documents")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        fetched = self.debian_package or self.huggingface_dataset
        if self.path and fetched:
            raise ValueError("give either path, or debian_package and/or huggingface_dataset, not both")
        if not self.path and not fetched:
            raise ValueError("say where the text is: path, debian_package or huggingface_dataset")
        if self.name == "heldout":
            raise ValueError("the name heldout is taken by the held-out text; choose another")
        return self


def _sources(value: Any) -> Any:
    """Makes tables of plain strings, which are paths, and give each source a name of its own.

    `--set corpus.sources=a.txt,b.jsonl.zst` is such a string, with commas.
    """
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, tuple):
        value = list(value)
    if not isinstance(value, list):
        return value
    value = [{"path": entry} if isinstance(entry, str) else entry for entry in value]
    taken = {entry["name"] for entry in value if isinstance(entry, dict) and entry.get("name")}
    named = []
    for entry in value:
        if isinstance(entry, dict) and not entry.get("name"):
            name = stem = _source_name(entry)
            number = 1
            while name in taken or name == "heldout":
                number += 1
                name = f"{stem}_{number}"
            taken.add(name)
            entry = entry | {"name": name}
        named.append(entry)
    return named


def _source_name(entry: dict[str, Any]) -> str:
    place = str(
        entry.get("path") or entry.get("debian_package") or entry.get("huggingface_dataset") or "text"
    )
    parts = [part for part in re.split(r"[/\\]", place) if part and not re.search(r"[*?\[]", part)]
    last = re.sub(r"(\.(txt|jsonl?|parquet|html?|gz|zst))+$", "", parts[-1] if parts else "text")
    return re.sub(r"[^A-Za-z0-9_-]+", "_", last).strip("_-")[:90] or "text"


_Sources = Annotated[
    tuple[Source, ...],
    BeforeValidator(_sources, json_schema_input_type=str | list[str | Source]),
]


class Corpus(Section):
    sources: _Sources = Field(min_length=1, description="bodies of raw text; a plain string is a path")
    language_identifier: Literal["py3langid", "lid176"] = "py3langid"
    line_language_threshold: float | None = Field(
        None, ge=0, le=1, description="default: from the language card"
    )
    document_language_threshold: float | None = Field(
        None, ge=0, le=1, description="default: from the language card"
    )
    max_foreign_character_share: float = Field(
        0.01, ge=0, le=1, description="letters outside the language's script, per line"
    )
    min_line_characters: int = Field(10, ge=0)
    min_document_characters: int = Field(100, ge=0)
    deduplicate_lines: bool = True
    deduplicate_documents: bool = True
    max_document_bytes: PositiveInt = Field(
        10_000_000,
        description="a longer line, page or cell (as it is stored, decompressed) counts as a bad record",
    )
    max_bad_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="bad records are passed over up to this share of a source's; one of ten or more always, "
        "unless 0",
    )
    workers: PositiveInt = 2


class Tokenizer(Section):
    vocab_size: PositiveInt = 8192
    min_frequency: PositiveInt = 2
    max_sample_bytes: PositiveInt = Field(200_000_000, description="text that the vocabulary is learned from")
    path: str | None = Field(
        None, description="folder with a ready tokenizer.json: used as it is, nothing is trained"
    )


class DatasetIdentity(Section):
    """Keys of [dataset] that are copied into the identity."""

    mask_documents: bool = Field(False, description="attention does not cross document borders")


class Dataset(DatasetIdentity):
    """[dataset]: the other keys become the token shards and the phases."""

    sequence_length: PositiveInt = 512
    heldout_share: float = Field(0.02, gt=0, lt=0.5, description="share of documents, by hash of the text")
    mixture: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="source name → weight; default: by tokens"
    )
    max_epochs: PositiveFloat = Field(
        4.0, description="refuse to repeat a source more often (Muennighoff et al. 2023)"
    )


class Model(Section):
    """[model], of the identity: keys as in Hugging Face's `config.json`.

    Keys there that do not change the maths are ignored on import.
    """

    model_type: Literal[tuple(FAMILIES)] = "llama"
    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt = 704
    num_hidden_layers: PositiveInt = Field(6, le=10_000)
    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt | None = Field(
        None, description="tokens that there are; default: the tokenizer's"
    )
    vocab_multiple: PositiveInt = Field(
        64, description="rows of the vocabulary's matrices are padded to a multiple of this"
    )
    max_position_embeddings: PositiveInt | None = Field(
        None, description="default: the longest sequence_length"
    )
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_local_base_freq: PositiveFloat = Field(
        10_000.0, description="RoPE's base in the windowed layers of a gemma3_text"
    )
    rotary_pct: float = Field(
        1.0, gt=0, le=1, description="share of each head that positions turn, in a gpt_neox"
    )
    layer_norm_epsilon: PositiveFloat = Field(1e-5, description="of families with LayerNorm")
    tie_word_embeddings: bool | None = Field(None, description="default: the family's")
    attention_bias: bool | None = Field(None, description="default: the family's")
    mlp_bias: bool | None = Field(None, description="default: the family's")
    hidden_act: Literal["silu", "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"] | None = Field(
        None, description="default: the family's"
    )
    sliding_window: PositiveInt | None = Field(
        None, description="tokens back that windowed layers see, itself included"
    )
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = Field(
        None, description="of each layer; default: all windowed where there is a window"
    )
    query_pre_attn_scalar: PositiveFloat | None = Field(
        None, description="scores are divided by its root; default: head_dim"
    )
    attn_logit_softcapping: PositiveFloat | None = Field(None, description="cap of a gemma2's scores")
    final_logit_softcapping: PositiveFloat | None = Field(None, description="cap of a gemma's logits")
    use_parallel_residual: bool = Field(
        True, description="attention and MLP of a gpt_neox layer read the same input"
    )
    initializer_range: PositiveFloat = 0.02
    weights: str | None = Field(
        None,
        description='"hf:FOLDER" or "hf:OWNER/NAME[@REVISION]" on the Hugging Face hub starts from these '
        "weights; their config.json replaces the keys above",
    )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head: vocab_size (which must be set), rounded up to vocab_multiple.

        Those beyond vocab_size are padding: zero, never trained, in no logits that are read and in no export.
        """
        assert self.vocab_size is not None
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class Layout(Section):
    """[layout], of the placement: ranks along each mesh axis, and what is traded for memory.

    The expert axis is not in use yet.
    """

    pipeline: PositiveInt = Field(1, description="ranks that split the layers into stages")
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"
    ] = Field("1f1b", description="in which order stages work on micro-batches")
    pipeline_stages_per_rank: PositiveInt | None = Field(
        None, description="default: 1, 2 in schedules that interleave"
    )
    pipeline_layers: tuple[int, ...] | None = Field(
        None, description="layers of each stage, in the order of the model; default: split by cost"
    )
    replicate: PositiveInt = Field(
        1, description="groups that hold whole copies of what `shard` splits (hybrid sharding)"
    )
    shard: int = Field(
        0, ge=0, description="ranks that split parameters, gradients and optimiser state; 0: all left"
    )
    context: PositiveInt = Field(1, description="ranks that split each sequence")
    tensor: PositiveInt = Field(
        1, description="ranks that split each matrix, and activations along the sequence"
    )
    expert: Literal[1] = 1
    sequence_parallel: bool = Field(
        True, description="tensor ranks also split the activations between their matrices"
    )
    zero: Literal[1, 2, 3] = Field(
        1, description="1: optimiser state stays split through a step; 2: gradients too; 3: parameters too"
    )
    cpu_offload: bool = Field(
        False, description="parameters, gradients and optimiser state wait, and step, on the CPU"
    )
    context_attention: Literal["all_gather", "ulysses"] = Field(
        "all_gather", description="gather keys and values, or swap the split of sequences for one of heads"
    )
    compile: bool | None = Field(None, description="layers by torch.compile; default: on GPUs")
    recompute: Literal["none", "attention", "operators", "full"] = Field(
        "none",
        description="activations made again in the backward: none, of attention, all but saved operators, "
        "all",
    )
    recompute_every_layers: PositiveInt = Field(1, description="recompute in every n-th layer")
    recompute_saved_operators: tuple[str, ...] = Field(
        ("mm", "addmm", "scaled_dot_product_attention"),
        description="what `operators` keeps: names in torch.ops.aten",
    )


class BatchRamp(Section):
    """Steps begin small and grow by equal amounts, evenly over `tokens` (Megatron's --rampup-batch-size)."""

    first_tokens_per_step: PositiveInt = Field(description="of the first step")
    step_tokens: PositiveInt = Field(description="what tokens_per_step grows by each time")
    tokens: PositiveInt = Field(description="trained before steps have train.tokens_per_step")


ScheduleName = Literal[tuple(LEARNING_RATE_SCHEDULES)]
_WITH_DECAY_SHARE = ", ".join(
    name for name, schedule in LEARNING_RATE_SCHEDULES.items() if schedule.has_decay_share
)
Precision = Literal["fp32", "bf16", "fp8"]
ReduceDtype = Literal["fp32", "bf16"]


class Fp8(Section):
    """[train.fp8]: how layers multiply matrices in fp8 (Micikevicius et al. 2022, arXiv:2209.05433).

    All else is as in bf16.
    """

    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        "tensorwise",
        description="a scale for each tensor, for each row, or for each row with the weights' gradients in "
        "bf16",
    )
    kept_in_bf16: tuple[str, ...] = Field(
        (), description='modules that stay in bf16: "layers.0", "layers.*.attention"'
    )
    head: bool = Field(
        False,
        description="the head's products too: logits and the gradient of its input; its weight's is in bf16",
    )
    gathered_in_fp8: bool = Field(
        True, description="send and hold weights in 8 bits, where scaling is tensorwise"
    )
    emulate: bool = Field(
        False, description="round to 8 bits but multiply wide: slow, for devices that lack FP8"
    )
    watch_steps: PositiveInt = Field(
        50, le=100_000, description="steps after a change to fp8 in which a rise leads back to bf16"
    )
    max_loss_rise: PositiveFloat = Field(
        0.02, description="relative, of ten steps' mean over that of watch_steps before"
    )
    max_gradient_norm_rise: PositiveFloat = Field(1.0, description="the same of the gradient norm")
    probe_every_steps: int = Field(
        0, ge=0, description="compare gradients with those in bf16, of the same batch; 0: never"
    )


class TrainSchedule(Section):
    """Keys of [train] of which `resolve` makes phases of steps and segments of the learning rate."""

    tokens: PositiveInt | None = Field(
        None,
        description="token budget of the run; default: the text, dataset.max_epochs times; with phases: left "
        "out, or their sum",
    )
    tokens_per_step: PositiveInt = Field(16_384, description="one optimiser step, over all ranks")
    batch_ramp: BatchRamp | None = Field(None, description="smaller steps at the start; of the first phase")
    micro_batch_sequences: PositiveInt | None = Field(
        None,
        description="sequences per forward on one rank (lowered to what divides); default: the most that fit "
        "the device's memory, or 4 where no card knows it",
    )
    learning_rate: PositiveFloat = 1e-3
    final_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    schedule: ScheduleName = "cosine"
    warmup_share: float = Field(0.02, ge=0, lt=1, description="share of the tokens")
    decay_share: float = Field(
        0.2, ge=0, le=1, description=f"share of the tokens that {_WITH_DECAY_SHARE} spends decaying"
    )


class TrainIdentity(Section):
    """Keys of [train] that are copied into the identity: optimiser, objective, precision, skipped steps."""

    skip_steps: tuple[tuple[PositiveInt, PositiveInt], ...] = Field(
        (), description="[first, last] steps whose text is passed over without training on it"
    )
    weight_decay: float = Field(0.1, ge=0)
    adam_beta1: float = Field(0.9, gt=0, lt=1)
    adam_beta2: float = Field(0.95, gt=0, lt=1)
    adam_epsilon: PositiveFloat = 1e-8
    max_gradient_norm: PositiveFloat = 1.0
    z_loss: float = Field(0.0, ge=0)
    precision: Precision = "bf16"
    precision_changes: tuple[tuple[PositiveInt, Precision], ...] = Field(
        (), description="[step, precision]: what is computed in from that step on"
    )
    fp8: Fp8 = Fp8()
    optimiser_state: Literal["fp32", "bf16"] = Field(
        "fp32", description="precision in which moments are kept"
    )
    gradient_reduce_dtype: ReduceDtype = Field(
        "fp32", description="dtype in which data-parallel ranks send and add up gradients"
    )
    max_skipped_steps_in_a_row: PositiveInt = 3
    heldout_sequences: PositiveInt = Field(64, description="sequences of the held-out text scored each time")


class TrainPlacement(Section):
    """Keys of [train] that are copied into the placement: memory, logs and time limits."""

    loss_chunk_tokens: PositiveInt | None = Field(
        None, description="tokens whose logits exist at one time; default: by a GPU's memory, 2048 on a CPU"
    )
    deterministic: bool = Field(
        False,
        description="the same bits from each run on the same ranks, on GPUs too: no kernel adds in an order "
        "that varies; attention's backward is slower there. A CPU needs no such setting",
    )
    log_every_steps: PositiveInt = 10
    heldout_every_steps: PositiveInt = 100
    tensorboard: bool = True
    collect_garbage_every_steps: PositiveInt = Field(
        50, description="Python's collector, on all ranks at once; 1 in zero-bubble schedules"
    )
    start_timeout_seconds: float = Field(
        1800.0,
        ge=1,
        le=604_800,
        description="longest wait for other ranks at the start, for each communicator, and in collectives "
        "until the first steps are done: cold imports and compilation take minutes",
    )
    step_timeout_seconds: float = Field(
        600.0, ge=1, le=604_800, description="longest wait for other ranks in each collective of later steps"
    )


class Train(TrainPlacement, TrainIdentity, TrainSchedule):
    """[train]: one table for the person who writes it; each key's class says what becomes of it."""


class Phase(Section):
    """One of [[phases]]: a part of the run with its own steps, sequences or text.

    A key that it leaves out has the value of [train] or [dataset]. A `learning_rate` begins a new segment of
    the learning rate, which lasts until a later phase begins one and warms up from the rate that was reached;
    the shares are of that segment's tokens.
    """

    tokens: PositiveInt = Field(description="token budget of the phase")
    tokens_per_step: PositiveInt | None = None
    sequence_length: PositiveInt | None = Field(None, description="must divide the longest of all phases")
    mixture: dict[str, PositiveFloat] | None = None
    micro_batch_sequences: PositiveInt | None = None
    learning_rate: PositiveFloat | None = Field(None, description="begins a new segment of the learning rate")
    final_learning_rate_ratio: float | None = Field(None, ge=0, le=1)
    schedule: ScheduleName | None = None
    warmup_share: float | None = Field(None, ge=0, lt=1)
    decay_share: float | None = Field(None, ge=0, le=1)


class Checkpoint(Section):
    """[checkpoint], of the placement."""

    every_steps: PositiveInt = 500
    keep_newest: int = Field(
        2,
        ge=2,
        description="older ones are removed; two, for only the next step shows whether the newest is sound",
    )
    keep_every_steps: int | None = Field(
        None,
        ge=0,
        description="checkpoints of its multiples are kept for good; 0: none; default: at most ten of a run",
    )


class Verify(Section):
    parity_steps: PositiveInt = 20
    parity_sequences_per_step: PositiveInt = 4
    parity_sequence_length: PositiveInt = 128
    tolerance: PositiveFloat = Field(1e-5, description="relative loss difference, each step")


class Evaluate(Section):
    ngram_order: PositiveInt = 6
    prompts: tuple[str, ...] = Field((), description="default: openings of held-out documents")
    sample_tokens: PositiveInt = 80
    temperature: float = Field(0.7, ge=0)
    top_k: PositiveInt = 50


class Report(Section):
    license: str = Field("other", description="of the model, for its card (a Hugging Face licence id)")
    text_license: str = Field("", description="of the training text, for the card")


class RecipeIdentity(Section):
    """Keys outside all tables that are copied into the identity."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    language: str
    seed: int = Field(1, ge=0)


class Recipe(RecipeIdentity):
    """A whole recipe."""

    description: str = ""
    folder: str = Field("", description="run folder; default: runs/NAME")
    cluster: str = Field(
        "laptop", description="cluster card: its accelerator's peak, and what plans count with"
    )
    machine: str = Field("", description="card of your own machine for plans, made by kielo plan calibrate")
    corpus: Corpus
    tokenizer: Tokenizer = Tokenizer()
    dataset: Dataset = Dataset()
    model: Model = Model()
    layout: Layout = Layout()
    train: Train = Train()
    phases: tuple[Phase, ...] = Field((), description="parts of the run in order; none: one of train.tokens")
    checkpoint: Checkpoint = Checkpoint()
    verify: Verify = Verify()
    evaluate: Evaluate = Evaluate()
    report: Report = Report()
