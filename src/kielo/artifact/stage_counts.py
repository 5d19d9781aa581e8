"""The counts in the manifests of the stages (`stage_json.read_counts`), and the funnel of the corpus."""

from typing import ClassVar

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject

# `corpus/funnel.json`: what each step of the corpus stage dropped and why, and what was left.


class FunnelSource(JsonObject):
    """One source of text."""

    name: str
    """The source's name in the recipe."""
    origin: str
    """Origin of the text: a path, a package or a dataset."""
    files: int
    """Files that were read."""
    files_not_read: int = 0
    """Files beside them that were not: of another format, left out by the recipe, or about the data."""
    file_bytes: int | None = None
    """Bytes of those files on disk."""
    documents_in: int
    """Documents in the files, those that could not be read included."""
    bytes_in: int
    """UTF-8 bytes of the documents that could be read."""
    bad_records: int = 0
    """Records that could not be read."""
    damaged_file_bytes: int = 0
    """Bytes on disk of the files that broke off."""
    bad_examples: list[str] = []
    """The problem of each of the first such records."""
    documents_kept: int
    """Documents that are left after all steps."""
    bytes_kept: int
    """UTF-8 bytes of the text that is left after all steps."""


class FunnelRow(JsonObject):
    """Text that one step dropped for one reason. An unreadable record is a document without bytes."""

    name: str
    """The step."""
    reason: str
    """The reason; empty where the step dropped nothing."""
    documents: int
    """Documents dropped for this reason."""
    lines: int
    """Lines dropped for this reason."""
    bytes: int
    """UTF-8 bytes dropped for this reason."""
    documents_left: int
    """Documents left after the whole step."""
    bytes_left: int
    """UTF-8 bytes left after the whole step."""


class Funnel(JsonFile):
    """The way of the text through the steps of the corpus stage."""

    FILE_NAME: ClassVar[str] = "funnel.json"

    settings: JsonTable
    """All settings that decide the outcome; the language card's values where the recipe leaves them open."""
    sources: list[FunnelSource]
    """The sources in the order of the recipe."""
    steps: list[FunnelRow]
    """One row for each reason, in the order of the steps, each step's largest reason first."""
    threshold_table: dict[str, dict[str, float]]
    """"lines" and "documents" → language threshold → share (0 to 1) of their bytes that reached it."""


# The counts in the manifests, which other stages read.


class RawCounts(JsonObject):
    """The counts of a downloaded source, `raw/NAME`."""

    origin: str
    """Its origin, with the version or the commit."""
    problems: list[str]
    """Why it is not from the first choice."""


class CorpusCounts(JsonObject):
    """The counts of the corpus stage. A corpus of another program may lack any of them."""

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
    """The counts of one set of documents as tokens, end-of-text included."""

    file: str = ""
    """Name of its shard; empty except in parts of shards."""
    tokens: int
    documents: int | None = None
    """null: the files do not say."""
    bytes: int | None = None
    """UTF-8 bytes of the text; of ready tokens estimated."""
    words: int | None = None
    """null: ready tokens, whose text is not read whole."""
    tokens_with_loss: int | None = None
    """Tokens that carry loss, if only a part of the text does."""
    bytes_with_loss: int | None = None
    """Bytes of that part, with one for each end."""
    too_long_conversations: int = 0
    """Conversations that are longer than a sequence."""
    languages: list[str] = []
    """The languages of a held-out set; empty: not known."""
    folder: str | None = None
    """The folder of ready tokens, which are read in place; null: a shard of RUN/tokens."""
    times_ns: list[list[int]] | None = None
    """When each file of ready tokens was last written, its index and its mask; null: not noted."""
    xxh3_128: list[str] = []
    """Checksum of each file of ready tokens; empty: not noted."""


class RoundTrip(JsonObject):
    """Documents that were decoded again, and those that came back exactly."""

    checked: int
    exact: int


class PackCounts(JsonObject):
    """The counts of the pack stage: set → its tokens."""

    sources: dict[str, TokenCounts]
    heldout: TokenCounts
    heldout_sets: dict[str, TokenCounts] = {}
    """The counts of each source's held-out documents, if there are several sources or languages."""
    round_trip: RoundTrip | None = None
    tokenizer_hash: str | None = None


class PartCounts(JsonObject):
    """Of a part of the shards."""

    sources: dict[str, TokenCounts]
    heldout_sets: dict[str, TokenCounts]
    heldout: dict[str, TokenCounts]
    met: dict[str, int]
    """Source → its documents, held-out ones included."""
    round_trip: RoundTrip


class EvaluationTextCounts(JsonObject):
    """Of the texts from outside of the mixture."""

    texts: dict[str, TokenCounts]


class PackedLength(JsonObject):
    """Of a source's documents in sequences of one length. Documents without tokens are not counted."""

    sequences: int
    documents: int
    cut_documents: int
    cut_in_one_stream: int
    """As many would be cut if they were trained on end to end."""
    filling: int
    """Positions of an epoch without a token."""


class PackingCounts(JsonObject):
    """Of the sequences that documents were packed into."""

    sources: dict[str, dict[str, PackedLength]]
    """Source → length → its sequences."""


class CheckpointCounts(JsonObject):
    """Of a checkpoint."""

    step: int
    tensor_bytes: int
    save_id: str
