"""Keep, extend or replace the vocabulary of a model that continues training: costs of each choice; no torch.

Each choice pays for the tokens that it makes of the text, and for learning rows that the old vocabulary does
not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kielo.models.parameter_shapes import token_flops
from kielo.models.proportions import count
from kielo.plan.choose_layout import nothing_runs
from kielo.plan.planned_layout import plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases
from kielo.recipe.sections import CompleteModel, Recipe
from kielo.resolve.planned_phases import flops_per_token
from kielo.tokenizer.load import TextTokenizer

Kind = Literal["keep", "extend", "replace"]
# NorMistral-11B learned 51,200 new rows on 1,000 steps of 1,024 × 4,096 tokens with its body frozen (Samuel
# et al. 2024, arXiv:2412.06484, and the scripts of ltgoslo/norallm): one run, not a law.
TOKENS_PER_NEW_ROW = 81_920
_VOCABULARY = ("embed", "head")  # the modules that are trained while the body is frozen
_LEAST_SAVING = 0.05  # plans of one model on one layout differ by less than the planner's error


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary that the model may have."""

    name: str
    kind: Kind
    size: int  # rows of its embedding
    bytes_per_token: float  # of the measured text
    new_rows: int  # rows that no old row becomes
    english_tokens: int | None = None  # of the English side of parallel text


@dataclass(frozen=True)
class Choice:
    """Cost of a vocabulary: training on the text, and learning the new rows with the body frozen."""

    vocabulary: Vocabulary
    parameters: int
    embedding_share: float  # of the model's parameters, with the head
    text_tokens: int
    relearn_tokens: int
    text_flops: float
    relearn_flops: float
    text_hours: float | None = None  # device-hours; None without a machine
    relearn_hours: float | None = None

    @property
    def cost(self) -> float:
        """Device-hours if they are known, else FLOPs."""
        return self.text_cost + self.relearn_cost

    @property
    def text_cost(self) -> float:
        return self.text_flops if self.text_hours is None else self.text_hours

    @property
    def relearn_cost(self) -> float:
        return self.relearn_flops if self.relearn_hours is None else self.relearn_hours


def kind_of(old: TextTokenizer, new: TextTokenizer) -> Kind:
    """Return keep for equal vocabularies, extend if each old token keeps its id, else replace."""
    of_old, of_new = (one.whole.get_vocab(with_added_tokens=True) for one in (old, new))
    if of_old == of_new:
        return "keep"
    return "extend" if of_old.items() <= of_new.items() else "replace"


def embedding_share(model: CompleteModel, size: int) -> float:
    """Return embedding and untied head as a share of all parameters, with `size` tokens."""
    model = model.model_copy(update={"vocab_size": size})
    matrices = 1 if model.tie_word_embeddings else 2
    return matrices * size * model.hidden_size / count(model)


class Pricing:
    """Costs for a complete model, trained like the recipe's longest phase. Without `nodes` they are FLOPs."""

    def __init__(self, recipe: Recipe, model: CompleteModel, nodes: int | None):
        usual = max(full_phases(recipe), key=lambda phase: phase.tokens)
        keys = ("tokens", "tokens_per_step", "micro_batch_sequences")
        update = {key: getattr(usual, key) for key in keys} | {"batch_ramp": None, "trainable": ()}
        train = recipe.train.model_copy(update=update)
        dataset = recipe.dataset.model_copy(update={"sequence_length": usual.sequence_length})
        self._recipe = recipe.model_copy(update={"phases": (), "train": train, "dataset": dataset})
        self._model = model.model_copy(update={"weights": None, "transplant": None, "params": None})
        self._length, self._nodes = usual.sequence_length, nodes
        self._frozen_tokens = _tokens(recipe, is_frozen=True)

    def choice(self, of: Vocabulary, text_bytes: float, relearn_tokens: int | None = None) -> Choice:
        """Compute the costs of a text of `text_bytes`. Raises KieloError if no layout runs on the nodes.

        `relearn_tokens` defaults to the tokens of the recipe's frozen phases. Without such phases it is
        `TOKENS_PER_NEW_ROW` for each new row.
        """
        model = self._model.model_copy(update={"vocab_size": of.size})
        tokens = round(text_bytes / of.bytes_per_token)
        asked = relearn_tokens or self._frozen_tokens or TOKENS_PER_NEW_ROW * of.new_rows
        relearn_tokens = asked if of.new_rows else 0
        text_flops = float(tokens * token_flops(model, self._length))
        relearn_flops = float(relearn_tokens * flops_per_token(model, self._length, _VOCABULARY))
        numbers = tokens, relearn_tokens, text_flops, relearn_flops
        choice = Choice(of, count(model), embedding_share(model, of.size), *numbers)
        if self._nodes is None:
            return choice
        text_hours, relearn_hours = self._hours_per_token(model, self._nodes)
        return replace(choice, text_hours=tokens * text_hours, relearn_hours=relearn_tokens * relearn_hours)

    def _hours_per_token(self, model: CompleteModel, nodes: int) -> tuple[float, float]:
        """Plan a token of the text, and a token with the body frozen, on the first's fastest layout."""
        run = RunToPlan.of(self._recipe, model)
        found = search(run, [nodes])
        if not found.ranked.get(nodes):
            raise nothing_runs(run, [nodes], found)
        fastest = found.ranked[nodes][0]
        train = self._recipe.train.model_copy(update={"trainable": _VOCABULARY})
        frozen_run = RunToPlan.of(self._recipe.model_copy(update={"train": train}), model)
        frozen = plan_layouts(frozen_run, [(fastest.layout, nodes, fastest.micro_batch)])[0]
        hours = [one.devices / one.tokens_per_second / 3600 for one in (fastest, frozen)]
        return hours[0], hours[1]


@dataclass(frozen=True)
class Advice:
    """The choices for a text of `text_bytes`. The first choice keeps the vocabulary."""

    text_bytes: float
    choices: Sequence[Choice]

    @cached_property
    def best(self) -> Choice:
        """The cheapest choice if it saves a twentieth of the first choice's cost, else the first."""
        kept, cheapest = self.choices[0], min(self.choices, key=lambda one: one.cost)
        return cheapest if cheapest.cost <= (1 - _LEAST_SAVING) * kept.cost else kept

    def pays_from_bytes(self, choice: Choice) -> float | None:
        """Return the bytes of text from which a choice costs less than keeping, or None for never."""
        gain = (self.choices[0].text_cost - choice.text_cost) / self.text_bytes
        return None if gain <= 0 else choice.relearn_cost / gain


def recipe_tokens(recipe: Recipe) -> int | None:
    """Return the tokens on which a recipe trains the whole model, or None if they follow from its text."""
    if not recipe.phases and recipe.train.tokens is None:
        return None
    return _tokens(recipe, is_frozen=False)


def check_rows(model: CompleteModel, kept: TextTokenizer, size: int) -> None:
    """Raise KieloError for a tokenizer with more tokens than the model has rows: it is not the model's."""
    if model.vocab_size is not None and size > model.vocab_size:
        raise KieloError(
            f"{kept.folder}: {size:,} tokens, and the model has {model.vocab_size:,}. Fix: the model's "
            "tokenizer first, then the other tokenizers"
        )


def _tokens(recipe: Recipe, is_frozen: bool) -> int:
    return sum(
        phase.tokens
        for phase in full_phases(recipe)
        if (bool(phase.trainable) and set(phase.trainable) <= set(_VOCABULARY)) == is_frozen
    )
