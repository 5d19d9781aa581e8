"""The counts in the manifests of the stages (`stage_json.read_counts`), and the funnel of the corpus."""

from typing import ClassVar

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject


class FunnelSource(JsonObject):
    """A source of text."""

    name: str
    origin: str
    """A path, a package or a dataset."""
    files: int
    """Files that were read."""
    files_not_read: int = 0
    """Files beside them: of another format, left out by the recipe, or about the data."""
    file_bytes: int | None = None
    """Bytes of the read files on disk."""
    documents_in: int
    """Documents in the files, unreadable ones included."""
    bytes_in: int
    """UTF-8 bytes of the readable documents."""
    bad_records: int = 0
    """Records that could not be read."""
    damaged_file_bytes: int = 0
    """Bytes on disk of files that broke off."""
    bad_examples: list[str] = []
    """Problems of the first bad records."""
    documents_kept: int
    """Documents after all steps."""
    bytes_kept: int


class FunnelRow(JsonObject):
    """Text that a step dropped for one reason. An unreadable record is a document without bytes."""

    name: str
    """The step."""
    reason: str
    """Empty if the step dropped nothing."""
    documents: int
    lines: int
    bytes: int
    documents_left: int
    """After the whole step."""
    bytes_left: int


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


class RawCounts(JsonObject):
    """The counts of a downloaded source, `raw/NAME`."""

    origin: str
    """With the version or the commit."""
    problems: list[str]
    """Reasons why it is not from the first choice."""


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
    ids_before_texts: list[int] | None = None
    """Ids that the post-processor puts before a text."""


class TokenCounts(JsonObject):
    """The counts of a set of documents as tokens, end-of-text included."""

    file: str = ""
    """Name of its shard; empty except in parts of shards."""
    tokens: int
    documents: int | None = None
    """null: the files do not say."""
    bytes: int | None = None
    """UTF-8 bytes of the text; an estimate for ready tokens."""
    words: int | None = None
    """null: ready tokens, whose text is not read completely."""
    tokens_with_loss: int | None = None
    """Tokens that carry loss, if only a part of the text does."""
    bytes_with_loss: int | None = None
    """Bytes of that part, with one for each end."""
    too_long_conversations: int = 0
    """Conversations longer than a sequence."""
    languages: list[str] = []
    """Languages of a held-out set; empty: not known."""
    folder: str | None = None
    """Folder of ready tokens, which are read in place; null: a shard of RUN/tokens."""
    times_ns: list[list[int]] | None = None
    """Last write of each file of ready tokens, its index and its mask; null: not noted."""
    xxh3_128: list[str] = []
    """Checksum of each file of ready tokens; empty: not noted."""


class RoundTrip(JsonObject):
    """Documents that were decoded, and documents that were then exactly the same."""

    checked: int
    exact: int


class PackCounts(JsonObject):
    """The counts of the pack stage: set → its tokens."""

    sources: dict[str, TokenCounts]
    heldout: TokenCounts
    heldout_sets: dict[str, TokenCounts] = {}
    """Each source's held-out documents, if there are several sources or languages."""
    round_trip: RoundTrip | None = None
    tokenizer_hash: str | None = None


class PartCounts(JsonObject):
    """The counts of a part of the shards."""

    sources: dict[str, TokenCounts]
    heldout_sets: dict[str, TokenCounts]
    heldout: dict[str, TokenCounts]
    met: dict[str, int]
    """Source → its documents, with held-out documents."""
    round_trip: RoundTrip


class EvaluationTextCounts(JsonObject):
    """The counts of the texts from outside of the mixture."""

    texts: dict[str, TokenCounts]


class PackedLength(JsonObject):
    """The counts of a source's documents in sequences of one length, without empty documents."""

    sequences: int
    documents: int
    cut_documents: int
    cut_in_one_stream: int
    """Documents that training end to end would cut."""
    filling: int
    """Positions of an epoch without a token."""


class PackingCounts(JsonObject):
    """The counts of the sequences that documents were packed into."""

    sources: dict[str, dict[str, PackedLength]]
    """Source → length → its sequences."""


class CheckpointCounts(JsonObject):
    """The counts of a checkpoint."""

    step: int
    tensor_bytes: int
    save_id: str
