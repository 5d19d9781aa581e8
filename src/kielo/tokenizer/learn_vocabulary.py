"""Vocabularies that are learned in another way than by the byte-pair trainer of `tokenizers`.

Unigram (Kudo 2018, arXiv:1804.10959): words are written as likely pieces. The trainer of `tokenizers` learns
them as SentencePiece does. Pieces are whole characters within the words of `spelling.py`. Characters beyond
the most frequent that make up 99.95 % of the text are written as bytes. The vocabulary is spelled in GPT-2's
alphabet of bytes, all of which are tokens, because in SentencePiece's form a "▁" of the text would come back
as a space.

Extension: a ready byte-pair tokenizer + text → the same tokenizer with further tokens. Old tokens keep their
ids, and new ids follow the largest of them. A new merge comes after all old merges and makes a new token, so
it only joins what the old tokenizer writes: **a text's new ids, with each new token written as the old tokens
that it joins, are its old ids**. (With `ignore_merges`, as in Llama 3, except for words that are a new token
by themselves: they become this token, of the same text.) Text that is to stay unchanged forbids merges: two
old tokens that are neighbours in it are never merged. Each new token begins with a merge of two old tokens,
so all text with only such neighbours is encoded as before.
"""

import heapq
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from threading import Event, Thread

from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
from tokenizers.trainers import Trainer

from kielo.artifact.json_object import JsonTable
from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer, vocabulary_size
from kielo.tokenizer.measure import batched
from kielo.tokenizer.spelling import ALPHABET, CUT, LONGEST_WORD, SPACE, Spelling, cut_words, pre_tokenizer

_SECONDS_TO_END = 1.0
CHARACTER_COVERAGE = 0.9995  # SentencePiece's default
# So much less likely than the rarest piece that a byte is only used if no piece has its character.
_BYTE_PENALTY = 10.0
_LONGEST_PIECE = 16  # characters, as SentencePiece's


def learn_stoppably(tokenizer: Tokenizer, texts: Iterable[str], trainer: Trainer) -> None:
    """Train the tokenizer in another thread: signals are handled in the main thread, which only waits.

    An exception of a handler soon ends the reading of texts. The thread's later work is not used.
    """
    problems: list[BaseException] = []
    stop = Event()

    def until_stopped() -> Iterator[str]:
        for text in texts:
            if stop.is_set():
                raise InterruptedError
            yield text

    def learn() -> None:
        try:
            tokenizer.train_from_iterator(until_stopped(), trainer)
        except BaseException as problem:
            problems.append(problem)

    thread = Thread(target=learn, name="tokenizer", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        # Python's end would kill a thread that reads texts inside Rust.
        stop.set()
        thread.join(_SECONDS_TO_END)
        raise
    if problems:
        raise problems[0]


def unigram_tokenizer(
    texts: Iterable[str], vocab_size: int, control_tokens: Collection[AddedToken]
) -> Tokenizer:
    """Learn `vocab_size` tokens, or fewer if the text has no more. texts: read twice.

    Ids: control tokens, then the bytes, then pieces in the order of their spelling. Memory grows with the
    different words of the text, not with its length. The trainer adds up in no fixed order, so the scores of
    two runs differ a little, and a word may have other pieces of equal score.
    """
    room = vocab_size - len(control_tokens) - len(ALPHABET)
    covered = covered_characters(texts, most=max(1, room // 2))
    pieces = _learned(texts, covered, room + sum(map(str.isascii, covered))) if room else []
    scores = {"".join(ALPHABET[byte] for byte in piece.encode()): score for piece, score in pieces}
    lowest = min(scores.values(), default=0.0) - _BYTE_PENALTY
    alphabet = sorted(ALPHABET.values())
    vocabulary = [(token.content, lowest) for token in control_tokens]
    vocabulary += [(byte, scores.get(byte, lowest)) for byte in alphabet]
    vocabulary += sorted((piece, score) for piece, score in scores.items() if piece not in alphabet)
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(control_tokens))
    return tokenizer


def covered_characters(texts: Iterable[str], most: int) -> list[str]:
    counted: Counter[str] = Counter()
    for text in texts:
        counted.update(text)
    wanted, covered = CHARACTER_COVERAGE * counted.total(), list[str]()
    for character, count in sorted(counted.items(), key=lambda one: (-one[1], one[0])):
        if wanted <= 0 or len(covered) == most:
            break
        covered.append(character)
        wanted -= count
    return covered


def _learned(texts: Iterable[str], covered: list[str], number: int) -> list[tuple[str, float]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = CUT
    trainer = trainers.UnigramTrainer(
        vocab_size=number, special_tokens=[], max_piece_length=_LONGEST_PIECE, show_progress=False
    )
    learn_stoppably(tokenizer, covered_parts(texts, set(covered)), trainer)
    return [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]


def covered_parts(texts: Iterable[str], covered: set[str]) -> Iterator[str]:
    for text in texts:
        rare = "".join(set(text) - covered)
        yield from filter(None, re.split(f"[{re.escape(rare)}]+", text)) if rare else [text]


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
        """Write the id `made` for each occurrence of `pair`, from the left. Return the pairs that have it."""
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
    """Return up to `number` pairs in the order of merging, frequent pairs first. Pair i makes first_id + i.

    Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) from pieces of a vocabulary. `tokenizers` can
    only begin with single characters. counted: word as ids → its count in the text. is_allowed: asked once
    for each pair when its turn comes. Of equally frequent pairs the lower ids come first. Pairs with less
    than min_frequency occurrences are not merged.
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


def extend(
    old: TextTokenizer,
    texts: Iterable[str],
    vocab_size: int,
    min_frequency: int = 2,
    unchanged: Iterable[str] = (),
) -> Tokenizer:
    """Return `old` with tokens learned on `texts`: `vocab_size` in all, or fewer if the text has no more.

    unchanged: texts that are encoded as before. A new token is, like Kielo's own, within one word, without
    two digits. Raises KieloError for a tokenizer that is no byte-pair encoding, a vocabulary that is not
    larger than `old`, and without text.
    """
    content = json.loads(old.whole.to_str())
    size, words = vocabulary_size(old), _Words(old, content)
    _check_model(content["model"], old, size, vocab_size)
    found = (word for text_words in words.of(texts) for word in text_words)
    # Time grows with the square of a word's length: long words are cut.
    starts = ((word, first) for word in found for first in range(0, len(word), LONGEST_WORD))
    parts = (word[first : first + LONGEST_WORD] for word, first in starts)
    counted = Counter(part for part in parts if len(part) > 1)
    if num_cut := sum(count for part, count in counted.items() if len(part) == LONGEST_WORD):
        print(
            f"tokenizer: {num_cut * LONGEST_WORD:,} tokens of the sample are in words of {LONGEST_WORD} or "
            "more tokens. New tokens were learned from pieces of these words",
            file=sys.stderr,
        )
    if not counted and not words.num_texts:
        raise KieloError(
            "no training text to learn new tokens from. Fix: more text (funnel.json has what was dropped)"
        )
    kept = {word for text_words in words.of(unchanged) for word in text_words}
    tokens = _Tokens(old, content, kept)
    learn_merges(counted, size, vocab_size - size, tokens.add, min_frequency)
    return tokens.extended()


class _Words:
    def __init__(self, old: TextTokenizer, content: JsonTable):
        self._tokenizer = old.for_text.tokenizer
        vocabulary = old.whole.get_vocab(with_added_tokens=True)
        # SentencePiece's form may encode a whole text as one word. Its words begin with a space.
        self._begins_word = {number for token, number in vocabulary.items() if token.startswith(SPACE)}
        self._added = {token["id"] for token in content["added_tokens"]}
        self.num_texts = 0

    def of(self, texts: Iterable[str]) -> Iterator[list[tuple[int, ...]]]:
        for batch in batched(texts):
            for encoding in self._tokenizer.encode_batch(batch, add_special_tokens=False):
                self.num_texts += 1
                yield list(self._cut(encoding.ids, encoding.word_ids))

    def _cut(self, ids: list[int], word_ids: list[int | None]) -> Iterator[tuple[int, ...]]:
        word: list[int] = []
        before = None
        for number, of_word in zip(ids, word_ids, strict=True):
            if word and (of_word != before or number in self._begins_word or number in self._added):
                yield tuple(word)
                word = []
            if number not in self._added:
                word.append(number)
            before = of_word
        if word:
            yield tuple(word)


class _Tokens:
    def __init__(self, old: TextTokenizer, content: JsonTable, kept: set[tuple[int, ...]]):
        self._content, model = content, content["model"]
        self._spelling = Spelling(content, old.folder, "a byte-level tokenizer, or no tokenizer.extend")
        names = old.whole.get_vocab(with_added_tokens=True)
        self._size = self._old_size = vocabulary_size(old)
        self._names = {number: token for token, number in names.items()}
        added = {one["id"] for one in content["added_tokens"]}
        # kept: words, as old ids, in which no new token may be.
        # Never part of a longer token: added tokens, a byte that is spelled as <0x0A>, the unknown token.
        self._alone = {
            number
            for number, token in self._names.items()
            if number in added or self._spelling.is_byte(token) or token == model.get("unk_token")
        }
        self._taken = set(names)
        self._kept = {pair for word in kept for pair in pairwise(word)}
        if model.get("ignore_merges"):  # a word that is a token becomes it whatever the merges are
            self._taken |= {"".join(self._names[number] for number in word) for word in kept}
        self._merges: list[list[str]] = []

    def add(self, pair: Pair) -> bool:
        """Add the token that the pair makes, with the next id. Return False if it is not allowed."""
        if pair in self._kept or not self._alone.isdisjoint(pair):
            return False
        left, right = (self._names[one] for one in pair)
        token = left + right
        if token in self._taken or len(cut_words(self._spelling.text_of(token))) > 1:
            return False
        self._names[self._size] = token
        self._taken.add(token)
        self._merges.append([left, right])
        self._size += 1
        return True

    def extended(self) -> Tokenizer:
        model = self._content["model"]
        # An added token outside of the model's vocabulary would get the first id after it.
        for added in self._content["added_tokens"]:
            model["vocab"].setdefault(added["content"], added["id"])
        for number in range(self._old_size, self._size):
            model["vocab"][self._names[number]] = number
        model["merges"] = [*model["merges"], *self._merges]
        return Tokenizer.from_str(json.dumps(self._content))


def _check_model(model: JsonTable, old: TextTokenizer, size: int, vocab_size: int) -> None:
    affixes = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if model["type"] != "BPE" or affixes:
        what = f"with {affixes[0]}" if affixes else f"of the type {model['type']}"
        raise KieloError(
            f"tokenizer.extend: {old.folder} has a model {what}, and only byte-pair encoding (BPE) without "
            "affixes can be extended. Fix: tokenizer.path to keep it, or neither key to learn a vocabulary"
        )
    if vocab_size <= size:
        raise KieloError(
            f"tokenizer.vocab_size = {vocab_size} counts old tokens too, and {old.folder} has {size}. "
            f"Fix: tokenizer.vocab_size = {size + 8192}, for 8192 new tokens"
        )
