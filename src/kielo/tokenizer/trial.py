"""A tokenizer from elsewhere is tried in a process of its own, before any text is given to it.

Its normaliser, its regular expressions and its model are a stranger's: they may never end, fill the memory,
end the process, or give other ids each time. The process has limits of all that; Kielo names what it met.

Run as a program it encodes each text of `PROBES` twice, and prints the name of each before.
"""

import os
import resource
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from kielo.recipe.errors import KieloError

MOST_FILE_BYTES = 1 << 30  # a vocabulary of 256,000 has 35 MB
CPU_SECONDS, WALL_SECONDS = 60, 600
MEMORY_BYTES, MEMORY_PER_BYTE = 4 << 30, 30
MOST_ROWS = 1 << 24
_LENGTH = 4096
_FAULT = "!"
# Text as it occurs, and what is known to be hard for regular expressions and merges.
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
    """Raises KieloError for a tokenizer.json that cannot be used, or not safely. key: whose it is."""
    state = path.stat()
    if state.st_size > MOST_FILE_BYTES:
        raise KieloError(
            f"{key}: {path} has {state.st_size:,} bytes, and a tokenizer has at most {MOST_FILE_BYTES:,}. "
            "Fix: the tokenizer.json of a tokenizer in its place"
        )
    if fault := _fault(path, (state.st_size, state.st_mtime_ns, state.st_ino)):
        raise KieloError(
            f"{key}: {path} {fault}; what would work: another tokenizer, or none, and the recipe trains one"
        )


@cache
def _fault(path: Path, state: tuple[int, ...]) -> str:
    """Returns what is wrong with a tokenizer, "" for a good one. state: of the file, which is tried once."""
    memory = MEMORY_BYTES + MEMORY_PER_BYTE * state[0]
    command = [sys.executable, "-P", "-m", "kielo.tokenizer.trial", str(path), str(memory), str(CPU_SECONDS)]
    # One thread: those of a large machine reserve more addresses than the limit.
    variables = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"was not tried to its end within {WALL_SECONDS} s"
    if done.returncode == 0:
        return ""
    *_, last = ["reading it", *done.stdout.splitlines()]
    if last.startswith(_FAULT):
        return last.removeprefix(_FAULT)
    if done.returncode == -signal.SIGXCPU:
        return f"takes more than {CPU_SECONDS} s for {last}"
    why = next((f"; {line}" for line in done.stderr.splitlines() if "memory" in line), "")[:200]
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
        if getattr(tokenizer.model, "dropout", None):  # it is turned off, and the stage says so
            tokenizer.model.dropout = None
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= MOST_ROWS:
            print(f"{_FAULT}has a token of id {largest:,}, for which no model has a row")
            return 1
        for doing, text in PROBES.items():
            print(doing, flush=True)
            once, again = (tokenizer.encode(text, add_special_tokens=False).ids for _ in range(2))
            if once != again:
                print(f"{_FAULT}gives other ids each time ({doing}): something in it is drawn at random")
                return 1
            tokenizer.decode(once)
    except BaseException as error:  # a panic of the Rust library is no Exception
        reason = " ".join(str(error).split())[:200]
        print(f"{_FAULT}cannot be used: {reason} ({type(error).__name__}, at {doing})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
