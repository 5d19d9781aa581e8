"""A `Contender` as a model of EleutherAI's harness: likelihoods of answers, of texts, and greedy text.

An export that the harness loads by transformers gets the same tokens, and long prompts are cut alike. This
file imports the harness, so it is imported when tasks are scored.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoTokenizer

from kielo.evaluate.contender import Contender
from kielo.evaluate.generate import following_tokens
from kielo.evaluate.likelihoods import sequence_log_likelihoods, shortened
from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import decode, encode, role_id

_MOST_NEW_TOKENS = 256  # if a task names no number; the harness's own
_Tokenized = tuple[Any, list[int], list[int]]  # (texts, context, continuation)


class ContenderLM(TemplateLM):
    """A contender as the harness calls it. `shortened` counts prompts whose beginning did not fit.

    is_chat: questions are laid out by the chat template, so texts can have control tokens.
    """

    def __init__(self, contender: Contender, is_chat: bool = False) -> None:
        super().__init__()
        if is_chat and not contender.has_chat_template:
            raise KieloError(
                f"evaluate.task_chat: no chat template in {contender.tokenizer.folder}. Fix: leave it out"
            )
        self._contender, self._is_chat = contender, is_chat
        self.max_length, self.shortened = contender.sequence_length, 0

    @property
    def eot_token_id(self) -> int:
        return self._contender.end_of_text_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        begins = role_id(self._contender.tokenizer, "bos_token")
        return self.eot_token_id if begins is None else begins

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokenizer = self._contender.tokenizer
        first = () if add_special_tokens is False else self._contender.first_ids
        if not self._is_chat:
            return [*first, *encode(tokenizer, [string])[0]]
        ids = tokenizer.whole.encode(string, add_special_tokens=False).ids
        return ids if ids[:1] == [self.prefix_token_id] else [*first, *ids]

    @cached_property
    def _chat_tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._contender.tokenizer.folder, local_files_only=True)

    @property
    def tokenizer_name(self) -> str:
        return str(self._contender.tokenizer.folder)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Lay out turns as text. Without add_generation_prompt the last turn stays open."""
        open_end = {"continue_final_message": not add_generation_prompt}
        return str(
            self._chat_tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt, **open_end
            )
        )

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(list(requests), disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the nats of each text, in windows of a sequence, the first token after the prefix token."""
        windows: list[_Tokenized] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            parts = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            mine = [(None, *make_disjoint_window(part)) for part in parts]
            windows += mine
            owners += [number] * len(mine)
        sums = [0.0] * len(requests)
        for number, (nats, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += nats
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[str]:
        """Continue each prompt greedily, up to one of the task's stops."""
        return [self._continuation(*request.args) for request in requests]

    def _loglikelihood_tokens(self, requests: Sequence[_Tokenized], **_: Any) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        self.shortened += shortened(self._contender, pairs)
        return sequence_log_likelihoods(self._contender, pairs)

    def _continuation(self, prompt: str, options: dict[str, Any]) -> str:
        how = normalize_gen_kwargs(options, _MOST_NEW_TOKENS)
        if how.get("do_sample") or how.get("num_beams", 1) != 1:
            raise KieloError(
                f"the task asks for {'samples' if how.get('do_sample') else 'beams'}, and a checkpoint is "
                "continued greedily. Fix: lm_eval --model hf on the export"
            )
        most, contender = how["max_gen_toks"], self._contender
        if (room := self.max_length - most) < 1:
            raise KieloError(
                f"the task asks for {most:,} new tokens, and the model's sequences have {self.max_length:,}"
            )
        end = decode(contender.tokenizer, [[self.eot_token_id]])[0]
        stops = [stop for stop in handle_stop_sequences(how.get("until"), eos=end) if stop]
        ids = self.tok_encode(prompt) or [self.prefix_token_id]
        self.shortened += len(ids) > room
        new: list[int] = []
        for token in islice(
            following_tokens(contender, ids[-room:], lambda logits: int(logits.argmax())), most
        ):
            new.append(token)
            if any(stop in decode(contender.tokenizer, [new])[0] for stop in stops):
                break
        return str(postprocess_generated_text(decode(contender.tokenizer, [new])[0], stops, None))
