"""The scores of a model, `scores.json` and of encoders `masked_scores.json`, and a run's `summary.json`."""

from typing import ClassVar

from pydantic import Field

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject

# `evaluate/scores.json`: the bits per byte of a model and of the baselines, and samples of its text.


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
        """Return baseline → its bits per byte, in the order of `BASELINES`; empty unless all exist."""
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
    sampling: JsonTable
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


# `evaluate/masked_scores.json`: how well an encoder predicts hidden tokens, and what its states know.
#
# Shares of hidden tokens stand beside those of baselines; the measures of a person's own files are there
# only where the recipe names such files.


BASELINES_OF_HIDDEN_TOKENS = ("unigram", "bigram", "neighbours")


class Accuracy(JsonObject):
    """Shares of the hidden tokens that were predicted; more is better."""

    model: float
    """The model's."""
    unigram: float
    """That of the most frequent token of the training text."""
    bigram: float
    """That of the token which most often follows the one before in the training text."""
    neighbours: float | None = None
    """That of the likeliest token between the one before and the one after, by counted pairs."""

    def baselines(self) -> dict[str, float]:
        """Return baseline → its share."""
        found = {name: getattr(self, name) for name in BASELINES_OF_HIDDEN_TOKENS}
        return {name: share for name, share in found.items() if share is not None}


class PseudoBitsPerByte(JsonObject):
    """Bits per byte of held-out text of which each token in turn is hidden; fewer is better.

    Tokens are predicted from both sides, so these are no bits per byte of a decoder: nobody could decompress
    with them.
    """

    token: float
    """With the predicted token hidden alone (Salazar et al. 2020)."""
    within_word: float
    """With the later tokens of its word hidden too (Kauf and Ivanova 2023)."""
    perplexity: float
    """Pseudo-perplexity of a token, hidden alone."""
    texts: int = Field(ge=1)
    """Held-out documents of which the beginning, as long as a sequence, was scored."""
    tokens: int = Field(ge=1)
    """Tokens that were hidden in turn."""
    bytes: int = Field(ge=1)
    """UTF-8 bytes of these beginnings."""


class PairAccuracy(JsonObject):
    """Shares of minimal pairs of which the good sentence is likelier; a tie is a miss."""

    pairs: int = Field(ge=1)
    """Pairs."""
    token: float
    """By the pseudo-log-likelihood of Salazar et al. (2020): each token is hidden alone."""
    within_word: float
    """By that of Kauf and Ivanova (2023): the later tokens of the same word are hidden too."""


class MinimalPairScores(JsonObject):
    """The scores on a file of minimal pairs."""

    file: str
    """Its name."""
    all: PairAccuracy
    groups: dict[str, PairAccuracy]
    """Phenomenon → its score; empty where the file names none."""


class PartOfSpeechScores(JsonObject):
    """Part-of-speech tags by a linear classifier of frozen states."""

    accuracy: float
    """Share of the words of the development file whose tag is right."""
    baseline: float
    """That of each word's most frequent tag in the training file; of unknown words the most frequent tag."""
    words: int = Field(ge=1)
    """Words of the development file."""
    training_words: int = Field(ge=1)
    """Words that the classifier learned from."""
    tags: int
    """Different tags in the training file."""
    layer: int
    """The layer whose output are the features, counted from 1."""
    pieces: str
    """The features of a word of several tokens: those of the first one, or their mean."""


class Filling(JsonObject):
    """A token for a hidden word."""

    text: str
    """The token's text, without spaces around it; of a token of spaces alone as Python spells it."""
    probability: float
    """By the model."""


class FilledMask(JsonObject):
    """A sentence with a hidden word, and what the model puts there."""

    before: str
    """The text before the hidden word."""
    after: str
    """The text after it."""
    truth: str | None
    """The hidden word; null: nobody knows it, the sentence is the recipe's."""
    fillings: list[Filling]
    """The likeliest ones, best first."""

    def sentence(self) -> str:
        """Return the text with a gap in the place of the word."""
        return f"{self.before}____{self.after}"

    def likeliest(self) -> str:
        """Return the fillings with their probabilities, as people read them."""
        return ", ".join(f"{one.text} {100 * one.probability:.0f} %" for one in self.fillings)


class MaskedScores(JsonFile):
    """The scores of one encoder on hidden tokens of the held-out text of a run."""

    FILE_NAME: ClassVar[str] = "masked_scores.json"

    model: str
    """Name of the checkpoint's folder."""
    accuracy: Accuracy
    loss: float
    """The model's mean loss in nats per hidden token."""
    hidden_tokens: int = Field(ge=1)
    """Tokens that were hidden."""
    sequences: int = Field(ge=1)
    """Sequences of held-out text."""
    sequence_length: int
    """Tokens of a sequence."""
    masking: str
    """The unit that is hidden: subword, whole_word or span."""
    masking_rate: float
    """Share of the tokens that are hidden."""
    seed: int
    """The seed that chose them."""
    pseudo_bits_per_byte: PseudoBitsPerByte | None = None
    filled_masks: list[FilledMask] = []
    """Sentences with a hidden word."""
    minimal_pairs: MinimalPairScores | None = None
    part_of_speech: PartOfSpeechScores | None = None


# `summary.json`: the figures of a run in one file, written by the report stage into the run's folder.


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
