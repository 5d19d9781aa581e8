"""A machine that is made up, runs on it that are made up too, and what `calibrate.py` finds out about it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planned_beside_measured import compare

from kielo.plan.calibrate import (
    Machine,
    efficiency_with,
    measure,
    priors_of,
    read_machine,
    with_figures,
    write_machine,
)
from kielo.plan.efficiency import fitted, members
from kielo.plan.planned_layout import plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.cards import accelerator
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved, write
from kielo.resolve.text import imagined_text

# Phases as (sequence length, micro-batch, micro-batches, steps).
SHAPES = [(256, 1, 1, 12), (256, 1, 4, 12), (1024, 1, 1, 12), (128, 1, 4, 12), (256, 4, 1, 12)]
LAYOUTS: list[dict[str, Any]] = [
    {"model.hidden_size": 512, "model.intermediate_size": 1408, "model.num_attention_heads": 8},
    {"model.num_hidden_layers": 8, "model.vocab_size": 16384}, {"layout.pipeline": 2},
    {"layout.recompute": "full"},
    {"layout.zero": 3},
]  # fmt: skip


def _resolved(folder: Path, phases=SHAPES, ranks: int = 2, gpu: str | None = None, **keys: Any) -> Resolved:
    """A run of the demo's recipe with other phases and keys."""
    data = ranks // keys.get("layout.pipeline", 1)
    longest = max(phase[0] for phase in phases)
    keys = {
        "dataset.sequence_length": longest, "train.tokens_per_step": longest, "model.hidden_size": 256,
        "model.intermediate_size": 704, "model.num_key_value_heads": 4, "model.vocab_size": 4096,
    } | keys  # fmt: skip
    recipe = read_recipe("demo_estonian", [f"{key}={value}" for key, value in keys.items()]).recipe
    content = recipe.model_dump(exclude_unset=True)
    content["train"].pop("tokens")
    content["phases"] = []
    for length, size, number, steps in phases:
        tokens = length * size * number * data
        content["phases"].append({
            "tokens": tokens * steps, "tokens_per_step": tokens, "sequence_length": length,
            "micro_batch_sequences": size,
        })  # fmt: skip
    recipe = type(recipe).model_validate(content)
    device = "cpu" if gpu is None else "cuda"
    return resolve(
        recipe, folder, world_size=ranks, device=device, accelerator=gpu, text=imagined_text(recipe)
    )


def _run(folder: Path, machine: Machine, resolved: Resolved, every: int = 1, noise: float = 0.0) -> Path:
    """metrics.jsonl and resolved.toml as that machine would leave them: slow first steps, a held-out row,
    half a line.
    """
    path = folder / "train" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    write(resolved, folder / "resolved.toml")
    _write_rows(path, resolved, [1.0] * len(resolved.identity.phases))
    on_as_many = replace(machine, ranks=resolved.placement.world_size)
    seconds = [shape.planned_seconds for shape in compare(on_as_many, path)]
    _write_rows(path, resolved, seconds, every, noise)
    return path


def _write_rows(
    path: Path, resolved: Resolved, seconds: list[float], every: int = 1, noise: float = 0.0
) -> None:
    """seconds: of a step of each phase."""
    generator, rows, elapsed = np.random.default_rng(5), [], 0.0
    for phase, placed, step_seconds in zip(resolved.identity.phases, resolved.placement.phases, seconds):
        for step in range(phase.first_step, phase.last_step + 1):
            slow = 3.0 if step < phase.first_step + 2 else np.exp(noise * generator.normal())
            elapsed += step_seconds * slow
            if step % every == 0 or step == 1:
                speed = phase.tokens_per_step / step_seconds / slow
                tflops = speed * placed.flops_per_token / resolved.placement.world_size / 1e12
                rows.append({
                    "step": step, "tokens": 0, "samples": 0, "phase": phase.number, "loss": 3.0,
                    "tokens_per_second": speed, "tflops_per_second": tflops, "seconds": elapsed,
                })  # fmt: skip
    rows.insert(5, {"step": 5, "tokens": 0, "heldout_loss": 3.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9', encoding="utf-8")


def machine_of(changes: Mapping[str, float], name: str = "cpu") -> Machine:
    """A machine whose figures are those that the fit starts from, times `changes`."""
    card = accelerator(name)
    values = {key: prior.start * changes.get(key, 1.0) for key, prior in priors_of(card).items()}
    precision = "fp32" if name == "cpu" else "bf16"
    spread = {"lower": -0.06, "upper": 0.06}
    figures, constants = with_figures(card, precision, values), efficiency_with(card, values)
    return Machine(figures, constants, spread, precision, 2, ())


CPU = {
    "flops": 2.3,
    "bytes_a_flop": 0.9,
    "link_share": 1.4,
    "flash": 1.5,
    "layer_seconds": 0.7,
    "elementwise": 1.1,
}


def test_one_run_tells_other_shapes_and_layouts(tmp_path):
    """Within 3 %, though the log has noise of 3 % a step, slow first steps and other rows."""
    truth = machine_of(CPU)
    found = measure([_run(tmp_path / "own", truth, _resolved(tmp_path), noise=0.03)])
    assert 0.8 < found.accelerator.peak_tflops["fp32"] / truth.accelerator.peak_tflops["fp32"] < 1.25
    assert set(found.accelerator.peak_tflops) == {"fp32"}
    for number, keys in enumerate(LAYOUTS):
        resolved = _resolved(tmp_path, [(256, 2, 2, 6), (512, 1, 4, 6)], **keys)
        for shape in compare(found, _run(tmp_path / str(number), truth, resolved)):
            assert shape.planned_seconds == pytest.approx(shape.measured_seconds, rel=0.03), keys


def test_own_rows_are_told(tmp_path):
    truth = machine_of(CPU)
    path = _run(tmp_path / "own", truth, _resolved(tmp_path))
    shapes = compare(measure([path]), path)
    assert [(shape.sequence_length, shape.micro_batch, shape.micro_batches) for shape in shapes] == [
        s[:3] for s in SHAPES
    ]
    assert all(shape.planned_seconds == pytest.approx(shape.measured_seconds, rel=0.01) for shape in shapes)


def test_a_gpu_keeps_its_peaks(tmp_path):
    """The figures of its runs go into the constants of its architecture and of Kielo's engine, no others."""
    truth = machine_of({"matrix_engine": 0.9, "layer_seconds": 1.3, "elementwise": 1.2}, "h100_80")
    shapes = [(2048, 1, 1, 12), (2048, 4, 2, 12), (8192, 1, 1, 12), (512, 1, 8, 12)]
    big = {
        "model.hidden_size": 4096, "model.intermediate_size": 11008, "model.num_attention_heads": 32,
        "model.num_key_value_heads": 8, "train.precision": "bf16",
    }  # fmt: skip
    resolved = _resolved(tmp_path, shapes, gpu="h100_80", **big)
    found = measure([_run(tmp_path / "own", truth, resolved)])
    assert found.accelerator.peak_tflops == accelerator("h100_80").peak_tflops
    other = _resolved(tmp_path, [(4096, 2, 2, 8)], gpu="h100_80", **big | {"model.num_hidden_layers": 12})
    (shape,) = compare(found, _run(tmp_path / "other", truth, other))
    assert shape.planned_seconds == pytest.approx(shape.measured_seconds, rel=0.03)
    shipped = fitted()[0].values["layer_seconds"]
    at = members("layer_seconds").index("fsdp")
    assert found.efficiency.values["layer_seconds"][at] > shipped[at]
    assert np.delete(found.efficiency.values["layer_seconds"], at).tolist() == np.delete(shipped, at).tolist()


def test_the_range_narrows_when_kielo_is_measured(tmp_path):
    """Before, the safe figure is DeepSpeed's and the range holds both. Planted: a third slower products."""
    shapes = [(2048, 1, 1, 12), (2048, 4, 2, 12), (8192, 1, 1, 12), (512, 1, 8, 12)]
    truth, path = machine_of({"rocm_engine": 0.75}, "mi250x_gcd"), tmp_path / "lumi.toml"
    keys = {"model.hidden_size": 4096, "model.intermediate_size": 11008, "model.num_attention_heads": 32}
    resolved = _resolved(tmp_path, shapes, gpu="mi250x_gcd", **keys, **{"train.precision": "bf16"})
    write_machine(measure([_run(tmp_path / "own", truth, resolved)]), path)
    found = []
    for sets in ([], [f'machine="{path}"']):
        run = RunToPlan.of_recipe(read_recipe("norwegian_7b", sets).recipe)
        layout = run.recipe.layout.model_copy(update={"shard": 512, "replicate": 1})
        found += plan_layouts(run, [(layout, 64, 2)])
    before, after = found
    assert before.published.name == "Megatron-DeepSpeed" and before.published.factor > 4 / 3
    assert before.high_seconds > before.published.factor * before.step_seconds > before.step_seconds
    assert before.low_seconds < before.step_seconds < after.step_seconds < before.high_seconds
    assert after.published is None and after.safe_share == 1
    widths = [one.high_seconds / one.low_seconds - 1 for one in found]
    assert widths[1] < widths[0] / 2
    # On H100 others' FSDP was measured, whose constants a plan has.
    h100 = RunToPlan.of_recipe(read_recipe("norwegian_7b", ['cluster="dgx_h100"']).recipe)
    (beside,) = plan_layouts(h100, [(layout, 64, 2)])
    assert beside.published == ("PyTorch's FSDP", "", 1.0)


def test_a_machine_is_written_and_read(tmp_path):
    path = tmp_path / "my_machine.toml"
    machine = measure([_run(tmp_path / "own", machine_of(CPU), _resolved(tmp_path))])
    write_machine(machine, path)
    read = read_machine(path)
    assert (read.accelerator, read.precision, read.ranks, read.runs) == (
        machine.accelerator,
        "fp32",
        2,
        machine.runs,
    )
    assert read.spread == pytest.approx(machine.spread, rel=1e-3)
    for name, values in machine.efficiency.values.items():
        assert read.efficiency.values[name] == pytest.approx(values, rel=1e-3)
    assert "own/train/metrics.jsonl" in path.read_text()


def test_rows_every_ten_steps_are_enough(tmp_path):
    phases = [(256, 1, 1, 60), (256, 1, 4, 60)]
    truth = machine_of(CPU)
    path = _run(tmp_path / "own", truth, _resolved(tmp_path, phases), every=10)
    seconds = [shape.planned_seconds for shape in compare(truth, path)]
    assert [shape.measured_seconds for shape in compare(measure([path]), path)] == pytest.approx(seconds)


def test_only_the_newest_attempt_counts(tmp_path):
    """The newest attempt's layout is the one in resolved.toml; an attempt's seconds begin anew."""
    truth = machine_of(CPU)
    resolved = _resolved(tmp_path, [(256, 1, 1, 20), (256, 1, 4, 20)])
    path = _run(tmp_path / "own", truth, resolved)
    lines = path.read_text().splitlines()[:-1]
    slower = [json.loads(line) for line in lines[:24]]
    for row in slower:
        for key in ("tokens_per_second", "tflops_per_second"):
            row[key] = row.get(key, 0.0) / 9
        row["seconds"] = row.get("seconds", 0.0) * 9
    path.write_text("".join(json.dumps(row) + "\n" for row in slower) + "\n".join(lines[24:]))
    (newest,) = compare(truth, path)
    assert (newest.sequence_length, newest.micro_batch, newest.micro_batches) == (256, 1, 4)
    assert newest.measured_seconds == pytest.approx(newest.planned_seconds)


def test_no_file(tmp_path):
    with pytest.raises(KieloError, match="no such file"):
        measure([tmp_path / "metrics.jsonl"])
    with pytest.raises(KieloError, match="no metrics.jsonl was given"):
        measure([])


def test_no_plan_beside_it(tmp_path):
    path = _run(tmp_path / "own", machine_of({}), _resolved(tmp_path))
    (tmp_path / "own" / "resolved.toml").unlink()
    with pytest.raises(KieloError, match="neither .*resolved.toml nor"):
        measure([path])


def test_no_training_rows(tmp_path):
    path = _run(tmp_path / "own", machine_of({}), _resolved(tmp_path))
    path.write_text('{"step": 5, "tokens": 0, "heldout_loss": 3.0}\n')
    with pytest.raises(KieloError, match="no row of a training step"):
        measure([path])


def test_too_few_rows(tmp_path):
    path = _run(tmp_path / "own", machine_of({}), _resolved(tmp_path), every=10)
    with pytest.raises(KieloError, match=r"3 rows after its first 2 steps.*log_every_steps=1"):
        measure([path])


@pytest.mark.full
def test_other_devices(tmp_path):
    """Runs on other devices are refused; on a processor, other numbers of ranks are other devices too."""
    two = _run(tmp_path / "two", machine_of({}), _resolved(tmp_path))
    one = _run(tmp_path / "one", machine_of({}), _resolved(tmp_path, ranks=1))
    gpu = _run(
        tmp_path / "gpu",
        machine_of({}, "h100_80"),
        _resolved(tmp_path, gpu="h100_80", **{"train.precision": "bf16"}),
    )
    with pytest.raises(KieloError, match="is of 1 ranks on a processor in fp32, .* of 2 ranks"):
        measure([two, one])
    with pytest.raises(KieloError, match="is of h100_80 in bf16, .* of 2 ranks on a processor in fp32"):
        measure([two, gpu])
    with pytest.raises(KieloError, match="the card of 2 ranks on 'cpu' in fp32"):
        compare(measure([two]), one)


def test_a_plan_of_other_ranks_than_the_rows(tmp_path):
    path = _run(tmp_path / "own", machine_of({}), _resolved(tmp_path))
    write(_resolved(tmp_path, ranks=1), tmp_path / "own" / "resolved.toml")
    with pytest.raises(KieloError, match="rows are for 2 ranks, its resolved.toml for 1"):
        measure([path])


def test_a_gpu_without_a_card(tmp_path):
    path = _run(tmp_path / "own", machine_of({}), _resolved(tmp_path))
    plan = tmp_path / "own" / "resolved.toml"
    plan.write_text(plan.read_text().replace('device = "cpu"', 'device = "cuda"').replace(
        'accelerator = "cpu"', 'accelerator = "unknown"'
    ))  # fmt: skip
    with pytest.raises(KieloError, match="on 'unknown', for which no card"):
        measure([path])


@pytest.mark.parametrize("content", ["", "not toml [", "[accelerator]\nname = 'cpu'\n"])
def test_another_file_is_no_machine(tmp_path, content):
    path = tmp_path / "my_machine.toml"
    with pytest.raises(KieloError, match="cannot be read"):
        read_machine(path)
    path.write_text(content)
    with pytest.raises(KieloError, match="kielo plan calibrate"):
        read_machine(path)


def test_needs_no_torch():
    check = "import sys, kielo.plan.calibrate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
