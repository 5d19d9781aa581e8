"""The facts of a run that people ask for first: parameters, tokens, learning rate and FLOPs; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kielo.artifact.json_object import JsonTable
from kielo.models.parameter_shapes import parameters
from kielo.recipe.errors import KieloError
from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.recipe.phases import FullPhase
from kielo.recipe.sections import CompleteModel, Recipe
from kielo.resolve.planned_phases import epochs, flops_per_token
from kielo.resolve.resolve import case_before_text
from kielo.resolve.resolved import Identity, PlannedPhase
from kielo.resolve.text import Text, has_budget, ready_tokens, with_budget_of_ready_tokens


@dataclass(frozen=True)
class Overview:
    """The size of a run. `model` is complete. `flops` are model FLOPs of the run.

    `steps`: (tokens a step, tokens of a sequence) of each kind of step. `learning_rates`: a sentence for each
    segment. `epochs`: source → how often it is read; None before the text is packed. `ready_tokens`: source
    of token files → its tokens; None if there are none on this machine.
    """

    model: CompleteModel
    parameters: int
    tokens: int | None
    steps: tuple[tuple[int, int], ...]
    learning_rates: tuple[str, ...]
    flops: float | None
    epochs: Mapping[str, float] | None = None
    ready_tokens: Mapping[str, int] | None = None

    def rows(self) -> list[tuple[str, str]]:
        model = self.model
        heads = f"{model.num_attention_heads} heads"
        if model.num_key_value_heads != model.num_attention_heads:
            heads += f" ({model.num_key_value_heads} of keys)"
        steps = "; ".join(f"steps of {step:,}, sequences of {length:,}" for step, length in self.steps)
        tokens = "as many tokens as the text gives"
        if self.tokens is not None:
            tokens = f"{amount(self.tokens)} tokens"
        rows = [
            ("model", f"{model.model_type}, {amount(self.parameters)} parameters"),
            (
                "shape",
                f"{model.num_hidden_layers} layers of {model.hidden_size:,}, {heads}, MLP "
                f"{model.intermediate_size:,}, {model.vocab_size:,} tokens in the vocabulary",
            ),
            ("training", f"{tokens}; {steps}"),
            ("learning rate", "; then ".join(self.learning_rates)),
        ]
        if self.flops is not None:
            rows.append(("compute", f"{self.flops:.2g} model FLOPs"))
        if self.epochs is not None:
            read = ", ".join(f"{times:.2f} of {name}" for name, times in self.epochs.items())
            rows.insert(3, ("epochs", read))
        if self.ready_tokens is not None:
            found = ", ".join(f"{amount(tokens)} of {name}" for name, tokens in self.ready_tokens.items())
            rows.append(("ready tokens", found))
        return rows

    def figures(self) -> JsonTable:
        return {
            "model_type": self.model.model_type,
            "parameters": self.parameters,
            "tokens": self.tokens,
            "model_flops": self.flops,
            "epochs": None if self.epochs is None else dict(self.epochs),
        }


def overview_of_recipe(recipe: Recipe) -> Overview:
    """Return the facts before there is text. Raises KieloError for a model that is not complete."""
    recipe = with_budget_of_ready_tokens(recipe)
    case = case_before_text(recipe)
    overview = overview_of_phases(case.model, case.phases)
    overview = replace(overview, ready_tokens=_ready_tokens(recipe))
    return overview if has_budget(recipe) else replace(overview, tokens=None, flops=None)


def _ready_tokens(recipe: Recipe) -> Mapping[str, int] | None:
    try:
        return ready_tokens(recipe) or None
    except KieloError:
        return None


def overview_of_phases(model: CompleteModel, phases: Sequence[FullPhase]) -> Overview:
    sentences = [
        _rate(rate.peak, rate.peak * rate.final_ratio, rate.schedule, rate.decay_share)
        for phase in phases
        if (rate := phase.learning_rate) is not None
    ]
    return _overview(model, [(phase.tokens, phase) for phase in phases], sentences)


def overview_of_run(identity: Identity, text: Text | None = None) -> Overview:
    """Return the facts of a resolved run, with epochs only if it has text."""
    phases = identity.phases
    sizes = [(phase.steps * phase.tokens_per_step, phase) for phase in phases]
    sentences = [
        _rate(rate.peak, rate.final, rate.schedule, rate.decay_tokens) for rate in identity.learning_rates
    ]
    overview = _overview(identity.model, sizes, sentences)
    if text is None or not {name for phase in phases for name in phase.mixture} <= text.tokens.keys():
        return overview
    read = epochs(phases, text.epoch_tokens)
    return replace(overview, epochs={name: float(times) for name, (times, _) in read.items()})


def _overview(
    model: CompleteModel, phases: Sequence[tuple[int, FullPhase | PlannedPhase]], rates: Sequence[str]
) -> Overview:
    """Return the sums. phases: each with its tokens."""
    flops = sum(tokens * flops_per_token(model, of.sequence_length, of.trainable) for tokens, of in phases)
    steps = dict.fromkeys((of.tokens_per_step, of.sequence_length) for _, of in phases)
    tokens = sum(tokens for tokens, _ in phases)
    return Overview(model, parameters(model), tokens, tuple(steps), tuple(rates), float(flops))


def amount(number: float) -> str:
    """Return a number for people: "34.2 billion", "9.44 million", "512"."""
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            places = 0 if number >= 1000 * size else 1 if number >= 10 * size else 2
            text = f"{number / size:,.{places}f}"
            return f"{text.removesuffix('.0').removesuffix('.00')} {name}"
    return f"{number:,}"


def _rate(peak: float, final: float, schedule: str, decay: float) -> str:
    if LEARNING_RATE_SCHEDULES[schedule].has_decay_share and not decay:
        return f"{peak:.3g}, held"
    return f"{peak:.3g} to {final:.3g}, {schedule}"
