"""Contenders of the step benchmark: a name → what builds it. Each file is one engine, as it is shipped.

What a file imports it imports when it is built, so that an engine that is not installed is told and left out.
"""

from collections.abc import Callable
from importlib import import_module

from contenders.contender import Contender, Work

# name → (module, its builder, the distributions whose versions are noted).
_BUILDERS = {
    "kielo": ("contenders.own", "build", ("kielo", "torch")),
    "kielo-compiled": ("contenders.own", "build_compiled", ("torch",)),
    "kielo-fp8": ("contenders.own", "build_fp8", ("torchao",)),
    "trainer": ("contenders.hugging_face", "build_trainer", ("transformers", "accelerate")),
    "trainer-compiled": ("contenders.hugging_face", "build_compiled_trainer", ("transformers", "accelerate")),
    "transformers": ("contenders.hugging_face", "build", ("transformers",)),
    "litgpt": ("contenders.litgpt_model", "build", ("litgpt",)),
    "olmo-core": ("contenders.olmo_core", "build", ("ai2-olmo-core",)),
    "torchtitan": ("contenders.torchtitan_model", "build", ("torchtitan",)),
    "torchtitan-fp8": ("contenders.torchtitan_model", "build_fp8", ("torchtitan", "torchao")),
    "megatron": ("contenders.megatron", "build", ("megatron-core", "transformer-engine")),
    "megatron-fp8": ("contenders.megatron", "build_fp8", ("megatron-core", "transformer-engine")),
}
NAMES = tuple(_BUILDERS)


def builder(name: str) -> Callable[[Work], Contender]:
    """Returns the builder of a contender; raises ImportError if its engine is not installed."""
    file, function, _ = _BUILDERS[name]
    return getattr(import_module(file), function)


def distributions(names: tuple[str, ...]) -> list[str]:
    """Returns the distributions that `names` are installed as."""
    return sorted(
        {distribution for name in names for distribution in _BUILDERS[name][2]} | {"kielo", "torch"}
    )
