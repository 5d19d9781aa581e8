"""Jobs that share a stage on a cluster, pack or corpus: a recipe and flags → their plan, and their progress.

Each job of an array makes its share of the parts (`dataset/token_parts.py`, `corpus/corpus_shares.py`). One
more job, after all of them, makes missing parts and joins all. launch_folder.py writes the folder, as
RUN/launch/pack_0001.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from kielo.artifact.launch_files import Work
from kielo.artifact.manifest import read_manifest
from kielo.corpus.corpus_shares import CorpusProgress, corpus_progress, refuse_engine
from kielo.corpus.corpus_stage import plan_corpus
from kielo.dataset.pack import PackProgress, pack_progress
from kielo.launch.job_plan import JobPlan, Wishes, check_environment, check_request, made_for
from kielo.launch.launch_folder import LAUNCH_FOLDER, shared_stage_of
from kielo.launch.schedulers import job_ids, states, states_or_reason
from kielo.recipe.cards import cluster, on_cpu_nodes
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import refuse_before_text


@dataclass(frozen=True)
class ShareStatus:
    """The state of jobs that share a stage."""

    name: str
    site: str
    ids: list[str]  # of the array and of the job that joins
    jobs: dict[str, str] | None  # id → state; None for the reason in no_answer
    progress: PackProgress | CorpusProgress
    no_answer: str = ""


def plan_share_jobs(recipe: Recipe, wishes: Wishes, stage: Work) -> JobPlan:
    """Check the wishes against the recipe's cluster. Each job has a whole node, with a worker a core.

    The nodes have no devices if the card names such nodes.
    """
    nodes = on_cpu_nodes(cluster(recipe.cluster), wishes.partition)
    site, of_site, partition, _, hours = check_request(recipe, wishes, nodes)
    if stage == "pack":
        refuse_before_text(recipe)
    else:
        refuse_engine(recipe)
    corpus = recipe.corpus
    if "workers" not in corpus.model_fields_set:
        corpus = corpus.model_copy(update={"workers": site.cpu_cores_per_node})
    place = recipe.model_copy(update={"corpus": corpus}), site, of_site, partition, wishes
    wall, grace, silence, arrays = round(hours * 3600), 0, 0, wishes.jobs or 1
    plan = JobPlan(*place, 1, wall, grace, silence, arrays, None, "the jobs share a stage", work=stage)
    site_folder, made = made_for(wishes, site)
    return replace(plan, site_folder=site_folder, made=made)


def check_shareable(plan: JobPlan, shares: int) -> None:
    """Refuse jobs that would end at once or have nothing to do, and a second set beside queued jobs."""
    if plan.shared_stage == "pack":
        _check_packable(plan, shares)
    check_environment(plan)
    above = run_folder(plan.recipe).absolute() / LAUNCH_FOLDER
    for folder in sorted(above.glob(f"{plan.shared_stage}_[0-9]*")):
        if found := states(plan.site.scheduler, _ids(folder)):
            queued = ", ".join(f"{job} {state.split()[0]}" for job, state in found.items())
            raise KieloError(
                f"{folder}: jobs that share the {plan.shared_stage} stage are in the queue already ({queued})"
            )
    if plan.shared_stage == "corpus":
        _plan_corpus(plan)


def _plan_corpus(plan: JobPlan) -> None:
    """Fetch and hash the text once, before many jobs would, and write the plan of the tasks."""
    run = run_folder(plan.recipe)
    if plan_corpus(plan.recipe, run / "corpus", run / "raw") is None:
        raise KieloError(f"{run / 'corpus'}: is finished already, from the same text and recipe")


def _check_packable(plan: JobPlan, shares: int) -> None:
    run = run_folder(plan.recipe)
    for stage in ("corpus", "tokenizer"):
        if read_manifest(run / stage) is None:
            raise KieloError(
                f"{run / stage}: not made yet, and the jobs only pack. Fix: kielo run RECIPE "
                "--to tokenizer first, or --dry-run to write the scripts alone"
            )
    progress = _progress(plan.recipe, "pack")
    if progress.is_joined:
        raise KieloError(f"{run / 'tokens'}: is packed already, from the same text and recipe")
    if shares > progress.parts:
        why = f"the corpus has {progress.parts} files, and a job packs at least one"
        raise KieloError(f"--pack {shares}: {why}. Fix: --pack {progress.parts}")


def share_status(folder: Path) -> ShareStatus:
    """Read the progress of a folder's jobs. Raises KieloError for text that has changed since."""
    recipe = read_recipe(str(folder / "recipe.toml")).recipe
    site, ids = cluster(recipe.cluster), _ids(folder)
    jobs, no_answer = states_or_reason(site.scheduler, ids)
    progress = _progress(recipe, shared_stage_of(folder) or "pack")
    return ShareStatus(recipe.name, site.name, ids, jobs, progress, no_answer)


def _progress(recipe: Recipe, stage: str) -> PackProgress | CorpusProgress:
    run = run_folder(recipe)
    if stage == "corpus":
        return corpus_progress(recipe, run / "corpus")
    return pack_progress(recipe, run / "corpus", run / "tokenizer", run / "tokens")


def _ids(folder: Path) -> list[str]:
    return job_ids(folder / "chain" / "jobs")
