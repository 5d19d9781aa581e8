"""Tasks of the harness on a checkpoint, on its export by the harness alone, and by a plain script."""

import json
import os
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.artifact.scores import Scores
from kielo.artifact.stage_json import read_stage_json
from kielo.artifact.task_result import QUESTIONS_NAME
from kielo.cli.main import main
from kielo.evaluate.contender import load_checkpoint, load_hugging_face
from kielo.evaluate.layout_contender import load_checkpoint_on_ranks
from kielo.evaluate.likelihoods import sequence_log_likelihoods
from kielo.evaluate.tasks import Place, score_tasks
from kielo.ranks.world import world_of_job
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Evaluate
from kielo.resolve.resolved import Resolved, placed_as_trained, read
from kielo.stages.attempt import placed_here
from kielo.tokenizer.load import encode, load_tokenizer
from tests.cli.test_run import write_recipe
from tests.evaluate.harness_data import belebele, write_cached, write_group_folder
from tests.started_ranks import run_ranks

pytestmark = pytest.mark.full
pytest.importorskip("lm_eval")

LIMIT = 16
LANGUAGES = ("est_Latn", "fin_Latn")
NAMES = tuple(f"belebele_{language}" for language in LANGUAGES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run, with an export. Its sequences have 512 tokens, which cut Belebele's."""
    recipe = write_recipe(tmp_path_factory.mktemp("tasks"))
    changes = ["dataset.sequence_length=512", "train.tokens=20480", "train.tokens_per_step=1024"]
    flags = [part for value in changes for part in ("--set", value)]
    assert main(["run", str(recipe), "--to", "export", *flags]) == 0
    return recipe.parent / "run"


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `kielo prefetch` with Belebele's questions."""
    folder = tmp_path_factory.mktemp("brought")
    for language in LANGUAGES:
        write_cached(folder / "datasets", "facebook/belebele", language, belebele(language))
    (folder / "prefetched.json").write_text('{"brought": [], "made_at": ""}')
    return folder


def run_harness(export: Path, manager: Any, names: list[str], **how: Any) -> dict[str, Any]:
    """Return what `lm_eval --model hf` finds with this index of tasks."""
    import lm_eval

    return lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(export), "dtype": "float32"}, device="cpu", batch_size=4,
        tasks=names, task_manager=manager, **how,
    )  # fmt: skip


def by_the_harness(
    export: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, limit: int = LIMIT, **how: Any
) -> dict[str, Any]:
    """What `lm_eval --model hf` finds."""
    import datasets
    import huggingface_hub.constants
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    files = Path(lm_eval.__file__).parent / "tasks" / "belebele"
    manager = TaskManager(include_path=files, include_defaults=False)
    return run_harness(export, manager, list(NAMES), limit=limit, **how)


def by_a_plain_script(export: Path, rows: list[dict[str, str]]) -> list[list[float]]:
    """Return the log-likelihood of " A" … " D" after each question, by transformers alone, one by one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    found = []
    for row in rows:
        answers = "\n".join(
            f"{letter}: {row[f'mc_answer{number}']}" for number, letter in enumerate("ABCD", 1)
        )
        prompt = f"P: {row['flores_passage']}\nQ: {row['question'].strip()}\n{answers}\nAnswer:"
        own = []
        for letter in "ABCD":
            context, whole = tokenizer(prompt).input_ids, tokenizer(f"{prompt} {letter}").input_ids
            ids = torch.tensor([whole[-model.config.max_position_embeddings - 1 :]])
            with torch.no_grad():
                logs = model(ids[:, :-1]).logits[0].log_softmax(-1)
            new = len(whole) - len(context)
            own.append(logs[-new:].gather(1, ids[0, -new:, None]).sum().item())
        found.append(own)
    return found


@pytest.fixture(scope="module")
def theirs(run: Path, brought: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        return by_the_harness(run / "hf", brought / "datasets", patch)


@pytest.fixture(scope="module")
def plain(run: Path) -> dict[str, list[list[float]]]:
    return {f"belebele_{code}": by_a_plain_script(run / "hf", belebele(code)[:LIMIT]) for code in LANGUAGES}


def assert_same_answers(results: Path, theirs: dict[str, Any], plain: dict[str, list[list[float]]]) -> None:
    """Each answer's log-likelihood within 1e-4, and each question's verdict."""
    for name in NAMES:
        (folder,) = results.glob(f"{name}-*")
        ours = [json.loads(line) for line in (folder / QUESTIONS_NAME).read_text().splitlines()]
        assert len(ours) == len(plain[name]) == LIMIT
        for mine, other, logs in zip(ours, theirs["samples"][name], plain[name], strict=True):
            assert mine["doc"] == other["doc"] and mine["acc"] == other["acc"]
            assert [float(one[0][0]) for one in mine["resps"]] == pytest.approx(logs, rel=1e-4)
            assert [float(one[0][0]) for one in other["resps"]] == pytest.approx(logs, rel=1e-4)
            assert mine["acc"] == (logs.index(max(logs)) + 1 == int(mine["doc"]["correct_answer_num"]))


def test_belebele_has_one_accuracy_by_three_programs(
    run: Path,
    brought: Path,
    theirs: dict[str, Any],
    plain: dict[str, list[list[float]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Answers are the same, and scores to the last printed digit."""
    monkeypatch.setenv("KIELO_PREFETCHED", str(brought))
    words = ["evaluate", str(run), "--set", f"evaluate.task_limit={LIMIT}"]
    assert main([*words, "--tasks", ",".join(NAMES)]) == 0
    screen = capsys.readouterr().out
    scores = read_stage_json(run / "evaluate", Scores)
    assert_same_answers(run / "evaluate_tasks" / newest_checkpoint(run).name, theirs, plain)
    for name in NAMES:
        for key in ("acc,none", "acc_norm,none"):
            (one,) = (one for one in scores.tasks if (one.task, one.metric) == (name, key))
            expected = theirs["results"][name]
            assert f"{one.value:.4f}" == f"{expected[key]:.4f}"
            assert f"{one.standard_error:.4f}" == f"{expected[key.replace(',', '_stderr,')]:.4f}"
            assert (one.questions, one.chance, one.measures, one.version) == (LIMIT, 0.25, "reading", "0.0")
        assert name in screen


def ask_on_a_rank(run: Path, placed: Resolved, brought: Path, results: Path) -> None:
    os.environ["KIELO_PREFETCHED"] = str(brought)
    with world_of_job(60, "cpu") as world:
        checkpoint = newest_checkpoint(run)
        contender = load_checkpoint_on_ranks(checkpoint, placed, run / "tokenizer", world, "fp32")
        score_tasks(contender, Evaluate(tasks=NAMES, task_limit=LIMIT), Place(results, {}))


@pytest.mark.parametrize(
    "sizes",
    [{"tensor": 2}, {"shard": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}],
    ids=lambda sizes: " x ".join(sizes),
)
def test_answers_do_not_depend_on_the_layout(
    sizes: dict[str, int],
    run: Path,
    brought: Path,
    theirs: dict[str, Any],
    plain: dict[str, list[list[float]]],
    tmp_path: Path,
) -> None:
    """The harness on the sharded checkpoint: the answers of the export and of transformers alone."""
    recipe = read_recipe(run, [f"layout.{axis}={size}" for axis, size in sizes.items()]).recipe
    ranks = prod(sizes.values())
    placed = placed_as_trained(placed_here(recipe, ranks), run)
    assert all(getattr(placed.placement.layout, axis) == size for axis, size in sizes.items())
    run_ranks(ask_on_a_rank, ranks, run, placed, brought, tmp_path, timeout_seconds=300)
    assert_same_answers(tmp_path, theirs, plain)


def test_likelihoods_equal_those_of_transformers(run: Path) -> None:
    """Continuations of several lengths in one call, after contexts of several lengths, each by itself."""
    from transformers import AutoModelForCausalLM

    contender = load_checkpoint(newest_checkpoint(run), read(run / "resolved.toml"), run / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).eval()
    ids = encode(contender.tokenizer, ["Keel on rikas ja vana. " * 90])[0]
    pairs = [(ids[:1], ids[1:4]), (ids[:30], ids[30:31]), (ids[:30], ids[30:39]), (ids[:600], ids[600:605])]
    found = sequence_log_likelihoods(contender, pairs)
    for (context, rest), (nats, is_greedy) in zip(pairs, found, strict=True):
        whole = torch.tensor([[*context, *rest][-513:]])
        with torch.no_grad():
            logs = model(whole[:, :-1]).logits[0, -len(rest) :].log_softmax(-1)
        expected = logs.gather(1, torch.tensor(rest)[:, None]).sum().item()
        assert nats == pytest.approx(expected, rel=1e-4)
        assert is_greedy == (logs.argmax(-1).tolist() == rest)


TEXTS = [f"Keel on rikas ja vana, {number}. korda." + " Tere, maailm." * number for number in range(9)]
FOLDER = {
    "_common": "dataset_path: json\ntest_split: test\n"
    "dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}\n",
    "bytes.yaml": "task: of_others_bytes\ninclude: _common\noutput_type: loglikelihood_rolling\n"
    "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]\n",
    "words.yaml": "task: of_others_words\ninclude: _common\noutput_type: generate_until\n"
    "doc_to_text: '{{text}}'\ndoc_to_target: '{{end}}'\n"
    "generation_kwargs: {until: ['!', '. '], max_gen_toks: 12}\n"
    "metric_list: [{metric: exact_match}]\n",
    "choice.yaml": "task: of_others_choice\ninclude: _common\noutput_type: multiple_choice\nnum_fewshot: 2\n"
    "process_docs: !function utils.odd\ndoc_to_text: '{{text}}'\ndoc_to_target: 0\n"
    "doc_to_choice: '{{[end, text]}}'\nfewshot_split: test\nmetadata: {version: 3}\n",
    "last.yaml": "task: of_others_last\ninclude: _common\noutput_type: loglikelihood\ndoc_to_text: ''\n"
    "doc_to_target: '{{end}}'\nmetric_list: [{metric: perplexity}, {metric: acc}]\n",
    "group.yaml": "group: of_others\ntask: [of_others_choice, of_others_last]\n"
    "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\nmetadata: {version: 2}\n",
    "utils.py": "def odd(docs):\n    return docs.filter(lambda doc: doc['number'] % 2)\n",
}


def test_a_task_folder_of_others_loads_unchanged(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likelihoods, whole texts, words, examples, functions, a group: as `lm_eval --include_path` has them."""
    from lm_eval.tasks import TaskManager

    # Its own would draw 100,000 samples for each metric that is no mean.
    monkeypatch.setattr("lm_eval.api.metrics.bootstrap_stderr", lambda metric, values, iters: 0.25)
    for name, text in FOLDER.items():
        (tmp_path / name).write_text(text.replace("FOLDER", str(tmp_path)))
    rows = ({"text": text, "number": number, "end": text[:9]} for number, text in enumerate(TEXTS))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["of_others", "of_others_bytes", "of_others_words"]
    theirs = run_harness(run / "hf", TaskManager(include_path=tmp_path, include_defaults=False), names)
    words = ["evaluate", str(run), "--set", f"evaluate.task_folders={json.dumps([str(tmp_path)])}"]
    assert main([*words, "--tasks", ",".join(names)]) == 0
    scores = read_stage_json(run / "evaluate", Scores)
    ours = {(one.task, one.metric): one for one in scores.tasks}
    values = {
        (task, key): value
        for task, metrics in theirs["results"].items()
        for key, value in metrics.items()
        if "," in key and "_stderr" not in key
    }
    assert len(values) >= 6 and set(ours) == set(values)
    for (task, key), value in values.items():
        assert ours[task, key].value == pytest.approx(value, rel=1e-5), (task, key)
        error = theirs["results"][task][key.replace(",", "_stderr,")]
        found = ours[task, key].standard_error
        assert found is None if error == "N/A" else found == pytest.approx(error, rel=1e-3), (task, key)
    assert (ours["of_others_choice", "acc,none"].shots, ours["of_others_choice", "acc,none"].version) == (
        2,
        "3",
    )
    (folder,) = (run / "evaluate_tasks" / newest_checkpoint(run).name).glob("of_others_words-*")
    lines = [json.loads(line) for line in (folder / QUESTIONS_NAME).read_text().splitlines()]
    written = [one["resps"] for one in theirs["samples"]["of_others_words"]]
    assert [line["resps"] for line in lines] == written and any(text for ((text,),) in written)


def test_the_folder_of_a_research_group_loads_unchanged(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form for lm-eval 0.4.7, with an example: prompts, answers and metrics of each question."""
    import datasets
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("lm_eval.api.metrics.bootstrap_stderr", lambda metric, values, iters: 0.25)
    monkeypatch.chdir(tmp_path)  # paths of data are relative
    names = write_group_folder(tmp_path, tmp_path / "datasets")
    (tmp_path / "prefetched.json").write_text('{"brought": [], "made_at": ""}')
    monkeypatch.setenv("KIELO_PREFETCHED", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        manager = TaskManager(include_path="tasks", include_defaults=False)
        theirs = run_harness(run / "hf", manager, names, num_fewshot=1)
    sets = ["--set", 'evaluate.task_folders=["tasks"]', "--set", "evaluate.shots=1"]
    assert main(["evaluate", str(run), *sets, "--tasks", ",".join(names)]) == 0
    assert {len(rows) for rows in theirs["samples"].values()} == {4, 5} and len(theirs["samples"]) == 6
    for name, others in theirs["samples"].items():
        (folder,) = (run / "evaluate_tasks" / newest_checkpoint(run).name).glob(f"{name}-*")
        ours = [json.loads(line) for line in (folder / QUESTIONS_NAME).read_text().splitlines()]
        for mine, other in zip(ours, json.loads(json.dumps(others)), strict=True):
            assert (mine["doc"], mine["target"]) == (other["doc"], other["target"])
            assert mine["arguments"] == other["arguments"]
            assert [mine[key] for key in other["metrics"]] == [other[key] for key in other["metrics"]]
            if isinstance(other["arguments"][0][1], str):  # an answer of which likelihoods are compared
                logs = ([float(one[0][0]) for one in of["resps"]] for of in (mine, other))
                assert next(logs) == pytest.approx(next(logs), rel=1e-4)
            else:
                assert (mine["resps"], mine["filtered_resps"]) == (other["resps"], other["filtered_resps"])
    scores = {(one.task, one.metric): one for one in read_stage_json(run / "evaluate", Scores).tasks}
    for task, metrics in theirs["results"].items():
        for key, value in metrics.items():
            if "," in key and "_stderr" not in key:
                assert f"{scores[task, key].value:.4f}" == f"{value:.4f}"
                assert scores[task, key].shots == 1
    assert scores["all_choices", "acc,none"].questions == 10


CHAT = (
    "{% for turn in messages %}<|endoftext|>{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant:{% endif %}"
)


def test_questions_are_laid_out_by_the_chat_template(
    run: Path, brought: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its control tokens and examples as turns: the prompts and likelihoods of the harness."""
    monkeypatch.setenv("KIELO_PREFETCHED", str(brought))
    export = tmp_path / "hf"
    shutil.copytree(run / "hf", export)
    (export / "chat_template.jinja").write_text(CHAT)
    how = {"num_fewshot": 1, "limit": 4, "apply_chat_template": True}
    name, row = "belebele_est_Latn", belebele("est_Latn")[0]
    theirs = by_the_harness(export, brought / "datasets", monkeypatch, **how)["samples"][name]
    settings = Evaluate(tasks=(name,), shots=1, task_limit=4, task_chat=True)
    contender = load_hugging_face(export, 512)
    score_tasks(contender, settings, Place(tmp_path / "results", {}))
    (folder,) = (tmp_path / "results").iterdir()
    ours = [json.loads(line) for line in (folder / QUESTIONS_NAME).read_text().splitlines()]
    for mine, other in zip(ours, theirs, strict=True):
        prompt = mine["arguments"][0][0]
        assert prompt == other["arguments"][0][0] and prompt.count("<|endoftext|>") == 4
        found, expected = ([float(one[0][0]) for one in of["resps"]] for of in (mine, other))
        assert found == pytest.approx(expected, rel=1e-4)
    assert row["question"] in theirs[0]["arguments"][0][0]
    from kielo.evaluate.tasks_model import ContenderLM

    plain = replace(contender, tokenizer=load_tokenizer(run / "tokenizer"))
    with pytest.raises(KieloError, match="^evaluate.task_chat: no chat template in .* Fix: leave it out"):
        ContenderLM(plain, is_chat=True)
