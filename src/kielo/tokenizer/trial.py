"""A tokenizer from elsewhere: tried in its own process, and refused if it loses text or is of other weights.

Its normaliser, regular expressions and model may never end, fill the memory, end the process, or give
different ids each time. Run as a program with limits, this file encodes each text of `PROBES` twice.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import regex

from kielo.artifact.weights_folder import CONFIG_FILE as CONFIG_OF_MODEL
from kielo.recipe.errors import KieloError
from kielo.tokenizer import load
from kielo.tokenizer.control_tokens import read_object, unknown_token
from kielo.tokenizer.load import TOKENIZER_FILE, TextTokenizer, encode

_CHECKED_TEXTS = 256
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
# Rows of weights beyond the tokens: padding to a multiple of 64 is usual, and many have a few hundred.
_MOST_PADDING_ROWS, _MOST_PADDING = 512, 0.02
_SHOWN = 24  # characters of a text that does not come back
# White space, controls, joiners and marks on letters are no loss: normalisers leave them out.
_SEEN = regex.compile(r"[^\p{Z}\p{C}\p{M}]")


class Unknown(NamedTuple):
    """Characters of texts that a tokenizer has no token for. first: the first, with its neighbours."""

    characters: int
    of_characters: int
    texts: int
    of_texts: int
    first: str

    def sentence(self) -> str:
        return (
            f"{self.texts:,} of {self.of_texts:,} texts ({self.texts / self.of_texts:.1%}) have characters "
            f"that this tokenizer lacks ({self.characters / self.of_characters:.2%} of all characters), "
            f"first {self.first!r}"
        )


def find_unknown(tokenizer: TextTokenizer, texts: Iterable[str]) -> Unknown | None:
    """Count characters of the first 256 texts that are unknown (in WordPiece a word) or dropped, if any."""
    batch = list(islice(texts, _CHECKED_TEXTS))
    name = unknown_token(json.loads(tokenizer.whole.to_str())["model"])
    places = _dropped(tokenizer, batch) if name is None else _unknown(tokenizer, batch, name)
    if not (found := [(text, there) for text, there in zip(batch, places, strict=True) if there]):
        return None
    text, (first, *_) = found[0]
    return Unknown(
        characters=sum(len(there) for _, there in found),
        of_characters=sum(map(len, batch)),
        texts=len(found),
        of_texts=len(batch),
        first=text[max(0, first - _SHOWN // 2) : first + _SHOWN // 2],
    )


def refuse_unknown(unknown: Unknown, share: float, key: str) -> None:
    """Raise KieloError if over `share` of the texts have unknown characters. SentencePiece omits 0.05 %."""
    if unknown.texts <= share * unknown.of_texts:
        return
    accepted = math.ceil(100 * unknown.texts / unknown.of_texts) / 100
    raise KieloError(
        f"{key}: {unknown.sentence()}. A model could never write them. Fix: a byte-level tokenizer or a "
        "tokenizer with byte fallback, or no tokenizer.path, so that this recipe trains its own. "
        f"tokenizer.max_unknown_share = {accepted:g} accepts this tokenizer"
    )


def _dropped(tokenizer: TextTokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    characters = [one for one in sorted(set().union(*texts)) if _SEEN.match(one)]
    dropped = {one for one, ids in zip(characters, encode(tokenizer, characters), strict=True) if not ids}
    for text in texts:
        yield [place for place, one in enumerate(text) if one in dropped]


def _unknown(tokenizer: TextTokenizer, texts: Sequence[str], name: str) -> Iterator[list[int]]:
    unknown = tokenizer.whole.token_to_id(name)
    encodings = tokenizer.for_text.tokenizer.encode_batch(list(texts), add_special_tokens=False)
    for text, encoding in zip(texts, encodings, strict=True):
        lacking: set[int] = set()
        if unknown in encoding.ids:
            for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
                lacking.update(range(begin, end) if number == unknown else ())
        yield sorted(place for place in lacking if _SEEN.match(text[place]))


def refuse_lossy(tokenizer: TextTokenizer, texts: Iterable[str], key: str) -> None:
    """Raise KieloError if more than half of the first 256 texts do not come back, but for spaces and NFKC."""
    batch = list(islice(texts, _CHECKED_TEXTS))
    backs = load.decode(tokenizer, encode(tokenizer, batch))
    pairs = [(_bare(text), _bare(back)) for text, back in zip(batch, backs, strict=True)]
    lost = [(text, back) for text, back in pairs if text != back]
    if 2 * len(lost) <= len(pairs):
        return
    text, back = lost[0]
    first = len(os.path.commonprefix([text, back]))
    begin = max(0, first - _SHOWN // 2)
    raise KieloError(
        f"{key}: of {len(pairs):,} texts {len(lost):,} do not come back from this tokenizer: "
        f"{text[begin : begin + _SHOWN]!r} becomes {back[begin : begin + _SHOWN]!r} (without spaces). "
        "Fix: a byte-level tokenizer, or a tokenizer with byte fallback that keeps capitals and accents, or "
        "no tokenizer.path, so that this recipe trains its own"
    )


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def refuse_other_vocabulary(tokenizer: Path, weights: Path, key: str) -> None:
    """Raise KieloError if more than a tenth of the ids (`key`) are other tokens in the weights' tokenizer."""
    if not all((folder / TOKENIZER_FILE).is_file() for folder in (tokenizer, weights)):
        return
    ours, theirs = (
        {number: token for token, number in load.load_tokenizer(folder).whole.get_vocab().items()}
        for folder in (tokenizer, weights)
    )
    alike = sum(theirs.get(number) == token for number, token in ours.items())
    if 10 * alike >= 9 * len(ours):
        return
    number = next(number for number in sorted(ours) if theirs.get(number) != ours[number])
    raise KieloError(
        f"{key}: is not the vocabulary of model.weights: {len(ours) - alike:,} of its {len(ours):,} ids are "
        f"other tokens there, such as {number}: {ours[number]!r} here, {theirs.get(number)!r} in {weights}. "
        f'Fix: tokenizer.path = "{weights}", or model.transplant = "mean" to make rows for this vocabulary'
    )


def doubts_about_weights(tokenizer: TextTokenizer, weights: Path) -> list[str]:
    """Return doubts about a tokenizer for weights without one, by numbers in their configuration."""
    if (weights / TOKENIZER_FILE).is_file():  # which `refuse_other_vocabulary` compares
        return []
    configs = {name: read_object(weights / name) for name in (CONFIG_OF_MODEL, "generation_config.json")}
    found = [*_other_special_ids(tokenizer, configs), *_other_size(tokenizer, configs[CONFIG_OF_MODEL])]
    if not found:
        return []
    return [
        f"{weights} has no {TOKENIZER_FILE}, so its vocabulary is not compared, and {tokenizer.folder} is "
        f"perhaps not its tokenizer: {'; '.join(found)}. Fix: tokenizer.path = the tokenizer of these weights"
    ]


def _other_special_ids(tokenizer: TextTokenizer, configs: Mapping[str, Any]) -> Iterator[str]:
    for role in _ROLES:
        ours = tokenizer.end_of_text if role == "eos_token" else load.role_name(tokenizer, role)
        found = ((file, config.get(f"{role}_id")) for file, config in configs.items())
        listed = [(file, ids if isinstance(ids, list) else [ids]) for file, ids in found]
        theirs = [(file, one) for file, ids in listed for one in ids if isinstance(one, int)]
        number = None if ours is None else tokenizer.whole.token_to_id(ours)
        if theirs and number is not None and number not in [one for _, one in theirs]:
            file, other = theirs[0]
            name = tokenizer.whole.id_to_token(other)
            yield f"{role}_id in its {file} is {other}, which is {name!r} here, and {ours!r} is {number}"


def _other_size(tokenizer: TextTokenizer, config: Mapping[str, Any]) -> Iterator[str]:
    rows, size = config.get("vocab_size"), load.vocabulary_size(tokenizer)
    if isinstance(rows, int) and rows - size > max(_MOST_PADDING_ROWS, _MOST_PADDING * rows):
        yield f"its vocab_size is {rows:,}, and this tokenizer has {size:,} tokens"


MOST_FILE_BYTES = 1 << 30  # a vocabulary of 256,000 has 35 MB
CPU_SECONDS, WALL_SECONDS = 60, 600
MEMORY_BYTES, MEMORY_PER_BYTE = 4 << 30, 30
MOST_ROWS = 1 << 24
_LENGTH = 4096
_FAULT = "!"
# Usual text, and text that is hard for regular expressions and merges.
PROBES = {
    "words": "Eesti tähed õ, ä ja ü; 日本語 한국어 हिन्दी ไทย العربية עברית ქართული ελληνικά. " * 8,
    "one letter many times": "a" * _LENGTH,
    "two letters in turns": "ab" * (_LENGTH // 2),
    "spaces": " " * _LENGTH,
    "line ends": "\n" * _LENGTH,
    "digits": "1234567890" * (_LENGTH // 10),
    "punctuation": "!?.,;:-_(){}[]" * (_LENGTH // 14),
    "marks on one letter": "a" + "\u0301" * _LENGTH,
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈" * (_LENGTH // 16),
    "control characters": "\x00\x01\x1b\x7f\u200b\ufeff\ufffd" * (_LENGTH // 8),
    "spaces before a letter": (" " * 64 + "x") * (_LENGTH // 65),
}


def try_tokenizer(path: Path, key: str) -> None:
    state = path.stat()
    if state.st_size > MOST_FILE_BYTES:
        raise KieloError(
            f"{key}: {path} has {state.st_size:,} bytes, and the limit is {MOST_FILE_BYTES:,}. "
            "Fix: the tokenizer.json of a tokenizer in its place"
        )
    if fault := _fault(path, (state.st_size, state.st_mtime_ns, state.st_ino)):
        raise KieloError(f"{key}: {path} {fault}. Fix: another tokenizer, or none: then the recipe trains it")


@cache
def _fault(path: Path, state: tuple[int, ...]) -> str:  # state: of the file, which is tried once
    memory = MEMORY_BYTES + MEMORY_PER_BYTE * state[0]
    command = [sys.executable, "-P", "-m", "kielo.tokenizer.trial", str(path), str(memory), str(CPU_SECONDS)]
    # One thread: the threads of a large machine reserve more addresses than the limit.
    variables = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    run = partial(subprocess.run, capture_output=True, text=True, errors="replace", check=False)
    try:
        done = run(command, env=variables, timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"was not tried to its end within {WALL_SECONDS} s"
    if done.returncode == 0:
        return ""
    *_, last = ["reading it", *done.stdout.splitlines()]
    if last.startswith(_FAULT):
        return last.removeprefix(_FAULT)
    if done.returncode == -signal.SIGXCPU:
        return f"takes more than {CPU_SECONDS} s for {last}"
    why = next((f": {line}" for line in done.stderr.splitlines() if "memory" in line), "")[:200]
    return f"ends the process that reads it (exit code {done.returncode}, at {last}{why})"


def main() -> int:
    path, memory, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tokenizers import Tokenizer

    doing = "reading it"
    try:
        tokenizer = Tokenizer.from_file(path)
        if getattr(tokenizer.model, "dropout", None):  # the stage turns it off, and logs it
            tokenizer.model.dropout = None
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= MOST_ROWS:
            print(f"{_FAULT}has a token of id {largest:,}, for which no model has a row")
            return 1
        for doing, text in PROBES.items():
            print(doing, flush=True)
            once, again = (tokenizer.encode(text, add_special_tokens=False).ids for _ in range(2))
            if once != again:
                print(f"{_FAULT}gives different ids each time ({doing}): something in it is random")
                return 1
            tokenizer.decode(once)
    except BaseException as error:  # a panic of the Rust library is no Exception
        reason = " ".join(str(error).split())[:200]
        print(f"{_FAULT}cannot be used: {reason} ({type(error).__name__}, at {doing})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
