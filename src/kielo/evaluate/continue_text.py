"""Text that the model of a Hugging Face folder writes after a prompt, with a key-value cache.

transformers generates it: every Kielo model is exported to one of its classes, which compute the same.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, TextStreamer, set_seed

from kielo.evaluate.contender import load_hugging_face_model, start_of_text_id
from kielo.tokenizer.load import decode, encode, end_of_text_id, load_tokenizer, vocabulary_size
from kielo.tokenizer.text_frame import ids_before_texts


@dataclass(frozen=True)
class Sampling:
    """Options of `continue_text`. A temperature of 0 takes the likeliest token each time."""

    num_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 1


class _Printer(TextStreamer):
    """Prints text as soon as its characters are whole, to whatever stdout is now."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, flush=True, end="\n" if stream_end else "")


def continue_text(folder: Path, prompt: str, sampling: Sampling, prints: bool = True) -> str:
    """Returns the continuation of `prompt`, up to the end of text; prints it while it grows.

    The prompt begins a document, as in training: after what the tokenizer's post-processor puts before a
    text. Raises KieloError for a folder that transformers cannot load.
    """
    tokenizer = load_tokenizer(folder)
    end = end_of_text_id(tokenizer)
    model = load_hugging_face_model(folder, vocabulary_size(tokenizer), "auto")
    first_ids = ids_before_texts(tokenizer) or (start_of_text_id(model, end),)
    ids = [*first_ids, *encode(tokenizer, [prompt])[0]]
    set_seed(sampling.seed)
    how = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
    if sampling.temperature == 0:
        how = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    tokens = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=sampling.num_tokens,
            eos_token_id=end,
            pad_token_id=end,
            streamer=_Printer(
                AutoTokenizer.from_pretrained(folder, local_files_only=True),
                skip_prompt=True,
                skip_special_tokens=True,
            )
            if prints
            else None,
            **how,
        )
    new = written[0, len(ids) :].tolist()
    return decode(tokenizer, [new[:-1] if new[-1:] == [end] else new])[0]
