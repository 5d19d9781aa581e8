"""Unigram vocabularies (Kudo 2018, arXiv:1804.10959): texts → a tokenizer that writes words as likely pieces.

The trainer of `tokenizers` learns them as SentencePiece does. Pieces are whole characters within the words of
`pre_tokens.py`. Characters beyond the most frequent that make up 99.95 % of the text are written as bytes.
The vocabulary is spelled in GPT-2's alphabet of bytes, all of which are tokens, because in SentencePiece's
form a "▁" of the text would come back as a space.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from threading import Event, Thread

from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
from tokenizers.trainers import Trainer

from kielo.tokenizer.pre_tokens import CUT, pre_tokenizer
from kielo.tokenizer.spelling import ALPHABET

_SECONDS_TO_END = 1.0
CHARACTER_COVERAGE = 0.9995  # SentencePiece's default
# So much less likely than the rarest piece that a byte is only used if no piece has its character.
_BYTE_PENALTY = 10.0
_LONGEST_PIECE = 16  # characters, as SentencePiece's


def learn_stoppably(tokenizer: Tokenizer, texts: Iterable[str], trainer: Trainer) -> None:
    """Train the tokenizer in another thread: signals are handled in the main thread, which only waits.

    An exception of a handler soon ends the reading of texts. What the thread computes after the last text
    continues until the process ends, and is not used.
    """
    problems: list[BaseException] = []
    stop = Event()

    def learn() -> None:
        try:
            tokenizer.train_from_iterator(_until(stop, texts), trainer)
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


def _until(stop: Event, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if stop.is_set():
            raise InterruptedError
        yield text


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
    others = [(piece, score) for piece, score in scores.items() if piece not in alphabet]
    vocabulary = [(token.content, lowest) for token in control_tokens]
    vocabulary += [(byte, scores.get(byte, lowest)) for byte in alphabet]
    vocabulary += sorted(others)
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
        if rare := set(text) - covered:
            yield from filter(None, re.split(f"[{re.escape(''.join(rare))}]+", text))
        else:
            yield text
