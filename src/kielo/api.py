"""Kielo as a Python library: `kielo.Recipe` and `kielo.Run`, and the functions that verbs call.

    import kielo

    recipe = kielo.Recipe.load("demo_estonian").with_(train__tokens=1_000_000)
    run = recipe.prepare()
    run = recipe.train(ranks=2)
    print(run.metrics()[-1].loss, recipe.evaluate().bits_per_byte.model)

What a verb prints is printed here too. An error is a `kielo.KieloError` with the message of the verb.
A room is imported when a function needs it, so that neither `import kielo` nor a verb's --help loads torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kielo.recipe.errors import KieloError as KieloError
from kielo.recipe.errors import Stopped as Stopped

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

    from kielo.artifact.metrics import TrainingStep
    from kielo.artifact.scores import MaskedScores, Scores, StageTime, Summary
    from kielo.artifact.stage_counts import Funnel
    from kielo.artifact.verify_results import Parity
    from kielo.recipe.sections import Recipe as Settings

STAGES = ("corpus", "tokenizer", "pack", "train", "verify", "evaluate", "export", "report")


class PlannedRow(NamedTuple):
    """A layout of `Recipe.plan`, the fastest first. settings: what to give as [layout]."""

    nodes: int
    layout: str
    step_seconds: float
    tokens_per_second: float
    peak_bytes: float
    days: float
    device_hours: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A recipe and changes to its keys, each "train.tokens=1000000" as of --set.

    >>> recipe = Recipe.load("demo_estonian").with_(train__tokens=1_003_520, seed=3)
    >>> recipe.settings.train.tokens, recipe.settings.seed
    (1003520, 3)
    >>> str(recipe.folder)
    'runs/demo_estonian'
    """

    reference: str
    sets: tuple[str, ...] = ()

    @staticmethod
    def load(reference: str | Path, *sets: str) -> "Recipe":
        """Read and check a recipe: a path, the name of a shipped recipe, or the folder of a run.

        >>> Recipe.load("demo_estonain")
        Traceback (most recent call last):
        kielo.recipe.errors.KieloError: demo_estonain: no such recipe file, ... did you mean demo_estonian?
        """
        recipe = Recipe(str(reference), sets)
        recipe.settings  # noqa: B018 - which reads it: a wrong recipe is refused here
        return recipe

    def with_(self, **changes: Any) -> "Recipe":
        """Return the recipe with other values; a double underscore is the dot of a key.

        >>> Recipe.load("demo_estonian").with_(corpus__sources=["my.txt"]).settings.corpus.sources[0].path
        'my.txt'
        """
        from kielo.recipe.toml_text import toml_value

        sets = [f"{key.replace('__', '.')}={toml_value(value)}" for key, value in changes.items()]
        return Recipe.load(self.reference, *self.sets, *sets)

    @cached_property
    def settings(self) -> "Settings":
        """The values of every key, as in `settings.model.hidden_size`."""
        from kielo.recipe.read import read_recipe

        return read_recipe(self.reference, self.sets).recipe

    @property
    def folder(self) -> Path:
        """The folder of its run, which need not exist yet."""
        from kielo.recipe.read import run_folder

        return run_folder(self.settings)

    def make(self, *stages: str, ranks: int = 1, again: str | None = None) -> "Run":
        """Make these stages (default: all), as `kielo run` does; those that are current are skipped.

        ranks: processes that train. again: a stage that is made though it is current. Raises KieloError if a
        stage fails, and `kielo.Stopped` if training stops on purpose.
        """
        from kielo.stages.make_stages import Invocation, make

        chosen = [name for name in STAGES if name in (stages or STAGES)]
        if unknown := [name for name in stages if name not in STAGES]:
            raise KieloError(f"{', '.join(unknown)}: no such stage. Fix: choose of {', '.join(STAGES)}")
        if ranks < 1:
            raise KieloError(f"ranks = {ranks}: give 1 or more")
        invocation = Invocation(self.settings, self.reference, self.sets, self.folder, ranks)
        make(invocation, chosen, again)
        return Run(self.folder, invocation.stages)

    def pack_share(self, k: int, n: int) -> None:
        """Pack the k-th of n shares of the text, beside other machines; `make("pack")` joins them."""
        from kielo.stages.make_stages import Invocation, make_share

        make_share(Invocation(self.settings, self.reference, self.sets, self.folder, ranks=1), (k, n))

    def prepare(self) -> "Run":
        """Make clean text, a tokenizer and token shards: the stages before training."""
        return self.make("corpus", "tokenizer", "pack")

    def train(self, ranks: int = 1) -> "Run":
        """Train on the prepared text, from the newest checkpoint if there is one."""
        return self.make("train", ranks=ranks)

    def verify(self) -> "Parity":
        """Certify that the newest checkpoint trains in transformers as here; also if it does not."""
        from kielo.artifact.lease import held
        from kielo.stages.results import certify

        with held(self.folder):
            return certify(self.settings, self.folder)

    def evaluate(self) -> "Scores | MaskedScores":
        """Score the newest checkpoint on held-out text, beside baselines."""
        from kielo.artifact.lease import held
        from kielo.stages.results import evaluate, newest_checkpoint

        with held(self.folder):
            return evaluate(self.settings, self.folder, newest_checkpoint(self.folder))

    def export(self, to: str | Path, dtype: str | None = None) -> Path:
        """Write the newest checkpoint as a folder that transformers loads, and return it.

        dtype: "fp32", "bf16", "fp16" or "source"; default: as of `kielo export`.
        """
        from kielo.stages.results import export_checkpoint, newest_checkpoint

        checkpoint, tokenizer = newest_checkpoint(self.folder), self.folder / "tokenizer"
        export_checkpoint(checkpoint, Path(to), tokenizer, self.settings, dtype=dtype, is_replacing=False)
        return Path(to)

    def plan(self, *nodes: int, cluster: str | None = None, most: int = 5) -> list[PlannedRow]:
        """Return the fastest layouts that fit on each number of nodes, `most` at most.

        nodes: default, the recipe's.

        >>> first = Recipe.load("viking_7b").plan(16, cluster="lumi_g", most=1)[0]
        >>> first.nodes, first.peak_bytes < 64 * 2**30, first.settings["tensor"] in (1, 2, 4, 8)
        (16, True, True)
        """
        from kielo.plan.choose_layout import different_axes, nothing_runs
        from kielo.plan.cost import cost
        from kielo.plan.run_to_plan import RunToPlan
        from kielo.plan.search import search

        recipe = self if cluster is None else self.with_(cluster=cluster)
        run = RunToPlan.of_recipe(recipe.settings)
        chosen = sorted(nodes or {number for number in run.recipe.nodes if number <= run.site.nodes} or {1})
        if not all(1 <= number <= run.site.nodes for number in chosen):
            raise KieloError(f"nodes {chosen}: {run.site.name} has 1 to {run.site.nodes} nodes")
        found = search(run, chosen)
        if not any(found.ranked.values()):
            raise nothing_runs(run, chosen, found)
        return [
            PlannedRow(
                of.nodes, of.name, of.step_seconds, of.tokens_per_second, of.peak_bytes, costs.days,
                costs.device_hours, of.layout.model_dump(mode="json"),
            )
            for number in chosen for of in different_axes(found.ranked[number])[:most]
            for costs in [cost(of)]
        ]  # fmt: skip


class Run:
    """The folder of a run, and what its stages left there; None for what a stage has not made yet.

    >>> run = Run("runs/demo_estonian")
    >>> run.metrics()[-1].step, round(run.scores.bits_per_byte.model, 2)
    (730, 1.41)
    >>> [row.name for row in run.funnel.steps[:2]]
    ['normalise', 'script']
    """

    def __init__(self, folder: str | Path, stages: "Mapping[str, StageTime] | None" = None) -> None:
        """Open a run's folder. stages: the times of the stages that `Recipe.make` made or skipped."""
        self.folder, self.stages = Path(folder), dict(stages or {})
        if not self.folder.is_dir():
            raise KieloError(
                f"{folder}: no such folder. Fix: give the folder of a run, as runs/demo_estonian"
            )

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run was made from."""
        return Recipe.load(self.folder)

    def metrics(self) -> "list[TrainingStep]":
        """Return a row for each logged step of the training, in order; [] before it."""
        from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, read_metrics

        rows = of_kind(read_metrics(self.folder / "train" / METRICS_NAME), TrainingStep)
        last = {row.step: row for row in rows}  # a resumed run writes steps again
        return [last[step] for step in sorted(last)]

    @property
    def scores(self) -> "Scores | MaskedScores | None":
        """Bits per byte, baselines and samples; of an encoder the measures of hidden tokens."""
        from kielo.artifact.scores import MaskedScores, Scores
        from kielo.artifact.stage_json import read_stage_json

        folder = self.folder / "evaluate"
        return read_stage_json(folder, MaskedScores) or read_stage_json(folder, Scores)

    @property
    def funnel(self) -> "Funnel | None":
        """The documents and bytes that each step of cleaning dropped."""
        from kielo.artifact.stage_counts import Funnel
        from kielo.artifact.stage_json import read_stage_json

        return read_stage_json(self.folder / "corpus", Funnel)

    @property
    def summary(self) -> "Summary | None":
        """The content of summary.json, which the report stage writes."""
        from kielo.artifact.scores import Summary
        from kielo.artifact.stage_json import read_json

        return read_json(self.folder, Summary)

    def tokenizer(self) -> "Tokenizer":
        """Load the run's tokenizer: `run.tokenizer().encode("Tere").ids`. Needs no torch."""
        from kielo.tokenizer.load import load_tokenizer

        return load_tokenizer(self.folder / "tokenizer").whole

    def model(self) -> "PreTrainedModel":
        """Load the exported model with transformers, with the head that it was trained with."""
        from kielo.artifact.manifest import read_manifest
        from kielo.recipe.model_types import FAMILIES

        if read_manifest(self.folder / "hf") is None:
            raise KieloError(f"{self.folder}: not exported yet. Fix: kielo run {self.folder} --only export")
        import transformers

        family = FAMILIES[self.recipe.settings.model.model_type]
        kind = "AutoModelForMaskedLM" if family.is_encoder else "AutoModelForCausalLM"
        own_code = not family.in_transformers
        return getattr(transformers, kind).from_pretrained(
            self.folder / "hf", dtype="auto", trust_remote_code=own_code
        )

    def report(self) -> Path:
        """Write report.html, summary.json and the model card of what there is; return the page."""
        from kielo.report.write import write_report

        stages = self.stages or (self.summary.stages if self.summary else {})
        return write_report(self.folder, self.recipe.settings, stages)


def compare(*runs: str | Path, to: str | Path = "comparison.html") -> Path:
    """Write a page with the curves, scores, speed and differing settings of two or more runs; return it.

    Raises KieloError if nothing was trained in any of them, or if `to` is a file of yours.
    """
    from kielo.report.compare_runs import write_comparison

    return write_comparison({Path(run): Run(run).recipe.settings for run in runs}, Path(to))
