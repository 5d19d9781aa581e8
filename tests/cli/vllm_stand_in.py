"""A stand-in of vLLM, which has no build for a processor here: the part of its documented interface that
`kielo verify export` uses (docs.vllm.ai: LLM, SamplingParams, RequestOutput), computed by transformers.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    prompt_logprobs: int | None = None
    ignore_eos: bool = False


class ModelRegistry:
    @staticmethod
    def get_supported_archs() -> list[str]:
        return ["LlamaForCausalLM", "OPTForCausalLM"]


class LLM:
    def __init__(self, model: str, *, dtype: str, max_model_len: int, enforce_eager: bool) -> None:
        self.length = max_model_len
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[dict[str, list[int]]], how: SamplingParams) -> list[SimpleNamespace]:
        """As vLLM: the first row of a prompt's is None, a row has the prompt's token and the likeliest."""
        assert how.temperature == 0 and how.ignore_eos and how.max_tokens and how.prompt_logprobs
        outputs = []
        for prompt in prompts:
            ids = list(prompt["prompt_token_ids"])
            assert len(ids) + how.max_tokens <= self.length
            rows: list[Any] = [None]
            for logs, number in zip(self._logs(ids)[:-1], ids[1:], strict=True):
                of_row = {number, *logs.topk(how.prompt_logprobs).indices.tolist()}
                rows.append({one: SimpleNamespace(logprob=logs[one].item()) for one in of_row})
            written = list(ids)
            for _ in range(how.max_tokens):
                written.append(int(self._logs(written)[-1].argmax()))
            new = written[len(ids) :]
            outputs.append(SimpleNamespace(prompt_logprobs=rows, outputs=[SimpleNamespace(token_ids=new)]))
        return outputs

    def _logs(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
