"""The sections of a recipe, frozen and typed. A key is declared here and nowhere else.

Units are in the names, and every default is the value that a newcomer should have. The text below a field is
its description. `resolve` copies sections whole into `resolved.toml`: into the identity (what the run trains:
each checkpoint stores it, and a change is refused) or the placement (where and how it runs: any attempt can
change it). A section of both kinds has a base class of each kind. `resolve` makes steps of `TrainSchedule`.
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
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

from kielo.recipe.addresses import address_problem, is_address
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
    _parts = (parts for number in (1, 2, 3) for parts in combinations(RECOMPUTED_PARTS, number))
    Recompute = Literal[("none", *map("+".join, _parts), "operators", "full")]


def _listed(table: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {of.about}" for name, of in table.items() if of.about)


class Section(BaseModel):
    """A frozen table of a recipe or a card. It refuses unknown keys, NaN and infinities."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reads_amounts(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept 4M or 1e9 for a whole number, and a number for a list of one. Refuse true, 1 to Python."""
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
            raise ValueError("Fix: a number below 2**63, because torch and numpy hold 64 bits")
        return value

    def part(self, kind: type[Part]) -> Part:
        """Return the values of the fields that `kind`, a base class of this section, declares."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})


_Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str) else value, json_schema_input_type=str | list[str]
    ),
]


class Source(Section):
    """A body of text in one place: `path`, ready `tokens`, or `debian_package` and/or `huggingface_dataset`.

    apt-get fetches `debian_package` into the run folder. Without apt, `huggingface_dataset` is used.
    """

    name: str = Field("", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Short name, also of its token files. Default: the file's stem or the package's name."""
    path: str | None = None
    """File, folder or glob: .txt (one document a line), .jsonl, .json, .parquet, .html, …, plain or as .gz,
    .zst, .xz or .bz2. Or an address, such as https://…, s3://… or hf://datasets/…, whose files are fetched
    into the run folder once."""
    debian_package: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9+.-]+$")
    """Debian package whose HTML pages are the text."""
    huggingface_dataset: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?$"
    )
    """Dataset on the Hugging Face hub: OWNER/NAME."""
    huggingface_subset: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$"
    )
    """Subset (configuration) of the dataset, e.g. 20231101.et. Only with huggingface_dataset."""
    tokens: str | None = None
    """Ready token files, read in place: Megatron's PREFIX (.bin and .idx), OLMo's NAME.npy, nanotron's
    NAME.ds, or a folder or pattern of them."""
    tokens_dtype: Literal["uint16", "uint32"] | None = None
    """Type of ids that .npy and .ds files do not store. Default: uint16 if the vocabulary fits. Only with
    tokens."""
    text_field: str = ""
    """Field or column that holds the text. Default: "text"; for code "content"; for instructions "messages"
    or "conversations"."""
    kind: KindName = Field("text", description=f"Kind of text. {_listed(KINDS)}.")
    language: _Texts = ()
    """Code of the text's language, or a list: text in any is kept. Default: the recipe's. Code has none."""
    clean: bool = True
    """Whether the filters run. false for text that is already clean (HPLT, FineWeb2, CulturaX): only empty
    documents and exact duplicates are dropped, and turns of instructions need not alternate."""
    min_language_score: float | None = Field(None, ge=0, le=1)
    """Probability of its language that a document of HPLT or FineWeb2 must have, by their own field. Default:
    all documents. Only with kind = text."""
    min_document_score: float | None = Field(None, ge=0, le=10)
    """Document score of HPLT (0 to 10) that a document must have. Default: all documents. Only with kind =
    text."""
    encoding: str | None = None
    """Encoding of the files, e.g. "windows-1257". Default: from a byte-order mark or the head of an HTML or
    XML file, else UTF-8. Only with path."""
    leave_out: _Texts = ()
    """Patterns of files to ignore, by their names below `path`, e.g. docs/*.csv. Any other data file that
    Kielo cannot read is an error. Only with path or tokens."""
    documents: Literal["lines", "paragraphs", "files"] = "lines"
    """Document of a .txt file: a line, a paragraph (ended by an empty line), or the file. Only with path."""
    pair_fields: _Texts = ()
    """The two fields of a pair, in the order of `language`: names (of row 1 in .tsv), column numbers in
    .tsv (default: 1, 2), language codes in .tmx. Default: the codes in `language`. Only with kind =
    parallel."""
    templates: _Texts = (DEFAULT_TEMPLATE,)
    """Layouts with {source}, {target}, {source_language}, {target_language}; one for each pair. Only with
    kind = parallel."""
    reverse_share: float = Field(0.5, ge=0, le=1)
    """Share of pairs that begin with the second language. Only with kind = parallel."""
    loss: Literal["all", "answers"] = "all"
    """Tokens that carry loss. answers: the assistant's messages, each with the token that ends its turn. Only
    with kind = instructions."""
    too_long: Literal["split", "truncate", "drop"] = "split"
    """Treatment of a conversation longer than the longest sequence_length. split: the rest is trained as a
    sequence without its beginning; truncate: the rest is dropped. Only with kind = instructions."""
    licence: str = ""
    """Licence of this text, for the model card."""
    address: str = ""
    """Address of this text (URL or DOI), for the model card."""
    max_documents: PositiveInt | None = None
    """Number of documents to read. Default: all."""

    @property
    def address_of_files(self) -> str | None:
        return self.path if is_address(self.path) else None

    @property
    def local_path(self) -> str | None:
        return None if is_address(self.path) else self.path

    @property
    def is_downloaded(self) -> bool:
        return bool(self.debian_package or self.huggingface_dataset or self.address_of_files)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield what the keys cannot have together, with the fix."""
        if self.address_of_files and (problem := address_problem(self.address_of_files)):
            yield f"path {problem}"
        kind, given = self.kind, self.model_fields_set
        fetched = self.debian_package or self.huggingface_dataset
        if self.language and not KINDS[kind].has_language:
            yield f"kind = {kind!r} has no language. Fix: leave the key out"
        if kind == "parallel" and len(self.language) != 2:
            yield 'kind = "parallel" has two languages. Fix: language = ["en", "fi"]'
        if self.encoding is not None and not _is_encoding(self.encoding):
            known = "utf-8, utf-16le, windows-1252, windows-1257, iso-8859-15, shift_jis, …"
            yield f"encoding = {self.encoding!r} is not known. Fix: {known}"
        if kind != "text" and given & {"min_language_score", "min_document_score"}:
            yield 'min_language_score and min_document_score need kind = "text"'
        if kind != "parallel" and given & {"pair_fields", "templates", "reverse_share"}:
            yield 'pair_fields, templates and reverse_share need kind = "parallel"'
        if kind != "instructions" and "loss" in given:
            yield 'loss needs kind = "instructions". All other text carries loss on every token'
        if kind != "instructions" and "too_long" in given:
            yield 'too_long needs kind = "instructions"'
        if self.pair_fields and len(self.pair_fields) != 2:
            yield f"pair_fields names {len(self.pair_fields)} fields. Fix: two"
        for template in self.templates:
            if problem := template_problem(template):
                yield f"templates: {template!r}: {problem}"
        if self.path and fetched:
            yield "two places of the text. Fix: path, or debian_package and/or huggingface_dataset"
        if self.tokens and (self.path or fetched):
            yield "Fix: either tokens or raw text (path, debian_package, huggingface_dataset)"
        if not self.path and not fetched and not self.tokens:
            yield "no place of the text. Fix: path, debian_package, huggingface_dataset or tokens"
        if self.tokens and given & {"min_language_score", "min_document_score"}:
            yield "tokens have no scores. Fix: leave out min_language_score and min_document_score"
        if self.tokens and (self.max_documents or self.text_field or kind != "text" or not self.clean):
            yield "tokens are read as they are. Fix: leave out max_documents, text_field, kind and clean"
        for key in ("encoding", "documents"):
            if not self.path and key in given and getattr(self, key) is not None:
                yield f"{key} describes the files at `path`. Fix: path, or leave the key out"
        if self.leave_out and not (self.path or self.tokens):
            yield "leave_out names files at `path` or `tokens`. Fix: leave the key out"
        if self.huggingface_subset and not self.huggingface_dataset:
            yield "huggingface_subset belongs to a huggingface_dataset. Fix: huggingface_dataset"
        if self.tokens_dtype and not self.tokens:
            yield "tokens_dtype describes ready token files. Fix: tokens, or leave the key out"
        if self.name == "heldout" or self.name.startswith("heldout."):
            yield "heldout and heldout.… are names of the held-out text. Fix: another name"


def _is_encoding(name: str) -> bool:
    try:
        "a".encode(name)
    except (LookupError, UnicodeError):
        return False
    of_names = ("idna", "punycode", "unicode-escape", "raw-unicode-escape", "utf-7")
    return codecs.lookup(name).name not in of_names


def _sources(value: Any) -> Any:
    """Make a table of each plain string, a path, and name each source. --set gives paths joined by commas."""
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


def _source_name(entry: Mapping[str, Any]) -> str:
    keys = ("path", "debian_package", "huggingface_dataset", "tokens")
    place = str(next((entry[key] for key in keys if entry.get(key)), "text"))
    place = place.partition("?")[0] if place.startswith("http") else place
    parts = [part for part in re.split(r"[/\\]", place) if part and not re.search(r"[*?\[]", part)]
    last = parts[-1] if parts else "text"
    last = re.sub(r"(\.(txt|jsonl?|parquet|html?|gz|zst|bin|idx|npy|ds))+$", "", last)
    return re.sub(r"[^A-Za-z0-9_-]+", "_", last).strip("_-")[:90] or "text"


class CodeFilters(Section):
    """[corpus.code]: files of code that nobody wrote by hand. The defaults are The Stack's.

    Kocetkov et al. 2022, arXiv:2211.15533, and Chen et al. 2021, arXiv:2107.03374, section 3.1.
    """

    languages: tuple[str, ...] = ()
    """Programming languages to keep, by file extension. Default: all. Only with a source of code that is
    cleaned."""
    max_line_characters: PositiveInt = 1000
    """Characters of the longest line that a file can have. Only with a source of code that is cleaned."""
    max_mean_line_characters: PositiveFloat = 100.0
    """Mean characters a line that a file can have. Only with a source of code that is cleaned."""
    min_alphanumeric_share: float = Field(0.25, ge=0, le=1)
    """Share of letters and digits that a file must have. Only with a source of code that is cleaned."""
    generated_marks: tuple[str, ...] = ("generated by", "auto-generated", "autogenerated", "do not edit")
    """Words of generated files: a file with one of them in its first lines, in any case, is dropped. Only
    with a source of code that is cleaned."""


IDENTIFIERS = ("py3langid", "lid176", "heliport")
FASTTEXT_SUFFIXES, LEARNED_SUFFIX = (".bin", ".ftz"), ".kielo_lid"


def _identifier(name: str) -> str:
    if name in IDENTIFIERS or name.endswith((*FASTTEXT_SUFFIXES, LEARNED_SUFFIX)):
        return name
    raise ValueError(
        f"no identifier. Fix: {', '.join(IDENTIFIERS)}, or a file that ends with "
        f"{', '.join(FASTTEXT_SUFFIXES)} or {LEARNED_SUFFIX}"
    )


_Identifier = Annotated[str, AfterValidator(_identifier)]
_Sources = Annotated[
    tuple[Source, ...], BeforeValidator(_sources, json_schema_input_type=str | list[str | Source])
]


class Corpus(Section):
    sources: _Sources = Field(min_length=1)
    """Bodies of text. A plain string is a path."""
    language_identifier: _Identifier = "py3langid"
    """Program that identifies languages: py3langid, fastText's lid.176 as lid176, or heliport, a package to
    install. Or a file: a model of fastText (.bin, .ftz), or of `kielo languages --learn` (.kielo_lid)."""
    line_language_threshold: float | None = Field(None, ge=0, le=1)
    """Probability of the language that a line must have. Default: from the language card. Only with a source
    of running or parallel text that is cleaned."""
    document_language_threshold: float | None = Field(None, ge=0, le=1)
    """Probability of the language that a document must have. Default: from the language card. Only with a
    source of running or parallel text that is cleaned."""
    words: Literal["letters", "icu"] = "letters"
    """What a word is. letters: letters without a space between them. icu: by the dictionaries of ICU (the
    package icu4py) in Chinese, Japanese, Thai, Khmer, Lao and Burmese, which have no spaces between words.
    Only with a source of raw text."""
    max_foreign_character_share: float = Field(0.3, ge=0, le=1)
    """Share of letters outside the language's scripts that a line can have. Names in articles need some. Only
    with a source of running text that is cleaned."""
    min_line_characters: int = Field(10, ge=0)
    """Characters that a line must have. Only with a source of running text that is cleaned."""
    min_document_characters: int = Field(100, ge=0)
    """Characters that a document must have after all other filters. Only with a source of running text that
    is cleaned."""
    deduplicate_lines: bool = True
    """Whether the first of equal lines alone is kept. Only with a source of running text that is cleaned."""
    deduplicate_documents: bool = True
    """Whether only the first of equal documents of the corpus is kept. Only with a source of raw text."""
    near_copies: Literal["none", "fineweb2", "hplt"] = "none"
    """How near copies of documents are found, by MinHash. fineweb2: runs of 5 words, in 14 bands of 8. hplt:
    single words, in 17 bands of 15. Only with a source of running text that is cleaned."""
    near_copies_keep: Literal["longest", "first", "score"] = "longest"
    """Which document of a cluster of near copies is kept. score: with the largest document_score
    in its metadata, as in HPLT's files. Of equal documents the first. Only with near_copies."""
    max_document_bytes: PositiveInt = 10_000_000
    """Bytes of the longest line, page or cell, as stored but decompressed. A longer record is bad. Only with
    raw text."""
    max_bad_share: float = Field(0.01, ge=0, le=1)
    """Share of bad records of a source that are skipped; more are an error. One bad record in ten or more is
    always skipped, unless this is 0. Only with a source of raw text."""
    quality: Literal["none", "fineweb2", "hplt"] = "none"
    """Filters of documents by repetitions, lines and words. fineweb2: the filters of Gopher and FineWeb with
    FineWeb2's limits of the language. hplt: HPLT's score of web documents, 0.5 or more, by its program
    docscorer, a package to install. Only with a source of running text that is cleaned."""
    repair_encoding: bool = False
    """Whether ftfy repairs lines whose UTF-8 was read in another encoding ("Ãµ" for "õ"). Only with a source
    of running text that is cleaned."""
    mask_personal_data: tuple[Literal["email", "ip", "iban", "national_number", "phone"], ...] = ()
    """Kinds of personal data that become the name of their kind, such as [EMAIL]. IBANs and national numbers
    are known by their check digits, phone numbers by the plans of the language's countries. Only with a
    source of running text that is cleaned."""
    damage: tuple[
        Literal["spaced_letters", "loops", "capitals", "keyword_lists", "lost_diacritics"], ...
    ] = ()
    """Classes of damaged text that are mended (spaced_letters, loops) or dropped. Only with a source of
    running text that is cleaned."""
    decontaminate: bool | tuple[str, ...] = False
    """`true` drops documents that share 13 words in a row with evaluate.texts, evaluate.minimal_pairs or
    evaluate.tasks. A list names files of such texts, .txt or .jsonl. Only with a source of raw text."""
    own_steps: tuple[str, ...] = ()
    """Python files with a function judge(text, metadata), which returns None or the reason to drop the
    document, or change(text), which returns the new text. Only with a source of running text that is
    cleaned."""
    workers: PositiveInt = 2
    """Processes that clean text, and later pack it."""
    engine: Literal["processes", "ray"] = "processes"
    """Runner of the corpus' tasks. processes: workers of this machine. ray: a cluster of Ray whose
    nodes share the run's disk. Only with a source of raw text."""
    code: CodeFilters = CodeFilters()
    """Limits for files of code."""

    @property
    def token_sources(self) -> tuple[Source, ...]:
        return tuple(source for source in self.sources if source.tokens)

    @property
    def of_raw_text(self) -> "Corpus":
        """Return the section without sources of ready tokens. It can be empty."""
        raw = tuple(source for source in self.sources if not source.tokens)
        return self.model_copy(update={"sources": raw})


TokenizerModel = Literal["bpe", "unigram"]
AsTokenizer = bool | Literal["auto"]


class Tokenizer(Section):
    model: TokenizerModel = "bpe"
    """Method that learns the vocabulary: byte-pair encoding (Sennrich et al. 2016), or unigram (Kudo 2018) as
    in SentencePiece. Both contain all bytes and restore every text. Only without path."""
    vocab_size: PositiveInt = 8192
    """Tokens of the vocabulary, with bytes, control tokens and all tokens of extend. Only without path."""
    min_frequency: PositiveInt = 2
    """Occurrences in the text that a pair needs to be merged. Only with model = bpe, without path."""
    max_sample_bytes: PositiveInt = 200_000_000
    """Bytes of text that the vocabulary is learned from. Only without path."""
    temperature: float = Field(1.0, ge=1, le=1000)
    """Temperature of languages: the share of a language in that sample is its bytes^(1/temperature). 1 keeps
    the shares of the text. A larger value repeats text of small languages. Only with sources of several
    languages, without path."""
    reserved_tokens: tuple[str, ...] = ()
    """Names of control tokens for later use, such as "<|tool|>". Each gets an id that no text can produce."""
    path: str | None = None
    """Folder with a ready tokenizer.json, or hf:OWNER/NAME[@REVISION] on the hub. It is used as it is."""
    extend: str | None = None
    """Ready BPE tokenizer, given like path. It keeps its tokens and ids. Tokens learned from this recipe's
    text follow them, up to vocab_size."""
    unchanged_sources: tuple[str, ...] = ()
    """Names of sources that the new tokens are not learned from, and whose training text (the sample of
    max_sample_bytes) is encoded as before. Only with extend."""
    max_unknown_share: float = Field(0.01, ge=0, le=1)
    """Share of texts in which a ready tokenizer can lack a character. Only with path or extend, for decoders,
    which could never write it."""
    bos: AsTokenizer = "auto"
    """Whether a bos_token begins each text, in training too. auto: as the tokenizer's post-processor does."""
    eos: AsTokenizer = "auto"
    """Whether the tokenizer puts end-of-text after each text. auto: as its post-processor does. Documents of
    the training always end with it."""

    @property
    def ready(self) -> str | None:
        return self.path or self.extend

    @property
    def ready_key(self) -> str:
        return "tokenizer.path" if self.path else "tokenizer.extend"


Packing = Literal["one_stream", "best_fit", "one_a_sequence", "as_is"]
PACKED = ("best_fit", "one_a_sequence")  # with documents that are put into sequences before training


class DatasetIdentity(Section):
    """Keys of [dataset] that are copied into the identity."""

    mask_documents: bool = False
    """Whether attention stops at document borders."""
    restart_positions: bool | None = None
    """Whether learned positions (gpt2, opt) restart at 0 in each document. Default: true. false continues a
    run from before this key existed. Only with mask_documents."""


class Dataset(DatasetIdentity):
    """[dataset]. The other keys become the token shards and the phases."""

    sequence_length: PositiveInt = 512
    """Tokens of a training sequence."""
    heldout_share: float = Field(0.02, gt=0, lt=0.5)
    """Share of documents that are held out, by hash of the text."""
    mixture: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Source name → weight: its share of the tokens (or documents: mixture_unit). Default: by tokens and
    temperature."""
    mixture_unit: Literal["tokens", "documents"] = "tokens"
    """Unit of the weights: tokens, or documents as in interleave_datasets of Hugging Face's datasets, which
    gives sources of long documents more of the tokens. Only with a mixture."""
    temperature: float = Field(1.0, ge=1, le=1000)
    """Temperature of sources: the share of a source is its tokens^(1/temperature). 1 keeps the shares. A
    larger value raises those with little text (3.3 is the α = 0.3 of XLM-R). Only with several sources,
    without a mixture."""
    packing: Packing = "one_stream"
    """Way from documents to sequences. one_stream: end to end, cut at each sequence_length. best_fit: only
    longer documents are cut (Ding et al. 2024). one_a_sequence: each document in its own padded sequence, so
    a step of N × sequence_length tokens has N documents. as_is: ready tokens that were cut into blocks of
    sequence_length and shuffled before, in file order; the last token of a block predicts nothing, as in
    Hugging Face's Trainer."""
    max_epochs: PositiveFloat = 4.0
    """Epochs of a source that a run can use; more are refused (Muennighoff et al. 2023)."""
    source_max_epochs: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Source name → its own max_epochs."""


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
    """[model], in the identity: keys of Hugging Face's `config.json`. Import ignores keys without effect."""

    model_type: ModelType = "llama"
    """Model family, by Hugging Face's name."""
    params: Amount | None = None
    """Number of parameters in place of a shape, such as "3B", in the family's usual proportions."""
    hidden_size: PositiveInt = 256
    """Width of the hidden states."""
    intermediate_size: PositiveInt = 704
    """Width inside the MLP."""
    num_hidden_layers: PositiveInt = Field(6, le=10_000)
    """Number of layers, each with attention and MLP."""
    num_attention_heads: PositiveInt = 8
    """Number of query heads."""
    num_key_value_heads: PositiveInt | None = None
    """Number of key and value heads, fewer in grouped-query attention. Default: num_attention_heads."""
    head_dim: PositiveInt | None = None
    """Width of a head. Default: hidden_size / num_attention_heads."""
    vocab_size: PositiveInt | None = None
    """Number of tokens. Default: the tokenizer's."""
    vocab_multiple: PositiveInt = 64
    """Multiple to which the rows of the embedding and the head are padded."""
    max_position_embeddings: PositiveInt | None = None
    """Positions that the model has. Default: the longest sequence_length."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Number added to the mean square in RMSNorm."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of rotary positions (RoPE)."""
    rope_scaling: dict[str, Any] | None = None
    """Stretching of RoPE for long texts: config.json's table of rope_type and numbers."""
    rope_local_base_freq: PositiveFloat = 10_000.0
    """Base of RoPE in the windowed layers of gemma3_text and modernbert."""
    rotary_pct: float = Field(1.0, gt=0, le=1)
    """Share of each head that RoPE rotates. Only with gpt_neox."""
    layer_norm_epsilon: PositiveFloat = 1e-5
    """Number added to the variance in LayerNorm."""
    tie_word_embeddings: bool | None = None
    """Whether the head uses the embedding's weights. Default: the family's."""
    attention_bias: bool | None = None
    """Whether attention's projections have biases. Default: the family's."""
    mlp_bias: bool | None = None
    """Whether the MLP's projections have biases. Default: the family's."""
    hidden_act: ActivationName | None = None
    """Activation of the MLP. Default: the family's."""
    sliding_window: PositiveInt | None = None
    """Tokens that a windowed layer sees, the current token included; in a modernbert (default: 65) equally
    many forward."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """Kind of each layer. Default: all windowed if there is a window; in a modernbert every third is full,
    from the first on."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Number whose root divides the scores. Default: head_dim."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Cap of attention's scores. Only with gemma2."""
    final_logit_softcapping: PositiveFloat | None = None
    """Cap of the logits. Only with gemma2 and gemma3_text."""
    use_parallel_residual: bool = True
    """Whether attention and MLP of a layer read the same input. Only with gpt_neox."""
    position_bucket_size: PositiveInt = 32
    """Half of the relative positions, 2 × this - 1. Far distances share one. Only with ltg_bert."""
    position_heads: Literal["concatenated", "interleaved"] = "concatenated"
    """Cut of positions into heads: concatenated (HPLT) or interleaved (NorBERT 3). Only with ltg_bert."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the first weights. An ltg_bert derives its own from hidden_size."""
    weights: str | None = None
    """Weights to start from: "hf:FOLDER", "hf:OWNER/NAME[@REVISION]" on the Hugging Face hub, or
    "megatron:FOLDER", a checkpoint of Megatron-LM or Megatron-DeepSpeed. Their config.json, or Megatron's
    arguments, replace the keys above."""
    transplant: Literal["mean", "focus", "random"] | None = None
    """Method that gives the weights this recipe's tokenizer. mean: a row of embedding and head comes from the
    old token of the same text, or is the mean of the old tokens that spell it. focus: the mean is weighted by
    similarity. random: all rows are drawn. Only with weights."""
    transplant_vectors: str | None = None
    """File with an auxiliary vector of each token of this recipe's tokenizer: .vec (fastText's text format)
    or .npz (`vectors`, a row for each id). Only with transplant = focus."""


class CompleteModel(Model):
    """[model] with all values that a recipe can leave to Kielo, set by `models.families.complete`."""

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
        """Return the rows of the embedding and the head: vocab_size, rounded up to vocab_multiple.

        Rows beyond vocab_size are padding: zero, never trained, in no logits that are read and in no export.
        """
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class Layout(Section):
    """[layout], in the placement: ranks along each mesh axis, and time traded for memory."""

    pipeline: PositiveInt = 1
    """Ranks that split the layers into stages."""
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"
    ] = "1f1b"
    """Order in which stages work on micro-batches. Only with pipeline of 2 or more."""
    pipeline_stages_per_rank: PositiveInt | None = None
    """Stages on each rank. Default: 1; 2 in schedules that interleave. Only with pipeline of 2 or more."""
    pipeline_layers: tuple[int, ...] | None = None
    """Layers of each stage, in order. Default: split by cost. Only with pipeline of 2 or more."""
    replicate: int = Field(1, ge=0)
    """Groups that each hold a whole copy of what `shard` splits (hybrid sharding). 0: all remaining ranks.
    0 needs a shard above 0."""
    shard: int = Field(0, ge=0)
    """Ranks that split parameters, gradients and optimiser state. 0: all remaining ranks."""
    context: PositiveInt = 1
    """Ranks that split each sequence."""
    tensor: PositiveInt = 1
    """Ranks that split each matrix, and activations along the sequence."""
    expert: Literal[1] = 1
    """Ranks that split the experts of a layer. Not in use yet."""
    sequence_parallel: bool = True
    """Whether tensor ranks split the activations between matrices, too. Only with tensor of 2 or more."""
    tensor_overlap: Literal["none", "chunked"] = "none"
    """Overlap of tensor ranks' communication. chunked: activations are gathered and scattered in pieces, each
    beside the product of another. Only with tensor of 2 or more."""
    zero: Literal[1, 2, 3] = 1
    """Level of ZeRO. 1: optimiser state stays split through a step; 2: gradients too; 3: parameters too. Only
    with several ranks along shard, context or replicate."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimiser state are kept, and updated, on the CPU."""
    context_attention: Literal["all_gather", "ulysses"] = "all_gather"
    """Method of context ranks: gather keys and values, or exchange split sequences for split heads. Only with
    context of 2 or more."""
    alibi_kernel: Literal["flex", "bias"] = "flex"
    """Kernel of ALiBi's attention on GPUs. flex: FlexAttention; bias: scaled_dot_product_attention with a
    tensor of biases, for GPUs that FlexAttention does not run on. Only with model_type = bloom."""
    compile: bool | None = None
    """Whether layers are compiled by torch. Default: on GPUs, and for long runs in bf16 on CPUs with AMX."""
    recompute: Recompute = "none"
    """Activations that the backward computes again: none, of attention, of norms, of the MLP's activation
    (joined by +), all but saved operators, all."""
    recompute_every_layers: PositiveInt = 1
    """Distance n of recomputed layers: every n-th layer. Only with recompute."""
    recompute_saved_operators: tuple[str, ...] = ("mm", "addmm", "scaled_dot_product_attention")
    """Operators whose results are saved: names in torch.ops.aten. Only with recompute = operators."""

    @property
    def recomputed(self) -> frozenset[str]:
        return frozenset(self.recompute.split("+")) - {"none"}


class LayoutOnNodes(Section):
    """An entry of [[layouts]]: the whole layout on these numbers of nodes, in place of [layout]."""

    cluster: str
    """Cluster card of these nodes."""
    nodes: tuple[PositiveInt, ...] = Field(min_length=1)
    """Numbers of nodes."""
    micro_batch_sequences: PositiveInt | None = None
    """Sequences per forward on one rank. Default: train.micro_batch_sequences."""
    layout: Layout
    """Keys of [layout]. A key that is left out has its own default, not the value of [layout]."""


class BatchRamp(Section):
    """Steps begin small and grow by equal amounts, evenly over `tokens` (Megatron's --rampup-batch-size)."""

    first_tokens_per_step: PositiveInt
    """Tokens of the first step."""
    step_tokens: PositiveInt
    """Tokens by which a step grows each time."""
    tokens: PositiveInt
    """Tokens trained before steps reach train.tokens_per_step."""


_WITH_DECAY_SHARE = ", ".join(name for name, of in LEARNING_RATE_SCHEDULES.items() if of.has_decay_share)
Precision = Literal["fp32", "bf16", "fp8"]
ReduceDtype = Literal["fp32", "bf16"]


class Fp8(Section):
    """[train.fp8]: matrix products of layers in fp8 (Micikevicius et al. 2022, arXiv:2209.05433)."""

    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Unit of a scale: tensor, row, or row with weights' gradients in bf16. Only with precision = fp8."""
    kept_in_bf16: tuple[str, ...] = ()
    """Modules that stay in bf16: "layers.0", "layers.*.attention". Only with precision = fp8."""
    head: bool = False
    """Whether the head also computes logits and the gradient of its input in fp8. The gradient of its weight
    is in bf16. Only with precision = fp8."""
    gathered_in_fp8: bool = True
    """Whether weights are sent and held in 8 bits. Only with precision = fp8 and scaling = tensorwise."""
    emulate: bool = False
    """Whether numbers are rounded to 8 bits and multiplied in a wider type. Slow, for devices without FP8.
    Only with precision = fp8."""
    watch_steps: PositiveInt = Field(50, le=100_000)
    """Steps after a change to fp8 in which a rise leads back to bf16. Only with precision_changes to fp8."""
    max_loss_rise: PositiveFloat = 0.02
    """Relative rise of the loss that leads back: mean of ten steps over the mean of watch_steps before. Only
    with precision_changes to fp8."""
    max_gradient_norm_rise: PositiveFloat = 1.0
    """Relative rise of the gradient norm that leads back. Only with precision_changes to fp8."""
    probe_every_steps: int = Field(0, ge=0)
    """Steps between comparisons of gradients with gradients in bf16, on the same batch. 0: never. Only with
    precision = fp8."""


class Spikes(Section):
    """[train.spikes]: the response to a loss that rises above its noise and does not return by itself."""

    response: Literal["go_back", "tell"] = "go_back"
    """Response to a spike. go_back: restore a checkpoint from before it and skip the text of its steps. tell:
    only write an alert."""
    window_steps: int = Field(128, ge=8, le=100_000)
    """Steps whose median and noise a new step is compared with."""
    threshold: PositiveFloat = 6.0
    """Robust standard deviations above the median from which a step is a spike."""
    wait_steps: int = Field(30, ge=3, le=100_000)
    """Steps in which a spike can pass by itself, counted from its first."""
    max_tries: PositiveInt = 3
    """Times that a run goes back for consecutive spikes before it stops. Only with response = go_back."""
    learning_rate_factor: float = Field(1.0, gt=0, le=1)
    """Factor of the later learning rate, each time that the run goes back. Only with response = go_back."""


class TrainSchedule(Section):
    """Keys of [train] that `resolve` turns into phases of steps and segments of the learning rate."""

    tokens: Amount | None = None
    """Token budget, such as "10B". Default: the text dataset.max_epochs times, or the sum of the phases."""
    tokens_per_step: PositiveInt = 16_384
    """Tokens of an optimiser step, over all ranks."""
    batch_ramp: BatchRamp | None = None
    """Smaller steps at the start of the first phase."""
    micro_batch_sequences: PositiveInt | None = None
    """Sequences per forward on one rank; fewer if that leaves fewer empty sequences. Default: the most that
    fit the device's memory, or 4 without a card."""
    learning_rate: PositiveFloat = 1e-3
    """Peak of the learning rate, at the end of the warm-up."""
    final_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after the warm-up: half a cosine, a straight line, or wsd (warm-up, stable,
    decay): the peak and then a straight line."""
    warmup_share: float = Field(0.02, ge=0, lt=1)
    """Share of the tokens in the warm-up."""
    decay_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description=f"Share of the tokens in the decay. Only with schedule = {_WITH_DECAY_SHARE}.",
    )
    trainable: tuple[str, ...] = ()
    """Modules to train, the others are frozen: "embed", "head", "layers.0", "layers.*.mlp". Default: all."""


Objective = Literal["next_token", "masked_tokens"]
StateDtype = Literal["fp32", "bf16"]
MaskingKind = Literal["subword", "whole_word", "span"]


class TrainIdentity(Section):
    """Keys of [train] that are copied into the identity: optimiser, objective, precision, skipped steps."""

    objective: Objective = "next_token"
    """Tokens that are predicted: the next token, or masked (hidden) tokens by an encoder."""
    masking: MaskingKind = "span"
    """Unit that is hidden: token, word, or span of 1 to 10 tokens. Only with objective = masked_tokens."""
    masking_rate: float = Field(0.30, gt=0, lt=1)
    """Share of tokens that are hidden at the first step. Only with objective = masked_tokens."""
    final_masking_rate: float = Field(0.15, gt=0, lt=1)
    """Share of tokens that are hidden at the last step, and in held-out text; linear between. Only with
    objective = masked_tokens."""
    causal_share: float = Field(0.0, ge=0, lt=1)
    """Share of sequences in which an encoder sees only earlier tokens and predicts the next token. Above 0,
    hidden tokens are predicted at the position before them, which gives a model both uses (GPT-BERT)."""
    skip_steps: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """Ranges [first, last] of steps whose text is skipped."""
    optimiser: OptimiserName = Field("adamw", description=f"Optimiser. {_listed(OPTIMISERS)}.")
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices. Biases and norms have none."""
    adam_beta1: float = Field(0.9, gt=0, lt=1)
    """Decay of the mean of gradients."""
    adam_beta2: float = Field(0.95, gt=0, lt=1)
    """Decay of the mean of squared gradients."""
    adam_epsilon: PositiveFloat = 1e-8
    """Number added to the root of the mean of squared gradients."""
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of hidden states that training sets to 0: of embeddings, of the outputs of attention and MLP, and
    of the input of an encoder's head."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of attention weights that training sets to 0, in encoders. A GPU then computes scores twice."""
    max_gradient_norm: PositiveFloat = 1.0
    """Norm of the gradients over all parameters. Longer gradients are scaled to it."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of log²(sum of exponentials of the logits), which keeps logits small. 0: none."""
    precision: Precision | None = None
    """Precision that layers compute in; parameters stay in fp32. Default: bf16 on GPUs and on CPUs with AMX,
    else fp32. A run keeps the precision that it began with."""
    precision_changes: tuple[tuple[PositiveInt, Precision], ...] = ()
    """Changes [step, precision]: the precision from that step on."""
    fp8: Fp8 = Fp8()
    """Multiplication of matrices in fp8."""
    optimiser_state: StateDtype = "fp32"
    """Precision in which moments are kept."""
    optimiser_from_weights: bool = False
    """Whether model.weights also give Adam's moments, number of updates and fp32 weights. They must have them
    whole: a legacy checkpoint of Megatron-LM without distributed optimiser, or a universal checkpoint of
    DeepSpeed. Only with weights = megatron:FOLDER and optimiser = adamw."""
    gradient_reduce_dtype: ReduceDtype = "fp32"
    """Dtype in which data-parallel ranks send and sum gradients."""
    max_skipped_steps_in_a_row: PositiveInt = 3
    """Consecutive steps with gradients that are not finite before the run ends. Such steps are skipped."""
    spikes: Spikes = Spikes()
    """Treatment of rises of the loss above its noise."""
    heldout_sequences: PositiveInt = 64
    """Sequences of each held-out set that are scored each time."""

    @property
    def has_dropout(self) -> bool:
        return bool(self.hidden_dropout or self.attention_dropout)


class TrainPlacement(Section):
    """Keys of [train] that are copied into the placement: memory, logs and time limits."""

    loss_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits exist at one time. Default: from the GPU's memory; 2048 on a CPU."""
    deterministic: bool = False
    """Whether each run on the same ranks gives the same bits, on GPUs too. No kernel then adds in a varying
    order, and attention's backward is slower. CPUs need no such setting."""
    log_every_steps: PositiveInt = 10
    """Steps between lines of the log."""
    heldout_every_steps: PositiveInt = 100
    """Steps between scorings of held-out text."""
    compare_replicas_every_steps: int = Field(100, ge=0)
    """Steps between comparisons of what several ranks hold, also done before each save. 0: never."""
    wandb: str = ""
    """Project of Weights & Biases that also receives the log. Needs the package wandb."""
    tensorboard: bool = True
    """Whether the log is also written for TensorBoard, if it is installed."""
    collect_garbage_every_steps: PositiveInt = 50
    """Steps between runs of Python's garbage collector, on all ranks at once. 1 in zero-bubble schedules."""
    start_timeout_seconds: float | None = Field(None, ge=1, le=604_800)
    """Longest wait for other ranks at the start, for each communicator, and in collectives until the first
    steps are done: cold imports and compilation take minutes. Default: the cluster's, or 1800."""
    step_timeout_seconds: float = Field(600.0, ge=1, le=604_800)
    """Longest wait for other ranks in each collective of later steps."""
    hang_seconds: float = Field(20.0, ge=1, le=604_800)
    """Seconds without progress after which a run ends and names the stuck rank. They are counted beyond the
    usual pauses of steps, up to 3 × this. A silent rank ends the run after this or 15 s (from 1,000 ranks on
    15 ms a rank). One rank alone: step_timeout_seconds."""


class Train(TrainPlacement, TrainIdentity, TrainSchedule):
    """[train]: one table for the person who writes it. The class of a key says what becomes of it."""


class Phase(Section):
    """An entry of [[phases]]: a part of the run with its own steps, sequences or text.

    A key that is left out has the value of [train] or [dataset]. A `learning_rate` begins a new segment. It
    warms up from the rate reached and lasts until a later phase begins another segment.
    """

    tokens: PositiveInt
    """Token budget of the phase."""
    tokens_per_step: PositiveInt | None = None
    """Tokens of an optimiser step, over all ranks."""
    sequence_length: PositiveInt | None = None
    """Tokens of a sequence. It must divide the longest of all phases."""
    mixture: dict[str, PositiveFloat] | None = None
    """Source name → weight."""
    micro_batch_sequences: PositiveInt | None = None
    """Sequences per forward on one rank."""
    learning_rate: PositiveFloat | None = None
    """Peak of a new segment of the learning rate."""
    final_learning_rate_ratio: float | None = Field(None, ge=0, le=1)
    """Learning rate at the end of the segment, as a share of its peak."""
    schedule: ScheduleName | None = None
    """Shape of the segment after its warm-up."""
    warmup_share: float | None = Field(None, ge=0, lt=1)
    """Share of the segment's tokens in the warm-up."""
    decay_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Share of the segment's tokens in the decay. Only with schedule = {_WITH_DECAY_SHARE}.",
    )
    max_gradient_norm: PositiveFloat | None = None
    """Norm of the gradients. Longer gradients are scaled to it."""
    trainable: tuple[str, ...] | None = None
    """Modules that are trained; all others are frozen. []: all."""


def _address_of_copies(address: str) -> str:
    if address and not is_address(address):
        raise ValueError("no address. Fix: s3://BUCKET/RUN, or another file system of fsspec")
    if address and (problem := address_problem(address)):
        raise ValueError(problem)
    return address


class Checkpoint(Section):
    """[checkpoint], in the placement."""

    every_steps: PositiveInt = 500
    """Steps between checkpoints. The end of a run and a signal save too."""
    keep_newest: int = Field(2, ge=2)
    """Newest checkpoints to keep: two or more, because only the next step shows if the newest is sound."""
    keep_every_steps: int | None = Field(None, ge=0)
    """Steps of checkpoints that are kept for good: multiples of this. 0: none. Default: at most ten of a
    run."""
    memory_every_steps: int = Field(0, ge=0)
    """Steps between copies in the nodes' memory, between checkpoints. A restart in the same job resumes from
    the newest. 0: none. Only with a step between steps of every_steps."""
    copy_to: Annotated[str, AfterValidator(_address_of_copies)] = ""
    """Address, such as s3://BUCKET/RUN, that each checkpoint is copied to beside the training. A checkpoint
    is removed from this disk only after its copy was verified. Default: no copies."""


class Verify(Section):
    parity_steps: PositiveInt = 20
    """Optimiser steps that Kielo and transformers both train."""
    parity_sequences_per_step: PositiveInt = 4
    """Sequences of each of these steps."""
    parity_sequence_length: PositiveInt = 128
    """Tokens of each of these sequences."""
    tolerance: PositiveFloat = 1e-5
    """Relative difference of the loss at each step. Only rounding can make it larger."""


class EvaluationText(Section):
    """An entry of [[evaluate.texts]]: text from outside of the mixture that the run is scored on."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Short name, in the log and the report."""
    path: str
    """File or folder: .txt (one document a line), .jsonl, .parquet, …"""
    kind: Literal["text", "instructions"] = "text"
    """Kind of text: running text, or conversations in the tokenizer's chat template."""
    loss: Literal["all", "answers"] = "all"
    """Tokens that are scored: all, or only the answers. Only with kind = instructions."""
    language: str = ""
    """Code of the text's language. Default: the recipe's."""
    text_field: str = ""
    """Field or column that holds the text. Default: "text"; for instructions "messages"."""

    @model_validator(mode="after")
    def _loss_of_its_kind(self) -> Self:
        if self.kind != "instructions" and "loss" in self.model_fields_set:
            raise ValueError('loss needs kind = "instructions". Every token of other text is scored')
        return self


class PartOfSpeech(Section):
    """Part-of-speech tags by a linear classifier of an encoder's states. It needs `kielo[tagging]`."""

    train: str = ""
    """CoNLL-U file that the classifier learns from. Without it no tags are scored."""
    dev: str = ""
    """CoNLL-U file that the classifier is scored on."""
    from_layer: PositiveInt | None = None
    """Layer whose output is a token's features, counted from 1. Default: the last. Only with train."""
    pieces: Literal["first", "mean"] = "mean"
    """Features of a word of several tokens: of its first token, or the mean. Only with train."""


class Evaluate(Section):
    texts: tuple[EvaluationText, ...] = ()
    """Texts from outside of the mixture, scored during training and afterwards."""
    ngram_order: PositiveInt = 6
    """Bytes that the n-gram baseline sees, the predicted byte included. Only with train.objective =
    next_token or train.causal_share."""
    prompts: tuple[str, ...] = ()
    """Texts that the model continues. Default: openings of held-out documents. For an encoder, sentences that
    contain its mask token once."""
    sample_tokens: PositiveInt = 80
    """Tokens to write after each prompt. Only with train.objective = next_token or train.causal_share."""
    temperature: float = Field(0.7, ge=0)
    """Temperature of sampling. 0 takes the likeliest token. Only with train.objective = next_token or
    train.causal_share."""
    top_k: PositiveInt = 50
    """Number of likeliest tokens to sample from. Only with train.objective = next_token or
    train.causal_share, and a temperature above 0."""
    pseudo_tokens: PositiveInt = 2048
    """Tokens of held-out text that are hidden one by one. Only with train.objective = masked_tokens."""
    minimal_pairs: str = ""
    """Pairs of a good and a bad sentence: a .jsonl or .tsv file with sentence_good, sentence_bad and
    optionally phenomenon, or a folder or .zip of such .jsonl files, as BLiMP has them."""
    made_pairs: int = Field(0, ge=0)
    """Minimal pairs that each of three rules makes from held-out sentences. Default: 0, none. Only with
    train.objective = next_token or train.causal_share."""
    fluency_texts: int = Field(0, ge=0)
    """Held-out documents that the model continues, for shares of repetition and of languages. Default: 0,
    none. Only with train.objective = next_token or train.causal_share."""
    part_of_speech: PartOfSpeech = PartOfSpeech()
    """Tags from an encoder's frozen states."""
    tasks: tuple[str, ...] = ()
    """Tasks and groups of lm-eval, own tasks, and bundles such as bundle:et. They need `kielo[evaluate]`.
    Only with train.objective = next_token or train.causal_share."""
    shots: Annotated[int, Field(ge=0)] | None = None
    """Examples before each question. Default: as each task says. Only with tasks."""
    task_limit: PositiveInt | None = None
    """Number of questions of each task to score, from its first. Default: all. Only with tasks."""
    task_seed: int = Field(1234, ge=0)
    """Seed by which examples are drawn. Default: the seed of lm-eval. Only with tasks."""
    task_chat: bool = False
    """Lay out questions by the tokenizer's chat template. Only with tasks."""
    task_folders: tuple[str, ...] = ()
    """Folders with tasks: YAML files of lm-eval, and own tasks as TOML files. Only with tasks."""
    every_steps: int = Field(0, ge=0)
    """Steps between scores of tasks during training, in the run's own layout and precision. Default: 0, none.
    Only with tasks and train.objective = next_token."""

    @property
    def section(self) -> dict[str, Any]:
        """Settings as JSON, without `every_steps`, which changes no score of a checkpoint.

        Later keys are left out at their defaults, so that scores stay current.
        """
        content, usual = self.model_dump(mode="json"), Evaluate().model_dump(mode="json")
        of_tasks = ("tasks", "shots", "task_limit", "task_seed", "task_chat", "task_folders")
        later = ("made_pairs", "fluency_texts", *of_tasks)
        del content["every_steps"]
        return {key: value for key, value in content.items() if key not in later or value != usual[key]}

    @property
    def own_files(self) -> dict[str, str]:
        tags = self.part_of_speech
        named = {
            "minimal_pairs": self.minimal_pairs,
            "part_of_speech.train": tags.train,
            "part_of_speech.dev": tags.dev,
        }
        return {key: path for key, path in named.items() if path}


class Report(Section):
    license: str = "other"
    """Licence of the model, for its card (a Hugging Face licence id)."""
    text_license: str = ""
    """Licence of the training text, for the card."""


class RecipeIdentity(Section):
    """Keys outside all tables that are copied into the identity."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Name of the run. Its folder is runs/NAME."""
    language: str
    """Language card, whose values filter the text (`kielo languages` lists them)."""
    seed: int = Field(1, ge=0)
    """Seed of first weights, the order of the text and sampling."""


class Recipe(RecipeIdentity):
    description: str = ""
    """Sentence for the report and the model card."""
    folder: str = ""
    """Run folder. Default: runs/NAME."""
    follows: str = ""
    """Recipe of the run whose exported weights this recipe starts from. `kielo run` makes them first. Only
    with model.weights, which names them."""
    cluster: str = "laptop"
    """Cluster card: its accelerator's peak, and the machine that plans count with."""
    nodes: tuple[PositiveInt, ...] = ()
    """Numbers of nodes of the cluster that the layout is meant for. Plans use them by default."""
    layouts: tuple[LayoutOnNodes, ...] = ()
    """Layouts for some numbers of nodes. A layout by --set, or of a recipe that extends this recipe, removes
    them."""
    machine: str = ""
    """Card of your own machine for plans, made by `kielo plan calibrate`."""
    corpus: Corpus
    """Text and its filters."""
    tokenizer: Tokenizer = Tokenizer()
    """Vocabulary: learned, or a ready tokenizer."""
    dataset: Dataset = Dataset()
    """Sequences, held-out text, mixture."""
    model: Model = Model()
    """Shape of the model, or weights to start from."""
    layout: Layout = Layout()
    """Work of each rank."""
    train: Train = Train()
    """Budget, optimiser, precision, logs."""
    phases: tuple[Phase, ...] = ()
    """Parts of the run in order. Default: one part with train.tokens."""
    checkpoint: Checkpoint = Checkpoint()
    """Times at which checkpoints are saved, and which of them are kept."""
    verify: Verify = Verify()
    """Comparison with Hugging Face transformers."""
    evaluate: Evaluate = Evaluate()
    """Baselines and generated text."""
    report: Report = Report()
    """Licences on the model card."""
