"""The parity check: it holds for the real thing, and finds what is set wrong on purpose."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from kielo.artifact.manifest import read_manifest
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.dataset.batches import Batches
from kielo.models.families import hf_config
from kielo.models.llama.model import Llama, initial_value
from kielo.recipe.errors import KieloError
from kielo.verify.kielo_side import KieloSide
from kielo.verify.parity import ParityOptions, verify_parity
from tests.models.equality import pair
from tests.models.tiny_configs import TINY
from tests.train.tiny_run import resolve, write_tokens

SEED_WITH_BORDER = 4


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    write_tokens(folder / "tokens")
    return folder


def check(
    resolved: Any, folder: Path, checkpoint: Path | None = None, **options: Any
) -> tuple[dict[str, Any], str]:
    """The certificate, and what was printed."""
    printed = io.StringIO()
    console = Console(file=printed, width=140)
    options = ParityOptions(sequence_length=16, **options)
    return verify_parity(resolved, folder, checkpoint, options, console), printed.getvalue()


def with_model(resolved: Any, **changes: Any) -> Any:
    model = resolved.identity.model.model_copy(update=changes)
    return resolved.model_copy(update={"identity": resolved.identity.model_copy(update={"model": model})})


def test_twenty_steps_agree(run_folder: Path) -> None:
    """20 fp32 steps from the initial values, documents masked, z-loss, clipping: losses within 1e-5 at every
    step, settings equal, and the certificate is on disk with a manifest.
    """
    certificate, printed = check(resolve(run_folder), run_folder / "verify")
    assert certificate.passed, printed
    assert certificate.max_relative_loss_difference <= 1e-5
    assert certificate.logits_max_difference <= 1e-5
    assert certificate.gradient_max_relative_difference <= 1e-5
    assert certificate.settings.differing == [] and certificate.first_difference is None
    losses = certificate.losses.ours
    assert len(losses) == 20 and losses[-1] < losses[0]
    settings = certificate.settings.ours
    assert settings["Adam epsilon"] == [1e-8] and len(settings["learning rate of each step"]) == 20
    assert settings["clipping, norm let through"] == pytest.approx(0.5, rel=1e-4)
    on_disk = json.loads((run_folder / "verify" / "parity.json").read_text())
    assert on_disk == json.loads(json.dumps(certificate.content()))
    assert read_manifest(run_folder / "verify").counts["passed"]
    assert "Parity with Hugging Face holds" in printed


@pytest.mark.parametrize(
    ("overrides", "setting", "layer"),
    [
        ({"rope_theta": 5000.0}, "RoPE base", "layers.0.attention"),
        ({"rms_norm_eps": 1e-3}, "norm epsilon", "layers.0.attention_norm"),
        ({"hidden_act": "gelu"}, None, "layers.0.mlp"),
        ({"adam_epsilon": 1e-4}, "Adam epsilon", None),
        ({"weight_decay": 0.0}, "weight decay", None),
        ({"max_gradient_norm": 10.0}, "clipping, largest gradient norm", None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_named(
    run_folder: Path, tmp_path: Path, overrides: dict[str, Any], setting: str | None, layer: str | None
) -> None:
    """One thing set wrong on one side: the check fails and names just that setting and the layer
    where it starts.
    """
    certificate, printed = check(
        resolve(run_folder), tmp_path / "verify", steps=3, hugging_face_overrides=overrides
    )
    first = certificate.first_difference
    assert not certificate.passed
    assert (first.settings[0] if first.settings else None) == setting, first
    assert first.layer == layer, first
    for name in filter(None, (setting, layer)):
        assert name in printed.rpartition("NO parity")[2]


@pytest.mark.parametrize("variant", ["bloom", "gpt2", "gemma2", "gpt_neox"])
def test_other_families_agree(run_folder: Path, tmp_path: Path, variant: str) -> None:
    """Fused and transposed tensors, windows, ALiBi, learned positions, dropout in the config; documents
    masked; random weights, biases too, that each side reads from Hugging Face's files by its own code.
    """
    ours, _ = pair(TINY[variant], tmp_path / "hf")
    model = ours.config.model_dump() | {"weights": f"hf:{tmp_path / 'hf'}"}
    resolved = with_model(resolve(run_folder), **model)
    certificate, printed = check(resolved, tmp_path / "verify", steps=3, sequences_per_step=8)
    assert certificate.passed, printed
    assert certificate.logits_max_difference <= 1e-5
    assert certificate.gradient_max_relative_difference <= 1e-4
    settings = certificate.settings.theirs
    assert settings["weight decay"] == certificate.settings.ours["weight decay"]
    assert set(settings["weight decay"]) == {name for name, _ in ours.named_parameters()}
    assert ("RoPE base" in settings) == (variant in ("gemma2", "gpt_neox"))


@pytest.mark.parametrize("variant", ["gpt2", "opt"])
def test_learned_positions_begin_anew_in_each_document(
    run_folder: Path, tmp_path: Path, variant: str
) -> None:
    """As transformers has them in documents that are given alone; those of earlier runs go on."""
    ours, _ = pair(TINY[variant], tmp_path / "hf")
    resolved = with_model(
        resolve(run_folder), **ours.config.model_dump() | {"weights": f"hf:{tmp_path / 'hf'}"}
    )
    for restart in (True, None):
        dataset = resolved.identity.dataset.model_copy(update={"restart_positions": restart})
        identity = resolved.identity.model_copy(update={"dataset": dataset})
        side = resolved.model_copy(update={"identity": identity})
        certificate, printed = check(side, tmp_path / f"verify_{restart}", steps=3, sequences_per_step=8)
        assert certificate.passed, printed
        assert certificate.logits_max_difference <= 1e-5


@pytest.mark.parametrize(
    ("variant", "overrides", "setting", "layer"),
    [
        ("bloom", {"layer_norm_epsilon": 1e-1}, "norm epsilon", "embed_norm"),
        ("gpt_neox", {"rope_theta": 500.0}, "RoPE base", "layers.0.attention"),
        ("gemma2", {"attn_logit_softcapping": 0.01}, None, "layers.0.attention"),
    ],
)
def test_a_wrong_setting_is_named_in_other_families(
    run_folder: Path, tmp_path: Path, variant: str, overrides: dict[str, Any], setting: str | None, layer: str
) -> None:
    """Parity from initial values, with a border of documents in what is traced, names it: modules that are
    fused on the other side do not hide where it starts, nor does another arrangement of the documents.
    """
    ours, _ = pair(TINY[variant], tmp_path / "hf")
    resolved = with_model(resolve(run_folder, seed=SEED_WITH_BORDER), **ours.config.model_dump())
    assert len(first_documents(resolved).unique()) > 1
    certificate, printed = check(resolved, tmp_path / "right", steps=1)
    assert certificate.passed, printed
    certificate, _ = check(resolved, tmp_path / "wrong", steps=2, hugging_face_overrides=overrides)
    first = certificate.first_difference
    assert not certificate.passed
    assert (first.settings[0] if first.settings else None) == setting, first
    assert first.layer == layer, first


def test_losses_that_part_by_rounding_alone(run_folder: Path, tmp_path: Path) -> None:
    """A learning rate at which no two engines stay together: losses part by far more than the tolerance, no
    further than transformers from itself, and the certificate passes and says so.
    """
    certificate, printed = check(resolve(run_folder, learning_rate=0.3), tmp_path / "verify")
    rounding = certificate.losses.rounding_differences
    assert certificate.max_relative_loss_difference > 1e-4 > 1e-6 > certificate.losses.relative_differences[0]
    assert len(rounding) == 20 and rounding == sorted(rounding) and rounding[0] < 1e-6
    assert certificate.passed and certificate.first_difference is None, printed
    assert "by rounding alone" in printed and f"from itself by up to {rounding[-1]:.1e}" in printed


def test_losses_that_part_by_more_than_rounding(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that no setting shows, a thousandth of the weights a step: everything of step 1 is equal,
    rounding is measured, and the certificate is refused at step 2.
    """
    step = KieloSide.step

    def decays_more(side: KieloSide, *arguments: Any) -> dict[str, float]:
        measured = step(side, *arguments)
        for weight in side.parameters().values():
            weight.mul_(0.999)
        return measured

    monkeypatch.setattr(KieloSide, "step", decays_more)
    certificate, printed = check(resolve(run_folder), tmp_path / "verify", steps=3)
    assert not certificate.passed and certificate.first_difference.step == 2, printed
    assert max(certificate.losses.rounding_differences) < 1e-6
    assert "Losses part at step 2" in printed


def first_documents(resolved: Any) -> torch.Tensor:
    """Document numbers of the first micro-batch of two sequences of 16."""
    identity, placement = resolved.identity, resolved.placement
    phase = identity.phases[0].model_copy(update={"sequence_length": 16, "sequences_per_step": 4})
    batches = Batches(Path(placement.tokens_folder), identity.seed, phase, 16, placement.end_of_text_id, True)
    return torch.from_numpy(batches.step(1, 0, 1).documents[:2])


def test_checkpoint_tied_and_stretched(run_folder: Path, tmp_path: Path) -> None:
    """A checkpoint's weights are equal, with tied embeddings and Llama-3 RoPE scaling;
    plain causal attention.
    """
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8}  # fmt: skip
    resolved = with_model(
        resolve(run_folder, mask_documents=False), tie_word_embeddings=True, rope_scaling=rope
    )
    model = resolved.identity.model
    weights = {
        f"model/{name}": initial_value(name, p.shape, model, 11)
        for name, p in Llama(model).named_parameters()
    }
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(5, weights, {})
    checkpoint = checkpointer.settle()
    certificate, printed = check(resolved, tmp_path / "verify", checkpoint=checkpoint, steps=3)
    assert certificate.passed, printed
    assert certificate.settings.theirs["head tied to embedding"]
    assert "step_00000005" in certificate.weights


def test_hugging_face_weights_load_alike(run_folder: Path, tmp_path: Path) -> None:
    """Weights in a Hugging Face folder, read by us and, on their own path, by transformers."""
    resolved = resolve(run_folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**hf_config(resolved.identity.model))).save_pretrained(tmp_path / "hf")
    resolved = with_model(resolved, weights=f"hf:{tmp_path / 'hf'}")
    certificate, printed = check(resolved, tmp_path / "verify", steps=2)
    assert certificate.passed, printed


def test_unknown_override_is_refused(run_folder: Path, tmp_path: Path) -> None:
    """A misspelt override would check nothing: it is refused by name, and nothing is left behind."""
    with pytest.raises(KieloError, match="'rope_tehta' is no key of a llama config"):
        check(resolve(run_folder), tmp_path / "verify", steps=1, hugging_face_overrides={"rope_tehta": 1.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ours", "theirs", "first"),
    [
        (
            {"attention_bias": True},
            {"attention_bias": False},
            r"layers\.0\.self_attn\.k_proj\.bias and 7 more",
        ),
        ({"mlp_bias": True}, {"mlp_bias": False}, r"layers\.0\.mlp\.down_proj\.bias and 5 more"),
        ({}, {"num_hidden_layers": 1}, r"layers\.1\.input_layernorm\.weight and 8 more"),
    ],
)
def test_tensors_that_transformers_model_lacks_are_named(
    run_folder: Path, tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], first: str
) -> None:
    """Neither an end without words nor a comparison without them."""
    resolved = with_model(resolve(run_folder), **ours)
    with pytest.raises(KieloError, match=rf"{first}, which transformers' LlamaForCausalLM .* lacks"):
        check(resolved, tmp_path / "verify", steps=1, hugging_face_overrides=theirs)
