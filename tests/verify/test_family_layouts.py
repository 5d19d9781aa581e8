"""Every family and variant over two ranks, along each axis, and in the night over all layouts,
against one process.
"""

import copy
import logging

import pytest
from transformers import AutoConfig

from kielo.models import families
from kielo.parallel.mesh import Mesh
from kielo.ranks.world import start_world
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model, Recipe
from kielo.resolve.software import BACKEND_VARIABLE
from kielo.verify.layouts import BARS, verify_layouts
from kielo.verify.layouts_cases import Case, all_cases
from kielo.verify.layouts_rank import compare
from kielo.verify.layouts_subject import Outcome, Sizes, subject, train_plainly
from kielo.verify.screens import layouts_verdict
from tests.models.tiny_configs import TINY
from tests.started_ranks import run_ranks

STEPS = 2  # the second shows what the first one's weights became
SHALLOW = Sizes(layers=2)  # one of each kind, with and without a window; stages need four to cut a V

# Families that transformers has no class for, with both ways to cut relative positions into heads.
REMOTE = {
    "ltg_bert": Model(model_type="ltg_bert"),
    "ltg_bert, interleaved": Model(model_type="ltg_bert", position_heads="interleaved"),
}
# Of these some sequences are causal.
HYBRIDS = ("ltg_bert, interleaved", "modernbert, biases, another order of layers, tanh gelu")
VARIANTS = [*TINY, *REMOTE]
# The axes of `make test`. Tensor takes a word for each weight of a family; stages cut what is before and
# after its layers; context moves positions, windows and slopes. Shards take parameters as they come, and
# `tests/verify/test_layouts.py` has Llama. The other families differ in what no axis splits, or another case
# has it: this Llama has Qwen2's biases, OLMo 2 the norms of OLMo 3, OPT the stages of Gemma and GPT-NeoX.
FEW = {
    "llama, linear rope, biases, wide heads": ["tensor"],
    "mistral": ["context"],
    "qwen3": ["tensor"],
    "olmo2, yarn rope, biases, wide heads, tied": ["tensor"],
    "gemma2": ["tensor", "context"],
    "gpt2": ["tensor"],
    "opt": ["pipeline"],
    "gpt_neox": ["tensor"],
    "bloom": ["tensor", "context"],
    "bloom, six heads, untied": ["pipeline"],
    "modernbert": ["tensor"],
    "modernbert, biases, another order of layers, tanh gelu": ["context"],
    "ltg_bert": ["tensor", "pipeline"],
    "ltg_bert, interleaved": ["tensor"],
}
# Variant → case → how far loss, norm, gradients and weights are off, and where.
Found = dict[str, dict[str, dict[str, dict]]]


def recipe_of(variant: str, folder) -> Recipe:
    recipe = read_recipe("demo_estonian").recipe
    if variant in HYBRIDS:
        train = recipe.train.model_copy(update={"objective": "masked_tokens", "causal_share": 0.3})
        recipe = recipe.model_copy(update={"train": train})
    if variant in REMOTE:
        return recipe.model_copy(update={"model": REMOTE[variant]})
    given = copy.deepcopy(TINY[variant])
    AutoConfig.for_model(given.pop("model_type"), **given).save_pretrained(folder)
    return recipe.model_copy(update={"model": families.read_hf_config(folder)})


def cases_of(number: int, is_first: bool, is_remote: bool) -> list[Case]:
    """Tensor and pipeline for every variant, both ways of context and collectives in chunks for the first of
    each kind; the rest in turn. Relative positions are of whole sequences: no context.
    """
    if is_remote:
        return [
            Case({"tensor": 2, "sequence_parallel": is_first}, switches={"documents": is_first}),
            Case({"pipeline": 2, "pipeline_schedule": "1f1b" if is_first else "zbv"}, 4, {"documents": True}),
            *([Case({"shard": 2, "zero": 3}, 2, {"documents": True})] if is_first else ()),
        ]
    is_even = number % 2 == 0
    contexts = [
        Case({"context": 2}, switches={"documents": is_even}),
        Case({"context": 2, "context_attention": "ulysses"}, switches={"documents": not is_even}),
    ]
    return [
        Case(
            {
                "tensor": 2,
                "sequence_parallel": is_first or number % 3 != 1,
                "tensor_overlap": "chunked" if is_first else "none",
            },
            switches={"documents": not is_even},
        ),
        Case({"pipeline": 2, "pipeline_schedule": "1f1b" if is_even else "zbv"}, 4, {"documents": is_even}),
        *(contexts if is_first else [contexts[number // 2 % 2]]),
        *([Case({"shard": 2, "zero": 3}, 2, {"documents": is_even})] if number % 3 == 0 else ()),
    ]


def cases_by_variant(is_few: bool) -> dict[str, list[Case]]:
    """The cases of each variant that `make test` runs (is_few: one along each axis of FEW), or all others."""
    found = {}
    for number, variant in enumerate(VARIANTS):
        cases = cases_of(number, variant in families.FAMILIES, variant in REMOTE)
        by_axis = {next(iter(case.layout)): case for case in cases[:: 1 if number % 2 else -1]}
        few = [by_axis[axis] for axis in FEW.get(variant, [])]
        found[variant] = few if is_few else [case for case in cases if case not in few]
    return found


def on_rank(recipes: dict[str, Recipe], cases: dict[str, list[Case]]) -> Found:
    """One start of ranks for all: the first DTensor operations of a process take as long as all others."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    world, meshes = start_world(60, "cpu"), dict[tuple[int, ...], Mesh]()
    found: Found = {}
    for variant, recipe in recipes.items():
        truths: dict[tuple[bool, Sizes], Outcome] = {}
        found[variant] = {}
        for case in cases[variant]:
            try:
                sizes = Sizes() if "pipeline" in case.layout else SHALLOW
                of = subject(recipe, case.switches, sizes)
                key = of.mask_documents, sizes
                if key not in truths:
                    truths[key] = train_plainly(of, STEPS)
                found[variant][case.name] = compare(recipe, case, STEPS, world, meshes, truths[key], sizes)
            except Exception as error:
                raise RuntimeError(f"{variant}: {case.name}") from error
    return found


def find(tmp_path_factory: pytest.TempPathFactory, is_few: bool) -> Found:
    recipes = {variant: recipe_of(variant, tmp_path_factory.mktemp("config")) for variant in VARIANTS}
    return run_ranks(on_rank, 2, recipes, cases_by_variant(is_few), timeout_seconds=800)[0]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return find(tmp_path_factory, is_few=True)


@pytest.fixture(scope="module")
def found_of_others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return find(tmp_path_factory, is_few=False)


def assert_within_bars(differences: dict[str, dict[str, dict]]) -> None:
    for case, difference in differences.items():
        for what, bar in BARS.items():
            assert difference[what]["value"] <= bar, (case, what, difference[what])


@pytest.mark.parametrize("variant", FEW)
def test_two_ranks_train_as_one(found: Found, variant: str) -> None:
    """Windows, ALiBi, learned positions, caps, biases and norms hold along tensor, context (both attentions),
    pipeline and shard: losses, norms, gradients and weights within the bars of `kielo verify layouts`.
    """
    assert found[variant]
    assert_within_bars(found[variant])


@pytest.mark.full
def test_two_ranks_train_as_one_along_every_axis(found_of_others: Found) -> None:
    """The cases of each variant that the test above leaves out."""
    assert sum(map(len, found_of_others.values())) > len(VARIANTS)
    for differences in found_of_others.values():
        assert_within_bars(differences)


@pytest.mark.full
@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_every_layout_of_every_family(model_type: str, tmp_path, monkeypatch) -> None:
    """`kielo verify layouts` passes for each kind of model in its share of every third case of up to four
    ranks. Compiled layers are traced whole, without machine code, which `tests/parallel/test_compile.py` has
    of every kind.

    `test_every_layout_holds_the_bars` has all cases with one kind, and the test above each axis with all
    kinds; all with all would take hours.
    """
    monkeypatch.setenv(BACKEND_VARIABLE, "aot_eager")
    few_ranks = [case.name for case in all_cases() if case.ranks <= 4]
    names = few_ranks[3 * list(families.FAMILIES).index(model_type) :: 3 * len(families.FAMILIES)]
    certificate = verify_layouts(recipe_of(model_type, tmp_path), tmp_path, names, steps=STEPS)
    assert certificate["passed"], layouts_verdict(certificate)
