"""`kielo evaluate`: scores of a run's checkpoint, or of a Hugging Face folder, on the run's held-out text."""

import argparse
import json
import shlex
from pathlib import Path

from kielo.artifact.checkpoint_folder import INDEX_NAME
from kielo.artifact.lease import held
from kielo.artifact.scores import MaskedScores, PairAccuracy, Scores
from kielo.artifact.stage_json import read_stage_json
from kielo.cli.flags import rank_words, takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.cli.watch import watch
from kielo.evaluate.euroeval import euroeval_command, run_euroeval
from kielo.evaluate.evaluation import unscored_in_words
from kielo.ranks.rendezvous import find_rendezvous
from kielo.recipe.errors import KieloError
from kielo.recipe.read import RUN_RECIPE_NAME, read_recipe, run_folder
from kielo.recipe.sections import Precision, Recipe
from kielo.stages import late, results
from kielo.stages.attempt import on_ranks, placed_here


@takes("""
    $ kielo evaluate demo_estonian
    $ kielo evaluate runs/demo_estonian/hf demo_estonian
    $ kielo evaluate runs/demo_estonian --tasks bundle:et,my_task
    MODEL  recipe or run folder (its newest checkpoint), or Hugging Face folder
    [RECIPE]
    --ranks RANKS:count      processes of this machine that share the model, in the layout of the recipe
    --precision {fp32,bf16}  precision of the products; default: fp32. Only with --ranks or in a job
    --tasks NAMES  tasks, groups and bundles to score, with commas between; default: evaluate.tasks
    --euroeval     print EuroEval's command for the export, and run it if EuroEval is installed
    --watch  score each new checkpoint of a run beside its training, until the run has finished
    --once  with --watch: score the checkpoints that exist, then end
    --json
""")
def evaluate(options: argparse.Namespace) -> int:
    if options.tasks:
        options.sets = [*options.sets, f"evaluate.tasks={json.dumps(options.tasks.split(','))}"]
    if options.watch:
        return watch(options)
    if options.once:
        raise KieloError(f"--once needs --watch. Fix: kielo evaluate {options.model} --watch --once")
    model = Path(options.model)
    is_hugging_face = (model / "config.json").is_file()
    is_run = (model / RUN_RECIPE_NAME).is_file()
    if model.is_dir() and not is_run and options.recipe is None:
        what = "Hugging Face folder" if is_hugging_face else "folder"
        raise KieloError(
            f"{model} is a {what}, and no recipe names its held-out text. Fix: kielo evaluate {model} RECIPE"
        )
    if options.recipe is not None and not model.is_dir():
        raise KieloError(f"{model}: no such folder. Fix: a recipe, a checkpoint or a Hugging Face folder")
    if options.recipe is not None and not is_hugging_face and not (model / INDEX_NAME).is_file():
        raise KieloError(
            f"{model}: a run folder, scored by its own text. Fix: {model}/hf or "
            f"{model}/train/checkpoints/newest, for another recipe's text"
            if is_run
            else f"{model}: neither a checkpoint (no {INDEX_NAME}) nor a Hugging Face folder (no "
            "config.json); see `kielo checkpoint list RUN`"
        )
    recipe = read_recipe(options.recipe or options.model, options.sets).recipe
    folder = run_folder(recipe)
    precision: Precision = options.precision or "fp32"

    def checkpoint() -> Path:
        return model if options.recipe else results.newest_checkpoint(folder)

    def on_this_rank() -> int:
        with keep_stdout_for_json(options.json):
            placed = placed_here(recipe, find_rendezvous().size)
            scores = (
                late.evaluate_hugging_face_on_ranks(recipe, placed, folder, model, precision)
                if is_hugging_face
                else late.make_scores_on_ranks(recipe, placed, folder, checkpoint, precision)
            )
        return 0 if scores is None else _print(recipe, scores, None, options.json)  # on rank 0

    if options.euroeval:
        return _euroeval(model if is_hugging_face else folder / "hf", recipe.language)
    names = [options.model, *([options.recipe] if options.recipe else [])]
    code = on_ranks(rank_words(["evaluate", *names], options), options.ranks, on_this_rank)
    if code is not None:
        return code
    if options.precision is not None:
        raise KieloError("--precision: one process scores in fp32. Fix: --ranks 1 --precision bf16")
    scores: Scores | MaskedScores
    with keep_stdout_for_json(options.json):
        if is_hugging_face:
            scores = late.evaluate_hugging_face(recipe, folder, model)
        else:
            with held(folder):
                scores = results.evaluate(recipe, folder, checkpoint())
    # The scores of the hybrid objective's causal use.
    causal = read_stage_json(folder / "evaluate", Scores) if isinstance(scores, MaskedScores) else None
    return _print(recipe, scores, causal, options.json)


def _print(recipe: Recipe, scores: Scores | MaskedScores, causal: Scores | None, is_json: bool) -> int:
    """Print the scores, and return the exit code."""
    if is_json:
        print_json(scores.content() | ({"causal": causal.content()} if causal else {}))
        return _exit_code(causal or scores)
    if isinstance(scores, MaskedScores):
        _print_masked(scores)
        if causal is None:
            return 0
        scores = causal
    bits = scores.bits_per_byte.content()
    print_table(["contender", "bits per byte"], [(name, f"{value:.3f}") for name, value in bits.items()])
    if scores.sets:
        rows = [(one.name, " ".join(one.languages), f"{one.bits_per_byte:.3f}") for one in scores.sets]
        print_table(["held-out set", "languages", "bits per byte"], rows)
    _print_tasks(scores)
    _print_fluency(recipe, scores)
    for sample in scores.samples:
        print(f"\n{sample.prompt} ▸ {sample.text}")
    return _exit_code(scores)


def _exit_code(scores: Scores | MaskedScores) -> int:
    return 1 if isinstance(scores, Scores) and scores.unscored_tasks else 0


def _print_tasks(scores: Scores) -> None:
    rows = []
    for one in scores.tasks:
        error = "" if one.standard_error is None else f"{one.standard_error:.4f}"
        chance = "" if one.chance is None else f"{one.chance:.4f}"
        of = one.task, one.measures, one.metric, f"{one.value:.4f}", error, chance
        rows.append((*of, f"{one.questions:,}", str(one.shots)))
    if rows:
        titles = ("task", "measures", "metric", "value", "standard error", "chance", "questions", "shots")
        print_table(titles, rows)
    for said in unscored_in_words(scores):
        print_text(said)


def _euroeval(export: Path, language: str) -> int:
    command = euroeval_command(export, language)
    print(shlex.join(command))
    code = run_euroeval(command)
    if code is None:
        print_text("EuroEval is not installed. Fix: pip install 'euroeval[all]' in an environment of its own")
    return code or 0


def _print_fluency(recipe: Recipe, scores: Scores) -> None:
    if pairs := scores.minimal_pairs:
        _print_pairs(f"minimal pairs of {pairs.file}", {**pairs.terms, **pairs.groups, "all": pairs.all})
    if made := scores.made_pairs:
        _print_pairs("made pairs", made.groups)
        print_text(
            f"made pairs: {recipe.evaluate.made_pairs:,} asked for of each rule; {made.sentences:,} held-out "
            f"sentences; left out because the training text has them: {made.in_training:,}"
        )
    elif recipe.evaluate.made_pairs:
        print_text("made pairs: none, because no held-out sentence fits the rules")
    if fluency := scores.fluency:
        rows = [
            ("words in repeated 4-grams", fluency.repeated, fluency.repeated_in_heldout),
            *((f"text in {code}", share, fluency.languages_in_heldout.get(code, 0.0))
              for code, share in fluency.languages.items()),
        ]  # fmt: skip
        shares = [(name, f"{100 * ours:.1f} %", f"{100 * own:.1f} %") for name, ours, own in rows]
        print_table([f"{fluency.texts:,} continuations", "model", "held-out text"], shares)
    elif recipe.evaluate.fluency_texts:
        print_text("continuations: none, because all held-out documents are too short")


def _print_pairs(title: str, scores: dict[str, PairAccuracy]) -> None:
    rows = []
    for name, one in scores.items():
        values = (one.likelihood, one.standard_error, one.fewer_tokens)
        share, error, shorter = (f"{100 * (value or 0):.1f} %" for value in values)
        rows.append((name, f"{one.pairs:,}", share, error, shorter))
    print_table([title, "pairs", "good likelier", "standard error", "good has fewer tokens"], rows)


def _print_masked(scores: MaskedScores) -> None:
    rows = [(name, f"{100 * share:.1f} %") for name, share in scores.accuracy.content().items()]
    print_table(["contender", "hidden tokens predicted"], rows)
    print_text(f"loss of the model: {scores.loss:.3f} nats per hidden token")
    if bits := scores.pseudo_bits_per_byte:
        print_text(
            f"pseudo bits per byte: {bits.token:.3f}; with the later tokens of a word also hidden: "
            f"{bits.within_word:.3f}"
        )
    if pairs := scores.minimal_pairs:
        pair_rows = []
        for name, one in {**pairs.groups, "all": pairs.all}.items():
            shares = (f"{100 * (share or 0):.1f} %" for share in (one.token, one.within_word))
            pair_rows.append((name, f"{one.pairs:,}", *shares))
        print_table(["minimal pairs", "pairs", "good likelier", "within word"], pair_rows)
    if tags := scores.part_of_speech:
        print_text(
            f"parts of speech: {100 * tags.accuracy:.1f} % of {tags.words:,} words; the most frequent tag of "
            f"each: {100 * tags.baseline:.1f} %"
        )
    if scores.filled_masks:
        word_rows = [(one.sentence(), one.truth or "–", one.likeliest()) for one in scores.filled_masks]
        print_table(["hidden word", "truth", "fillings"], word_rows)
