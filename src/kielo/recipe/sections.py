"""The sections of a recipe, frozen and typed. A key is declared here and nowhere else.

Units are in the names. Every field is read by some room (a house test checks that), and every default is the
value that a newcomer should have. `[model]` keys are those of a Hugging Face `config.json`.

`resolve` copies sections whole into `resolved.toml`: those with identity (what is trained: stored in each
checkpoint, and a change of it is refused) and those with placement (where and how it runs: may change for
every attempt). A section of both kinds is made of base classes, one of each kind, so that a key's class says
which it is: `TrainIdentity`, `TrainPlacement`, and `TrainSchedule`, of which `resolve` makes steps. A new key
is an entry in the right class here, and the line that uses it.
"""

import codecs
import re
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kielo.recipe.amounts import Amount, is_amount, parse_amount
from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.optimisers import OPTIMISERS
from kielo.recipe.source_kinds import DEFAULT_TEMPLATE, KINDS, template_problem

Part = TypeVar("Part", bound="Section")
RECOMPUTED_PARTS = ("attention", "norms", "activations")  # of a layer, each by itself

if TYPE_CHECKING:  # names of tables, which are text to a type checker
    KindName = str
    ModelType = str
    OptimiserName = str
    Recompute = str
    ScheduleName = str
else:
    KindName = Literal[tuple(KINDS)]
    ModelType = Literal[tuple(FAMILIES)]
    OptimiserName = Literal[tuple(OPTIMISERS)]
    ScheduleName = Literal[tuple(LEARNING_RATE_SCHEDULES)]
    Recompute = Literal[
        (
            "none",
            *(
                "+".join(parts)
                for number in range(1, len(RECOMPUTED_PARTS) + 1)
                for parts in combinations(RECOMPUTED_PARTS, number)
            ),
            "operators",
            "full",
        )
    ]


class Section(BaseModel):
    """One frozen table of a recipe or a card. Refuses unknown keys, NaN and infinities."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reads_amounts(cls, value: Any, info: ValidationInfo) -> Any:
        """Whole numbers may be written as 4M or 1e9, and one number stands for a list of one.

        true is no number, though Python counts with it: one layer in place of a mistake.
        """
        kind = str(cls.model_fields[info.field_name or ""].annotation)
        words = re.findall(r"\w+", kind)
        if isinstance(value, bool) and "bool" not in words and {"int", "float"} & {*words}:
            raise ValueError("Fix: a number")
        if "int" not in words or "str" in words:
            return value
        if kind.startswith("tuple") and isinstance(value, int | str) and not isinstance(value, bool):
            parts = value.split(",") if isinstance(value, str) else [value]
            return tuple(parse_amount(part) if is_amount(part) else part for part in parts)
        return parse_amount(value) if is_amount(value) else value

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(one, int) and abs(one) >= 2**63 for one in numbers):
            raise ValueError("Fix: a number below 2**63, for torch and numpy hold 64 bits")
        return value

    def part(self, kind: type[Part]) -> Part:
        """Return the values of the fields that `kind`, a base class of this section, declares."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})


# One text, or a list of them.
_Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str) else value, json_schema_input_type=str | list[str]
    ),
]


class Source(Section):
    """One body of text, in exactly one place.

    Raw text is at `path`, or in `debian_package` and/or `huggingface_dataset`; `tokens` are ready ids.
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
        description="file, folder or glob: .txt (one document a line), .jsonl, .json, .parquet, .html, …, "
        "plain or as .gz, .zst, .xz or .bz2",
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
    tokens: str | None = Field(
        None,
        description="ready token files, read in place: Megatron's PREFIX (.bin and .idx), OLMo's NAME.npy, "
        "nanotron's NAME.ds, or a folder or pattern of them",
    )
    tokens_dtype: Literal["uint16", "uint32"] | None = Field(
        None,
        description="type of the ids in .npy and .ds files that do not tell; default: uint16 where the "
        "vocabulary fits",
    )
    text_field: str = Field(
        "",
        description='field or column that holds the text; default: "text", "content" of code, and "messages" '
        'or "conversations" of instructions',
    )
    kind: KindName = Field(
        "text", description="; ".join(f"{name}: {kind.description}" for name, kind in KINDS.items())
    )
    language: _Texts = Field(
        (),
        description="code of its language, or several: a text in any of them is kept; default: the recipe's. "
        "Code has none",
    )
    clean: bool = Field(
        True,
        description="false for text that others have cleaned (HPLT, FineWeb2, CulturaX): it passes as it is, "
        "and only empty documents and exact duplicates of documents are dropped; of instructions: turns need "
        "not alternate",
    )
    encoding: str | None = Field(
        None,
        description='encoding of its files, e.g. "windows-1257"; default: UTF-8, or what a byte-order mark, '
        "an HTML page or an XML file says",
    )
    leave_out: _Texts = Field(
        (),
        description="patterns of files that are not read, by their names below `path`, e.g. docs/*.csv; any "
        "other file of data that Kielo cannot read is an error",
    )
    documents: Literal["lines", "paragraphs", "files"] = Field(
        "lines",
        description="what one document of a .txt is: a line, lines up to the next empty one, or the file",
    )
    pair_fields: _Texts = Field(
        (),
        description="of parallel text: the two fields, in the order of `language`; in .tsv the numbers of "
        "columns (default 1, 2), in .tmx language codes; default: the codes in `language`",
    )
    templates: _Texts = Field(
        (DEFAULT_TEMPLATE,),
        description="of parallel text: layouts, of which each pair gets one; with {source}, {target}, "
        "{source_language} and {target_language}",
    )
    reverse_share: float = Field(
        0.5, ge=0, le=1, description="of parallel text: share of pairs laid out from the second language"
    )
    loss: Literal["all", "answers"] = Field(
        "all",
        description="of instructions: the tokens that carry loss. answers: only the assistant's messages, "
        "each with the token that ends its turn",
    )
    too_long: Literal["split", "truncate", "drop"] = Field(
        "split",
        description="of instructions: what becomes of a conversation that is longer than the longest "
        "sequence_length. split: its rest is trained without its beginning, as of any text; truncate: the "
        "rest is left out",
    )
    licence: str = Field("", description="of this text, for the model card")
    address: str = Field("", description="where people get this text (a URL or DOI), for the model card")
    max_documents: PositiveInt | None = Field(None, description="read no more than this many documents")

    @model_validator(mode="after")
    def _languages_of_its_kind(self) -> Self:
        if self.language and not KINDS[self.kind].has_language:
            raise ValueError(f"kind = {self.kind!r} has no language; leave the key out")
        if self.kind == "parallel" and len(self.language) != 2:
            raise ValueError('kind = "parallel" has two languages. Fix: language = ["en", "fi"]')
        if self.encoding is not None:
            _check_encoding(self.encoding)
        if self.kind != "parallel" and self.model_fields_set & {"pair_fields", "templates", "reverse_share"}:
            raise ValueError('pair_fields, templates and reverse_share are of kind = "parallel"')
        if self.kind != "instructions" and "loss" in self.model_fields_set:
            raise ValueError('loss is of kind = "instructions"; all other text carries loss on every token')
        if self.kind != "instructions" and "too_long" in self.model_fields_set:
            raise ValueError('too_long is of kind = "instructions"')
        if self.pair_fields and len(self.pair_fields) != 2:
            raise ValueError(f"pair_fields names {len(self.pair_fields)} fields. Fix: two")
        for template in self.templates:
            if problem := template_problem(template):
                raise ValueError(f"templates: {template!r}: {problem}")
        return self

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        fetched = self.debian_package or self.huggingface_dataset
        if self.path and fetched:
            raise ValueError("give either path, or debian_package and/or huggingface_dataset, not both")
        if self.tokens and (self.path or fetched):
            raise ValueError("give either tokens or raw text (path, debian_package, huggingface_dataset)")
        if not self.path and not fetched and not self.tokens:
            raise ValueError("say where the text is: path, debian_package, huggingface_dataset or tokens")
        if self.tokens and (self.max_documents or self.text_field or self.kind != "text" or not self.clean):
            raise ValueError(
                "tokens are read as they are: leave max_documents, text_field, kind and clean out"
            )
        for key in ("encoding", "documents"):
            if not self.path and key in self.model_fields_set and getattr(self, key) is not None:
                raise ValueError(f"{key} is of the files at `path`")
        if self.leave_out and not (self.path or self.tokens):
            raise ValueError("leave_out is of the files at `path` or `tokens`; leave the key out")
        if self.huggingface_subset and not self.huggingface_dataset:
            raise ValueError("huggingface_subset is of huggingface_dataset; give that too")
        if self.tokens_dtype and not self.tokens:
            raise ValueError("tokens_dtype is of ready token files; give tokens, or leave the key out")
        if self.name == "heldout" or self.name.startswith("heldout."):
            raise ValueError("names of heldout and heldout.… are taken by the held-out text; choose another")
        return self


def _check_encoding(name: str) -> None:
    """Raise ValueError for what is no encoding of text."""
    try:
        "a".encode(name)
        if codecs.lookup(name).name in ("idna", "punycode", "unicode-escape", "raw-unicode-escape", "utf-7"):
            raise LookupError
    except (LookupError, UnicodeError):
        raise ValueError(
            f"encoding = {name!r} is not known. Fix: utf-8, utf-16le, windows-1252, "
            "windows-1257, iso-8859-15, shift_jis, …"
        ) from None


def _sources(value: Any) -> Any:
    """Make tables of plain strings, which are paths, and give each source a name of its own.

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
        entry.get("path")
        or entry.get("debian_package")
        or entry.get("huggingface_dataset")
        or entry.get("tokens")
        or "text"
    )
    parts = [part for part in re.split(r"[/\\]", place) if part and not re.search(r"[*?\[]", part)]
    last = re.sub(
        r"(\.(txt|jsonl?|parquet|html?|gz|zst|bin|idx|npy|ds))+$", "", parts[-1] if parts else "text"
    )
    return re.sub(r"[^A-Za-z0-9_-]+", "_", last).strip("_-")[:90] or "text"


class CodeFilters(Section):
    """[corpus.code]: files of code that are no code by hand. The defaults are The Stack's.

    Kocetkov et al. 2022, arXiv:2211.15533, and Chen et al. 2021, arXiv:2107.03374, section 3.1.
    """

    languages: tuple[str, ...] = Field(
        (),
        description="programming languages that are kept, by file extension; default: all. Only with a "
        "source of code that is cleaned",
    )
    max_line_characters: PositiveInt = Field(
        1000, description="a file with a longer line is dropped. Only with a source of code that is cleaned"
    )
    max_mean_line_characters: PositiveFloat = Field(
        100.0, description="mean length of a file's lines. Only with a source of code that is cleaned"
    )
    min_alphanumeric_share: float = Field(
        0.25, ge=0, le=1, description="of a file's characters. Only with a source of code that is cleaned"
    )
    generated_marks: tuple[str, ...] = Field(
        ("generated by", "auto-generated", "autogenerated", "do not edit"),
        description="a file with one of these in its first lines, in any case, is dropped. Only with a "
        "source of code that is cleaned",
    )


_Sources = Annotated[
    tuple[Source, ...],
    BeforeValidator(_sources, json_schema_input_type=str | list[str | Source]),
]


class Corpus(Section):
    sources: _Sources = Field(min_length=1, description="bodies of raw text; a plain string is a path")
    language_identifier: Literal["py3langid", "lid176"] = Field(
        "py3langid",
        description="what tells languages apart: py3langid, or fastText's lid.176, which is downloaded once",
    )
    line_language_threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="default: from the language card. Only with a source of running or parallel text that is "
        "cleaned",
    )
    document_language_threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="default: from the language card. Only with a source of running or parallel text that is "
        "cleaned",
    )
    max_foreign_character_share: float = Field(
        0.3,
        ge=0,
        le=1,
        description="lines with a larger share of letters outside the language's scripts are dropped; "
        "articles have names in others. Only with a source of running text that is cleaned",
    )
    min_line_characters: int = Field(
        10, ge=0, description="shorter lines are dropped. Only with a source of running text that is cleaned"
    )
    min_document_characters: int = Field(
        100,
        ge=0,
        description="documents that have fewer left, after all other filters, are dropped. Only with a "
        "source of running text that is cleaned",
    )
    deduplicate_lines: bool = Field(
        True,
        description="keep only the first of equal lines of the corpus. Only with a source of running text "
        "that is cleaned",
    )
    deduplicate_documents: bool = Field(
        True,
        description="keep only the first of equal documents of the corpus. Only with a source of raw text",
    )
    max_document_bytes: PositiveInt = Field(
        10_000_000,
        description="a longer line, page or cell (as it is stored, decompressed) counts as a bad record. "
        "Only with raw text",
    )
    max_bad_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="bad records are passed over up to this share of a source's; one of ten or more always, "
        "unless 0. Only with a source of raw text",
    )
    workers: PositiveInt = Field(2, description="processes that clean text, later pack it, at one time")
    code: CodeFilters = Field(CodeFilters(), description="limits for files of code")

    @property
    def token_sources(self) -> tuple[Source, ...]:
        """Sources that are ready tokens: no stage cleans them."""
        return tuple(source for source in self.sources if source.tokens)

    @property
    def of_raw_text(self) -> "Corpus":
        """The section without sources that are ready tokens; it may have none left."""
        return self.model_copy(
            update={"sources": tuple(source for source in self.sources if not source.tokens)}
        )


TokenizerModel = Literal["bpe", "unigram"]
AsTokenizer = bool | Literal["auto"]


class Tokenizer(Section):
    model: TokenizerModel = Field(
        "bpe",
        description="how a vocabulary is learned: byte-pair encoding (Sennrich et al. 2016), or unigram "
        "(Kudo 2018), as SentencePiece has it; either has all bytes, and gives every text back. Only without "
        "path",
    )
    vocab_size: PositiveInt = Field(
        8192,
        description="tokens to learn, bytes and control tokens among them; with extend, those of the old "
        "vocabulary too. Only without path",
    )
    min_frequency: PositiveInt = Field(
        2,
        description="pairs that the text has less often are not merged. Only with model = bpe, without path",
    )
    max_sample_bytes: PositiveInt = Field(
        200_000_000, description="text that the vocabulary is learned from. Only without path"
    )
    temperature: float = Field(
        1.0,
        ge=1,
        le=1000,
        description="a language's share of that sample is its bytes^(1/temperature): 1 is as in the text, "
        "more makes the shares of small languages larger, whose text then counts repeatedly. Only with "
        "sources of several languages, without path",
    )
    reserved_tokens: tuple[str, ...] = Field(
        (),
        description='names of control tokens for later use, such as "<|tool|>": each is a token with an id '
        "that no text can write",
    )
    path: str | None = Field(
        None,
        description="folder with a ready tokenizer.json, or hf:OWNER/NAME[@REVISION] on the Hugging Face "
        "hub: used as it is, nothing is trained",
    )
    extend: str | None = Field(
        None,
        description="a ready BPE tokenizer, given as path is: it keeps its tokens and their ids, and gets "
        "tokens learned from this recipe's text after them, up to vocab_size",
    )
    unchanged_sources: tuple[str, ...] = Field(
        (),
        description="with extend: names of sources that the new tokens are not learned from, and whose "
        "training text (the sample of max_sample_bytes) is encoded as before",
    )
    max_unknown_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of texts in which a ready tokenizer may lack a character. Only with path or "
        "extend, for decoders, which could never write it",
    )
    bos: AsTokenizer = Field(
        "auto",
        description="Does the tokenizer put its bos_token before each text, in training too? auto: as its "
        "post-processor does",
    )
    eos: AsTokenizer = Field(
        "auto",
        description="Does the tokenizer put end-of-text after each text? auto: as its post-processor does. "
        "Documents of the training end with it in any case",
    )

    @property
    def ready(self) -> str | None:
        """The ready tokenizer that is used as it is, or extended."""
        return self.path or self.extend

    @property
    def ready_key(self) -> str:
        """The key that names it."""
        return "tokenizer.path" if self.path else "tokenizer.extend"


Packing = Literal["one_stream", "best_fit", "one_a_sequence", "as_is"]
PACKED = ("best_fit", "one_a_sequence")  # with documents that are put into sequences before training


class DatasetIdentity(Section):
    """Keys of [dataset] that are copied into the identity."""

    mask_documents: bool = Field(False, description="attention does not cross document borders")
    restart_positions: bool | None = Field(
        None,
        description="learned positions (gpt2, opt) begin at 0 in each document, as if it were alone. "
        "Default: true. Only with mask_documents. false continues a run that was begun before this key "
        "existed",
    )


class Dataset(DatasetIdentity):
    """[dataset]: the other keys become the token shards and the phases."""

    sequence_length: PositiveInt = Field(512, description="tokens of a training sequence")
    heldout_share: float = Field(0.02, gt=0, lt=0.5, description="share of documents, by hash of the text")
    mixture: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="source name → weight, of its tokens (or documents: mixture_unit); default: by tokens "
        "and temperature",
    )
    mixture_unit: Literal["tokens", "documents"] = Field(
        "tokens",
        description="what weights are shares of: tokens, or documents, as in interleave_datasets of Hugging "
        "Face's datasets, where a source of long documents gets more of the tokens. Only with a mixture",
    )
    temperature: float = Field(
        1.0,
        ge=1,
        le=1000,
        description="a source's share is its tokens^(1/temperature): 1 is by tokens, more "
        "makes the shares of small sources larger (3.3 is the α = 0.3 of XLM-R). Only with several sources, "
        "without a mixture",
    )
    packing: Packing = Field(
        "one_stream",
        description="documents end to end in one stream, cut where a sequence ends; or best-fit packed: only "
        "those longer than a sequence are cut (Ding et al. 2024); or one_a_sequence: each in one of its own, "
        "filled up, so that a step of N × sequence_length tokens has N of them; or as_is: ready tokens that "
        "were cut into blocks of sequence_length and shuffled before, in the order of the files, where the "
        "last token of a block predicts nothing, as for Hugging Face's Trainer",
    )
    max_epochs: PositiveFloat = Field(
        4.0, description="refuse to repeat a source more often (Muennighoff et al. 2023)"
    )
    source_max_epochs: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="source name → its own max_epochs"
    )


# What `model.params` stands for.
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)

ActivationName = Literal["silu", "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"]


class Model(Section):
    """[model], of the identity: keys as in Hugging Face's `config.json`.

    Keys there that do not change the maths are ignored on import.
    """

    model_type: ModelType = Field("llama", description="the family, by Hugging Face's name")
    params: Amount | None = Field(
        None,
        description='in place of a shape: "3B" is about this size, in the family\'s usual proportions',
    )
    hidden_size: PositiveInt = Field(256, description="width of the hidden states")
    intermediate_size: PositiveInt = Field(704, description="width inside the MLP")
    num_hidden_layers: PositiveInt = Field(6, le=10_000, description="layers, each attention and MLP")
    num_attention_heads: PositiveInt = Field(8, description="heads of queries")
    num_key_value_heads: PositiveInt | None = Field(
        None,
        description="heads of keys and values, fewer in grouped-query attention; default: as many",
    )
    head_dim: PositiveInt | None = Field(
        None, description="width of a head; default: hidden_size / num_attention_heads"
    )
    vocab_size: PositiveInt | None = Field(
        None, description="tokens that there are; default: the tokenizer's"
    )
    vocab_multiple: PositiveInt = Field(
        64, description="rows of the vocabulary's matrices are padded to a multiple of this"
    )
    max_position_embeddings: PositiveInt | None = Field(
        None, description="default: the longest sequence_length"
    )
    rms_norm_eps: PositiveFloat = Field(1e-5, description="added to the mean square in RMSNorm")
    rope_theta: PositiveFloat = Field(10_000.0, description="base of rotary positions (RoPE)")
    rope_scaling: dict[str, Any] | None = Field(
        None,
        description="how RoPE is stretched for long texts: config.json's table of rope_type and numbers",
    )
    rope_local_base_freq: PositiveFloat = Field(
        10_000.0, description="RoPE's base in the windowed layers of a gemma3_text or modernbert"
    )
    rotary_pct: float = Field(
        1.0, gt=0, le=1, description="share of each head that positions turn, in a gpt_neox"
    )
    layer_norm_epsilon: PositiveFloat = Field(1e-5, description="of families with LayerNorm")
    tie_word_embeddings: bool | None = Field(None, description="default: the family's")
    attention_bias: bool | None = Field(None, description="default: the family's")
    mlp_bias: bool | None = Field(None, description="default: the family's")
    hidden_act: ActivationName | None = Field(None, description="default: the family's")
    sliding_window: PositiveInt | None = Field(
        None,
        description="tokens back that windowed layers see, itself included; a modernbert's (default: 65) "
        "see as many forward",
    )
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = Field(
        None,
        description="of each layer; default: all windowed where there is a window; of a modernbert every "
        "third is full, from the first on",
    )
    query_pre_attn_scalar: PositiveFloat | None = Field(
        None, description="scores are divided by its root; default: head_dim"
    )
    attn_logit_softcapping: PositiveFloat | None = Field(None, description="cap of a gemma2's scores")
    final_logit_softcapping: PositiveFloat | None = Field(None, description="cap of a gemma's logits")
    use_parallel_residual: bool = Field(
        True, description="attention and MLP of a gpt_neox layer read the same input"
    )
    position_bucket_size: PositiveInt = Field(
        32, description="of an ltg_bert: its relative positions are 2 × this - 1; far distances share one"
    )
    position_heads: Literal["concatenated", "interleaved"] = Field(
        "concatenated",
        description="how an ltg_bert cuts projected positions into heads: concatenated (HPLT), interleaved "
        "(NorBERT 3)",
    )
    initializer_range: PositiveFloat = Field(
        0.02,
        description="standard deviation of the first weights; that of an ltg_bert follows from hidden_size",
    )
    weights: str | None = Field(
        None,
        description='"hf:FOLDER" or "hf:OWNER/NAME[@REVISION]" on the Hugging Face hub starts from these '
        "weights; their config.json replaces the keys above",
    )
    transplant: Literal["mean", "focus", "random"] | None = Field(
        None,
        description="with weights: this recipe's tokenizer takes the place of theirs. mean: a row of the "
        "embedding and head is that of the old token of the same text, or the mean of the old tokens that "
        "make it up; focus: such a mean is weighted by similarity; random: all are drawn anew",
    )
    transplant_vectors: str | None = Field(
        None,
        description="with transplant = focus: file with an auxiliary vector of each token of this recipe's "
        "tokenizer, .vec (fastText's text format) or .npz (`vectors`, a row for each id)",
    )


class CompleteModel(Model):
    """[model] with the values that a recipe may leave to Kielo, as `models.families.complete` sets them."""

    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: ActivationName

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head: vocab_size, rounded up to vocab_multiple.

        Those beyond vocab_size are padding: zero, never trained, in no logits that are read and in no export.
        """
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class Layout(Section):
    """[layout], of the placement: ranks along each mesh axis, and what is traded for memory.

    The expert axis is not in use yet.
    """

    pipeline: PositiveInt = Field(1, description="ranks that split the layers into stages")
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"
    ] = Field(
        "1f1b", description="in which order stages work on micro-batches. Only with pipeline of 2 or more"
    )
    pipeline_stages_per_rank: PositiveInt | None = Field(
        None,
        description="default: 1, 2 in schedules that interleave. Only with pipeline of 2 or more",
    )
    pipeline_layers: tuple[int, ...] | None = Field(
        None,
        description="layers of each stage, in the order of the model; default: split by cost. Only with "
        "pipeline of 2 or more",
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
    expert: Literal[1] = Field(1, description="ranks that split the experts of a layer; not in use yet")
    sequence_parallel: bool = Field(
        True,
        description="tensor ranks also split the activations between their matrices. Only with tensor of 2 "
        "or more",
    )
    tensor_overlap: Literal["none", "chunked"] = Field(
        "none",
        description="chunked: tensor ranks gather and scatter activations in pieces, each beside the product "
        "of another. Only with tensor of 2 or more",
    )
    zero: Literal[1, 2, 3] = Field(
        1,
        description="1: optimiser state stays split through a step; 2: gradients too; 3: parameters too. "
        "Only with several ranks along shard, context or replicate",
    )
    cpu_offload: bool = Field(
        False, description="parameters, gradients and optimiser state wait, and step, on the CPU"
    )
    context_attention: Literal["all_gather", "ulysses"] = Field(
        "all_gather",
        description="gather keys and values, or swap the split of sequences for one of heads. Only with "
        "context of 2 or more",
    )
    compile: bool | None = Field(
        None,
        description="layers by torch.compile; default: on GPUs, and long runs in bf16 on processors with AMX",
    )
    recompute: Recompute = Field(
        "none",
        description="activations made again in the backward: none, of attention, of norms, of the MLP's "
        "activation (joined by +), all but saved operators, all",
    )
    recompute_every_layers: PositiveInt = Field(
        1, description="recompute in every n-th layer. Only with recompute"
    )
    recompute_saved_operators: tuple[str, ...] = Field(
        ("mm", "addmm", "scaled_dot_product_attention"),
        description="what is kept: names in torch.ops.aten. Only with recompute = operators",
    )

    @property
    def recomputed(self) -> frozenset[str]:
        """Return the names that `recompute` joins, of what the backward makes again."""
        return frozenset(self.recompute.split("+")) - {"none"}


class BatchRamp(Section):
    """Steps begin small and grow by equal amounts, evenly over `tokens` (Megatron's --rampup-batch-size)."""

    first_tokens_per_step: PositiveInt = Field(description="of the first step")
    step_tokens: PositiveInt = Field(description="what tokens_per_step grows by each time")
    tokens: PositiveInt = Field(description="trained before steps have train.tokens_per_step")


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
        "bf16. Only with precision = fp8",
    )
    kept_in_bf16: tuple[str, ...] = Field(
        (),
        description='modules that stay in bf16: "layers.0", "layers.*.attention". Only with precision = fp8',
    )
    head: bool = Field(
        False,
        description="the head's products too: logits and the gradient of its input; its weight's is in bf16. "
        "Only with precision = fp8",
    )
    gathered_in_fp8: bool = Field(
        True,
        description="send and hold weights in 8 bits. Only with precision = fp8 and scaling = tensorwise",
    )
    emulate: bool = Field(
        False,
        description="round to 8 bits but multiply wide: slow, for devices that lack FP8. Only with precision "
        "= fp8",
    )
    watch_steps: PositiveInt = Field(
        50,
        le=100_000,
        description="steps after a change to fp8 in which a rise leads back to bf16. Only with "
        "precision_changes to fp8",
    )
    max_loss_rise: PositiveFloat = Field(
        0.02,
        description="relative, of ten steps' mean over that of watch_steps before. Only with "
        "precision_changes to fp8",
    )
    max_gradient_norm_rise: PositiveFloat = Field(
        1.0, description="the same of the gradient norm. Only with precision_changes to fp8"
    )
    probe_every_steps: int = Field(
        0,
        ge=0,
        description="compare gradients with those in bf16, of the same batch; 0: never. Only with precision "
        "= fp8",
    )


class Spikes(Section):
    """[train.spikes]: what is done when the loss rises out of its noise and does not come back by itself."""

    response: Literal["go_back", "tell"] = Field(
        "go_back",
        description="go_back: restore a checkpoint from before the spike and pass over the text of its "
        "steps; tell: only write an alert",
    )
    window_steps: int = Field(
        128, ge=8, le=100_000, description="steps before, whose median and noise a step is compared with"
    )
    threshold: PositiveFloat = Field(
        6.0, description="robust standard deviations above the median that make a step stand out"
    )
    wait_steps: int = Field(
        30, ge=3, le=100_000, description="steps in which a spike may pass by itself, from its first on"
    )
    max_tries: PositiveInt = Field(
        3,
        description="times of going back for spikes that follow on each other, before the run stops. Only "
        "with response = go_back",
    )
    learning_rate_factor: float = Field(
        1.0,
        gt=0,
        le=1,
        description="each time of going back multiplies the rate of all later steps by it. Only with "
        "response = go_back",
    )


class TrainSchedule(Section):
    """Keys of [train] of which `resolve` makes phases of steps and segments of the learning rate."""

    tokens: Amount | None = Field(
        None,
        description='token budget of the run, such as "10B"; default: the text, dataset.max_epochs times; '
        "with phases: left out, or their sum",
    )
    tokens_per_step: PositiveInt = Field(16_384, description="one optimiser step, over all ranks")
    batch_ramp: BatchRamp | None = Field(None, description="smaller steps at the start; of the first phase")
    micro_batch_sequences: PositiveInt | None = Field(
        None,
        description="sequences per forward on one rank (fewer where that leaves fewer empty ones); default: "
        "the most that fit the device's memory, or 4 where no card knows it",
    )
    learning_rate: PositiveFloat = Field(1e-3, description="the peak, at the end of the warm-up")
    final_learning_rate_ratio: float = Field(
        0.1, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )
    schedule: ScheduleName = Field(
        "cosine",
        description="of the learning rate after the warm-up: half a cosine, a straight line, or "
        "(warm-up, stable, decay) the peak and then a straight line",
    )
    warmup_share: float = Field(0.02, ge=0, lt=1, description="share of the tokens")
    decay_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description=f"share of the tokens that are spent decaying. Only with schedule = {_WITH_DECAY_SHARE}",
    )
    trainable: tuple[str, ...] = Field(
        (),
        description='modules that are trained, all others are frozen: "embed", "head", "layers.0", '
        '"layers.*.mlp"; default: all',
    )


Objective = Literal["next_token", "masked_tokens"]
StateDtype = Literal["fp32", "bf16"]
MaskingKind = Literal["subword", "whole_word", "span"]


class TrainIdentity(Section):
    """Keys of [train] that are copied into the identity: optimiser, objective, precision, skipped steps."""

    objective: Objective = Field(
        "next_token", description="what is predicted; masked_tokens: hidden tokens, by an encoder"
    )
    masking: MaskingKind = Field(
        "span",
        description="what is hidden together: one token, a word, or a span of 1 to 10 tokens. Only with "
        "objective = masked_tokens",
    )
    masking_rate: float = Field(
        0.30,
        gt=0,
        lt=1,
        description="share of tokens that are hidden, at the first step. Only with objective = masked_tokens",
    )
    final_masking_rate: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="the same at the last step, and of held-out text; linear between. Only with objective = "
        "masked_tokens",
    )
    causal_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the sequences in which an encoder sees only the tokens before each and "
        "predicts the next one; with any, hidden tokens are predicted at the position before them, so that "
        "one model has both uses (GPT-BERT)",
    )
    skip_steps: tuple[tuple[PositiveInt, PositiveInt], ...] = Field(
        (), description="[first, last] steps whose text is passed over without training on it"
    )
    optimiser: OptimiserName = Field(
        "adamw",
        description="; ".join(f"{name}: {of.about}" for name, of in OPTIMISERS.items() if of.about),
    )
    weight_decay: float = Field(0.1, ge=0, description="of matrices; biases and norms have none")
    adam_beta1: float = Field(0.9, gt=0, lt=1, description="decay of the mean of gradients")
    adam_beta2: float = Field(0.95, gt=0, lt=1, description="decay of the mean of squared gradients")
    adam_epsilon: PositiveFloat = Field(
        1e-8, description="added to the root of the mean of squared gradients"
    )
    hidden_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of hidden states that training sets to 0: of embeddings, of what each layer's "
        "attention and MLP add, and of what an encoder's head takes",
    )
    attention_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of attention's weights that training sets to 0, in encoders; on a GPU attention "
        "then computes its scores twice",
    )
    max_gradient_norm: PositiveFloat = Field(
        1.0, description="longer gradients, over all parameters, are shortened to this norm"
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="weight of log²(sum of exponentials of the logits), which keeps logits small; 0: none",
    )
    precision: Precision | None = Field(
        None,
        description="what layers compute in; parameters stay in fp32; default: bf16 on GPUs and on "
        "processors with AMX, else fp32; a run goes on in that in which it began",
    )
    precision_changes: tuple[tuple[PositiveInt, Precision], ...] = Field(
        (), description="[step, precision]: what is computed in from that step on"
    )
    fp8: Fp8 = Field(Fp8(), description="how layers multiply where the precision is fp8")
    optimiser_state: StateDtype = Field("fp32", description="precision in which moments are kept")
    gradient_reduce_dtype: ReduceDtype = Field(
        "fp32", description="dtype in which data-parallel ranks send and add up gradients"
    )
    max_skipped_steps_in_a_row: PositiveInt = Field(
        3,
        description="steps that are not finite are skipped; this many in a row end the run",
    )
    spikes: Spikes = Field(Spikes(), description="rises of the loss that stand out of its noise")
    heldout_sequences: PositiveInt = Field(64, description="sequences of each held-out set scored each time")

    @property
    def has_dropout(self) -> bool:
        return bool(self.hidden_dropout or self.attention_dropout)


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
    log_every_steps: PositiveInt = Field(10, description="steps from one line of the log to the next")
    heldout_every_steps: PositiveInt = Field(
        100, description="steps from one scoring of held-out text to the next"
    )
    compare_replicas_every_steps: int = Field(
        100,
        ge=0,
        description="steps from one comparison of what several ranks hold to the next; before each save too; "
        "0: never",
    )
    wandb: str = Field(
        "", description="project of Weights & Biases that the log goes to as well; needs the package wandb"
    )
    tensorboard: bool = Field(True, description="write the log for TensorBoard too, where it is installed")
    collect_garbage_every_steps: PositiveInt = Field(
        50, description="Python's collector, on all ranks at once; 1 in zero-bubble schedules"
    )
    start_timeout_seconds: float | None = Field(
        None,
        ge=1,
        le=604_800,
        description="longest wait for other ranks at the start, for each communicator, and in collectives "
        "until the first steps are done: cold imports and compilation take minutes; default: the cluster's, "
        "or 1800",
    )
    step_timeout_seconds: float = Field(
        600.0, ge=1, le=604_800, description="longest wait for other ranks in each collective of later steps"
    )
    hang_seconds: float = Field(
        20.0,
        ge=1,
        le=604_800,
        description="the ranks end, and the stuck one is named, when none gets on for so long beyond the "
        "usual pauses of steps, at most for 3 × these, or when one is silent for so long or 15 s (from 1,000 "
        "ranks on for 15 ms a rank); 1 rank alone: for `step_timeout_seconds`",
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
    tokens_per_step: PositiveInt | None = Field(None, description="one optimiser step, over all ranks")
    sequence_length: PositiveInt | None = Field(None, description="must divide the longest of all phases")
    mixture: dict[str, PositiveFloat] | None = Field(None, description="source name → weight")
    micro_batch_sequences: PositiveInt | None = Field(None, description="sequences per forward on one rank")
    learning_rate: PositiveFloat | None = Field(None, description="begins a new segment of the learning rate")
    final_learning_rate_ratio: float | None = Field(
        None, ge=0, le=1, description="learning rate at the end of the segment, as a share of its peak"
    )
    schedule: ScheduleName | None = Field(None, description="of the segment, after its warm-up")
    warmup_share: float | None = Field(None, ge=0, lt=1, description="share of the segment's tokens")
    decay_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"share of the segment's tokens. Only with schedule = {_WITH_DECAY_SHARE}",
    )
    max_gradient_norm: PositiveFloat | None = Field(
        None, description="longer gradients are shortened to this norm"
    )
    trainable: tuple[str, ...] | None = Field(
        None, description="modules that are trained, all others are frozen; [] for all"
    )


class Checkpoint(Section):
    """[checkpoint], of the placement."""

    every_steps: PositiveInt = Field(
        500, description="steps from one checkpoint to the next; the end of a run and a signal save too"
    )
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
    memory_every_steps: int = Field(
        0,
        ge=0,
        description="steps from one copy in the nodes' memory to the next, between checkpoints; a restart in "
        "the same job goes on from the newest; 0: none. Only with a step between those of every_steps",
    )


class Verify(Section):
    parity_steps: PositiveInt = Field(
        20, description="optimiser steps that Kielo and transformers both train"
    )
    parity_sequences_per_step: PositiveInt = Field(4, description="sequences of each of these steps")
    parity_sequence_length: PositiveInt = Field(128, description="tokens of each of these sequences")
    tolerance: PositiveFloat = Field(
        1e-5, description="relative loss difference, each step; more only as rounding makes it"
    )


class EvaluationText(Section):
    """One of [[evaluate.texts]]: text from outside of the mixture that the run is scored on, as it is."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=100,
        description="short name, in the log and the report",
    )
    path: str = Field(description="file or folder: .txt (one document a line), .jsonl, .parquet, …")
    kind: Literal["text", "instructions"] = Field(
        "text", description="running text; or conversations, laid out by the tokenizer's chat template"
    )
    loss: Literal["all", "answers"] = Field(
        "all", description="of instructions: the tokens that are scored, all or those of the answers"
    )
    language: str = Field("", description="code of its language; default: the recipe's")
    text_field: str = Field(
        "", description='field or column that holds the text; default: "text", of instructions "messages"'
    )

    @model_validator(mode="after")
    def _loss_of_its_kind(self) -> Self:
        if self.kind != "instructions" and "loss" in self.model_fields_set:
            raise ValueError('loss is of kind = "instructions"; of other text every token is scored')
        return self


class PartOfSpeech(Section):
    """Part-of-speech tags by a linear classifier of an encoder's states; needs `kielo[tagging]`."""

    train: str = Field(
        "", description="CoNLL-U file that the classifier learns from; none: no tags are scored"
    )
    dev: str = Field("", description="CoNLL-U file that it is scored on")
    from_layer: PositiveInt | None = Field(
        None,
        description="layer whose output is a token's features, counted from 1; default: the last. Only with "
        "train",
    )
    pieces: Literal["first", "mean"] = Field(
        "mean",
        description="features of a word of several tokens: those of the first one, or their mean. Only with "
        "train",
    )


class Evaluate(Section):
    texts: tuple[EvaluationText, ...] = Field(
        (), description="texts from outside of the mixture, scored while training and afterwards"
    )
    ngram_order: PositiveInt = Field(
        6,
        description="bytes that the n-gram baseline sees, the predicted one included. Only with "
        "train.objective "
        "= next_token or train.causal_share",
    )
    prompts: tuple[str, ...] = Field(
        (),
        description="default: openings of held-out documents; of an encoder sentences with its mask token, "
        "once in each",
    )
    sample_tokens: PositiveInt = Field(
        80,
        description="tokens that the model writes after each prompt. Only with train.objective = next_token "
        "or train.causal_share",
    )
    temperature: float = Field(
        0.7,
        ge=0,
        description="of sampling; 0 takes the likeliest token. Only with train.objective = next_token or "
        "train.causal_share",
    )
    top_k: PositiveInt = Field(
        50,
        description="likeliest tokens that are sampled from. Only with train.objective = next_token or "
        "train.causal_share, and a temperature above 0",
    )
    pseudo_tokens: PositiveInt = Field(
        2048,
        description="tokens of held-out text that are hidden one by one. Only with train.objective = "
        "masked_tokens",
    )
    minimal_pairs: str = Field(
        "",
        description="file of a good and a bad sentence each, for an encoder: .jsonl or .tsv with "
        "sentence_good, sentence_bad and, if there is one, phenomenon",
    )
    part_of_speech: PartOfSpeech = Field(PartOfSpeech(), description="tags from an encoder's frozen states")

    @property
    def encoder_files(self) -> dict[str, str]:
        """Return key → the file that it names, of the measures of encoders."""
        tags = self.part_of_speech
        named = {
            "minimal_pairs": self.minimal_pairs,
            "part_of_speech.train": tags.train,
            "part_of_speech.dev": tags.dev,
        }
        return {key: path for key, path in named.items() if path}


class Report(Section):
    license: str = Field("other", description="of the model, for its card (a Hugging Face licence id)")
    text_license: str = Field("", description="of the training text, for the card")


class RecipeIdentity(Section):
    """Keys outside all tables that are copied into the identity."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=100,
        description="of the run: its folder is runs/NAME",
    )
    language: str = Field(
        description="language card: what the text is filtered by (`kielo languages` lists them)"
    )
    seed: int = Field(1, ge=0, description="of first weights, the order of the text and sampling")


class Recipe(RecipeIdentity):
    """A whole recipe."""

    description: str = Field("", description="a sentence for the report and the model card")
    folder: str = Field("", description="run folder; default: runs/NAME")
    follows: str = Field(
        "",
        description="the recipe of a run whose exported weights this one starts from (model.weights names "
        "them); `kielo run` makes them first",
    )
    cluster: str = Field(
        "laptop", description="cluster card: its accelerator's peak, and what plans count with"
    )
    nodes: tuple[PositiveInt, ...] = Field(
        (), description="of the cluster, that the layout is meant for; plans count with them by default"
    )
    machine: str = Field("", description="card of your own machine for plans, made by kielo plan calibrate")
    corpus: Corpus = Field(description="raw text and its filters")
    tokenizer: Tokenizer = Field(Tokenizer(), description="the vocabulary: trained, or a ready one")
    dataset: Dataset = Field(Dataset(), description="sequences, held-out text, mixture")
    model: Model = Field(Model(), description="shape of the model, or weights to start from")
    layout: Layout = Field(Layout(), description="how ranks share the work")
    train: Train = Field(Train(), description="budget, optimiser, precision, logs")
    phases: tuple[Phase, ...] = Field((), description="parts of the run in order; none: one of train.tokens")
    checkpoint: Checkpoint = Field(Checkpoint(), description="when checkpoints are saved, and which are kept")
    verify: Verify = Field(Verify(), description="the comparison with Hugging Face transformers")
    evaluate: Evaluate = Field(Evaluate(), description="baselines and generated text")
    report: Report = Field(Report(), description="licences on the model card")
