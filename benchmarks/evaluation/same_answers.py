"""Known benchmarks by three programs: the same answer to each question.

    python benchmarks/evaluation/same_answers.py RUN --to DIR --belebele DIR
    python benchmarks/evaluation/same_answers.py RUN --to DIR --task-folder DIR --tasks NAME ...

RUN is a finished run with an export. `kielo evaluate` scores its checkpoint, sharded over --ranks processes
in the layout of --set, and `lm_eval --model hf` scores the export.

--belebele names a folder with LANGUAGE-test.csv. A plain script then also answers all its questions by
transformers alone, one at a time, with prompts that it makes itself. --task-folder names task files that
others wrote for lm-eval. Relative paths of their data begin at --beside. The run is copied, not changed.

Ends with an error if a program chooses another answer, or if log-likelihoods differ by more than 1e-4
(relative). Writes results/same_answers_cpu.json, and keeps results of tasks that were not asked.
"""

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "same_answers_cpu.json"
TOLERANCE = 1e-4
LETTERS = "ABCD"
TASK = """
include: {template}
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
"""
Samples = dict[tuple[int, str], dict[str, Any]]  # (question, filter) → the harness's sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a finished run with an export")
    parser.add_argument("--to", type=Path, required=True, help="new folder for the copy and all answers")
    parser.add_argument("--belebele", type=Path, help="folder with LANGUAGE-test.csv")
    parser.add_argument("--task-folder", type=Path, help="folder of task files for lm-eval")
    parser.add_argument("--tasks", nargs="*", default=[], help="tasks of that folder")
    parser.add_argument(
        "--beside", type=Path, default=Path.cwd(), help="folder in which programs are started"
    )
    parser.add_argument("--limit", type=int, help="questions of each task; default: all")
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    layout = ["layout.tensor=2", "layout.pipeline=2"]
    parser.add_argument("--set", dest="sets", action="append", help=f"default: {' '.join(layout)}")
    options = parser.parse_args()
    options.sets = options.sets or layout
    options.to = options.to.resolve()
    if options.to.exists() and any(options.to.iterdir()):
        parser.error(f"--to {options.to}: is not empty, and its files stay. Name a new folder")
    folder = options.task_folder and options.task_folder.resolve()
    questions: dict[str, list[dict[str, str]]] = {}
    if options.belebele:
        folder = options.to / "belebele"
        questions = written_belebele(options.belebele, folder)
        options.tasks = list(questions)
    run = options.to / "run"
    shutil.copytree(options.run, run, ignore=shutil.ignore_patterns("evaluate", "evaluate_tasks", ".*.kielo"))
    ours = by_kielo(run, folder, options)
    theirs = by_the_harness(run / "hf", folder, options)
    plain = {name: by_transformers(run / "hf", rows[: options.limit]) for name, rows in questions.items()}
    before = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    how = {"run": options.run.name, "ranks": options.ranks, "layout": options.sets, "shots": options.shots}
    found = {
        name: how | compared(name, ours[name], theirs[name], plain.get(name))
        | {"date": date.today().isoformat()}
        for name in options.tasks
    }  # fmt: skip
    RESULT.write_text(json.dumps(before | found, indent=1) + "\n")


def written_belebele(belebele: Path, folder: Path) -> dict[str, list[dict[str, str]]]:
    """Write the questions and a task for each language, with the harness's own template."""
    import lm_eval

    template = Path(lm_eval.__file__).parent / "tasks" / "belebele" / "_default_template_yaml"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for path in sorted(belebele.glob("*-test.csv")):
        name = f"belebele_{path.name.removesuffix('-test.csv')}_csv"
        with path.open(encoding="utf-8", newline="") as file:
            found[name] = list(csv.DictReader(file))
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found[name]))
        (folder / f"{name}.yaml").write_text(TASK.format(template=template, name=name, data=data))
    return found


def started(words: list[str], folder: Path) -> None:
    print(*words, flush=True)
    # Data come from this machine's files.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(words, cwd=folder, check=True, env=os.environ | offline)


def by_kielo(run: Path, folder: Path | None, options: argparse.Namespace) -> dict[str, Samples]:
    values = [*options.sets, f"evaluate.shots={options.shots}"]
    values += [f"evaluate.task_folders={json.dumps([str(folder)])}"] if folder else []
    values += [f"evaluate.task_limit={options.limit}"] if options.limit else []
    sets = [word for value in values for word in ("--set", value)]
    words = ["evaluate", str(run), "--tasks", ",".join(options.tasks), "--ranks", str(options.ranks), *sets]
    started([sys.executable, "-m", "kielo", *words], options.beside)
    files = (run / "evaluate_tasks").glob("*/*/questions.jsonl")
    return {json.loads((path.parent / "result.json").read_text())["task"]: samples(path) for path in files}


def by_the_harness(export: Path, folder: Path | None, options: argparse.Namespace) -> dict[str, Samples]:
    to = options.to / "harness"
    words = ["--model", "hf", "--model_args", f"pretrained={export},dtype=float32", "--device", "cpu"]
    words += [
        "--tasks",
        ",".join(options.tasks),
        "--batch_size",
        "8",
        "--output_path",
        str(to),
        "--log_samples",
    ]
    words += ["--num_fewshot", str(options.shots)]
    words += ["--include_path", str(folder)] if folder else []
    words += ["--limit", str(options.limit)] if options.limit else []
    started([sys.executable, "-m", "lm_eval", *words], options.beside)
    found = {}
    for name in options.tasks:
        (path,) = to.glob(f"**/samples_{name}_2*.jsonl")  # the date follows
        found[name] = samples(path)
    return found


def samples(path: Path) -> Samples:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(row["doc_id"], row["filter"]): row for row in rows}


def by_transformers(export: Path, rows: list[dict[str, str]]) -> list[list[float]]:
    """Return the log-likelihood of each answer's letter after its question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    most = model.config.max_position_embeddings
    found = []
    for row in rows:
        lines = [f"{letter}: {row[f'mc_answer{number}']}" for number, letter in enumerate(LETTERS, 1)]
        prompt = "\n".join(
            [f"P: {row['flores_passage']}", f"Q: {row['question'].strip()}", *lines, "Answer:"]
        )
        before = len(tokenizer(prompt).input_ids)
        own = []
        for letter in LETTERS:
            whole = tokenizer(f"{prompt} {letter}").input_ids
            ids = torch.tensor([whole[-most - 1 :]])
            with torch.inference_mode():
                logs = model(ids[:, :-1]).logits[0].log_softmax(-1)
            new = len(whole) - before
            own.append(logs[-new:].gather(1, ids[0, -new:, None]).double().sum().item())
        found.append(own)
    return found


def compared(name: str, ours: Samples, theirs: Samples, plain: list[list[float]] | None) -> dict[str, Any]:
    """Return the scores of all programs and how far they differ. Raise AssertionError if they disagree."""
    assert ours.keys() == theirs.keys(), f"{name}: not the same questions"
    largest, words_alike = 0.0, 0
    metrics = theirs[min(theirs)]["metrics"]
    for key, other in theirs.items():
        mine = ours[key]
        assert mine["doc"] == other["doc"], (name, key)
        assert str(mine["target"]) == str(other["target"]), (name, key)  # a text in the harness's file
        assert [mine[metric] for metric in metrics] == [other[metric] for metric in metrics], (name, key)
        for answers in zip(mine["resps"], other["resps"], strict=True):
            if isinstance(answers[0][0], str):
                assert answers[0] == answers[1], (name, key)
                words_alike += 1
            else:
                largest = max(largest, difference(*(float(answer[0][0]) for answer in answers)))
    result: dict[str, Any] = {"questions": len({number for number, _ in ours})}
    for metric in metrics:
        values = [one[metric] for one in ours.values()]
        if all(isinstance(value, int | float) for value in values):
            result[metric] = sum(values) / len(values)
    if words_alike:
        result["same_texts"] = words_alike
    else:
        result["largest_difference"] = float(f"{largest:.1e}")
    if plain is not None:
        right = []
        for (number, _), one in sorted(ours.items()):
            logs = [float(answer[0][0]) for answer in one["resps"]]
            result["largest_difference_of_script"] = max(
                result.get("largest_difference_of_script", 0.0), *map(difference, logs, plain[number])
            )
            chosen = max(range(len(logs)), key=plain[number].__getitem__)
            right.append(chosen + 1 == int(one["doc"]["correct_answer_num"]))
            assert right[-1] == bool(one["acc"]), (name, number)
        result["acc_of_script"] = sum(right) / len(right)
        largest = max(largest, result["largest_difference_of_script"])
        result["largest_difference_of_script"] = float(f"{result['largest_difference_of_script']:.1e}")
    print(name, json.dumps(result), flush=True)
    assert largest < TOLERANCE, f"{name}: log-likelihoods differ by {largest:.1e}"
    return result


def difference(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), math.ulp(1.0))


if __name__ == "__main__":
    main()
