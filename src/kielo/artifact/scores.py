"""A run's `evaluate/scores.json`, for encoders `evaluate/masked_scores.json`, and `summary.json`."""

from typing import ClassVar

from pydantic import Field

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject

BASELINES = ("unigram", "xz", "ngram")


class BitsPerByte(JsonObject):
    """Bits per byte of held-out text; fewer is better. All had the same training text."""

    model: float
    unigram: float | None = None
    xz: float | None = None
    """`xz -9e` after the training text."""
    ngram: float | None = None
    """Interpolated byte n-gram."""

    def baselines(self) -> dict[str, float]:
        found = {name: getattr(self, name) for name in BASELINES}
        return {} if None in found.values() else found


class SetScore(JsonObject):
    """The model's score on a held-out set: a source's, or a text from outside of the mixture."""

    name: str
    languages: list[str]
    """Codes of the set's languages; empty if not known."""
    bits_per_byte: float
    bytes: int = Field(ge=0)
    """UTF-8 bytes that were scored."""
    documents: int = Field(ge=0)


class Sample(JsonObject):
    prompt: str
    """Default: the opening of a held-out document."""
    text: str
    """Continuation, without the prompt."""


class TaskScore(JsonObject):
    """A task's score by EleutherAI's harness, of one metric."""

    task: str
    """Name of the task in the harness, or of a person's own task."""
    metric: str
    """The metric with its filter as the harness names it, such as `acc,none`."""
    value: float
    standard_error: float | None = None
    questions: int = Field(ge=1)
    """Questions that were scored."""
    shots: int = Field(ge=0)
    """Examples before each question."""
    chance: float | None = None
    """The value of guessing; null if it is not known."""
    language: str = ""
    measures: str = ""
    """Ability that the task measures: knowledge, reading, culture, truthfulness, translation, language."""
    version: str = ""
    """Version of the task's file."""
    seed: int = 1234
    """Seed by which examples were drawn; without examples the default."""
    chat: bool = False
    """Questions were laid out by the chat template."""


class FluencyScores(JsonObject):
    """Repetition and language of the model's own continuations of held-out text."""

    texts: int = Field(ge=1)
    repeated: float
    """Share of the words of continuations in a 4-gram of words that occurred before in the same text."""
    repeated_in_heldout: float
    """The same of the held-out documents' own continuations."""
    languages: dict[str, float]
    """Language by the corpus' identifier → share of the continuations' characters, largest first."""
    languages_in_heldout: dict[str, float] = {}
    """The same of the held-out documents' own continuations."""


class PairAccuracy(JsonObject):
    """Shares of minimal pairs whose good sentence is likelier; a tie is a miss."""

    pairs: int = Field(ge=1)
    likelihood: float | None = None
    """Of a decoder: by the log-likelihood of the whole sentence."""
    standard_error: float | None = None
    """Of `likelihood`."""
    fewer_tokens: float | None = None
    """Of a decoder: share of pairs whose good sentence has fewer tokens; an equal number counts as a half.
    A model without training is about as good."""
    token: float | None = None
    """Of an encoder, by the pseudo-log-likelihood of Salazar et al. (2020): each token is hidden alone."""
    within_word: float | None = None
    """By Kauf and Ivanova's (2023): later tokens of the word are hidden too."""


class MinimalPairScores(JsonObject):
    file: str
    all: PairAccuracy
    groups: dict[str, PairAccuracy]
    """Phenomenon → its score; empty if the file names none. BLiMP: paradigm → its score."""
    terms: dict[str, PairAccuracy] = {}
    """BLiMP: `linguistics_term` of paradigms → their score."""


class MadePairScores(MinimalPairScores):
    """Score on minimal pairs that rules made from held-out text."""

    wanted: int = Field(ge=1)
    """Pairs that each rule was asked for."""
    sentences: int = Field(ge=0)
    """Held-out sentences that the rules saw."""
    in_training: int = Field(ge=0)
    """Sentences left out because the training text also contains them."""


class Scores(JsonFile):
    """Bits per byte of a model and of baselines on a run's held-out text, and samples of its text."""

    FILE_NAME: ClassVar[str] = "scores.json"

    model: str
    """Name of the checkpoint's folder, or path of the Hugging Face folder."""
    bits_per_byte: BitsPerByte
    sets: list[SetScore] = []
    """Score on each source's held-out text, and on texts from outside of the mixture."""
    samples: list[Sample]
    tasks: list[TaskScore] = []
    minimal_pairs: MinimalPairScores | None = None
    made_pairs: MadePairScores | None = None
    fluency: FluencyScores | None = None
    sampling: JsonTable
    """Temperature, top_k and seed of the samples."""
    heldout_bytes: int = Field(ge=0)
    """UTF-8 bytes of the held-out documents that were scored."""
    heldout_documents: int = Field(ge=0)
    heldout_tokens: int = Field(ge=0)
    """Tokens of those documents, each with its end-of-text."""
    sequence_length: int
    """Tokens of a window."""
    stride: int
    """Tokens between the starts of two windows."""
    convention: str
    """Definition of bits per byte, as a sentence."""
    heldout_documents_in_all: int
    heldout_bytes_in_all: int | None = None
    training_bytes: int
    training_bytes_of_byte_baselines: int
    """UTF-8 bytes of the training text of xz and the byte n-gram."""
    ngram_order: int
    """Bytes of the longest n-gram."""
    unscored_tasks: dict[str, str] = {}
    """Task of the recipe without a score → the reason. The next evaluation tries it again."""


BASELINES_OF_HIDDEN_TOKENS = ("unigram", "bigram", "neighbours")


class Accuracy(JsonObject):
    """Shares of the hidden tokens that were predicted; more is better."""

    model: float
    unigram: float
    """The most frequent token of the training text."""
    bigram: float
    """The most frequent token after the token before."""
    neighbours: float | None = None
    """The likeliest token between its neighbours, by counted pairs."""

    def baselines(self) -> dict[str, float]:
        found = {name: getattr(self, name) for name in BASELINES_OF_HIDDEN_TOKENS}
        return {name: share for name, share in found.items() if share is not None}


class PseudoBitsPerByte(JsonObject):
    """Bits per byte of held-out text with each token hidden in turn; fewer is better.

    Tokens are predicted from both sides, so this does not compare with a decoder's bits per byte.
    """

    token: float
    """The predicted token alone is hidden (Salazar et al. 2020)."""
    within_word: float
    """The later tokens of its word are hidden too (Kauf and Ivanova 2023)."""
    perplexity: float
    """Pseudo-perplexity of a token, hidden alone."""
    texts: int = Field(ge=1)
    """Held-out documents whose beginning, as long as a sequence, was scored."""
    tokens: int = Field(ge=1)
    """Tokens that were hidden one by one."""
    bytes: int = Field(ge=1)
    """UTF-8 bytes of these beginnings."""


class PartOfSpeechScores(JsonObject):
    """Part-of-speech tags by a linear classifier of frozen states."""

    accuracy: float
    """Share of the development file's words with the right tag."""
    baseline: float
    """The same by each word's most frequent tag in the training file; for unknown words the most frequent
    tag."""
    words: int = Field(ge=1)
    """Words of the development file."""
    training_words: int = Field(ge=1)
    tags: int
    layer: int
    """Layer whose output is the features, counted from 1."""
    pieces: str
    """Features of a word of several tokens: of its first token, or the mean."""


class Filling(JsonObject):
    text: str
    """Text of the token without spaces around it; a token of spaces as Python spells it."""
    probability: float


class FilledMask(JsonObject):
    """A sentence with a hidden word, and the model's words for it."""

    before: str
    after: str
    truth: str | None
    """The hidden word; null if the sentence is the recipe's, because nobody knows it."""
    fillings: list[Filling]
    """The likeliest tokens, best first."""

    def sentence(self) -> str:
        return f"{self.before}____{self.after}"

    def likeliest(self) -> str:
        return ", ".join(f"{token.text} {100 * token.probability:.0f} %" for token in self.fillings)


class MaskedScores(JsonFile):
    """The scores of an encoder on hidden tokens of the held-out text of a run, and on the recipe's files."""

    FILE_NAME: ClassVar[str] = "masked_scores.json"

    model: str
    """Name of the checkpoint's folder."""
    accuracy: Accuracy
    loss: float
    """Mean loss in nats per hidden token."""
    hidden_tokens: int = Field(ge=1)
    sequences: int = Field(ge=1)
    sequence_length: int
    masking: str
    """Hidden unit: subword, whole_word or span."""
    masking_rate: float
    """Share of the tokens that are hidden."""
    seed: int
    pseudo_bits_per_byte: PseudoBitsPerByte | None = None
    filled_masks: list[FilledMask] = []
    minimal_pairs: MinimalPairScores | None = None
    part_of_speech: PartOfSpeechScores | None = None


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
    seconds: float
    skipped: bool


class CorpusSummary(JsonObject):
    """The text before and after cleaning, in documents and UTF-8 bytes; null: the stage is not finished."""

    bytes_in: int | None
    documents_in: int | None
    bytes_kept: int | None
    documents_kept: int | None


class BitsPerByteSummary(JsonObject):
    """`BitsPerByte`; null: the stage is not finished."""

    model: float | None
    unigram: float | None
    xz: float | None
    ngram: float | None


class ParitySummary(JsonObject):
    """Parity with Hugging Face's transformers; null: the stage is not finished."""

    max_relative_loss_difference: float | None
    steps: int | None
    passed: bool | None


class Summary(JsonFile):
    """The figures of a run."""

    FILE_NAME: ClassVar[str] = "summary.json"

    stages: dict[str, StageTime]
    parameters: int | None = None
    """null: nothing was trained."""
    tokens: int | None = None
    """Tokens of the whole training; null: nothing was trained."""
    corpus: CorpusSummary
    bits_per_byte: BitsPerByteSummary
    masked_tokens: Accuracy | None = None
    """null: no encoder was evaluated."""
    parity: ParitySummary
    tokens_per_second: float | None
    """Median of training over all ranks; null: nothing was trained."""
    export: str | None
    """Folder of the exported model; null: nothing was exported."""
    kielo_version: str
