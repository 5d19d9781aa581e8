"""Parameter counts of published models, from nothing but their dimensions."""

from typing import Any, NamedTuple

import pytest
import torch

from kielo.models import families
from kielo.models.parameter_shapes import parameters
from kielo.recipe.sections import Model


class Published(NamedTuple):
    """parameters: exact, from the model's card;
    or the rounded figure that was published, as text ("1.5B").
    """

    dimensions: dict[str, Any]
    parameters: int | str


def gpt_neox(layers: int, width: int, heads: int, rows: int, parameters: int) -> Published:
    section = dimensions("gpt_neox", layers, width, heads, rows, 4 * width)
    return Published(section | {"rotary_pct": 0.25}, parameters)


def bloom(layers: int, width: int, heads: int, rows: int, parameters: int | str) -> Published:
    return Published(dimensions("bloom", layers, width, heads, rows, 4 * width), parameters)


def llama(
    layers: int,
    width: int,
    heads: int,
    groups: int,
    rows: int,
    mlp_width: int,
    parameters: int | str,
    **others: Any,
) -> Published:
    section = dimensions("llama", layers, width, heads, rows, mlp_width)
    return Published(section | {"num_key_value_heads": groups} | others, parameters)


def gpt2(
    layers: int, width: int, heads: int, rows: int, parameters: int | str, positions: int = 1024
) -> Published:
    section = dimensions("gpt2", layers, width, heads, rows, 4 * width)
    return Published(section | {"max_position_embeddings": positions}, parameters)


def opt(layers: int, width: int, heads: int, parameters: int | str) -> Published:
    return Published(dimensions("opt", layers, width, heads, 50272, 4 * width), parameters)


def olmo(
    kind: str, layers: int, width: int, heads: tuple[int, int], rows: int, mlp_width: int, parameters: int
) -> Published:
    """heads: of queries, and of keys and values."""
    section = dimensions(kind, layers, width, heads[0], rows, mlp_width)
    return Published(section | {"num_key_value_heads": heads[1]}, parameters)


def gemma(
    kind: str, layers: int, width: int, heads: tuple[int, int, int], mlp_width: int, parameters: int
) -> Published:
    """heads: of queries, of keys and values, and how wide each is."""
    rows = 256_000 if kind == "gemma2" else 262_144
    section = dimensions(kind, layers, width, heads[0], rows, mlp_width)
    return Published(section | {"num_key_value_heads": heads[1], "head_dim": heads[2]}, parameters)


def dimensions(
    model_type: str, layers: int, width: int, heads: int, rows: int, mlp_width: int
) -> dict[str, Any]:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": width,
        "num_attention_heads": heads,
        "vocab_size": rows, "intermediate_size": mlp_width,
    }  # fmt: skip


PUBLISHED = {
    # Cards of EleutherAI/gpt-neox-20b and EleutherAI/pythia-*: total parameters, vocabulary as padded there.
    "GPT-NeoX-20B": gpt_neox(44, 6144, 64, 50432, 20_554_567_680),
    "Pythia-70M": gpt_neox(6, 512, 8, 50304, 70_426_624),
    "Pythia-160M": gpt_neox(12, 768, 12, 50304, 162_322_944),
    "Pythia-410M": gpt_neox(24, 1024, 16, 50304, 405_334_016),
    "Pythia-1B": gpt_neox(16, 2048, 8, 50304, 1_011_781_632),
    "Pythia-1.4B": gpt_neox(24, 2048, 16, 50304, 1_414_647_808),
    "Pythia-2.8B": gpt_neox(32, 2560, 32, 50304, 2_775_208_960),
    "Pythia-6.9B": gpt_neox(32, 4096, 32, 50432, 6_857_302_016),
    "Pythia-12B": gpt_neox(36, 5120, 40, 50688, 11_846_072_320),
    # Cards of bigscience/bloom and bigscience/bloom-*.
    "BLOOM-560m": bloom(24, 1024, 16, 250880, 559_214_592),
    "BLOOM-1b1": bloom(24, 1536, 16, 250880, 1_065_314_304),
    "BLOOM-1b7": bloom(24, 2048, 16, 250880, 1_722_408_960),
    "BLOOM-3b": bloom(30, 2560, 32, 250880, 3_002_557_440),
    "BLOOM-7b1": bloom(30, 4096, 32, 250880, 7_069_016_064),
    "BLOOM-176B": bloom(70, 14336, 112, 250880, 176_247_271_424),
    # Luukkonen et al. 2023 (arXiv:2311.05640), the table of models; 131,072 tokens. Its "8B" is left out: 32
    # layers of 4,096 are 7.0 B, and 7.5 B only with an input embedding and a head that are not tied.
    "FinGPT-small": bloom(12, 768, 12, 131072, "186M"),
    "FinGPT-medium": bloom(24, 1024, 16, 131072, "437M"),
    "FinGPT-large": bloom(24, 1536, 16, 131072, "881M"),
    "FinGPT-XL": bloom(24, 2064, 24, 131072, "1.5B"),
    "FinGPT-3B": bloom(32, 2560, 32, 131072, "2.8B"),
    "FinGPT-13B": bloom(40, 5120, 40, 131072, "13.3B"),
    # Weight files of allenai/OLMo-2-0425-1B, OLMo-2-1124-{7B,13B}, OLMo-2-0325-32B, Olmo-3-1025-7B and
    # Olmo-3-1125-32B.
    "OLMo 2 1B": olmo("olmo2", 16, 2048, (16, 16), 100352, 8192, 1_484_916_736),
    "OLMo 2 7B": olmo("olmo2", 32, 4096, (32, 32), 100352, 11008, 7_298_617_344),
    "OLMo 2 13B": olmo("olmo2", 40, 5120, (40, 40), 100352, 13824, 13_716_198_400),
    "OLMo 2 32B": olmo("olmo2", 64, 5120, (40, 8), 100352, 27648, 32_234_279_936),
    "Olmo 3 7B": olmo("olmo3", 32, 4096, (32, 32), 100278, 11008, 7_298_011_136),
    "Olmo 3 32B": olmo("olmo3", 64, 5120, (40, 8), 100278, 27648, 32_233_522_176),
    # Weight files of google/gemma-2-{2b,9b,27b} and google/gemma-3-{270m,1b-pt}.
    "Gemma 2 2B": gemma("gemma2", 26, 2304, (8, 4, 256), 9216, 2_614_341_888),
    "Gemma 2 9B": gemma("gemma2", 42, 3584, (16, 8, 256), 14336, 9_241_705_984),
    "Gemma 2 27B": gemma("gemma2", 46, 4608, (32, 16, 128), 36864, 27_227_128_320),
    "Gemma 3 270M": gemma("gemma3_text", 18, 640, (4, 1, 256), 2048, 268_098_176),
    "Gemma 3 1B": gemma("gemma3_text", 26, 1152, (4, 1, 256), 6912, 999_885_952),
    # Card of LumiOpen/Poro-34B.
    "Poro-34B": bloom(54, 7168, 56, 128000, "34.2B"),
    # Weight files of meta-llama/Llama-3.*.
    "Llama-3.1-8B": llama(32, 4096, 32, 8, 128256, 14336, 8_030_261_248),
    "Llama-3.1-70B": llama(80, 8192, 64, 8, 128256, 28672, 70_553_706_496),
    "Llama-3.1-405B": llama(126, 16384, 128, 8, 128256, 53248, 405_853_388_800),
    "Llama-3.2-3B": llama(28, 3072, 24, 8, 128256, 8192, 3_212_749_824, tie_word_embeddings=True),
    # Card of llm-jp/llm-jp-3-172b: 2,444,992,512 of the two embeddings and 169,947,181,056 others; the width
    # of the MLP and the groups are in the training scripts (llm-jp/Megatron-LM, branch 172b-exp2).
    "LLM-jp-172B": llama(96, 12288, 96, 16, 99487, 38464, 2_444_992_512 + 169_947_181_056),
    # Cards of LumiOpen/Viking-*, which leave out the MLP's width: Llama 2's for the two small ones. For the
    # large one two guesses have one count to the last digit: 8 groups with 20,480, and 56 heads with 16,384.
    "Viking-7B": llama(32, 4096, 32, 32, 131072, 11008, "7.55B"),
    "Viking-13B": llama(40, 5120, 40, 40, 131072, 13824, "14B"),
    "Viking-33B": llama(56, 7168, 56, 8, 131072, 20480, "33B"),
    # Weight files of openai-community/gpt2*. The paper's own figures (117M, 345M, ...) were miscounted.
    "GPT-2 small": gpt2(12, 768, 12, 50257, 124_439_808),
    "GPT-2 medium": gpt2(24, 1024, 16, 50257, 354_823_168),
    "GPT-2 large": gpt2(36, 1280, 20, 50257, 774_030_080),
    "GPT-2 XL": gpt2(48, 1600, 25, 50257, 1_557_611_200),
    # LUMI's blog post on scaling to 768 nodes names the size and 5,120 tokens, no shape: this is one that has
    # that size and divides by its 8 tensor ranks and 8 pipeline stages.
    "140B on LUMI": gpt2(56, 14336, 112, 131072, "140B", positions=5120),
    # Zhang et al. 2022 (arXiv:2205.01068), table 1, and weight files of facebook/opt-*. Its 350M is not done
    # here.
    "OPT-125M": opt(12, 768, 12, 125_239_296),
    "OPT-1.3B": opt(24, 2048, 32, 1_315_758_080),
    "OPT-2.7B": opt(32, 2560, 32, 2_651_596_800),
    "OPT-6.7B": opt(32, 4096, 32, 6_658_473_984),
    "OPT-13B": opt(40, 5120, 40, "13B"),
    "OPT-30B": opt(48, 7168, 56, "30B"),
    "OPT-66B": opt(64, 9216, 72, "66B"),
    "OPT-175B": opt(96, 12288, 96, "175B"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_one(name: str) -> None:
    """The arithmetic count is the model's that is built (on meta),
    and the published figure as far as it goes.
    """
    section, published = PUBLISHED[name]
    config = families.complete(
        Model(vocab_multiple=1, **section), section.get("max_position_embeddings", 2048)
    )
    count = parameters(config)
    with torch.device("meta"):
        model = families.build_model(config)
    assert count == sum(parameter.numel() for parameter in model.parameters())
    if isinstance(published, int):
        assert count == published
    else:
        figure, unit = published[:-1], {"M": 1e6, "B": 1e9}[published[-1]]
        last_digit = unit * 10.0 ** -len(figure.partition(".")[2])
        assert abs(count - float(figure) * unit) < last_digit, "figures are rounded by some, cut by others"
