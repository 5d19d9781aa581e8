"""Usual training settings of a model of a given size, for recipes that leave them open; no torch."""

from dataclasses import dataclass

from kielo.models.proportions import count
from kielo.recipe.sections import Recipe
from kielo.resolve.text import has_budget, with_budget_of_ready_tokens

FLOPS_PER_PARAMETER_AND_TOKEN = 6  # forward and backward (Kaplan et al. 2020, arXiv:2001.08361)
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv:2203.15556)
# Share of the bf16 peak that large runs reach; only turns device-hours into tokens, before there is a plan.
USUAL_MFU = 0.35
# (parameters, tokens a step, learning rate): GPT-3's (Brown et al. 2020, arXiv:2005.14165, table 2.1).
_STEPS = [(1.25e8, 2**19, 6e-4), (3.5e8, 2**19, 3e-4), (7.6e8, 2**19, 2.5e-4), (1.3e9, 2**20, 2e-4)]
_STEPS += [(2.7e9, 2**20, 1.6e-4), (6.7e9, 2**21, 1.2e-4), (1.3e10, 2**21, 1e-4), (1.75e11, 2**22, 6e-5)]
# (parameters up to, tokens in the vocabulary, tokens of a sequence): from small shipped recipes to Llama 3's.
_TEXT = ((3e7, 8192, 512), (3e8, 32_000, 1024), (1.2e9, 65_536, 2048), (float("inf"), 131_072, 4096))
# (section, key, words) of what can be filled, in the order of the message.
_TOLD = (
    ("train", "tokens", f"train.tokens = {{:_}} ({TOKENS_PER_PARAMETER} a parameter)"),
    ("train", "tokens_per_step", "tokens_per_step = {:_}"),
    ("train", "learning_rate", "learning_rate = {:g}"),
    ("dataset", "sequence_length", "sequences of {:_}"),
    ("tokenizer", "vocab_size", "{:_} tokens in the vocabulary"),
)


@dataclass(frozen=True)
class UsualTraining:
    """Numbers of a training. `tokens` is a whole number of steps."""

    vocabulary_size: int
    sequence_length: int
    tokens_per_step: int
    learning_rate: float
    tokens: int


def usual_training(parameters: int, tokens: int | None = None) -> UsualTraining:
    """Return the usual numbers for `parameters`, and 20 tokens each. A short run has 1,000 smaller steps."""
    tokens = tokens or TOKENS_PER_PARAMETER * parameters
    _, step, rate = min(_STEPS, key=lambda row: abs(row[0] / parameters - 1) + abs(parameters / row[0] - 1))
    vocabulary, length = next((size, length) for most, size, length in _TEXT if parameters <= most)
    while step > length * 8 and tokens < 1000 * step:
        step //= 2
    step = max(step, length)
    if parameters < 6e7:
        rate = 1e-3
    return UsualTraining(vocabulary, length, step, rate, max(1, tokens // step) * step)


def flops_of_device_hours(hours: float, peak_tflops: float) -> float:
    """Estimate the model FLOPs of these device-hours, at 35 % of the peak."""
    return hours * 3600 * peak_tflops * 1e12 * USUAL_MFU


def tokens_of_device_hours(hours: float, parameters: int, peak_tflops: float) -> int:
    """Estimate the tokens that these device-hours train, at 35 % of the peak."""
    return int(flops_of_device_hours(hours, peak_tflops) / (FLOPS_PER_PARAMETER_AND_TOKEN * parameters))


def with_usual_training(recipe: Recipe, is_idea: bool = False) -> tuple[Recipe, list[str]]:
    """Return the recipe with what a plan needs, and a line on the filled keys.

    Each key that the recipe leaves out is filled by the model's size. An idea (`is_idea`) cannot be run yet.
    A complete recipe is filled only without a token budget, because otherwise it runs with its defaults.
    Ready tokens are a budget, because they are counted. A recipe with weights stays as it is.
    """
    recipe = with_budget_of_ready_tokens(recipe)
    if (has_budget(recipe) and not is_idea) or recipe.model.weights is not None:
        return recipe, []
    given, train = recipe, recipe.train
    budget = train.tokens or sum(phase.tokens for phase in recipe.phases)
    usual = usual_training(parameters_asked(recipe), budget or None)
    if recipe.tokenizer.path is None and recipe.model.vocab_size is None:
        recipe = _filled(recipe, "tokenizer", "vocab_size", usual.vocabulary_size)
    has_step = "tokens_per_step" in train.model_fields_set
    positions = recipe.model.max_position_embeddings or usual.sequence_length
    most, step = min(usual.sequence_length, positions), train.tokens_per_step
    length = next(n for n in range(most, 0, -1) if step % n == 0) if has_step else most
    recipe = _filled(recipe, "dataset", "sequence_length", length)
    length = recipe.dataset.sequence_length
    step = max(usual.tokens_per_step // length, 1) * length
    recipe = _filled(recipe, "train", "tokens_per_step", step)
    recipe = _filled(recipe, "train", "learning_rate", usual.learning_rate)
    if not budget:
        step = recipe.train.tokens_per_step
        recipe = _filled(recipe, "train", "tokens", max(1, usual.tokens // step) * step)
    told = [
        words.format(getattr(getattr(recipe, section), key))
        for section, key, words in _TOLD
        if key in getattr(recipe, section).model_fields_set - getattr(given, section).model_fields_set
    ]
    return recipe, [f"not set in the recipe, so as usual for this size: {', '.join(told)}"] if told else []


def parameters_asked(recipe: Recipe) -> int:
    """Return the parameters that the recipe asks for, by `model.params` or by its shape."""
    model = recipe.model
    if model.params is not None:
        return model.params
    return count(model.model_copy(update={"vocab_size": model.vocab_size or recipe.tokenizer.vocab_size}))


def _filled(recipe: Recipe, section: str, key: str, value: int | float) -> Recipe:
    table = getattr(recipe, section)
    if key in table.model_fields_set:
        return recipe
    return recipe.model_copy(update={section: table.model_copy(update={key: value})})
