"""The kinds of model that a recipe may name, and where `models/` has each. One line registers a kind."""

# Hugging Face's `model_type` → the family's folder, and the class in its model.py.
FAMILIES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "Llama"),
    "mistral": ("llama", "Llama"),
    "qwen2": ("llama", "Llama"),
    "qwen3": ("llama", "Llama"),
    "olmo2": ("olmo", "Olmo"),
    "olmo3": ("olmo", "Olmo"),
    "gemma2": ("gemma", "Gemma"),
    "gemma3_text": ("gemma", "Gemma"),
    "gpt2": ("gpt2", "GPT2"),
    "opt": ("opt", "OPT"),
    "gpt_neox": ("gpt_neox", "GPTNeoX"),
    "bloom": ("bloom", "Bloom"),
}
