"""Kielo as a Python library: `kielo.Recipe` and `kielo.Run`, and the functions that verbs call.

    import kielo

    recipe = kielo.Recipe.load("demo_estonian").with_(train__tokens=1_000_000)
    run = recipe.prepare()
    run = recipe.train(ranks=2)
    print(run.metrics()[-1].loss, recipe.evaluate().bits_per_byte.model)

Functions print as the verbs do. An error is a `kielo.KieloError` with the message of the verb. A function
imports its room when it is called, so that `import kielo` is fast and loads no torch.
"""

from collections.abc import Mapping
from contextlib import suppress
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
    """A layout of `Recipe.plan`. settings: the keys of [layout]."""

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
    """A recipe and changes to its keys, each as for --set: "train.tokens=1000000".

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
        recipe.settings  # noqa: B018 - read now, so that a wrong recipe is refused here
        return recipe

    def with_(self, **changes: Any) -> "Recipe":
        """Return the recipe with changed values; a double underscore is the dot of a key.

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
        """The folder of its run, existing or not."""
        from kielo.recipe.read import run_folder

        return run_folder(self.settings)

    def make(self, *stages: str, ranks: int = 1, again: str | None = None) -> "Run":
        """Make these stages (default: all) unless they are current, as `kielo run` does.

        ranks: number of training processes. again: a stage to repeat. Raise KieloError if a stage fails, and
        `kielo.Stopped` if training stops on purpose.
        """
        from kielo.stages.make_stages import Invocation, make

        chosen = [name for name in STAGES if name in (stages or STAGES)]
        if unknown := [name for name in stages if name not in STAGES]:
            raise KieloError(f"{', '.join(unknown)}: no such stage. Fix: one of {', '.join(STAGES)}")
        if ranks < 1:
            raise KieloError(f"ranks = {ranks}: give 1 or more")
        invocation = Invocation(self.settings, self.reference, self.sets, self.folder, ranks)
        make(invocation, chosen, again)
        return Run(self.folder, invocation.stages)

    def pack_share(self, k: int, n: int) -> None:
        """Pack the k-th of n shares of the text, beside other machines; `make("pack")` joins them."""
        from kielo.stages.make_stages import Invocation, make_share

        make_share(Invocation(self.settings, self.reference, self.sets, self.folder, ranks=1), (k, n))

    def corpus_share(self, k: int, n: int) -> None:
        """Do the k-th of n shares of the corpus, beside other machines; `make("corpus")` joins them."""
        from kielo.stages.make_stages import Invocation, make_corpus_share

        make_corpus_share(Invocation(self.settings, self.reference, self.sets, self.folder, ranks=1), (k, n))

    def prepare(self) -> "Run":
        """Make clean text, a tokenizer and token shards: the stages before training."""
        return self.make("corpus", "tokenizer", "pack")

    def train(self, ranks: int = 1) -> "Run":
        """Train on the prepared text, from the newest checkpoint if there is one."""
        return self.make("train", ranks=ranks)

    def verify(self) -> "Parity":
        """Compare the training of the newest checkpoint with transformers. Return the certificate."""
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

        dtype: "fp32", "bf16", "fp16" or "source". The default is `kielo export`'s.
        """
        from kielo.stages.results import export_checkpoint, newest_checkpoint

        checkpoint, tokenizer = newest_checkpoint(self.folder), self.folder / "tokenizer"
        export_checkpoint(checkpoint, Path(to), tokenizer, self.settings, dtype=dtype, is_replacing=False)
        return Path(to)

    def plan(self, *nodes: int, cluster: str | None = None, most: int = 5) -> list[PlannedRow]:
        """Return at most `most` of the fastest layouts on each number of nodes (default: the recipe's).

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
                nodes=planned.nodes,
                layout=planned.name,
                step_seconds=planned.step_seconds,
                tokens_per_second=planned.tokens_per_second,
                peak_bytes=planned.peak_bytes,
                days=(costs := cost(planned)).days,
                device_hours=costs.device_hours,
                settings=planned.layout.model_dump(mode="json"),
            )
            for number in chosen
            for planned in different_axes(found.ranked[number])[:most]
        ]


class Run:
    """The folder of a run, and the results of its stages; None before a stage has run.

    >>> run = Run("runs/demo_estonian")
    >>> run.metrics()[-1].step, round(run.scores.bits_per_byte.model, 2)
    (730, 1.41)
    >>> [row.name for row in run.funnel.steps[:2]]
    ['normalise', 'script']
    """

    def __init__(self, folder: str | Path, stages: "Mapping[str, StageTime] | None" = None) -> None:
        """Open a run folder. stages: times of the stages that `Recipe.make` made or skipped."""
        self.folder, self.stages = Path(folder), dict(stages or {})
        if not self.folder.is_dir():
            raise KieloError(f"{folder}: no such folder. Fix: the folder of a run, as runs/demo_estonian")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return Recipe.load(self.folder)

    def metrics(self) -> "list[TrainingStep]":
        """Return a row for each logged step of the training, in order."""
        from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, read_metrics

        rows = of_kind(read_metrics(self.folder / "train" / METRICS_NAME), TrainingStep)
        last = {row.step: row for row in rows}  # a resumed run writes steps again
        return [last[step] for step in sorted(last)]

    @property
    def scores(self) -> "Scores | MaskedScores | None":
        """Bits per byte, baselines and samples; for an encoder the measures of hidden tokens."""
        from kielo.artifact.scores import MaskedScores, Scores
        from kielo.artifact.stage_json import read_stage_json

        folder = self.folder / "evaluate"
        return read_stage_json(folder, MaskedScores) or read_stage_json(folder, Scores)

    @property
    def funnel(self) -> "Funnel | None":
        """The documents and bytes that each cleaning step dropped."""
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
        """Load the exported model with transformers, with its language-model head."""
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
        """Write report.html, summary.json and the model card of the finished stages. Return the page."""
        from kielo.report.write import write_report

        stages = self.stages
        with suppress(KieloError):  # a summary of another version is written again
            stages = stages or (self.summary.stages if self.summary else {})
        return write_report(self.folder, self.recipe.settings, stages)


def compare(*runs: str | Path, to: str | Path = "comparison.html") -> Path:
    """Write a page with the curves, scores, speed and differing settings of two or more runs. Return it.

    Raises KieloError if no run has trained or cleaned anything, or if `to` is a file of yours.
    """
    from kielo.report.write import write_comparison

    return write_comparison({Path(run): Run(run).recipe.settings for run in runs}, Path(to))
