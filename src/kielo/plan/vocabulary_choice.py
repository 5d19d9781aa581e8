"""Keep, extend or replace the vocabulary of a model that trains on: (vocabularies, model, text) -> costs.

Each choice pays for the tokens that it makes of the text, and for learning the rows that the old vocabulary
does not have. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
# NorMistral-11B learned 51,200 new rows on 1,000 steps of 1,024 x 4,096 tokens with its body frozen (Samuel
# et al. 2024, arXiv:2412.06484, and the scripts of ltgoslo/norallm): one run, and no law.
TOKENS_PER_NEW_ROW = 81_920
_VOCABULARY = ("embed", "head")  # the modules that are trained while the body is frozen
# Plans of one model on one layout differ by less than the planner's error, yet not by nothing.
_LEAST_SAVING = 0.05


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary that the model may have.

    size: rows of its embedding. bytes_per_token: of the measured text. new_rows: those that are not an old
    row. english_tokens: of the English side of parallel text; None where there was none.
    """

    name: str
    kind: Kind
    size: int
    bytes_per_token: float
    new_rows: int
    english_tokens: int | None = None


@dataclass(frozen=True)
class Choice:
    """What a vocabulary costs.

    embedding_share: of the model's parameters, with the head. Tokens, FLOPs and device-hours of the text, and
    of learning the new rows with the body frozen. Hours are None where no machine was asked for.
    """

    vocabulary: Vocabulary
    parameters: int
    embedding_share: float
    text_tokens: int
    relearn_tokens: int
    text_flops: float
    relearn_flops: float
    text_hours: float | None = None
    relearn_hours: float | None = None

    @property
    def cost(self) -> float:
        """Device-hours where they are known, else FLOPs."""
        return self.text_cost + self.relearn_cost

    @property
    def text_cost(self) -> float:
        return self.text_flops if self.text_hours is None else self.text_hours

    @property
    def relearn_cost(self) -> float:
        return self.relearn_flops if self.relearn_hours is None else self.relearn_hours


def kind_of(old: TextTokenizer, new: TextTokenizer) -> Kind:
    """Return keep for equal vocabularies, extend where each old token keeps its id, else replace."""
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
    """Costs of vocabularies for one model.

    recipe: how it is trained; of its phases the one with most tokens counts. model: complete. nodes: of the
    recipe's cluster, or None for FLOPs alone.
    """

    def __init__(self, recipe: Recipe, model: CompleteModel, nodes: int | None):
        usual = max(full_phases(recipe), key=lambda phase: phase.tokens)
        train = {
            "tokens": usual.tokens, "tokens_per_step": usual.tokens_per_step, "batch_ramp": None,
            "micro_batch_sequences": usual.micro_batch_sequences, "trainable": (),
        }  # fmt: skip
        dataset = {"sequence_length": usual.sequence_length}
        self._recipe = recipe.model_copy(
            update={
                "phases": (),
                "train": recipe.train.model_copy(update=train),
                "dataset": recipe.dataset.model_copy(update=dataset),
            }
        )
        self._model = model.model_copy(update={"weights": None, "transplant": None, "params": None})
        self._length, self._nodes = usual.sequence_length, nodes
        self._frozen_tokens = _tokens(recipe, is_frozen=True)

    def choice(self, of: Vocabulary, text_bytes: float, relearn_tokens: int | None = None) -> Choice:
        """Compute the costs of a text of so many bytes.

        relearn_tokens: for a vocabulary with new rows; default, those of the recipe's phases with a frozen
        body, else `TOKENS_PER_NEW_ROW` for each row. Raises KieloError where no layout of the model runs on
        the nodes.
        """
        model = self._model.model_copy(update={"vocab_size": of.size})
        tokens = round(text_bytes / of.bytes_per_token)
        asked = relearn_tokens or self._frozen_tokens or TOKENS_PER_NEW_ROW * of.new_rows
        relearn_tokens = asked if of.new_rows else 0
        text_hours, relearn_hours = self._hours_per_token(model)
        return Choice(
            of, count(model), embedding_share(model, of.size), tokens, relearn_tokens,
            float(tokens * token_flops(model, self._length)),
            float(relearn_tokens * flops_per_token(model, self._length, _VOCABULARY)),
            None if text_hours is None else tokens * text_hours,
            None if relearn_hours is None else relearn_tokens * relearn_hours,
        )  # fmt: skip

    def _hours_per_token(self, model: CompleteModel) -> tuple[float | None, float | None]:
        """Plans a token of the text, and one with the body frozen, on the fastest layout of the former."""
        if self._nodes is None:
            return None, None
        run = RunToPlan.of(self._recipe, model)
        found = search(run, [self._nodes])
        if not found.ranked.get(self._nodes):
            raise nothing_runs(run, [self._nodes], found)
        fastest = found.ranked[self._nodes][0]
        train = self._recipe.train.model_copy(update={"trainable": _VOCABULARY})
        frozen_run = RunToPlan.of(self._recipe.model_copy(update={"train": train}), model)
        frozen = plan_layouts(frozen_run, [(fastest.layout, self._nodes, fastest.micro_batch)])[0]
        hours = [one.devices / one.tokens_per_second / 3600 for one in (fastest, frozen)]
        return hours[0], hours[1]


@dataclass(frozen=True)
class Advice:
    """The choices, the first of which keeps the vocabulary, for a text of so many bytes."""

    text_bytes: float
    choices: Sequence[Choice]

    @cached_property
    def best(self) -> Choice:
        """The cheapest, if it saves a twentieth of what keeping costs; else the first."""
        kept, cheapest = self.choices[0], min(self.choices, key=lambda one: one.cost)
        return cheapest if cheapest.cost <= (1 - _LEAST_SAVING) * kept.cost else kept

    def pays_from_bytes(self, choice: Choice) -> float | None:
        """Return the bytes of text from which a choice costs less than keeping; None for never."""
        gain = (self.choices[0].text_cost - choice.text_cost) / self.text_bytes
        return None if gain <= 0 else choice.relearn_cost / gain


def recipe_tokens(recipe: Recipe) -> int | None:
    """Return the tokens that a recipe trains all of the model on; None where they follow from its text."""
    if not recipe.phases and recipe.train.tokens is None:
        return None
    return _tokens(recipe, is_frozen=False)


def check_rows(model: CompleteModel, kept: TextTokenizer, size: int) -> None:
    """Raise KieloError for a tokenizer with more tokens than the model has rows: it is not the model's."""
    if model.vocab_size is not None and size > model.vocab_size:
        raise KieloError(
            f"{kept.folder}: {size:,} tokens, and the model has {model.vocab_size:,}. Fix: the "
            "tokenizer of the model first, then those that may follow it"
        )


def _tokens(recipe: Recipe, is_frozen: bool) -> int:
    return sum(
        phase.tokens
        for phase in full_phases(recipe)
        if (bool(phase.trainable) and set(phase.trainable) <= set(_VOCABULARY)) == is_frozen
    )
