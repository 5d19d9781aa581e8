"""Learns the merges of byte-pair encoding that follow those of an existing vocabulary.

Words as pieces of a vocabulary, with their counts → pairs to merge, the most frequent first (Sennrich et al.
2016, arXiv:1508.07909), where `tokenizers` can only begin with single characters.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

Pair = tuple[int, int]


class Words:
    """Words in the making: each a row of ids, with the counts of all adjacent pairs."""

    def __init__(self, counted: Mapping[tuple[int, ...], int]):
        self._rows = [list(word) for word in counted]
        self._counts = list(counted.values())
        self.pairs: dict[Pair, int] = defaultdict(int)
        self._places: dict[Pair, set[int]] = defaultdict(set)  # pair → the words that have, or had, it
        for number, row in enumerate(self._rows):
            self._note(number, pairwise(row))

    def merge(self, pair: Pair, made: int) -> set[Pair]:
        """Writes the id `made` for each occurrence of `pair`, from the left; returns the pairs it is in."""
        more: set[Pair] = set()
        for number in self._places.pop(pair):
            row, count = self._rows[number], self._counts[number]
            merged = _merged(row, pair, made)
            if len(merged) == len(row):
                continue  # an earlier merge took the pair away
            for gone in pairwise(row):
                self.pairs[gone] -= count
            self._note(number, pairwise(merged))
            more.update(one for one in pairwise(merged) if made in one)
            self._rows[number] = merged
        del self.pairs[pair]
        return more

    def _note(self, number: int, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            self.pairs[pair] += self._counts[number]
            self._places[pair].add(number)


def learn_merges(
    counted: Mapping[tuple[int, ...], int],
    first_id: int,
    number: int,
    is_allowed: Callable[[Pair], bool],
    min_frequency: int = 2,
) -> list[Pair]:
    """Returns up to `number` pairs in the order in which they are to be merged; pair i makes id first_id + i.

    counted: word as ids → how often the text has it. is_allowed: asked once for each pair whose turn it is;
    one that is refused is never merged. Of pairs that are equally frequent the one of lower ids comes first.
    Pairs that occur less than min_frequency times are not merged.
    """
    words, learnt = Words(counted), list[Pair]()
    turns = [(-count, pair) for pair, count in words.pairs.items()]
    heapq.heapify(turns)
    while turns and len(learnt) < number:
        asked, pair = heapq.heappop(turns)
        count = words.pairs.get(pair, 0)
        if count < min_frequency:
            continue
        if count != -asked:
            heapq.heappush(turns, (-count, pair))  # other merges took some of its occurrences
        elif is_allowed(pair):
            made = first_id + len(learnt)
            learnt.append(pair)
            for more in words.merge(pair, made):
                heapq.heappush(turns, (-words.pairs[more], more))
    return learnt


def _merged(row: list[int], pair: Pair, made: int) -> list[int]:
    left, right = pair
    merged, at, last = [], 0, len(row) - 1
    while at <= last:
        if at < last and row[at] == left and row[at + 1] == right:
            merged.append(made)
            at += 2
        else:
            merged.append(row[at])
            at += 1
    return merged
