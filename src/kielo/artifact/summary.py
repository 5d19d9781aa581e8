"""`summary.json`: the figures of a run in one file, written by the report stage into the run's folder."""

from typing import ClassVar

from kielo.artifact.scores import Accuracy
from kielo.artifact.stage_json import JsonFile, JsonObject

# Stage, in the order of a run → its folder.
STAGE_FOLDERS = {
    "corpus": "corpus",
    "tokenizer": "tokenizer",
    "pack": "tokens",
    "train": "train",
    "verify": "verify",
    "evaluate": "evaluate",
    "export": "hf",
}


class StageTime(JsonObject):
    """The time of one stage."""

    seconds: float
    """Seconds of the work that made the stage's folder."""
    skipped: bool
    """True if an earlier run had made the stage already."""


class CorpusSummary(JsonObject):
    """The text before and after cleaning; null: the stage is not finished."""

    bytes_in: int | None
    """UTF-8 bytes of the raw text."""
    documents_in: int | None
    """Documents of the raw text."""
    bytes_kept: int | None
    """UTF-8 bytes of the clean text."""
    documents_kept: int | None
    """Documents of the clean text."""


class BitsPerByteSummary(JsonObject):
    """Bits per byte of held-out text; fewer is better. null: the stage is not finished."""

    model: float | None
    """The model's."""
    unigram: float | None
    """The token unigram's."""
    xz: float | None
    """Those of `xz -9e` after the training text."""
    ngram: float | None
    """The interpolated byte n-gram's."""


class ParitySummary(JsonObject):
    """Parity with Hugging Face's transformers; null: the stage is not finished."""

    max_relative_loss_difference: float | None
    """Largest relative difference of the losses over all steps."""
    steps: int | None
    """Optimiser steps that were compared."""
    passed: bool | None
    """True if the certificate passed."""


class Summary(JsonFile):
    """The figures of a run."""

    FILE_NAME: ClassVar[str] = "summary.json"

    stages: dict[str, StageTime]
    """Stage → its time, in the order of the run."""
    parameters: int | None = None
    """Parameters of the model; null: nothing was trained."""
    tokens: int | None = None
    """Tokens of the whole training; null: nothing was trained."""
    corpus: CorpusSummary
    bits_per_byte: BitsPerByteSummary
    masked_tokens: Accuracy | None = None
    """Shares of hidden tokens that an encoder and its baselines predict; null: no encoder was evaluated."""
    parity: ParitySummary
    tokens_per_second: float | None
    """Tokens per second of training over all ranks, the median; null: nothing was trained."""
    export: str | None
    """The folder of the exported model; null: nothing was exported."""
    kielo_version: str
    """The version of Kielo that wrote this file."""
