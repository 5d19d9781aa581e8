"""The kinds of model that a recipe can name, and facts for its checks. One line adds a kind."""

from typing import NamedTuple


class Family(NamedTuple):
    """A kind's folder in `models/`, and the class in its model.py.

    has_rope: heads are rotated in pairs. is_encoder: tokens also attend to later tokens.
    has_relative_positions: attention has terms of each pair's distance. in_transformers: False if only remote
    code has its classes, which an export includes.
    """

    folder: str
    class_name: str
    has_rope: bool = True
    is_encoder: bool = False
    has_relative_positions: bool = False
    in_transformers: bool = True


# By Hugging Face's `model_type`.
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "Llama"),
    "mistral": Family("llama", "Llama"),
    "qwen2": Family("llama", "Llama"),
    "qwen3": Family("llama", "Llama"),
    "olmo2": Family("olmo", "Olmo"),
    "olmo3": Family("olmo", "Olmo"),
    "gemma2": Family("gemma", "Gemma"),
    "gemma3_text": Family("gemma", "Gemma"),
    "gpt2": Family("gpt2", "GPT2", has_rope=False),
    "opt": Family("opt", "OPT", has_rope=False),
    "gpt_neox": Family("gpt_neox", "GPTNeoX"),
    "bloom": Family("bloom", "Bloom", has_rope=False),
    # The published files have no model_type: `models/families.py` knows them by their classes.
    "ltg_bert": Family(
        "ltg_bert", "LtgBert", False, True, has_relative_positions=True, in_transformers=False
    ),
    "modernbert": Family("modernbert", "ModernBert", is_encoder=True),
}
