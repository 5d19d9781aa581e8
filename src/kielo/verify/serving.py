"""An export in the programs that serve it, beside Kielo's own model of the checkpoint.

Kielo's model computes in fp32 on the processor, with the weights rounded to the dtype of the export. Beside a
GGUF file they are not rounded: llama.cpp rounds what it multiplies with too, and its limit allows for both.
Each program gives the log-probabilities of held-out texts, and continues them with the likeliest tokens. The
texts have the ids of training. The export itself proves that programs cut text into the same ids.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kielo.artifact.checkpoint_folder import run_around, step_folders
from kielo.artifact.checkpoint_index import read_index
from kielo.artifact.documents import SUFFIX, read_documents
from kielo.artifact.durable import refuse_other_json
from kielo.artifact.manifest import (
    Manifest,
    hash_manifest,
    installed_versions,
    read_manifest,
    write_json_atomically,
)
from kielo.artifact.token_shards import TokenShard
from kielo.artifact.verify_results import ROUNDING_FACTOR
from kielo.checkpoint.export_stage import GGUF_KIND, KIND
from kielo.checkpoint.export_tensors import file_tensors
from kielo.checkpoint.gguf_export import refuse_model
from kielo.checkpoint.load_model import load_model
from kielo.dataset.heldout_sets import HELDOUT
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel
from kielo.resolve.resolved import read
from kielo.tokenizer.load import TextTokenizer, end_of_text_id, load_tokenizer
from kielo.verify.screens import CANNOT, ServedBy, ServingCertificate
from kielo.verify.serving_programs import PROGRAMS, Answer, Question, ask, installed

SERVING_NAME = "serving.json"
NEW_TOKENS, MOST_TOKENS = 16, 128  # at most, after a text and of a text
_SHORTEST, _READ_DOCUMENTS = 2, 1000


class _Text(NamedTuple):
    place: str  # its source and id
    ids: list[int]


class _Subject(NamedTuple):
    """What is compared: the files of a checkpoint, and the texts."""

    checkpoint: Path
    model: CompleteModel
    folder: Path
    dtype: str
    gguf: Path | None
    tokenizer: TextTokenizer
    texts: list[_Text]
    new_tokens: int

    @property
    def question(self) -> Question:
        ids = [text.ids for text in self.texts]
        return Question(sequences=ids, new_tokens=self.new_tokens, end=end_of_text_id(self.tokenizer))


def verify_export(run: Path, export: Path, gguf: Path | None, num_texts: int, to: Path) -> ServingCertificate:
    """Compare the folder `export`, and the GGUF file in the folder `gguf`, with the checkpoint of `run`.

    Write the certificate to `to`/serving.json, and return it. Raise KieloError for folders that are not
    exports of one checkpoint that the run still has.
    """
    refuse_other_json(to / SERVING_NAME, "programs")
    subject = _subject(run, export, gguf, num_texts)
    # One model at a time: the programs end before Kielo's model is read.
    answers = {name: _asked(name, subject) for name in PROGRAMS}
    rows = {name: answer for name, answer in answers.items() if not isinstance(answer, Answer)}
    for dtype in dict.fromkeys((subject.dtype, "fp32")):
        given = {
            name: answer
            for name, answer in answers.items()
            if isinstance(answer, Answer) and dtype == _compared_dtype(name, subject)
        }
        if given:
            model = _rounded_model(subject, dtype)
            beside = {name: _beside(model, subject, answer) for name, answer in given.items()}
            rounding = _rounding(model, subject)  # changes the model
            rows |= {name: _judged(name, subject, given[name], beside[name], rounding) for name in given}
    certificate: ServingCertificate = {
        "passed": not any(row["verdict"] == "FAILED" for row in rows.values()),
        "checkpoint": subject.checkpoint.name,
        "export": str(export),
        "dtype": subject.dtype,
        "gguf": None if subject.gguf is None else str(subject.gguf),
        "texts": [text.place for text in subject.texts],
        "tokens": sum(len(text.ids) for text in subject.texts),
        "new_tokens": subject.new_tokens,
        "programs": [rows[name] for name in PROGRAMS],
        "versions": installed_versions(),
    }
    write_json_atomically(to / SERVING_NAME, certificate)
    return certificate


def _subject(run: Path, export: Path, gguf: Path | None, num_texts: int) -> _Subject:
    identity = read(run / "resolved.toml").identity
    if identity.train.objective == "masked_tokens":
        raise KieloError(
            f"{run}: an encoder, and the programs continue text. Fix: kielo verify round-trip {export}"
        )
    manifest = _manifest_of(export, KIND, f"kielo run {run} --to export")
    checkpoint = _checkpoint_of(run, export, manifest)
    file = None
    if gguf is not None:
        made_by = f"kielo export {run} --to {gguf} --format gguf"
        if _checkpoint_of(run, gguf, _manifest_of(gguf, GGUF_KIND, made_by)) != checkpoint:
            raise KieloError(f"{gguf}: is of another checkpoint than {export}. Fix: remove it, and {made_by}")
        (file,) = gguf.glob("*.gguf")
    positions = identity.model.max_position_embeddings
    new_tokens = min(NEW_TOKENS, positions // 2)
    tokenizer = load_tokenizer(export)
    texts = _texts(
        run / "tokens", end_of_text_id(tokenizer), num_texts, min(MOST_TOKENS, positions - new_tokens)
    )
    return _Subject(
        checkpoint, identity.model, export, manifest.section["dtype"], file, tokenizer, texts, new_tokens
    )


def _manifest_of(folder: Path, kind: str, made_by: str) -> Manifest:
    manifest = read_manifest(folder)
    if manifest is None or manifest.kind != kind:
        raise KieloError(f"{folder}: no finished export of kind {kind!r} is there. Fix: {made_by}")
    return manifest


def _checkpoint_of(run: Path, folder: Path, manifest: Manifest) -> Path:
    found = [
        one
        for one in step_folders(run / "train" / "checkpoints")
        if read_manifest(one) is not None and hash_manifest(one) == manifest.inputs["checkpoint"]
    ]
    if not found:
        raise KieloError(
            f"{folder}: is an export of no checkpoint that {run} has now. Fix: kielo export {run} --to "
            "NEW_FOLDER"
        )
    return found[0]


def run_of_export(folder: Path) -> Path:
    if (run := run_around(folder)) is None:
        raise KieloError(
            f"{folder}: is in no run, and a run has its checkpoint and held-out texts. "
            f"Fix: kielo verify export RUN --export {folder}"
        )
    return run


def _texts(tokens: Path, end: int, number: int, most: int) -> list[_Text]:
    """Return the longest of the first held-out documents, each with the ids that begin a document."""
    shard = TokenShard(tokens / HELDOUT)
    offsets = shard.document_offsets[: _READ_DOCUMENTS + 1].tolist()
    lengths = {at: after - before for at, (before, after) in enumerate(pairwise(offsets))}
    chosen = sorted(sorted(lengths, key=lambda at: -lengths[at])[:number])
    texts = []
    for at, document in enumerate(read_documents(tokens / f"{HELDOUT}{SUFFIX}")):
        if at in chosen:
            ids = shard.read(offsets[at], min(lengths[at], most)).tolist()
            ids = ids[:-1] if ids[-1] == end else ids
            texts.append(_Text(f"{document['source']}, {document['id']}", ids))
        if at >= max(chosen, default=0):
            break
    texts = [text for text in texts if len(text.ids) >= _SHORTEST]
    if not texts:
        raise KieloError(f"{tokens}: no held-out text. Fix: raise dataset.heldout_share or add text")
    return texts


def _asked(name: str, subject: _Subject) -> Answer | ServedBy:
    """Return what the program answers, or a row that says why it did not."""
    program = PROGRAMS[name]
    if installed(program.package) is None:
        return _row(name, "not installed", f"Fix: pip install {program.package}")
    file = subject.gguf if program.reads_gguf else subject.folder
    if file is None:
        try:
            refuse_model(subject.model)
        except KieloError as error:
            return _row(name, CANNOT, str(error).removeprefix("--format gguf: ").partition(" Fix: ")[0])
        return _row(name, "no file", "Fix: kielo export RUN --to DIR --format gguf, and --gguf DIR")
    try:
        answer = ask(name, file, subject.question)
    except KieloError as error:
        return _row(name, "FAILED", str(error))
    return answer if answer.cannot is None else _row(name, CANNOT, answer.cannot)


def _row(name: str, verdict: str, reason: str | None, limit: float | None = None) -> ServedBy:
    return {
        "program": name,
        "version": installed(PROGRAMS[name].package),
        "verdict": verdict,
        "reason": reason,
        "limit": limit,
        "largest_difference": None,
        "same_tokens": None,
    }


def _compared_dtype(name: str, subject: _Subject) -> str:
    return "fp32" if PROGRAMS[name].reads_gguf else subject.dtype


def _rounded_model(subject: _Subject, dtype: str) -> Any:
    """Return Kielo's model. dtype: of an export, to which the weights are rounded."""
    tensors = file_tensors(read_index(subject.checkpoint), subject.model, dtype)
    dtypes = {ours: tensor.dtype for tensor in tensors for ours in tensor.pieces}
    return load_model(subject.checkpoint, subject.model, torch.device("cpu"), dtypes)


@torch.inference_mode()
def _logs(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the log-probabilities after each id, fp64 [s, v]."""
    logits_1sv = model.logits(model(torch.tensor([list(ids)])))
    return logits_1sv[0, :, : model.config.vocab_size].double().log_softmax(-1)


def _of_ids(logs_sv: Tensor, ids: Sequence[int]) -> list[float]:
    return logs_sv[: len(ids) - 1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


class _Beside(NamedTuple):
    """Kielo's numbers of each text, beside a program's greedy text.

    scores: of all ids but the first. choices: for each token of the greedy text, Kielo's likeliest token, and
    by how much it is likelier.
    """

    scores: list[list[float]]
    choices: list[list[tuple[int, float]]]


def _beside(model: Any, subject: _Subject, answer: Answer) -> _Beside:
    scores, choices = [], []
    for text, written in zip(subject.texts, answer.greedy, strict=True):
        logs_sv = _logs(model, [*text.ids, *written])
        scores.append(_of_ids(logs_sv, text.ids))
        chosen = logs_sv[len(text.ids) - 1 : -1]
        gaps = chosen.amax(-1) - chosen.gather(-1, torch.tensor(written, dtype=torch.int64)[:, None])[:, 0]
        choices.append(list(zip(chosen.argmax(-1).tolist(), gaps.tolist(), strict=True)))
    return _Beside(scores, choices)


def _rounding(model: Any, subject: _Subject) -> float:
    """Return the largest change of a log-probability when each weight changes by a unit in the last place."""
    before = [_of_ids(_logs(model, text.ids), text.ids) for text in subject.texts]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            signs = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
            weight.mul_(1 + signs * torch.finfo(weight.dtype).eps)
    after = [_of_ids(_logs(model, text.ids), text.ids) for text in subject.texts]
    pairs = zip(chain(*before), chain(*after), strict=True)
    return max(abs(one - other) for one, other in pairs)


def _judged(name: str, subject: _Subject, answer: Answer, beside: _Beside, rounding: float) -> ServedBy:
    """Return the program's row, with the first text and token for which it differs."""
    program = PROGRAMS[name]
    file = subject.gguf if program.reads_gguf and subject.gguf else subject.folder
    limit = max(program.limit(subject.model.model_type, file), ROUNDING_FACTOR * rounding)
    largest, same, partings = 0.0, 0, list[str]()
    for number, text in enumerate(subject.texts):
        ours, theirs = beside.scores[number], answer.log_probabilities[number]
        differences = [abs(here - there) for here, there in zip(ours, theirs, strict=True)]
        largest = max([largest, *(one if math.isfinite(one) else math.inf for one in differences)])
        written, choices = answer.greedy[number], beside.choices[number]
        found = [
            *_first_score(subject.tokenizer, text.ids, theirs, ours, limit),
            *_first_choice(subject, written, choices, limit),
        ]
        same += len(written) if not found else 0
        partings += [f"text {number + 1} ({text.place}): {one}" for one in found[:1]]
    row = _row(name, "FAILED" if partings else "ok", next(iter(partings), None), limit)
    row["largest_difference"] = largest if math.isfinite(largest) else None
    row["same_tokens"] = same
    return row


def _first_score(
    tokenizer: TextTokenizer, ids: Sequence[int], theirs: Sequence[float], ours: Sequence[float], limit: float
) -> Iterator[str]:
    for at, (there, here) in enumerate(zip(theirs, ours, strict=True), start=1):
        if not abs(there - here) <= limit:
            yield (
                f"token {at + 1}, {_name(tokenizer, ids[at])}: log-probability {there:.5f}, and "
                f"{here:.5f} in Kielo (limit {limit:.1e})"
            )
            return


def _first_choice(
    subject: _Subject, written: Sequence[int], choices: Sequence[tuple[int, float]], limit: float
) -> Iterator[str]:
    """Yield the first token that is not Kielo's likeliest. Two that rounding can swap count as one."""
    for at, (token, (best, gap)) in enumerate(zip(written, choices, strict=True)):
        if not gap <= 2 * limit:
            yield (
                f"token {at + 1} of the greedy text: {_name(subject.tokenizer, token)}, and "
                f"{_name(subject.tokenizer, best)} in Kielo, which is {gap:.5f} likelier (limit "
                f"{2 * limit:.1e})"
            )
            return
    if len(written) < subject.new_tokens and written[-1:] != [end_of_text_id(subject.tokenizer)]:
        yield f"the greedy text ends after {len(written)} tokens of {subject.new_tokens}"


def _name(tokenizer: TextTokenizer, number: int) -> str:
    return f"{number} {tokenizer.whole.id_to_token(number)!r}"
