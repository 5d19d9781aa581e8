"""The kinds of model that a recipe may name. One line registers a kind.

Facts that a recipe is checked with before a family's own tables are read are here too.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """A kind's folder in `models/`, and the class in its model.py.

    has_rope: heads are rotated in pairs. is_encoder: every token attends to those after it too.
    has_relative_positions: attention has terms of each pair's distance. in_transformers: False if only
    remote code has its classes, which goes along with an export.
    """

    folder: str
    class_name: str
    has_rope: bool = True
    is_encoder: bool = False
    has_relative_positions: bool = False
    in_transformers: bool = True


# by Hugging Face's `model_type`
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
        "ltg_bert",
        "LtgBert",
        has_rope=False,
        is_encoder=True,
        has_relative_positions=True,
        in_transformers=False,
    ),  # fmt: skip
    "modernbert": Family("modernbert", "ModernBert", is_encoder=True),
}
