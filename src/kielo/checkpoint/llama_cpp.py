"""llama.cpp itself over a GGUF file, in a process of its own: its asserts end a process without a message.

The program is the Python package cyllama, a build of llama.cpp.
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kielo.checkpoint import own_process

PACKAGE = "cyllama"


def program() -> str | None:
    """Return llama.cpp's package with its version, or None if it is not installed."""
    try:
        return f"{PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        return None


def ids_of(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return llama.cpp's ids of each text, without special tokens. Raise KieloError if it fails."""
    return _ask(file, {"texts": list(texts)})["ids"]


def scores_of(
    file: Path, sequences: Sequence[Sequence[int]], new_tokens: int = 0
) -> tuple[list[list[float]], list[list[int]]]:
    """Return of each sequence of ids the log-probabilities of all ids but the first, and its greedy way on.

    new_tokens: ids of a way on. Raise KieloError if llama.cpp fails.
    """
    found = _ask(file, {"sequences": [list(one) for one in sequences], "new_tokens": new_tokens})
    return found["log_probabilities"], found["greedy"]


def _ask(file: Path, question: dict[str, Any]) -> Any:
    return own_process.ask("kielo.checkpoint.llama_cpp", f"llama.cpp ({program()})", file, question)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer a question of `ids_of` or `scores_of` in this process."""
    from cyllama.llama import llama_cpp as cpp

    class Model(cpp.LlamaModel):
        @property
        def n_vocab(self) -> int:  # get_logits_ith of cyllama 0.2.18 reads it, and LlamaModel lacks it
            return self.get_vocab().n_vocab

    how = cpp.LlamaModelParams()
    how.n_gpu_layers, how.use_extra_bufts = 0, False  # the weights as they are, mapped from the file
    model = Model(path_model=question["file"], params=how, verbose=False)
    if "texts" in question:
        vocabulary = model.get_vocab()
        return {
            "ids": [
                list(vocabulary.tokenize(text, add_special=False, parse_special=False)) if text else []
                for text in question["texts"]
            ]
        }
    scored, greedy = [], []
    for ids in question["sequences"]:
        context = _context(cpp, model, len(ids) + question["new_tokens"])
        rows = _logits(cpp, context, ids, 0)
        scored.append(_log_probabilities(rows[:-1], ids[1:]))
        way_on, row = [], rows[-1]
        for position in range(len(ids), len(ids) + question["new_tokens"]):
            way_on.append(int(row.argmax()))
            (row,) = _logits(cpp, context, way_on[-1:], position)
        greedy.append(way_on)
    return {"log_probabilities": scored, "greedy": greedy}


def _context(cpp: Any, model: Any, length: int) -> Any:
    how = cpp.LlamaContextParams()
    how.n_ctx = how.n_batch = how.n_ubatch = max(length, 32)
    how.flash_attn_type, how.type_k, how.type_v = 0, 0, 0  # off, and a cache in fp32
    return cpp.LlamaContext(model=model, params=how, verbose=False)


def _logits(cpp: Any, context: Any, ids: Sequence[int], first: int) -> Any:
    import numpy as np

    batch = cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for number, token in enumerate(ids):
        batch.add(token, first + number, [0], True)
    context.decode(batch)
    return np.array([context.get_logits_ith(number) for number in range(len(ids))], np.float64)


def _log_probabilities(rows: Any, ids: Sequence[int]) -> list[float]:
    import numpy as np

    highest = rows.max(axis=-1, keepdims=True)
    normaliser = highest[:, 0] + np.log(np.exp(rows - highest).sum(axis=-1))
    return (rows[np.arange(len(ids)), ids] - normaliser).tolist()


if __name__ == "__main__":
    own_process.answer_with(answer)
