"""Files that stages exchange are written through their types, and `kielo schema` describes each key."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from kielo.artifact import formats
from kielo.artifact.attempt_files import ALERTS_NAME, Alert, Outcome, append_alert
from kielo.artifact.folder_copies import CheckpointCopies, CopiesAt
from kielo.artifact.formats import FORMATS, schema_of
from kielo.artifact.launch_files import (
    Ladder,
    Launch,
    MadeSite,
    MeasuredSpeed,
    PlannedSpeed,
    ReferenceSpeed,
    Rung,
)
from kielo.artifact.manifest import write_manifest
from kielo.artifact.metrics import METRICS_NAME, Row, of_kind, read_metrics
from kielo.artifact.prefetched import Brought, Prefetched
from kielo.artifact.scores import Accuracy, MaskedScores
from kielo.artifact.stage_counts import PackCounts, RowMap
from kielo.artifact.stage_json import JsonFile, read_counts, read_json, read_stage_json, write_json
from kielo.artifact.task_result import TASKS_FOLDER, TaskResult
from kielo.artifact.token_file import TokenFile
from kielo.artifact.token_sources import TokenFiles, TokenFileSet
from kielo.artifact.verify_results import CheckReport, Complaint, NodeVerdict, Preflight
from kielo.cli.main import main
from kielo.recipe.errors import KieloError
from kielo.report.write import write_report
from tests.report import synthetic_run

FILES = {
    name: found.types[0] for name, found in FORMATS.items() if issubclass(found.types[0], JsonFile)
}  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with every file that stages exchange, as a Kielo of another version left it."""
    folder = tmp_path_factory.mktemp("run")
    synthetic_run.write_run(folder)
    write_report(folder, synthetic_run.RECIPE, synthetic_run.STAGES)
    write_json(folder / "train", Outcome(outcome="requeue", step=4, tokens=512, exit_code=75, message="õ"))
    copies = CopiesAt(copied={"step_00000004": "0"}, begun={"step_00000004": ["1"]})
    write_json(folder / "train", CheckpointCopies(addresses={"s3://õ": copies}))
    file = TokenFile(
        name="a.bin", format="megatron", dtype="<u2", first_byte=0, tokens=9, documents=None, bytes=18,
        index_bytes=0, fingerprint="0",
    )  # fmt: skip
    files = TokenFiles(end_of_text_id=0, sources={"a": TokenFileSet(files=(file,), training_tokens=5)})
    write_json(folder / "tokens", files)
    accuracy = Accuracy(model=0.4, unigram=0.1, bigram=0.2)
    write_json(folder / "evaluate", MaskedScores(
        model="õ", accuracy=accuracy, loss=3.0, hidden_tokens=9, sequences=2, sequence_length=16,
        masking="span", masking_rate=0.15, seed=1,
    ))  # fmt: skip
    write_json(folder / "tokenizer", RowMap(
        method="mean", old_tokenizer="0", old_vocabulary_size=2, rows=[[0], [0, 1], []],
        control_tokens={"õ": "</s>"},
    ))  # fmt: skip
    scored = folder / TASKS_FOLDER / "MODEL" / "TASK"
    scored.mkdir(parents=True)
    metrics = {"acc,none": 0.5, "acc_stderr,none": "N/A"}
    write_json(scored, TaskResult(task="õ", metrics=metrics, version="1.0", questions=2, shots=0))
    append_alert(folder / "train" / ALERTS_NAME, 4, "õ")
    complaint = Complaint(check="clock", rank=1, node="õ", message="late", is_refusal=True)
    checks = [CheckReport(name="clock", summary="", seconds=0.5, found=[[1.0], None])]
    write_json(folder, Preflight(
        passed=False, bad_nodes=["õ"], nodes=[NodeVerdict(name="õ", ranks=[0, 1], passed=False)],
        complaints=[complaint], checks=checks, ranks=2, seconds=1.0, finished_at="2026-11-23",
    ))  # fmt: skip
    launched = (folder / FORMATS["launch"].file).parent
    launched.mkdir(parents=True)
    write_json(launched, Launch(
        cluster="lumi_g", scheduler="slurm", job_name="õ", nodes=2, spares=0, devices=16, partition="dev-g",
        wall_seconds=7200, grace_seconds=300, jobs=1, forecast=None, no_forecast="õ", versions={"kielo": "0"},
        created_at="2026-11-23",
    ))  # fmt: skip
    one = Brought(kind="text", name="õ", origin="", folder="text/õ", bytes=1)
    write_json(folder, Prefetched(brought=[one], made_at="2026-11-23"))
    site = (folder / FORMATS["site"].file).parent
    site.mkdir(parents=True)
    made = {
        "cluster": "lumi_g",
        "image": "õ.sif",
        "venv": "/õ",
        "squash": "",
        "python": "3.12",
        "torch": "2.10",
    }
    write_json(site, MadeSite(**made, made_at="2026-11-23"))
    ladder = (folder / FORMATS["ladder"].file).parent
    ladder.mkdir(parents=True)
    planned = PlannedSpeed(
        tokens_per_second=2.0, low_tokens_per_second=1.0, high_tokens_per_second=3.0, tflops_per_device=0.5
    )
    speed = MeasuredSpeed(steps=8, step_seconds=0.5, tokens_per_second=2.5, tflops_per_device=0.6)
    rung = Rung(
        nodes=2, devices=16, layout="dp16", folder="2_nodes/dp16", planned=planned, measured=speed, state="õ"
    )
    other = ReferenceSpeed(nodes=2, tflops_per_device=91.0, tolerance=0.1, software="õ", source="õ")
    write_json(ladder, Ladder(
        name="õ", cluster="lumi_g", machine="", parameters=7, tokens_per_step=8, sequence_length=4,
        rungs=[rung], references=[other], kielo_version="0", written_at="2026-11-23",
    ))  # fmt: skip
    return folder


def is_schema(value: Any) -> bool:
    """True for the parts of JSON Schema (draft 2020-12) that are used here, and nothing else."""
    names = {"null", "boolean", "object", "array", "number", "string", "integer"}
    schemas_of = {
        "$defs": dict,
        "properties": dict,
        "anyOf": list,
        "items": None,
        "additionalProperties": None,
    }
    if isinstance(value, bool):
        return True
    for key, kind in schemas_of.items():
        parts = value.get(key, kind() if kind else True)
        parts = list(parts.values()) if isinstance(parts, dict) and kind is dict else parts
        if not all(is_schema(part) for part in (parts if isinstance(parts, list) else [parts])):
            return False
    texts = (value.get(key, "") for key in ("$schema", "$ref", "title", "description"))
    return value.get("type", "null") in names and all(isinstance(text, str) for text in texts)


@pytest.mark.parametrize("name", FORMATS)
def test_the_schema_names_every_key(name, capsys):
    """`kielo schema --of` prints it."""
    assert main(["schema", "--of", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == schema_of(name) and schema["$schema"].endswith("2020-12/schema")
    if name == "recipe":
        return
    assert is_schema(schema)
    described = {
        entry["title"]: entry for entry in [schema | {"title": ""}, *schema.get("$defs", {}).values()]
    }
    for kind in FORMATS[name].types:
        found = described.get(kind.__name__, schema)
        assert found["properties"].keys() == kind.model_fields.keys()
    parts = [part["properties"] for part in described.values() if "properties" in part]
    texts = [value for properties in parts for value in properties.values()]
    assert texts and any("description" in value for value in texts)


def test_without_a_name_the_formats_are_listed(capsys):
    assert main(["schema"]) == 0
    listed = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(name, file) for name, file, _ in listed] == [
        (name, found.file) for name, found in FORMATS.items()
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_written_as_it_was_read(name, run_folder, tmp_path):
    """Key by key; and what a newer Kielo added stays."""
    path = run_folder / FORMATS[name].file
    content = json.loads(path.read_text(encoding="utf-8")) | {"of_a_newer_kielo": [1]}
    (tmp_path / path.name).write_text(json.dumps(content), encoding="utf-8")
    write_json(tmp_path, read_json(tmp_path, FILES[name]))
    assert json.loads((tmp_path / path.name).read_text(encoding="utf-8")) == content
    assert path.name == FILES[name].FILE_NAME


def test_lines_are_of_the_listed_kinds(run_folder):
    rows = read_metrics(run_folder / FORMATS["metrics"].file)
    assert {type(row) for row in rows} < set(FORMATS["metrics"].types) - {Row}
    assert len(rows) == sum(len(of_kind(rows, kind)) for kind in {type(row) for row in rows})
    (line,) = (run_folder / FORMATS["alerts"].file).read_text(encoding="utf-8").splitlines()
    assert Alert.model_validate_json(line).message == "õ"
    assert FORMATS["metrics"].file.endswith(METRICS_NAME)


DAMAGE = {
    "not JSON": ('{"passed": tr', "not as Kielo writes it"),
    "a list": ("[]", "should be an object"),
    "nothing": ("", "not as Kielo writes it"),
    "other keys": ('{"a": 1}', "Field required"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", DAMAGE)
def test_a_foreign_file_is_refused_by_name(name, what, tmp_path):
    text, told = DAMAGE[what]
    (tmp_path / FILES[name].FILE_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(KieloError, match=f"{FILES[name].FILE_NAME}.*{told}"):
        read_json(tmp_path, FILES[name])
    assert read_json(tmp_path / "nowhere", FILES[name]) is None


def test_the_wrong_key_is_named(run_folder, tmp_path):
    """Values are not bent to their type; the message names the fix."""
    scores = json.loads((run_folder / "evaluate" / "scores.json").read_text(encoding="utf-8"))
    scores["bits_per_byte"]["xz"] = "1.6"
    (tmp_path / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    with pytest.raises(
        KieloError, match=r"scores.json.*bits_per_byte\.xz: .*number\). Fix: move .* away and run"
    ):
        read_stage_json(tmp_path, FILES["scores"])


@pytest.mark.parametrize(
    ("of_a", "told"),
    [
        ({"bytes": 7}, "tokens: Field required"),
        ({"tokens": "7"}, "tokens: Input should be a valid integer"),
        ({"tokens": 7, "times_ns": [[1.5]]}, r"times_ns\.0\.0: Input should be a valid integer"),
    ],
)
def test_a_wrong_key_of_counts_is_named(of_a, told, tmp_path):
    """With the manifest that has it; what a newer Kielo counts besides is no fault."""
    for a in ({"tokens": 7, "of_a_newer_kielo": 1}, of_a):
        counts = {"sources": {"a": a}, "heldout": {"tokens": 1}}
        write_manifest(tmp_path, "tokens", 1, {}, {}, counts, 1.0)
        if a is not of_a:
            assert read_counts(tmp_path, PackCounts).content() == counts
    with pytest.raises(
        KieloError, match=rf"manifest\.json: .*\(counts\.sources\.a\.{told}.*. Fix: move .* away"
    ):
        read_counts(tmp_path, PackCounts)
    assert read_counts(tmp_path / "nowhere", PackCounts) is None


def test_a_file_that_is_not_the_stages_is_refused(tmp_path):
    """It may be whole: the manifest knows its checksum."""
    write_json(tmp_path, Outcome(outcome="finished", step=1, tokens=1, exit_code=0, message=""))
    write_manifest(tmp_path, "train", 1, {}, {}, {}, 1.0)
    assert read_stage_json(tmp_path, Outcome).step == 1
    write_json(tmp_path, Outcome(outcome="finished", step=2, tokens=1, exit_code=0, message=""))
    with pytest.raises(KieloError, match="outcome.json: was changed since the stage wrote it"):
        read_stage_json(tmp_path, Outcome)


def test_every_type_of_a_whole_file_is_a_format():
    """A file in this room that no one listed would have no schema."""
    kinds = {
        kind for kind in vars(formats).values() if isinstance(kind, type) and issubclass(kind, BaseModel)
    }
    assert set(JsonFile.__subclasses__()) == set(FILES.values()) <= kinds
