"""Data of the harness's tasks, as the library `datasets` keeps them in its cache after a download."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

COMMIT = "a" * 40
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"  # beside the repository


def belebele(language: str) -> list[dict[str, str]]:
    """Return the questions of a language, as its file on the hub has them. Skip without the file."""
    path = SHARED / "belebele" / f"{language}-test.csv"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_cached(cache: Path, repository: str, configuration: str, rows: list[dict[str, str]]) -> Path:
    """Write the split "test" of a repository into a cache of `datasets`. Return the folder of the data."""
    from datasets import Dataset, DatasetInfo, SplitDict, SplitInfo
    from datasets.arrow_writer import ArrowWriter

    name = repository.rsplit("/", maxsplit=1)[-1]
    folder = cache / repository.replace("/", "___") / configuration / "0.0.0" / COMMIT
    folder.mkdir(parents=True)
    features = Dataset.from_list(rows).features
    with ArrowWriter(path=str(folder / f"{name}-test.arrow"), features=features) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    split = SplitInfo("test", num_examples=len(rows), dataset_name=name)
    info = DatasetInfo(
        features=features, builder_name="csv", dataset_name=name, config_name=configuration, version="0.0.0",
        splits=SplitDict({"test": split}, dataset_name=name),
    )  # fmt: skip
    info.write_to_directory(str(folder))
    assert json.loads((folder / "dataset_info.json").read_text())["config_name"] == configuration
    return folder


# A folder as a research group keeps it for lm-eval 0.4.7: bases without an extension, keys in quotation
# marks, data beside the tasks with a README.md of their splits, tags, functions, filters, corpus metrics.
_METRIC = "  - {metric: %s, aggregation: %s, higher_is_better: true}\n"
_STOPS = 'generation_kwargs:\n  until:\n    - "</s>"\n    - "<|end_of_text|>"\n    - "\\n\\n"\n'
GROUP_FOLDER = {
    "tasks/reading/_reading_yaml": "fewshot_config:\n  sampler: first_n\noutput_type: multiple_choice\n"
    'dataset_path: data/reading\ndescription: "Read the passage and answer.\\n\\n"\n'
    'doc_to_text: "P: {{passage}}\\nQ: {{question.strip()}}\\nA. {{first}}\\nB. {{second}}\\nAnswer:"\n'
    'doc_to_choice: ["A", "B"]\ndoc_to_target: "{{[1, 2].index(right)}}"\n'
    f"metric_list:\n{_METRIC % ('acc', 'mean')}{_METRIC % ('acc_norm', 'mean')}"
    "tag:\n - reading_with_examples\nmetadata:\n  version: 0.0\n",
    **{
        f"tasks/reading/reading_{code}.yaml": f'"dataset_name": "{code}"\n"fewshot_split": "dev"\n'
        f'"include": "_reading_yaml"\n"task": "reading_{code}"\n"test_split": "test"'
        for code in ("est_Latn", "fin_Latn")
    },
    "tasks/topics/_default_template_yaml": "dataset_path: group/topics\noutput_type: generate_until\n"
    'should_decontaminate: true\ndoc_to_decontamination_query: "{{sentence}}"\n'
    'doc_to_text: "Sentence: {{sentence}}\\nAnswer:"\ndoc_to_choice: ["travel", "e"]\n'
    "doc_to_target: \"{{['travel', 'e'].index(topic)}}\"\n"
    "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
    f"    ignore_case: true\n    ignore_punctuation: false\n{_STOPS}filter_list:\n"
    '  - name: "strict-match"\n    filter:\n      - function: remove_whitespace\n      - function: "regex"\n'
    '        regex_pattern: "(travel|e)"\n      - function: "take_first"\n'
    "dataset_kwargs:\n  trust_remote_code: true\nmetadata:\n  version: 1.0\n",
    "tasks/topics/topics_est.yaml": '"dataset_name": "est_Latn"\n"include": "_default_template_yaml"\n'
    '"task": "topics_est"\n"test_split": "test"\n"fewshot_split": "test"\n',
    "tasks/causes/causes_est.yaml": "task: causes_est\ndataset_path: data/causes\n"
    "output_type: multiple_choice\ntest_split: test\n"
    "fewshot_config: # without fewshot_split\n  sampler: first_n\n"
    "  samples: !function utils.list_fewshot_samples\ndoc_to_text: !function utils.doc_to_text\n"
    "doc_to_target: label\ndoc_to_choice: !function utils.doc_to_choice\n"
    f"metric_list:\n{_METRIC % ('acc', 'mean')}",
    "tasks/causes/causes_fin.yaml": "include: causes_est.yaml\ntask: causes_fin\n"
    "doc_to_text: 'Miksi? {{premise}}'\n",
    "tasks/causes/utils.py": "def doc_to_text(doc):\n    return f\"Why: {doc['premise']}\\nAnswer:\"\n\n\n"
    "def doc_to_choice(doc):\n    return ['\"' + doc[key] + '\"' for key in ('choice1', 'choice2')]\n\n\n"
    "def list_fewshot_samples():\n    shown = {'premise': 'Vihm.', 'choice1': 'Pilv.', 'choice2': 'Kivi.'}\n"
    "    return [{**shown, 'label': 0}]\n",
    "tasks/pairs/_default_template_yaml": "dataset_path: data/pairs\noutput_type: generate_until\n"
    "test_split: devtest\nfewshot_config:\n  sampler: first_n\n"
    f"metric_list:\n{_METRIC % ('chrf', 'chrf')}{_METRIC % ('bleu', 'bleu')}"
    'generation_kwargs:\n  until:\n    - "\\n"\n    - "</s>"\n  max_gen_toks: 12\n'
    "tag:\n  - pairs_of_group\nmetadata:\n  version: 0.0",
    "tasks/pairs/pairs_est-eng.yaml": '"description": "Translate from Estonian to English.\\n\\n"\n'
    '"doc_to_target": "{{english}}"\n"doc_to_text": "Estonian: {{estonian}}\\nEnglish:"\n'
    '"include": "_default_template_yaml"\n"task": "pairs_est-eng"\n"fewshot_split": "devtest"\n',
    "tasks/group.yaml": "group: all_choices\ntask:\n  - causes_est\n  - causes_fin\n"
    "aggregate_metric_list:\n  - metric: acc\n    aggregation: mean\n    weight_by_size: false\n"
    "metadata:\n  version: 1.0\n",
}


def write_group_folder(folder: Path, cache: Path) -> list[str]:
    """Write the tasks and their data, and the data of the hub into a cache. Return names to be scored."""
    for name, text in GROUP_FOLDER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    splits = {"test": range(5), "dev": range(5, 8)}
    configurations = []
    for code in ("est_Latn", "fin_Latn"):
        files = "".join(f"    - split: {of}\n      path: reading-{code}-{of}.csv\n" for of in splits)
        configurations.append(f"- config_name: {code}\n  data_files:\n{files}")
        for of, numbers in splits.items():
            rows = [f'"Jutt {n}, {code}.",Kes?,"Ema, {n}",Isa,{1 + n % 2}' for n in numbers]
            _write(
                folder / f"data/reading/reading-{code}-{of}.csv",
                ["passage,question,first,second,right", *rows],
            )
    _write(folder / "data/reading/README.md", ["---", "configs:", *configurations, "---"])
    for name, split, row in (
        ("causes", "test", {"premise": "Lumi sulas, {}.", "choice1": "Päike {}.", "choice2": "Kivi."}),
        ("pairs", "devtest", {"estonian": "Tere, {}!", "english": "Hello, {}!"}),
    ):  # fmt: skip
        file = f"{name}-{split}.json"
        files = ["---", "configs:", "- config_name: default", "  data_files:", f"    - split: {split}"]
        _write(folder / f"data/{name}/README.md", [*files, f"      path: {file}", "---"])
        rows = [{key: value.format(n) for key, value in row.items()} | {"label": n % 2} for n in range(5)]
        _write(folder / f"data/{name}/{file}", map(json.dumps, rows))
    topics = [{"sentence": f"Sõit linna, {n}.", "topic": ("travel", "e")[n % 2]} for n in range(4)]
    write_cached(cache, "group/topics", "est_Latn", topics)
    return ["all_choices", "reading_with_examples", "topics_est", "pairs_est-eng"]


def _write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
