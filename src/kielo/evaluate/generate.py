"""Text that a model writes: after a prompt or in a conversation, by a run's model or by transformers.

Transformers continues text from an export, and gives the probabilities of an answer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LogitsProcessorList, TextStreamer, set_seed

from kielo.artifact.documents import ANSWERS, Message
from kielo.evaluate.contender import Contender, load_hugging_face_model, start_of_text_id
from kielo.recipe.errors import KieloError
from kielo.tokenizer.chat_template import ChatTemplate, end_of_answers, has_chat_template
from kielo.tokenizer.load import decode, encode, end_of_text_id, load_tokenizer, vocabulary_size
from kielo.tokenizer.text_frame import ids_before_texts


# With a key-value cache: by transformers, because every Kielo model is exported to one of its classes.
@dataclass(frozen=True)
class Sampling:
    """Options of `continue_text`. A temperature of 0 takes the likeliest token each time."""

    num_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 1


class Printer(TextStreamer):
    """A streamer that prints text as soon as its characters are whole, to the current stdout."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, flush=True, end="\n" if stream_end else "")


class TextWriter:
    """A causal model in a Hugging Face folder with its tokenizer, which continues token ids.

    Raises KieloError for a folder that transformers cannot load.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, load_tokenizer(folder)
        self.end_of_text_id = end_of_text_id(self.tokenizer)
        self.model = load_hugging_face_model(folder, vocabulary_size(self.tokenizer), "auto")

    def document_ids(self, text: str) -> list[int]:
        """Return the ids of a text that begins a document, as in training."""
        first = ids_before_texts(self.tokenizer) or (start_of_text_id(self.model, self.end_of_text_id),)
        return [*first, *encode(self.tokenizer, [text])[0]]

    def write(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        streamer: TextStreamer | None = None,
        ends: Sequence[int] = (),
        watch: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> list[int]:
        """Return the ids that follow, up to the end of text or one of `ends`, which is not returned.

        watch: gets the ids [1, n] and the model's logits [1, vocab] before each draw, and returns logits.
        """
        set_seed(sampling.seed)
        how: dict[str, float | None] = {"temperature": sampling.temperature, "top_k": sampling.top_k}
        if sampling.temperature == 0:
            how = {"temperature": None, "top_k": None, "top_p": None}
        tokens = torch.tensor([ids], device=self.model.device)
        stops = [self.end_of_text_id, *ends]
        with torch.inference_mode():
            written = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=sampling.num_tokens,
                eos_token_id=stops,
                pad_token_id=self.end_of_text_id,
                streamer=streamer,
                logits_processor=LogitsProcessorList([watch] if watch else []),
                do_sample=sampling.temperature != 0,
                **how,
            )
        new = written[0, len(ids) :].tolist()
        return new[:-1] if new[-1:] and new[-1] in stops else new

    def text(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, [ids])[0]


def continue_text(folder: Path, prompt: str, sampling: Sampling, prints: bool = True) -> str:
    """Return the continuation of `prompt`, up to the end of text, and print it while it grows.

    The prompt begins a document, as in training: it follows the tokens that the tokenizer's post-processor
    puts before a text. Raise KieloError for a folder that transformers cannot load.
    """
    writer = TextWriter(folder)
    printer = Printer(folder) if prints else None
    return writer.text(writer.write(writer.document_ids(prompt), sampling, printer))


# Without a key-value cache: samples are short, so one definition of the model's forward is enough.
PROMPT_WORDS = 5
PROMPT_MOST_CHARACTERS = 80  # scripts without spaces: five "words" would be a page
NUM_SAMPLES = 3


def default_prompts(texts: Sequence[str], num_prompts: int = NUM_SAMPLES) -> list[str]:
    """Return openings of held-out documents, spread evenly over them, from long documents if possible."""
    long_enough = [text for text in texts if len(text) > 2 * PROMPT_MOST_CHARACTERS] or texts
    openings = list(dict.fromkeys(filter(None, map(opening, long_enough))))
    if not openings:
        return [""] * num_prompts
    return [openings[(2 * i + 1) * len(openings) // (2 * num_prompts)] for i in range(num_prompts)]


def opening(text: str) -> str:
    """Return the text's first five words, across lines if the first line is shorter."""
    words = text[: 4 * PROMPT_MOST_CHARACTERS].split()[:PROMPT_WORDS]
    return " ".join(words)[:PROMPT_MOST_CHARACTERS].rstrip()


def generate(
    contender: Contender, prompt: str, num_tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """Return the model's continuation of `prompt`: at most `num_tokens` tokens, up to the end of text.

    A temperature of 0 takes the likeliest token each time. The same seed gives the same text on one machine.
    """
    return continuations(contender, [prompt], num_tokens, temperature, top_k, [seed])[0]


@torch.inference_mode()
def continuations(
    contender: Contender,
    prompts: Sequence[str],
    num_tokens: int,
    temperature: float,
    top_k: int,
    seeds: Sequence[int],
) -> list[str]:
    """Do as `generate` for prompts that are continued together. Each prompt has its own seed."""
    num_tokens_known = vocabulary_size(contender.tokenizer)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    prompt_ids = encode(contender.tokenizer, prompts)
    begin = contender.first_ids or (contender.start_id,)
    rows = [[*begin, *ids] for ids in prompt_ids]
    unfinished = list(range(len(rows)))
    for _ in range(num_tokens):
        logits = _next_logits(contender, [rows[number] for number in unfinished])
        for number, row_logits in zip(tuple(unfinished), logits, strict=True):
            # Some models count more tokens than their tokenizer has.
            token = pick(row_logits[:num_tokens_known], temperature, top_k, generators[number])
            if token == contender.end_of_text_id:
                unfinished.remove(number)
            else:
                rows[number].append(token)
        if not unfinished:
            break
    return [
        _continuation(contender, prompt, ids, row[len(begin) + len(ids) :])
        for prompt, ids, row in zip(prompts, prompt_ids, rows, strict=True)
    ]


def _next_logits(contender: Contender, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits after each row, fp32 on the CPU. Shorter rows are padded on the right."""
    contexts = [row[-contender.sequence_length :] for row in rows]
    longest = max(map(len, contexts))
    padded = [[*row, *[contender.end_of_text_id] * (longest - len(row))] for row in contexts]
    tokens = torch.tensor(padded, device=contender.device)
    logits = contender.logits(tokens, contender.documents(tokens))
    last = torch.tensor([len(row) - 1 for row in contexts], device=logits.device)
    return logits[torch.arange(len(rows), device=logits.device), last].float().cpu()


def _continuation(contender: Contender, prompt: str, prompt_ids: list[int], new_ids: list[int]) -> str:
    whole, new = decode(contender.tokenizer, [prompt_ids + new_ids, new_ids])
    # A tokenizer that strips or normalises does not decode to the prompt exactly; then only new tokens count.
    return whole[len(prompt) :] if whole.startswith(prompt) else new


@torch.inference_mode()
def following_tokens(
    contender: Contender, ids: Sequence[int], choose: Callable[[Tensor], int]
) -> Iterator[int]:
    """Yield the tokens after `ids` up to the end of text, each chosen by its logits [known tokens]."""
    ids, known = list(ids), vocabulary_size(contender.tokenizer)
    while True:
        context = torch.tensor([ids[-contender.sequence_length :]], device=contender.device)
        logits = contender.logits(context, contender.documents(context))[0, -1].float().cpu()
        # Some models count more tokens than their tokenizer has.
        if (token := choose(logits[:known])) == contender.end_of_text_id:
            return
        ids.append(token)
        yield token


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one token from logits [vocab]: the softmax at this temperature over the `top_k` likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.topk(min(top_k, len(logits)))
    probabilities = torch.softmax(values / temperature, dim=-1)
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])


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
