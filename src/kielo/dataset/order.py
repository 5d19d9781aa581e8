"""The order of training data as a pure function: (seed, phase, sample number) -> (source, epoch, sequence).

Nothing is drawn, stored or locked: any rank computes any sample, so a run that stops goes on with the very
same samples on any number of ranks. The resume state is (phase, sample number).

A source is a stream of tokens. It is cut into text blocks of the *longest* sequence length of the whole run,
and each epoch permutes the text blocks; a shorter sequence length splits a text block into consecutive
sequences. So a phase can end anywhere and the next one, with another length, batch or mixture, goes on where
it stopped: at most one text block of each source is half used, and its used tokens are reported as seen. The
tokens after the last whole text block come at the end of each epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kielo.dataset.mixture import Mixture
from kielo.dataset.permutation import LARGEST_SIZE, key_from, keys_of_epochs, permute
from kielo.recipe.sections import MixtureOrder


@dataclass(frozen=True)
class OrderSource:
    """One source of a phase.

    num_tokens: the tokens that have a next token to predict, one less than the source's stream holds. weight:
    share of the samples, relative to the other sources'.
    """

    name: str
    num_tokens: int
    weight: float


@dataclass(frozen=True)
class Phase:
    """A range of a run's steps with one sequence length, batch and mixture.

    `longest_sequence_length` is that of the whole run, a multiple of every phase's length, and must stay the
    same in all its phases. `offsets`: source name -> tokens drawn from it before this phase,
    over all epochs. `is_shuffled`: else each epoch has the text in the order of its stream.
    """

    number: int
    first_sample: int
    sequence_length: int
    longest_sequence_length: int
    offsets: Mapping[str, int] = field(default_factory=dict)
    mixture_order: MixtureOrder = "every_sample"
    is_shuffled: bool = True


@dataclass(frozen=True)
class Located:
    """The places of samples in their sources, int64 [n] each.

    `sequence` i of a source at length s predicts tokens i*s+1 .. i*s+s of its stream. `seen_tokens`: how many
    of the sequence's first tokens an earlier phase has trained on (0 except at a phase's first sequence).
    """

    source: np.ndarray
    epoch: np.ndarray
    sequence: np.ndarray
    seen_tokens: np.ndarray


class Order:
    """Order of one phase. Memory does not grow with the samples or the sources' sizes."""

    def __init__(self, seed: int, phase: Phase, sources: Sequence[OrderSource]):
        length, longest = phase.sequence_length, phase.longest_sequence_length
        if length <= 0 or longest % length:
            raise ValueError(f"sequence length {length} must divide the longest of the run, {longest}")
        if not sources or any(not 0 < source.num_tokens <= LARGEST_SIZE for source in sources):
            raise ValueError("each source needs between 1 and 2^52 tokens: " + repr(list(sources)))
        if len({source.name for source in sources}) != len(sources):
            raise ValueError("two sources have one name: " + repr([source.name for source in sources]))
        self.seed, self.phase, self.sources = seed, phase, tuple(sources)
        key = key_from("mixture", seed, phase.number)
        self.mixture = Mixture([source.weight for source in sources], phase.mixture_order, key)
        self._sequences_per_block = longest // length
        tokens = np.array([source.num_tokens for source in sources], dtype=np.int64)
        self._num_sequences = -(-tokens // length)
        self._whole_blocks = tokens // longest
        # Neither phase nor length is in the key: the next phase must find the same permutation.
        self._key = np.array([key_from("text", seed, source.name) for source in sources], dtype=np.uint64)
        offset = np.array([phase.offsets.get(source.name, 0) for source in sources], dtype=np.int64)
        first_epoch, drawn = np.divmod(offset, tokens)
        self._first_draw = first_epoch * self._num_sequences + drawn // length
        self._seen_tokens = drawn % length

    def locate(self, samples: np.ndarray) -> Located:
        """Locates global samples. int64 [n], none before the phase's first -> Located of [n]."""
        index = np.atleast_1d(np.asarray(samples, dtype=np.int64)) - self.phase.first_sample
        if len(index) and index.min() < 0:
            raise ValueError(f"phase {self.phase.number} starts at sample {self.phase.first_sample}")
        source, turn = self.mixture.locate(index)
        epoch, place = np.divmod(turn + self._first_draw[source], self._num_sequences[source])
        block, within = (
            (place, 0) if self._sequences_per_block == 1 else np.divmod(place, self._sequences_per_block)
        )
        whole = np.flatnonzero(block < self._whole_blocks[source])  # the rest is the stream's tail
        shuffled, its_source = block.copy(), source[whole]
        keys = keys_of_epochs(self._key[its_source], epoch[whole])
        if self.phase.is_shuffled:
            shuffled[whole] = permute(block[whole], self._whole_blocks[its_source], keys)
        seen_tokens = np.where(turn == 0, self._seen_tokens[source], 0)
        return Located(source, epoch, shuffled * self._sequences_per_block + within, seen_tokens)

    def offsets_at(self, sample: int) -> dict[str, int]:
        """Returns the tokens drawn from each source before global `sample`: the offsets of the next phase.

        Sources of earlier phases that this one leaves out keep their offsets.
        """
        offsets = dict(self.phase.offsets)
        taken = self.mixture.taken(sample - self.phase.first_sample)
        for number, source in enumerate(self.sources):
            if taken[number]:
                draws = int(self._first_draw[number]) + taken[number]
                epoch, place = divmod(draws, int(self._num_sequences[number]))
                offsets[source.name] = epoch * source.num_tokens + place * self.phase.sequence_length
        return offsets

    def epochs_at(self, sample: int) -> dict[str, float]:
        """Returns the epochs (such as 1.5) read of each source before global `sample`, in all phases."""
        offsets = self.offsets_at(sample)
        return {source.name: offsets.get(source.name, 0) / source.num_tokens for source in self.sources}
