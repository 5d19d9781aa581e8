"""Arguments of transformers' Trainer under accelerate, DeepSpeed or torchrun, as keys of a recipe."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kielo.recipe.from_script.accelerate_settings import Accelerate, read_accelerate
from kielo.recipe.from_script.bash_reader import read_script
from kielo.recipe.from_script.deepspeed_settings import fill, read_deepspeed, settings_of
from kielo.recipe.from_script.script_arguments import (
    TRANSLATED,
    Machine,
    TranslatedScript,
    Translation,
    read_launcher,
    split_command,
    table,
    text_of_file,
    training_command,
)
from kielo.recipe.from_script.token_blends import source_names
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.read import read_first_language, recipe_choices, shipped_recipes
from kielo.recipe.sections import Model

_SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "vocab_size")  # fmt: skip
# Names of GPT-2's configuration → the recipe's.
_OVERRIDES = {
    "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_positions": "max_position_embeddings",
}  # fmt: skip
# Other names of config.json → the recipe's.
_OF_CONFIG = _OVERRIDES | {
    "layer_norm_eps": "layer_norm_epsilon", "activation_function": "hidden_act",
    "ffn_dim": "intermediate_size", "rotary_emb_base": "rope_theta",
}  # fmt: skip
_TAKEN = {
    *_SHAPE[1:], "head_dim", "max_position_embeddings", "rms_norm_eps", "layer_norm_epsilon", "rope_theta",
    "rope_scaling", "rotary_pct", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act",
    "use_parallel_residual", "initializer_range",
}  # fmt: skip
# Keys of config.json that change no training of a decoder.
_IDLE = re.compile(
    r"_.*|model_type|architectures|(torch_)?dtype|transformers_version|use_cache|pretraining_tp|summary_.*"
    r"|task_specific_params|\w+_token_id|auto_map|id2label|label2id"
)
_USUAL_BLOCK = 1024  # of run_clm.py


def read_trainer(path: Path, variables: dict[str, str], model_type: str | None = None) -> TranslatedScript:
    """Translate the training command of a script. Raise KieloError for what contradicts itself."""
    script, arguments = read_script(path, variables), table("trainer")
    command = training_command(script, arguments, path)
    launcher, words = split_command(command)
    to = Translation(path, script, arguments, "transformers")
    accelerate, rest = read_accelerate(to, launcher)
    machine = _machine(read_launcher(rest, to), accelerate)
    to.read(words, is_dashed=False)
    to.finish()
    if to.is_on("--bf16") and to.is_on("--fp16"):
        to.refuse("contradict each other. Fix: leave one of them out", "--bf16", "--fp16")
    if to.has("--deepspeed") and to.has("--fsdp"):
        to.refuse("contradict each other. Fix: leave one of them out", "--deepspeed", "--fsdp")
    settings = read_deepspeed(to, "--deepspeed")
    if accelerate.deepspeed_file:
        settings = _deepspeed_of_accelerate(to, accelerate.deepspeed_file)
    to.finish()
    to.take_same()
    fill(to, settings)
    clip = accelerate.settings.get("gradient_clipping")
    if isinstance(clip, int | float) and not to.has("--max_grad_norm"):
        to.put("train.max_gradient_norm", clip, origin="gradient_clipping of accelerate")
    _model(to, model_type)
    _batch(to, machine, {**accelerate.settings, **settings})
    _schedule(to, settings)
    _layout(to, accelerate, settings)
    _precision(to, accelerate, settings)
    _text(to)
    _run(to, command.variables)
    to.finish()
    return TranslatedScript(to.keys, to.comments, to.rows(), machine, script.sbatch.get("partition", ""))


def _machine(found: Machine, accelerate: Accelerate) -> Machine:
    nodes, devices = accelerate.number("num_machines"), accelerate.number("num_processes")
    nodes = nodes or found.nodes or 1
    if devices:
        return Machine(nodes, devices // nodes)
    return Machine(nodes, found.devices_per_node)


def _deepspeed_of_accelerate(to: Translation, name: str) -> dict[str, Any]:
    text = text_of_file(to.script, to.path, name)
    try:
        return settings_of(to, json.loads(text or ""), f"{name}: ")
    except ValueError:
        to.refuse(f"{name} is no JSON here, and it has settings of the run. Fix: put it beside the script")
        return {}


def _model(to: Translation, model_type: str | None) -> None:
    weights = to.value("--model_name_or_path")
    tokenizer = to.value("--tokenizer_name") or weights or to.value("--config_name")
    if tokenizer:
        is_here = (Path(tokenizer) / "tokenizer.json").is_file()
        names = [
            name for name in ("--tokenizer_name", "--model_name_or_path", "--config_name") if to.has(name)
        ][:1]
        to.put("tokenizer.path", tokenizer if is_here else f"hf:{tokenizer}", *names)
    if weights:
        to.put("model.weights", f"hf:{weights}", "--model_name_or_path")
        _known_shape(to, f"hf:{weights}")
        for name in ("--config_name", "--config_overrides", "--model_type"):
            to.drop(name, "config.json of the weights says it")
        return
    family = model_type or to.value("--model_type") or "gpt2"
    found: dict[str, Any] = {}
    if to.has("--config_name"):
        family, found = _config(to, to.value("--config_name"), family)
    if family not in FAMILIES:
        to.refuse(f"there is no family {family}. Fix: {', '.join(FAMILIES)}", "--model_type", "--config_name")
        return
    to.put("model.model_type", family, "--model_type")
    for one in filter(None, (to.value("--config_overrides") or "").split(",")):
        name, sign, value = one.partition("=")
        key = _OVERRIDES.get(name.strip(), name.strip())
        if not sign or key not in Model.model_fields:
            to.refuse(f"{one!r} is no key of [model]. Fix: {', '.join(_SHAPE[1:])}", "--config_overrides")
            continue
        try:
            found[key] = json.loads(value.lower())
        except ValueError:
            found[key] = value
    if (
        "intermediate_size" not in found
        and "hidden_size" in found
        and family in ("gpt2", "bloom", "gpt_neox", "opt")
    ):
        found["intermediate_size"] = 4 * found["hidden_size"]
    for key, value in found.items():
        to.put(f"model.{key}", value, "--config_overrides", "--config_name")
    if "num_hidden_layers" not in found:
        to.add_default("shape", "changes the model: the script does not say it; set [model], or params")


def _known_shape(to: Translation, weights: str) -> None:
    """Take the shape of weights that a shipped recipe names, for plans on a machine without them."""
    for name, path in shipped_recipes().items():
        if weights not in path.read_text(encoding="utf-8"):
            continue
        choice = (recipe_choices(name) or ("",))[0]
        model = read_first_language(name, [choice] if choice else []).recipe.model
        if model.weights == weights:
            for key in _SHAPE:
                if key in model.model_fields_set:
                    to.keys[f"model.{key}"] = (getattr(model, key), f"for plans, of the shipped {name}")
            if model.model_fields_set.issuperset(_SHAPE[1:5]) and "vocab_size" in model.model_fields_set:
                return
    to.comments.setdefault("model", []).append("The weights' config.json says the rest; plans need it too.")


def _config(to: Translation, name: str, family: str) -> tuple[str, dict[str, Any]]:
    """Return the family and keys of a configuration in a folder or file here."""
    place = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not place.is_file():
        to.drop("--config_name", "changes the model: its config.json is not here; set [model]")
        return family, {}
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        to.refuse("is no config.json. Fix: a folder with one", "--config_name")
        return family, {}
    rope = content.pop("rope_parameters", None) or {}  # of transformers 5
    if "rope_theta" in rope:
        content["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        content["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    keys = {_OF_CONFIG.get(key, key): value for key, value in content.items() if value is not None}
    for key, value in keys.items():
        if key not in _TAKEN and not _IDLE.fullmatch(key):
            to.add_default(
                key, f"changes the model, perhaps: config.json has {json.dumps(value)}; set [model]"
            )
    return str(content.get("model_type", family)), {key: keys[key] for key in keys if key in _TAKEN}


# --- Batch and schedule


def _batch(to: Translation, machine: Machine, settings: Mapping[str, Any]) -> None:
    if not to.has("--block_size"):
        to.add_default("--block_size", f"run_clm.py takes at most {_USUAL_BLOCK:,}, and so does the recipe")
    length = to.value("--block_size", _USUAL_BLOCK)
    to.put("dataset.sequence_length", length, "--block_size")
    micro = to.value("--per_device_train_batch_size", 8)
    given = to.value("--gradient_accumulation_steps")
    other = settings.get("accumulation", settings.get("gradient_accumulation_steps"))
    other = None if other == "auto" else other
    if given is not None and other is not None and int(other) != given:
        to.refuse(
            f"the settings of accelerate or DeepSpeed have {other}. Fix: one value",
            "--gradient_accumulation_steps",
        )
    steps = int(given or other or 1)
    if machine.devices is None:
        size = settings.get("batch")
        if not isinstance(size, int):
            to.refuse(
                "the batch needs the number of devices, which is unknown. Fix: --nproc_per_node of torchrun "
                "or --num_processes of accelerate launch"
            )
            return
    else:
        size = micro * steps * machine.devices
        if isinstance(settings.get("batch"), int) and settings["batch"] != size:
            to.refuse(
                f"{micro} × {steps} × {machine.devices} devices make {size}, and DeepSpeed's file has "
                f"{settings['batch']}. Fix: one value",
                "--per_device_train_batch_size",
                "--gradient_accumulation_steps",
            )
    to.keys["train.tokens_per_step"] = (
        size * length,
        f"{micro} × {steps} × {machine.devices} devices × {length}",
    )
    said = (
        f"train.tokens_per_step = {size * length:_}: {micro} × {steps} × {machine.devices} devices × {length}"
    )
    if to.has("--gradient_accumulation_steps"):
        to.say("--gradient_accumulation_steps", TRANSLATED, said)
    else:
        to.add_default("the batch", said, TRANSLATED)


def _schedule(to: Translation, settings: Mapping[str, Any]) -> None:
    step = to.keys.get("train.tokens_per_step", (0, ""))[0]
    steps = to.value("--max_steps", -1)
    if steps > 0 and step:
        to.put("train.tokens", steps * step, "--max_steps")
        to.drop(
            "--num_train_epochs", "--max_steps decides; dataset.max_epochs refuses to read a text too often"
        )
    else:
        to.drop("--max_steps", "the text decides")
        to.put("dataset.max_epochs", to.value("--num_train_epochs", 3.0), "--num_train_epochs")
        to.add_default("train.tokens", "the text decides: all of it, dataset.max_epochs times", TRANSLATED)
    ratio, warm = to.value("--warmup_ratio", 0.0), to.value("--warmup_steps", 0.0)
    if warm >= 1 and steps > 0:
        share = warm / steps
    elif warm >= 1:
        share = 0.0
        to.drop(
            "--warmup_steps",
            "changes the schedule: the number of steps follows from the text; set train.warmup_share",
        )
    else:
        share = warm or ratio
    kind = str(settings.get("scheduler") or to.value("--lr_scheduler_type", "linear"))
    if kind == "constant":
        share = 0.0
    if share >= 1:
        to.refuse(
            "the warm-up is longer than the run. Fix: fewer steps",
            "--warmup_steps",
            "--warmup_ratio",
            "--max_steps",
        )
    given = [name for name in ("--warmup_steps", "--warmup_ratio") if to.value(name, 0.0)]
    if warm < 1 or steps > 0:
        to.put("train.warmup_share", float(f"{share:.10g}"), *(given or ["--warmup_steps"]))
    for name in ("--warmup_steps", "--warmup_ratio"):
        if not to.value(name, 0.0):
            to.drop(name, "no warm-up by it")
    _shape(to, kind, steps)


def _shape(to: Translation, kind: str, steps: int) -> None:
    name = "--lr_scheduler_type"
    try:
        options = json.loads(to.value("--lr_scheduler_kwargs", "{}"))
    except ValueError:
        to.refuse("is no JSON. Fix: '{\"min_lr_rate\": 0.1}'", "--lr_scheduler_kwargs")
        return
    peak = to.keys["train.learning_rate"][0]
    end = options.get("min_lr", options.get("lr_end", to.value("--scheduler_lr_end", 0.0)))
    ratio = options.get("min_lr_rate", end / peak if peak else 0.0)
    schedules = {
        "linear": ("linear", 0.0), "WarmupDecayLR": ("linear", 0.0), "cosine": ("cosine", 0.0),
        "WarmupCosineLR": ("cosine", 0.0), "constant": ("linear", 1.0),
        "constant_with_warmup": ("linear", 1.0),
        "WarmupLR": ("linear", 1.0), "polynomial": ("linear", ratio), "cosine_with_min_lr": ("cosine", ratio),
        "cosine_warmup_with_min_lr": ("cosine", ratio),
        "warmup_stable_decay": ("wsd", options.get("min_lr_ratio", 0.0)),
    }  # fmt: skip
    schedule, final = schedules.get(kind, ("linear", 0.0))
    to.put("train.schedule", schedule, name)
    to.put(
        "train.final_learning_rate_ratio",
        float(f"{final:.10g}"),
        "--scheduler_lr_end",
        "--lr_scheduler_kwargs",
    )
    if kind not in schedules:
        to.drop(name, f"changes the schedule: there is no {kind}")
    elif to.has(name):
        to.say(name, TRANSLATED, f"train.final_learning_rate_ratio = {final:g}")
    if kind == "polynomial" and options.get("power", 1) != 1:
        to.drop("--lr_scheduler_kwargs", "changes the schedule: the line is straight")
    if kind.startswith("Warmup"):
        to.add_default(kind, "changes the warm-up: DeepSpeed's is logarithmic by default, Kielo's linear")
    if schedule == "wsd" and steps > 0 and options.get("num_decay_steps"):
        to.put(
            "train.decay_share", float(f"{options['num_decay_steps'] / steps:.10g}"), "--lr_scheduler_kwargs"
        )
        to.add_default(
            "warmup_stable_decay", "changes the schedule: the decay is linear, by default a cosine there"
        )


# --- Layout and precision


def _layout(to: Translation, accelerate: Accelerate, settings: Mapping[str, Any]) -> None:
    words = " ".join(to.value("--fsdp", ())).replace(",", " ").lower().split()
    zero, hybrid, offload = accelerate.zero, accelerate.is_hybrid, accelerate.offloads
    if words and words != ["true"]:
        levels = {
            "full_shard": 3,
            "hybrid_shard": 3,
            "shard_grad_op": 2,
            "hybrid_shard_zero2": 2,
            "no_shard": 1,
        }
        own = next((levels[word] for word in words if word in levels), 3)
        if zero is not None and zero != own and accelerate.engine == "fsdp":
            to.refuse(
                f"accelerate's settings have another strategy (layout.zero = {zero}). Fix: one of them",
                "--fsdp",
            )
        zero, hybrid, offload = own, any("hybrid" in word for word in words), "offload" in words
    elif words:
        zero = 3
    if settings.get("zero") is not None:
        zero = max(1, int(settings["zero"]))
        offload = (
            settings.get("offload") == "cpu" or zero == 3 and settings.get("offload_parameters") == "cpu"
        )
    to.put("layout.zero", zero or 1, "--fsdp")
    if hybrid:
        to.put("layout.shard", accelerate.per_node or 8, "--fsdp")
        to.put("layout.replicate", 0, "--fsdp")
    if offload:
        to.put("layout.cpu_offload", True, "--fsdp")
        to.add_default(
            "offload", "layout.cpu_offload: parameters, gradients and optimiser state are on the CPU"
        )
    names = [name for name in ("--gradient_checkpointing", "--activation_checkpointing") if to.has(name)]
    is_on = any(map(to.is_on, names)) or accelerate.recomputes
    if is_on or names:
        to.put("layout.recompute", "full" if is_on else "none", *names, origin="the launcher's settings")


def _precision(to: Translation, accelerate: Accelerate, settings: Mapping[str, Any]) -> None:
    mixed, file = accelerate.precision, settings.get("precision")
    own = next((name for name in ("bf16", "fp16") if to.is_on(f"--{name}")), "")
    found = [one for one in (own, mixed, file) if one]
    if len(set(found)) > 1:
        to.refuse(
            f"two precisions: {' and '.join(dict.fromkeys(found))}. Fix: one precision", "--bf16", "--fp16"
        )
    dtype = str(to.value("--torch_dtype", "")).replace("torch.", "")
    precision = found[0] if found else {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")
    if precision == "fp16":
        to.add_default("fp16", "changes the run: there is no fp16; the recipe trains in bf16")
    to.put(
        "train.precision", {"fp32": "fp32", "fp8": "fp8"}.get(precision, "bf16"), "--bf16", "--torch_dtype"
    )
    if dtype:
        to.say("--torch_dtype", TRANSLATED, "parameters stay in fp32")
    to.drop("--fp16", "there is no fp16; the recipe trains in bf16" if to.is_on("--fp16") else "off")


# --- Text and run


def _text(to: Translation) -> None:
    places: list[dict[str, Any]] = []
    names: list[str] = []
    for name in ("--train_file", "--train_path"):
        if to.has(name):
            given = to.value(name)
            given = given if isinstance(given, tuple) else tuple(given.split(","))
            places += [_place(one, name == "--train_path") for one in given if one]
            names.append(name)
    if to.has("--dataset_name"):
        place = {"huggingface_dataset": to.value("--dataset_name")}
        if to.has("--dataset_config_name"):
            place["huggingface_subset"] = to.value("--dataset_config_name")
        places.append(place)
        names += ["--dataset_name", "--dataset_config_name"]
    if not places:
        return
    ids = ["_".join(str(part) for part in place.values()).replace("*", "").strip("/") for place in places]
    short = source_names(ids)
    sources = [{"name": short[key], **place, "clean": False} for key, place in zip(ids, places, strict=True)]
    to.put("corpus.sources", sources, *names)
    shares = [float(one) for one in re.findall(r"[\d.]+", to.value("--interleave_probs", ""))]
    if shares:
        if len(shares) != len(sources):
            to.refuse(
                f"{len(shares)} shares for {len(sources)} texts. Fix: one for each", "--interleave_probs"
            )
            return
        mixture = {source["name"]: share for source, share in zip(sources, shares, strict=True)}
        to.put("dataset.mixture", mixture, "--interleave_probs")
        to.put("dataset.mixture_unit", "documents", "--interleave_probs")
    if to.has("--validation_split_percentage"):
        share = to.value("--validation_split_percentage") / 100
        if not 0 < share < 0.5:
            to.refuse("is no share below half. Fix: 5", "--validation_split_percentage")
            return
        to.put("dataset.heldout_share", share, "--validation_split_percentage")


def _place(given: str, may_be_dataset: bool) -> dict[str, Any]:
    """Return the key of a text: a file, or OWNER/NAME:SUBSET of the hub."""
    found = re.fullmatch(r"([\w.-]+/[\w.-]+):([\w./-]+)", given)
    if found is None or not may_be_dataset:
        return {"path": given}
    return {"huggingface_dataset": found[1], "huggingface_subset": found[2]}


def _run(to: Translation, variables: Mapping[str, str]) -> None:
    kind = to.value("--optim", "adamw_torch")
    usual = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adamw")
    if kind in usual:
        to.put("train.optimiser", "adamw", "--optim")
    else:
        to.drop("--optim", f"changes the training: there is no {kind}; the recipe has AdamW")
    if to.has("--save_total_limit"):
        to.put("checkpoint.keep_newest", max(2, to.value("--save_total_limit")), "--save_total_limit")
    logs = " ".join(to.value("--report_to", ("none",))).replace(",", " ").split()
    project = variables.get("WANDB_PROJECT", "") or "huggingface"
    if "wandb" in logs or "all" in logs:
        to.put("train.wandb", project, "--report_to")
    elif to.has("--report_to"):
        to.say("--report_to", TRANSLATED, "train.tensorboard is on by default")
    if to.has("--output_dir"):
        folder = to.given["--output_dir"].text.partition(" ")[2]
        if folder and "$" not in folder:
            to.comments.setdefault("", []).append(f'folder = "{folder}/kielo"  # --output_dir')
        to.drop("--output_dir", "a run is stored in runs/NAME, or in the line `folder`")
