"""The programs that serve an export, each asked in a process of its own for what a model gives to texts.

Each gives the log-probabilities of the tokens of a text, and the tokens that it takes after the text when it
takes the likeliest each time. An entry of PROGRAMS adds a program.
"""

import json
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypedDict

from kielo.checkpoint import llama_cpp, own_process
from kielo.tokenizer.load import load_tokenizer

# Limits of small models; larger models have ten times the effect of rounding their weights, if that is more.
# Programs that compute in fp32 differ by the order of their sums: by up to 2e-6 in ten families and the demo.
_FP32 = 1e-5
# A GPU can multiply fp32 matrices in TF32, which has the 11 bits of fp16.
_TF32 = 2e-2
# llama.cpp rounds what it multiplies with to the type of the weights, and has a GELU in fp16.
_LLAMA_CPP = {"F32": 2e-4, "F16": 2e-2, "BF16": 1e-1, "Q8_0": 2e-1}
_LLAMA_CPP_GELU = 2e-2
_SILU = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3")


class Question(TypedDict):
    """sequences: ids of each text. new_tokens: tokens after it, or fewer up to `end`, the end of text."""

    sequences: list[list[int]]
    new_tokens: int
    end: int


class Answer(NamedTuple):
    """log_probabilities: of all ids but the first of each text. cannot: why the program has no such model."""

    log_probabilities: list[list[float]]
    greedy: list[list[int]]
    cannot: str | None = None


class Program(NamedTuple):
    """package: of pip. limit: (model_type, file) → the largest difference of log-probabilities by rounding.

    answer: (export folder or GGUF file, question) → an Answer's fields, or raises CannotServeError.
    """

    package: str
    answer: Callable[[Path, Question], dict[str, Any]]
    limit: Callable[[str, Path], float]
    reads_gguf: bool = False


class CannotServeError(Exception):
    """The program has no such model."""


def installed(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def ask(name: str, file: Path, question: Question) -> Answer:
    """Return what the program `name` answers. Raise KieloError if it fails."""
    found = own_process.ask(__name__, name, file, {"program": name, **question})
    return Answer(**{"log_probabilities": [], "greedy": []} | found)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    question = Question(sequences=asked["sequences"], new_tokens=asked["new_tokens"], end=asked["end"])
    try:
        return PROGRAMS[asked["program"]].answer(Path(asked["file"]), question)
    except CannotServeError as error:
        return {"cannot": str(error)}


def _transformers(folder: Path, question: Question) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    scored, greedy, end = [], [], question["end"]
    with torch.inference_mode():
        for ids in question["sequences"]:
            ids_1s = torch.tensor([ids])
            logs_sv = model(input_ids=ids_1s, use_cache=False).logits[0].double().log_softmax(-1)
            scored.append(logs_sv[:-1].gather(-1, ids_1s[0, 1:, None])[:, 0].tolist())
            written = model.generate(
                ids_1s, attention_mask=torch.ones_like(ids_1s), max_new_tokens=question["new_tokens"],
                do_sample=False, eos_token_id=end, pad_token_id=end,
            )  # fmt: skip
            greedy.append(written[0, len(ids) :].tolist())
    return {"log_probabilities": scored, "greedy": greedy}


def _ctranslate2(folder: Path, question: Question) -> dict[str, Any]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    names = load_tokenizer(folder).whole.id_to_token
    scored, greedy = [], []
    with TemporaryDirectory(prefix="kielo_ctranslate2_") as place:
        converted = str(Path(place) / "model")
        try:
            TransformersConverter(str(folder)).convert(converted)
            generator = ctranslate2.Generator(converted, device="cpu", compute_type="float32")
        # Of any class: it has no reader of the family, or not beside this transformers or this tokenizer.
        except Exception as error:
            said = str(error).partition(" (supported")[0]
            raise CannotServeError(f"{type(error).__name__}: {said}") from error
        for ids in question["sequences"]:
            row = [names(number) for number in ids]
            (found,) = generator.score_batch([row], max_input_length=0)
            (written,) = generator.generate_batch(
                [row], max_length=question["new_tokens"], include_prompt_in_result=False,
                end_token=[question["end"]], return_end_token=True,
            )  # fmt: skip
            scored.append(found.log_probs[-len(ids) + 1 :])  # a model with a start token scores the first id
            greedy.append(written.sequences_ids[0])
    return {"log_probabilities": scored, "greedy": greedy}


def _llama_cpp(file: Path, question: Question) -> dict[str, Any]:
    return llama_cpp.answer({"file": str(file), **question})


def _vllm(folder: Path, question: Question) -> dict[str, Any]:
    from vllm import LLM, ModelRegistry, SamplingParams

    (architecture,) = json.loads((folder / "config.json").read_bytes())["architectures"]
    if architecture not in ModelRegistry.get_supported_archs():
        raise CannotServeError(f"it has no architecture {architecture}")
    new_tokens, sequences = question["new_tokens"], question["sequences"]
    longest = max(map(len, sequences)) + new_tokens
    model = LLM(model=str(folder), dtype="float32", max_model_len=longest, enforce_eager=True)
    how = SamplingParams(temperature=0, max_tokens=new_tokens, prompt_logprobs=1, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in sequences], how)
    return {
        "log_probabilities": [
            _of_prompt(ids, output.prompt_logprobs) for ids, output in zip(sequences, outputs, strict=True)
        ],
        "greedy": [list(output.outputs[0].token_ids) for output in outputs],
    }


def _of_prompt(ids: Sequence[int], rows: Sequence[Any]) -> list[float]:
    """Return the log-probabilities of vLLM's rows, {id: Logprob}; it has none of the first id."""
    return [row[number].logprob for number, row in zip(ids[1:], rows[1:], strict=True)]


def _of_llama_cpp(model_type: str, file: Path) -> float:
    of_file = _LLAMA_CPP[file.suffixes[-2].removeprefix(".")]
    return of_file if model_type in _SILU else max(of_file, _LLAMA_CPP_GELU)


PROGRAMS = {
    "transformers": Program("transformers", _transformers, lambda *_: _FP32),
    "CTranslate2": Program("ctranslate2", _ctranslate2, lambda *_: _FP32),
    "llama.cpp": Program(llama_cpp.PACKAGE, _llama_cpp, _of_llama_cpp, reads_gguf=True),
    "vLLM": Program("vllm", _vllm, lambda *_: _TF32),
}

if __name__ == "__main__":
    own_process.answer_with(_answer)
