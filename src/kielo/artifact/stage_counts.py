"""The counts in the manifests of the stages, which other stages read (`stage_json.read_counts`)."""

from kielo.artifact.funnel import FunnelSource
from kielo.artifact.json_object import JsonObject


class RawCounts(JsonObject):
    """Of a downloaded source, `raw/NAME`."""

    origin: str
    """Its origin, with the version or the commit."""
    problems: list[str]
    """Why it is not from the first choice."""


class CorpusCounts(JsonObject):
    """Of the corpus stage. A corpus of another program may lack any of them."""

    bytes_in: int | None = None
    documents_in: int | None = None
    bytes_kept: int | None = None
    documents_kept: int | None = None
    words_kept: int | None = None
    sources: list[FunnelSource] = []


class TokenizerCounts(JsonObject):
    """Of the tokenizer stage, beside the figures of measure.json. Earlier versions lack some."""

    end_of_text_id: int | None = None
    bytes_per_token: float | None = None
    largest_id: int | None = None
    ids_before_texts: list[int] | None = None
    """Ids that the post-processor puts before a text."""


class TokenCounts(JsonObject):
    """Of one set of documents as tokens, end-of-text included."""

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
    """Of text of which a part carries loss, that part's."""
    bytes_with_loss: int | None = None
    """Bytes of that part, with one for each end."""
    too_long_conversations: int = 0
    """Conversations that are longer than a sequence."""
    languages: list[str] = []
    """Of a held-out set; empty: not known."""
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
    """Of the pack stage: set → its tokens."""

    sources: dict[str, TokenCounts]
    heldout: TokenCounts
    heldout_sets: dict[str, TokenCounts] = {}
    """Of each source's held-out documents, where there are several sources or languages."""
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
