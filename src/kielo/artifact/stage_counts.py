"""JSON of the data stages: the funnel of the corpus, the tokenizer's figures and row map, and all counts.

Counts are in the stages' manifests (`stage_json.read_counts`).
"""

from typing import ClassVar, Literal

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject


class FunnelSource(JsonObject):
    name: str
    origin: str
    """A path, a package or a dataset."""
    files: int
    files_not_read: int = 0
    """Files beside them: of another format, left out by the recipe, or about the data."""
    file_bytes: int | None = None
    """Bytes of the read files on disk."""
    documents_in: int
    """Documents in the files, unreadable ones included."""
    bytes_in: int
    """UTF-8 bytes of the readable documents."""
    bad_records: int = 0
    damaged_file_bytes: int = 0
    """Bytes on disk of files that broke off."""
    bad_examples: list[str] = []
    """Problems of the first bad records."""
    documents_kept: int
    """Documents after all steps."""
    bytes_kept: int
    repaired_lines: int = 0
    """Lines in another encoding that ftfy repaired."""
    masked: dict[str, int] = {}
    """Kind of personal data → occurrences that became its name."""
    mended: dict[str, int] = {}
    """Class of damage → lines that were mended."""


class FunnelRow(JsonObject):
    """Text that a step dropped for one reason. An unreadable record is a document without bytes."""

    name: str
    reason: str
    """Empty if the step dropped nothing."""
    documents: int
    lines: int
    bytes: int
    documents_left: int
    """After the whole step."""
    bytes_left: int
    words: int = 0
    """Words between spaces. 0 in older files, as in `words_left`."""
    words_left: int = 0


class BorderExample(JsonObject):
    """The beginning of a text that a step kept or dropped."""

    step: str
    reason: str
    """Empty if the step kept it."""
    source: str
    text: str


class Funnel(JsonFile):
    """The way of the text through the steps of the corpus stage."""

    FILE_NAME: ClassVar[str] = "funnel.json"

    settings: JsonTable
    """All settings that decide the result; the language card's values if the recipe leaves them open."""
    sources: list[FunnelSource]
    steps: list[FunnelRow]
    """A row for each reason, in the order of the steps, each step's largest reason first."""
    threshold_table: dict[str, dict[str, float]]
    """"lines" and "documents" → language threshold → share of their bytes that reached it."""
    examples: list[BorderExample] = []
    """Texts with the smallest hashes on both sides of each step. They are masked like the corpus."""
    identified: dict[str, dict[str, int]] = {}
    """"lines" and "documents" → the identifier's word for dropped text → its bytes."""
    cluster_sizes: dict[str, int] = {}
    """Documents of a cluster of near copies ("2", "3-9") → clusters."""


class TokenizerMeasure(JsonFile):
    """Figures of a tokenizer. A word is a run of letters, marks and digits."""

    FILE_NAME: ClassVar[str] = "measure.json"

    measured_on: str
    end_of_text_id: int
    vocabulary_size: int
    """Tokens of the vocabulary, added tokens included."""
    tokens_per_word: float
    bytes_per_token: float
    characters_per_token: float
    exact_round_trip_share: float
    """Share of the texts that are the same after encoding and decoding."""
    vocabulary_used_share: float
    """Share of the vocabulary that occurs in the text."""
    single_byte_token_share: float
    """Share of the written tokens that are a single byte."""
    renyi_efficiency: float
    """Rényi entropy of order 2.5 divided by the logarithm of the vocabulary's size."""
    shannon_efficiency: float
    """Shannon entropy divided by the logarithm of the vocabulary's size."""
    texts: int
    words: int
    bytes: int
    tokens: int
    f95: int | None = None
    """Occurrences of the rarest of the 95 % most frequent tokens of the vocabulary."""


Transplant = Literal["mean", "focus", "random"]


class RowMap(JsonFile):
    """The old rows that each row of a new vocabulary is made of, in a vocabulary transplant."""

    FILE_NAME: ClassVar[str] = "row_map.json"

    method: Transplant
    """Method of the transplant: means of old rows, sums weighted by similarity, or no old rows."""
    old_tokenizer: str
    """Hash of the old rows' tokenizer."""
    old_vocabulary_size: int
    """Largest id of that tokenizer plus one. The model can have more rows."""
    rows: list[list[int]]
    """Old ids of each new id, ascending, repeated if the text has a token twice; empty: random."""
    control_tokens: dict[str, str]
    """New control token → the old control token whose row it takes."""
    weights: dict[str, list[float]] = {}
    """New id → weights (fp32) of its old rows, in their order. Rows of other ids have equal weights."""

    def is_composed(self, new_id: int) -> bool:
        """Return True for a row that is the mean or the weighted sum of old rows."""
        return len(self.rows[new_id]) > 1 or str(new_id) in self.weights

    @property
    def copied(self) -> int:
        return len(self.rows) - self.composed - self.random

    @property
    def composed(self) -> int:
        """Return the number of rows made of several old rows."""
        return sum(map(self.is_composed, range(len(self.rows))))

    @property
    def random(self) -> int:
        return sum(not row for row in self.rows)

    @property
    def tokens_per_composed_row(self) -> float:
        return (sum(map(len, self.rows)) - self.copied) / max(1, self.composed)


class RawCounts(JsonObject):
    origin: str  # with the version or the commit
    problems: list[str]  # reasons why it is not from the first choice
    versions: dict[str, str] = {}  # file of an address → its ETag, checksum or date there


class CorpusCounts(JsonObject):
    """The counts of the corpus stage. A corpus of another program can lack any of them."""

    bytes_in: int | None = None
    documents_in: int | None = None
    bytes_kept: int | None = None
    documents_kept: int | None = None
    words_kept: int | None = None
    sources: list[FunnelSource] = []


class TokenizerCounts(JsonObject):
    """The counts of the tokenizer stage, beside the figures of measure.json. Earlier versions lack some."""

    end_of_text_id: int | None = None
    bytes_per_token: float | None = None
    largest_id: int | None = None
    ids_before_texts: list[int] | None = None  # ids that the post-processor puts before a text


class TokenCounts(JsonObject):
    """The counts of a set of documents as tokens, end-of-text included."""

    file: str = ""  # name of its shard; empty except in parts of shards
    tokens: int
    documents: int | None = None  # null: the files do not say
    bytes: int | None = None  # UTF-8 bytes of the text; an estimate for ready tokens
    words: int | None = None  # null: ready tokens, whose text is not read completely
    tokens_with_loss: int | None = None  # tokens that carry loss, if only a part of the text does
    bytes_with_loss: int | None = None  # bytes of that part, with one for each end
    too_long_conversations: int = 0  # conversations longer than a sequence
    languages: list[str] = []  # languages of a held-out set; empty: not known
    folder: str | None = None  # folder of ready tokens, which are read in place; null: a shard of RUN/tokens
    times_ns: list[list[int]] | None = None
    """Last write of each file of ready tokens, its index and its mask; null: not noted."""
    xxh3_128: list[str] = []  # checksum of each file of ready tokens; empty: not noted


class RoundTrip(JsonObject):
    """Documents that were decoded, and documents that were then exactly the same."""

    checked: int
    exact: int


class PackCounts(JsonObject):
    sources: dict[str, TokenCounts]
    heldout: TokenCounts
    heldout_sets: dict[str, TokenCounts] = {}
    """Each source's held-out documents, if there are several sources or languages."""
    round_trip: RoundTrip | None = None
    tokenizer_hash: str | None = None


class PartCounts(JsonObject):
    sources: dict[str, TokenCounts]
    heldout_sets: dict[str, TokenCounts]
    heldout: dict[str, TokenCounts]
    met: dict[str, int]  # source → its documents, with held-out documents
    round_trip: RoundTrip


class EvaluationTextCounts(JsonObject):
    texts: dict[str, TokenCounts]


class PackedLength(JsonObject):
    """The counts of a source's documents in sequences of one length, without empty documents."""

    sequences: int
    documents: int
    cut_documents: int
    cut_in_one_stream: int  # documents that training end to end would cut
    filling: int  # positions of an epoch without a token


class PackingCounts(JsonObject):
    sources: dict[str, dict[str, PackedLength]]  # source → length → its sequences


class CheckpointCounts(JsonObject):
    step: int
    tensor_bytes: int
    save_id: str
