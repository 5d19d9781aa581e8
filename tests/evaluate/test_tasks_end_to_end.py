"""Tasks of the harness on a checkpoint, on its export by the harness alone, and by a plain script."""

import json
import shutil
from dataclasses import replace
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
from kielo.evaluate.likelihoods import sequence_log_likelihoods
from kielo.evaluate.tasks import Place, score_tasks
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Evaluate
from kielo.resolve.resolved import read
from kielo.tokenizer.load import encode, load_tokenizer
from tests.cli.test_run import write_recipe
from tests.evaluate.harness_data import belebele, write_cached

pytestmark = pytest.mark.full
pytest.importorskip("lm_eval")

LIMIT = 16
LANGUAGES = ("est_Latn", "fin_Latn")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run, with an export. Its sequences have 512 tokens, which cut Belebele's."""
    recipe = write_recipe(tmp_path_factory.mktemp("tasks"))
    changes = ["dataset.sequence_length=512", "train.tokens=10240", "train.tokens_per_step=512"]
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

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    files = Path(lm_eval.__file__).parent / "tasks" / "belebele"
    manager = lm_eval.tasks.TaskManager(include_path=files, include_defaults=False)
    names = [f"belebele_{language}" for language in LANGUAGES]
    return run_harness(export, manager, names, limit=limit, **how)


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


def test_belebele_has_one_accuracy_by_three_programs(
    run: Path, brought: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each answer's log-likelihood within 1e-4, each question's verdict, and the scores to the last digit."""
    monkeypatch.setenv("KIELO_PREFETCHED", str(brought))
    names = [f"belebele_{language}" for language in LANGUAGES]
    words = ["evaluate", str(run), "--set", f"evaluate.task_limit={LIMIT}"]
    assert main([*words, "--tasks", ",".join(names)]) == 0
    screen = capsys.readouterr().out
    scores = read_stage_json(run / "evaluate", Scores)
    theirs = by_the_harness(run / "hf", brought / "datasets", monkeypatch)
    step = newest_checkpoint(run).name
    for language, name in zip(LANGUAGES, names, strict=True):
        plain = by_a_plain_script(run / "hf", belebele(language)[:LIMIT])
        (folder,) = (run / "evaluate_tasks" / step).glob(f"{name}-*")
        ours = [json.loads(line) for line in (folder / QUESTIONS_NAME).read_text().splitlines()]
        assert len(ours) == len(plain) == LIMIT
        for mine, other, logs in zip(ours, theirs["samples"][name], plain, strict=True):
            assert mine["doc"] == other["doc"] and mine["acc"] == other["acc"]
            assert [float(one[0][0]) for one in mine["resps"]] == pytest.approx(logs, rel=1e-4)
            assert [float(one[0][0]) for one in other["resps"]] == pytest.approx(logs, rel=1e-4)
            assert mine["acc"] == (logs.index(max(logs)) + 1 == int(mine["doc"]["correct_answer_num"]))
        for key in ("acc,none", "acc_norm,none"):
            (one,) = (one for one in scores.tasks if (one.task, one.metric) == (name, key))
            expected = theirs["results"][name]
            assert f"{one.value:.4f}" == f"{expected[key]:.4f}"
            assert f"{one.standard_error:.4f}" == f"{expected[key.replace(',', '_stderr,')]:.4f}"
            assert (one.questions, one.chance, one.measures, one.version) == (LIMIT, 0.25, "reading", "0.0")
        assert name in screen


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
