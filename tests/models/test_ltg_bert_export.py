"""An exported LTG-BERT in transformers, by the code that goes along and without Kielo, beside its equations.

`make test-border` runs it with transformers 4.57 too.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.hugging_face_export import export
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.models import families
from tests.models.ltg_bert_reference import Reference
from tests.models.test_ltg_bert import EQUAL, LENGTH, VOCABULARY, batch, random_model, stored_tensors

SCRIPT = Path(__file__).with_name("use_ltg_bert.py")
LENGTHS = (LENGTH, 7)
PEERS = os.environ.get("KIELO_TEST_BORDER")
NOT_ASKED = pytest.mark.skipif(PEERS is None, reason="asked for by make test-border")
LAYOUTS = ("concatenated", "interleaved")


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    """Of random weights; each way to cut positions into heads → the export."""
    tokens = batch()[0]
    padding = torch.stack([(torch.arange(LENGTH) < length).long() for length in LENGTHS])
    labels = torch.where((torch.arange(LENGTH) % 3 == 1) & (padding == 1), tokens, -100)
    made = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp(layout)
        model, _ = random_model(folder, layout)
        checkpointer = Checkpointer(folder / "checkpoints")
        values = {f"model/{name}": value.detach().float() for name, value in model.named_parameters()}
        checkpointer.save(1, values, {})
        made[layout] = export(checkpointer.settle(), folder / "hf", model.config, None)
        torch.save({"tokens": tokens, "padding": padding, "labels": labels}, made[layout] / "batch.pt")
    return made


@pytest.fixture(scope="module", params=["5", pytest.param("4", marks=NOT_ASKED)])
def outs(request, exports, tmp_path_factory) -> dict[str, Path]:
    """Layout → the folder of what `use_ltg_bert.py` wrote, with one version of transformers."""
    out = tmp_path_factory.mktemp("out")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if request.param == "4":
        environment["PYTHONPATH"] = str(Path(PEERS, "transformers4").resolve())
    environment |= {"HF_HOME": str(out / "home"), "HF_HUB_OFFLINE": "1"}
    found = {layout: out / layout for layout in LAYOUTS}
    for folder in found.values():
        folder.mkdir()
    pairs = [str(path) for layout in LAYOUTS for path in (exports[layout], found[layout])]
    command = [sys.executable, "-P", str(SCRIPT), *pairs]
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version = torch.load(found[LAYOUTS[0]] / "found.pt", weights_only=False)["version"]
    assert version.startswith(f"{request.param}."), f"{PEERS}: found transformers {version}"
    return found


@pytest.fixture(params=LAYOUTS)
def used(request, exports, outs) -> tuple[Path, str, Path, dict[str, Any]]:
    """(the export, its layout, the folder of what was written, what was found)"""
    out = outs[request.param]
    return exports[request.param], request.param, out, torch.load(out / "found.pt", weights_only=False)


def reference(folder: Path, layout: str) -> Reference:
    stored = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
    del stored["classifier.nonlinearity.5.weight"]
    for tensor in stored.values():
        tensor.requires_grad_()
    return Reference(stored, 3, 1e-5, layout == "interleaved", 16)


def test_outputs_and_gradients_are_those_of_the_equations(used) -> None:
    """Within 1e-6 in float64, texts of two lengths in one batch; no id has another logit than its own."""
    folder, layout, _, found = used
    equations = reference(folder, layout)
    given = torch.load(folder / "batch.pt")
    losses = []
    for row, length in enumerate(LENGTHS):
        expected = equations.logits(given["tokens"][row, :length].tolist())
        torch.testing.assert_close(found["logits"][row, :length], expected, **EQUAL)
        labels = given["labels"][row, :length]
        losses.append(F.cross_entropy(expected, labels, ignore_index=-100, reduction="sum"))
        documents = [-1] * LENGTH
        causal = equations.logits(given["tokens"][row].tolist(), documents)
        torch.testing.assert_close(found["causal"][row], causal, **EQUAL)
    loss = sum(losses) / (given["labels"] != -100).sum()
    torch.testing.assert_close(found["loss"], loss, **EQUAL)
    loss.backward()
    gradients = {name: value.grad for name, value in equations.state.items()}
    assert found["gradients"].keys() == gradients.keys() == found["recomputed"].keys()
    for name, expected in gradients.items():
        assert expected.abs().max() > 1e-6, name
        torch.testing.assert_close(found["gradients"][name], expected, **EQUAL, msg=name)
        torch.testing.assert_close(found["recomputed"][name], expected, **EQUAL, msg=name)


def test_every_weight_is_read_and_other_ways_to_ask_give_the_same(used) -> None:
    folder, layout, _, found = used
    assert not any(found["report"].values()) and found["tied"]
    assert found["config"]["position_heads"] == layout and found["config"]["layer_norm_eps"] == 1e-5
    seen = torch.load(folder / "batch.pt")["padding"] == 1
    for way in ("added mask", "embedded", "tuple", "saved"):
        torch.testing.assert_close(found[way][seen], found["logits"][seen], **EQUAL, msg=way)
    torch.testing.assert_close(found["resized"][..., :VOCABULARY][seen], found["logits"][seen], **EQUAL)
    torch.testing.assert_close(found["base"], found["states"], **EQUAL)
    assert found["hidden_states"] == 3 and not found["attentions"][1, ..., LENGTHS[1] :].any()
    for dtype, near in ((torch.float16, 0.05), (torch.bfloat16, 0.5)):
        assert found[f"{dtype} parameters"] == {dtype}
        assert (found[str(dtype)][seen] - found["logits"][seen]).abs().max() < near


def test_it_is_fine_tuned_saved_and_loaded_again(used) -> None:
    """A new head on all other weights; each parameter gets a gradient."""
    for kind, shape in (("SequenceClassification", (2, 3)), ("TokenClassification", (2, LENGTH, 3))):
        one = used[3][f"AutoModelFor{kind}"]
        assert one["shape"] == shape and one["gradients"]
        assert all(name.startswith("head.") for name in one["missing"]) and len(one["missing"]) == 4
        assert torch.equal(one["before"], one["again"])


def test_what_it_cannot_do_is_refused(used) -> None:
    found = used[3]
    assert "99 tokens is longer than max_position_embeddings = 16" in found["too long"]
    assert "unknown arguments: position_ids (known: output_hidden_states," in found["positions"]
    assert found["nothing"] == "give input_ids or inputs_embeds, and not both"


def test_kielo_reads_what_transformers_saved(used) -> None:
    """Bit for bit the weights that were exported, and the way to cut positions into heads."""
    folder, layout, out, _ = used
    assert (out / "saved" / "modeling_ltg_bert.py").is_file()
    config = families.read_hf_config(out / "saved")
    assert config == families.read_hf_config(folder) and config.position_heads == layout
    model = families.build_model(config)
    load_model_weights(dict(model.named_parameters()), out / "saved", config)
    exported = load_file(folder / "model.safetensors")
    for name, value in stored_tensors(model).items():
        assert torch.equal(value, exported[name]), name


def test_the_code_needs_torch_and_transformers_alone(exports) -> None:
    """And the standard library; it begins with its licence."""
    for folder in exports.values():
        text = (folder / "modeling_ltg_bert.py").read_text(encoding="utf-8")
        assert "Apache License, Version 2.0" in text.partition('"""')[0]
        found = re.findall(r"^(?:from|import) (\w+)", text, re.M)
        assert set(found) == {"math", "torch", "transformers", "typing"}
