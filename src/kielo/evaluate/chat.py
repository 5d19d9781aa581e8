"""A conversation with the model of a Hugging Face folder: its turns, and the probabilities of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kielo.artifact.documents import ANSWERS, Message
from kielo.evaluate.generate import Printer, Sampling, TextWriter
from kielo.recipe.errors import KieloError
from kielo.tokenizer.chat_template import ChatTemplate, end_of_answers, has_chat_template
from kielo.tokenizer.load import vocabulary_size


@dataclass(frozen=True)
class TokenShare:
    """A token of an answer, its probability before temperature and top-k, and the two likeliest others."""

    text: str
    probability: float
    others: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer. `shares` has each token of the answer and the token that ended it."""

    prompt: str
    answer: str
    sampling: Sampling
    shares: tuple[TokenShare, ...]


class Chat:
    """Turns with one model: by its chat template, or as one text that user and model continue.

    With `is_plain` the tokenizer's chat template is not used.
    """

    def __init__(self, folder: Path, is_plain: bool = False) -> None:
        self._writer = TextWriter(folder)
        has_template = has_chat_template(folder) and not is_plain
        self._template = ChatTemplate(self._writer.tokenizer) if has_template else None
        end = end_of_answers(self._writer.tokenizer) if has_template else None
        self._ends = [] if end is None else [end]
        self.turns: list[Turn] = []

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def answer(self, prompt: str, sampling: Sampling, prints: bool = True) -> Turn:
        """Answer the prompt after the turns before it. Print the answer while it grows, and add the turn.

        Turns that the model's context cannot contain are left out, the oldest first. Ctrl-C ends the answer,
        not the program. Raises KieloError for a prompt that is longer than the context.
        """
        context = getattr(self._writer.model.config, "max_position_embeddings", None)
        room = None if context is None else context - min(sampling.num_tokens, context // 2)
        ids = self._ids(self.turns, prompt)
        for first in range(1, len(self.turns) + 1):
            if room is None or len(ids) <= room:
                break
            ids = self._ids(self.turns[first:], prompt)
        if room is not None and len(ids) > room:
            raise KieloError(
                f"the prompt has {len(ids):,} tokens, and {room:,} fit beside an answer: the context has "
                f"{context:,}. Fix: a shorter prompt"
            )
        at_most = sampling.num_tokens if context is None else min(sampling.num_tokens, context - len(ids))
        recorder = _Recorder(self._writer, prints)
        try:
            new = self._writer.write(
                ids, replace(sampling, num_tokens=at_most), recorder, self._ends, recorder.watch
            )
        except KeyboardInterrupt:
            recorder.end()
            new = recorder.ids
        turn = Turn(prompt, self._writer.text(new), sampling, tuple(recorder.shares))
        self.turns.append(turn)
        return turn

    def _ids(self, turns: Sequence[Turn], prompt: str) -> list[int]:
        if self._template is None:
            return self._writer.document_ids("\n".join([*(one.prompt + one.answer for one in turns), prompt]))
        messages: list[Message] = []
        for one in turns:
            messages += [Message(role="user", content=one.prompt), Message(role=ANSWERS, content=one.answer)]
        return self._template.prompt([*messages, Message(role="user", content=prompt)])


class _Recorder(Printer):
    """Print an answer, and keep its tokens with their probabilities."""

    def __init__(self, writer: TextWriter, prints: bool) -> None:
        super().__init__(writer.folder)
        self._tokenizer, self._prints = writer.tokenizer, prints
        self._known = vocabulary_size(writer.tokenizer)
        self._probabilities = torch.empty(0)
        self.ids: list[int] = []
        self.shares: list[TokenShare] = []

    def watch(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Keep the probabilities of the next token [vocab]. Return the logits as they are."""
        self._probabilities = torch.softmax(logits[0].float(), dim=-1)
        return logits

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self._record(int(value))
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._prints:
            super().on_finalized_text(text, stream_end)

    def _record(self, token: int) -> None:
        self.ids.append(token)
        values, likeliest = self._probabilities.topk(3)
        others = [
            (self._name(other), value)
            for other, value in zip(likeliest.tolist(), values.tolist(), strict=True)
            if other != token
        ]
        self.shares.append(
            TokenShare(self._name(token), float(self._probabilities[token]), tuple(others[:2]))
        )

    def _name(self, token: int) -> str:
        text = self._tokenizer.whole.decode([token], skip_special_tokens=False) if token < self._known else ""
        return text or f"token {token}"
