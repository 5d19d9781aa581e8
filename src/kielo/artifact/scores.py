"""`evaluate/scores.json`: the bits per byte of a model and of the baselines, and samples of its text."""

from typing import Any, ClassVar

from pydantic import Field

from kielo.artifact.stage_json import JsonFile, JsonObject

BASELINES = ("unigram", "xz", "ngram")


class BitsPerByte(JsonObject):
    """Bits per byte of held-out text; fewer is better. The baselines were given the same training text."""

    model: float
    """The model's."""
    unigram: float | None = None
    """The token unigram's."""
    xz: float | None = None
    """Those of `xz -9e` after the training text."""
    ngram: float | None = None
    """The interpolated byte n-gram's."""

    def baselines(self) -> dict[str, float]:
        """Returns baseline → its bits per byte, in the order of `BASELINES`; empty unless all exist."""
        found = {name: getattr(self, name) for name in BASELINES}
        return {} if None in found.values() else found


class SetScore(JsonObject):
    """The model's score on one held-out set: a source's, or a text's from outside of the mixture."""

    name: str
    """Name of the source or the text."""
    languages: list[str]
    """Codes of the languages that the set is in; empty where they are not known."""
    bits_per_byte: float
    """Bits per byte, by the same convention."""
    bytes: int = Field(ge=0)
    """UTF-8 bytes that were scored."""
    documents: int = Field(ge=0)
    """Documents that were scored."""


class Sample(JsonObject):
    """Text that the model wrote."""

    prompt: str
    """The prompt: by default the opening of a held-out document."""
    text: str
    """The continuation, without the prompt."""


class Scores(JsonFile):
    """The scores of one model on the held-out text of a run."""

    FILE_NAME: ClassVar[str] = "scores.json"

    model: str
    """Name of the checkpoint's folder, or path of the Hugging Face folder."""
    bits_per_byte: BitsPerByte
    sets: list[SetScore] = []
    """The model's score on each source's held-out text, and on texts from outside of the mixture."""
    samples: list[Sample]
    """Samples, one for each prompt."""
    sampling: dict[str, Any]
    """Settings of the samples: temperature, top_k, seed."""
    heldout_bytes: int = Field(ge=0)
    """UTF-8 bytes of the held-out documents that were scored."""
    heldout_documents: int = Field(ge=0)
    """Held-out documents that were scored."""
    heldout_tokens: int = Field(ge=0)
    """Tokens of those documents, one end-of-text each included."""
    sequence_length: int
    """Length of a window, in tokens."""
    stride: int
    """Distance between the starts of two windows, in tokens."""
    convention: str
    """The definition of bits per byte, as a sentence."""
    heldout_documents_in_all: int
    """Held-out documents that there are."""
    heldout_bytes_in_all: int | None = None
    """UTF-8 bytes of all held-out documents."""
    training_bytes: int
    """UTF-8 bytes of the training text."""
    training_bytes_of_byte_baselines: int
    """UTF-8 bytes of the training text that xz and the byte n-gram were given."""
    ngram_order: int
    """Order of the byte n-gram: the longest n-gram, in bytes."""
