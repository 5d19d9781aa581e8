"""Launch scripts of Megatron-LM, Megatron-DeepSpeed and transformers as recipes. Values are by hand."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from kielo.recipe import from_script
from kielo.recipe.complaints import field_of
from kielo.recipe.errors import KieloError
from kielo.recipe.from_script.megatron_rules import read_megatron
from kielo.recipe.from_script.recipe_writer import cluster_of, script_recipe
from kielo.recipe.from_script.script_arguments import NOT_HONOURED, TranslatedScript, table
from kielo.recipe.from_script.trainer_rules import read_trainer
from kielo.recipe.phases import steps_of_run
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Recipe
from tests.house.checks import ROOT

SCRIPTS = Path(__file__).parent / "scripts"
LLAMA = """
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 4 --hidden-size 256 \
--num-attention-heads 8 \\
  --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 64 \
--train-iters 100 \\
  --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --bf16 --swiglu --normalization RMSNorm \
--disable-bias-linear \\
  --position-embedding-type rope --vocab-size 1000"""
CLM = """
torchrun --nproc_per_node 4 run_clm.py --model_type llama --block_size 256 --max_steps 100 \
--learning_rate 1e-3 \\
  --config_overrides hidden_size=128,intermediate_size=256,num_hidden_layers=2,num_attention_heads=4,\
vocab_size=999 \\
  --tokenizer_name owner/name --train_file a.jsonl b.jsonl --per_device_train_batch_size 8"""


def translated(text: str, folder: Path, **variables: str) -> TranslatedScript:
    path = folder / "script.sh"
    path.write_text(text, encoding="utf-8")
    return (read_trainer if "run_clm" in text else read_megatron)(path, variables)


def recipe(found: TranslatedScript, folder: Path) -> Recipe:
    file = folder / "recipe.toml"
    file.write_text(script_recipe("", {"name": "run", "language": "fi"}, found), encoding="utf-8")
    return read_recipe(file).recipe


def of_file(name: str, folder: Path) -> Recipe:
    read = read_trainer if name in ("llammas_7b.sh", "smugri_7b.sh") else read_megatron
    return recipe(read(SCRIPTS / name, {}), folder)


# --- Whole scripts


def test_llmjp_with_a_blend_and_z_loss(tmp_path) -> None:
    found = of_file("llmjp_172b.sh", tmp_path)
    assert found.model.model_type == "llama" and found.model.num_key_value_heads == 16
    assert (found.layout.tensor, found.layout.pipeline, found.layout.recompute) == (4, 16, "none")
    assert found.train.tokens_per_step == 1728 * 4096 and found.train.z_loss == 1e-4
    assert steps_of_run(found) == 292_812
    assert [phase.tokens // (1728 * 4096) for phase in found.phases] == [290_812, 2_000]
    assert round(found.train.warmup_share * 290_812) == 2_000
    assert found.dataset.mixture["ja_wiki_0000"] == 2_563_804_308 and len(found.corpus.sources) == 5
    assert [source.tokens for source in found.corpus.sources][3] == "/corpus/v3/en/wiki_0000_text_document"


def test_bloom_with_deepspeed_in_a_here_document(tmp_path) -> None:
    found = of_file("bloom_176b.slurm", tmp_path)
    assert found.model.model_type == "bloom" and found.model.intermediate_size == 4 * 14336
    assert found.train.batch_ramp is not None and found.train.batch_ramp.tokens == 9_765_625 * 2048
    assert found.train.batch_ramp.first_tokens_per_step == 192 * 2048 and found.layout.recompute == "full"
    assert found.layout.pipeline_layers == (5, *[6] * 10, 5) and found.layout.zero == 1
    assert sum(phase.tokens for phase in found.phases) == pytest.approx(220_000_000 * 2048, rel=1e-5)
    assert found.phases[1].learning_rate == 6e-6 and found.train.hidden_dropout == 0.1
    assert found.dataset.mixture == {"web": 0.7, "all": 0.3} and found.seed == 42


def test_llammas_under_accelerate_and_deepspeed(tmp_path) -> None:
    found = of_file("llammas_7b.sh", tmp_path)
    assert found.model.weights == found.tokenizer.path == "hf:meta-llama/Llama-2-7b-hf"
    assert found.train.tokens_per_step == 16 * 2 * 8 * 1024 and steps_of_run(found) == 19_080
    assert (found.train.schedule, found.train.final_learning_rate_ratio) == ("linear", 0.1)
    # DeepSpeed moves parameters to the CPU at stage 3 only.
    assert (found.layout.zero, found.layout.cpu_offload, found.layout.recompute) == (2, False, "full")
    assert found.corpus.sources[1].huggingface_subset == "en" and found.dataset.mixture_unit == "documents"


def test_smugri_under_fsdp(tmp_path) -> None:
    found = of_file("smugri_7b.sh", tmp_path)
    assert (found.layout.zero, found.train.precision, found.train.weight_decay) == (3, "bf16", 0.05)
    assert found.train.final_learning_rate_ratio == pytest.approx(0.1) and found.train.warmup_share == 0.01
    assert recipe(read_trainer(SCRIPTS / "smugri_7b.sh", {"NODES": "2"}), tmp_path).train.tokens_per_step == (
        2 * 8 * 16 * 2 * 2048
    )


@pytest.mark.parametrize("name", ["poro_34b.sh", "viking_7b.sh", "lumi_140b.sh", "estonian_70b.sh"])
def test_every_argument_is_in_the_recipe_with_its_line(name) -> None:
    found = read_megatron(SCRIPTS / name, {})
    text = script_recipe("", {"name": "run", "language": "fi"}, found)
    for number, line in enumerate((SCRIPTS / name).read_text().splitlines(), 1):
        for word in line.split("#")[0].split():
            if word.startswith("--"):
                assert f"#   line {number}: {word.partition('=')[0].rstrip(')' + chr(34))}" in text
    assert "it belongs to no argument" not in text and "does not know" not in text


def test_the_differences_to_the_shipped_recipes_are_explained() -> None:
    """docs/from_other_engines.md has the table that docs/script_differences.py writes."""
    of = runpy.run_path(str(ROOT / "docs" / "script_differences.py"))
    page = (ROOT / "docs" / "from_other_engines.md").read_text(encoding="utf-8")
    assert of["table"]() in page


# --- Single arguments

# Arguments in place of LLAMA's → keys.
MEGATRON = {
    "--use-rotary-position-embeddings": {"model.model_type": "llama"},
    "--qk-layernorm": {"model.model_type": "qwen3"},
    "--add-qkv-bias": {"model.model_type": "qwen2", "model.mlp_bias": False},
    "--window-size 127,0": {"model.model_type": "mistral", "model.sliding_window": 128},
    "--ffn-hidden-size 700": {"model.intermediate_size": 700},
    "--micro-batch-size=4": {"train.micro_batch_sequences": 4},
    "--lr-decay-style constant": {"train.final_learning_rate_ratio": 1.0},
    "--lr-decay-iters 200 --lr-decay-style linear": {"train.final_learning_rate_ratio": 0.55},
    "--lr-decay-style WSD --lr-wsd-decay-iters 20": {"train.schedule": "wsd", "train.decay_share": 0.2},
    "--lr-decay-style WSD --lr-decay-iters 110 --lr-wsd-decay-iters 20 --lr-wsd-decay-style linear": {
        "train.schedule": "wsd", "train.decay_share": 0.1, "train.final_learning_rate_ratio": 0.55},
    "--lr-decay-style WSD --lr-decay-iters 200 --lr-wsd-decay-iters 20": {
        "train.schedule": "linear", "train.final_learning_rate_ratio": 1.0},
    "--train-tokens 1638400": {"train.tokens": 1_638_400},
    "--train-tokens 6553600": {"train.tokens": 100 * 64 * 512},
    "--lr-decay-tokens 6553600 --lr-decay-iters 100 --lr-decay-style linear": {
        "train.final_learning_rate_ratio": 0.55},
    "--lr-warmup-tokens 327680": {"train.warmup_share": 0.1},
    "--lr-warmup-iters 10": {"train.warmup_share": 0.1},
    "--lr-warmup-fraction .05": {"train.warmup_share": 0.05},
    "--rotary-base 500000": {"model.rope_theta": 500_000.0},
    "--rope-theta 500000": {"model.rope_theta": 500_000.0},
    "--num-key-value-heads 2": {"model.num_key_value_heads": 2},
    "--group-query-attention": {"model.num_key_value_heads": 1},
    "--normalization rmsnorm": {"model.model_type": "llama"},
    "--ds-sequence-parallel-size 2": {"layout.context": 2},
    "--tensor-model-parallel-size 2": {"layout.tensor": 2, "layout.sequence_parallel": False,
                                       "model.vocab_multiple": 256},
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": {
        "layout.pipeline_schedule": "interleaved_1f1b", "layout.pipeline_stages_per_rank": 2},
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1": {
        "layout.pipeline_layers": [1, 3]},
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2": {
        "layout.recompute": "full", "layout.recompute_every_layers": 2},
    "--recompute-granularity selective --recompute-modules layernorm core_attn": {
        "layout.recompute": "norms"},
    "--use-torch-fsdp2": {"layout.zero": 3},
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads": {"layout.zero": 2},
    "--fp8-format hybrid --first-last-layers-bf16": {
        "train.precision": "fp8", "train.fp8.kept_in_bf16": ["layers.0", "layers.3"]},
    "--grad-reduce-in-bf16": {"train.gradient_reduce_dtype": "bf16"},
    "--data-path 1. a 1e+2 b": {"dataset.mixture": {"a": 1.0, "b": 100.0}},
    "--data-path 1 /a/x_text_document 3 /b/x_text_document": {"dataset.mixture": {"a_x": 1, "b_x": 3}},
    "--skip-train-iteration-range 3-5 7-7": {"train.skip_steps": [[3, 5], [7, 7]]},
    "--split 90,10,0": {"dataset.heldout_share": 0.1},
    "--eval-iters 2": {"train.heldout_sequences": 128},
    "--reset-attention-mask": {"dataset.mask_documents": True},
    "--optimizer adam": {"train.weight_decay": 0.01, "train.adam_beta2": 0.999, "train.hidden_dropout": 0.1,
                         "model.intermediate_size": 640, "seed": 1234},
}  # fmt: skip
TRAINER = {
    "--gradient_accumulation_steps 3": {"train.tokens_per_step": 8 * 3 * 4 * 256},
    "--warmup_steps 10": {"train.warmup_share": 0.1},
    "--lr_scheduler_type cosine": {"train.schedule": "cosine", "train.final_learning_rate_ratio": 0.0},
    "--lr_scheduler_type constant --warmup_steps 9": {"train.warmup_share": 0.0,
                                                      "train.final_learning_rate_ratio": 1.0},
    "--fsdp 'hybrid_shard auto_wrap offload'": {
        "layout.zero": 3, "layout.replicate": 0, "layout.cpu_offload": True},
    "--gradient-checkpointing": {"layout.recompute": "full"},
    "--bf16 False": {"train.precision": "fp32"},
    "--torch_dtype bfloat16": {"train.precision": "bf16"},
    "--max_steps -1 --num_train_epochs 2": {"dataset.max_epochs": 2.0},
    "--save_total_limit 1": {"checkpoint.keep_newest": 2},
    "--validation_split_percentage 5": {"dataset.heldout_share": 0.05},
    "--seed 7": {"seed": 7, "train.weight_decay": 0.0, "train.adam_beta2": 0.999, "model.hidden_size": 128},
}  # fmt: skip


@pytest.mark.parametrize(
    ("base", "given", "expected"),
    [(LLAMA, *case) for case in MEGATRON.items()] + [(CLM, *case) for case in TRAINER.items()],
)
def test_an_argument_becomes_keys(base, given, expected, tmp_path) -> None:
    found = translated(f"{base} {given}\n", tmp_path)
    for key, value in expected.items():
        assert found.keys[key][0] == (pytest.approx(value) if isinstance(value, float) else value)
    recipe(found, tmp_path)  # it is valid
    word = given.split()[0].partition("=")[0]
    assert [row for row in found.rows if row.argument.startswith(word) and row.place and row.meaning]


def test_steps_of_a_batch_schedule_are_phases(tmp_path) -> None:
    """100 iterations: 16 of 32 sequences up to 262,144 tokens, then 84 of 64."""
    found = recipe(translated(f"{LLAMA} --step-batch-size-schedule 0:32 262144:64\n", tmp_path), tmp_path)
    assert [(phase.tokens, phase.tokens_per_step) for phase in found.phases] == [
        (16 * 32 * 512, 32 * 512), (84 * 64 * 512, None),
    ]  # fmt: skip


NOT = {
    "--fp16": (LLAMA.replace("--bf16", ""), "there is no fp16"),
    "--moe-router-topk 2": (LLAMA, "no family has experts"),
    "--lr-decay-style inverse-square-root": (LLAMA, "there is no inverse-square-root"),
    "--optimizer muon": (LLAMA, "the recipe has AdamW"),
    "--no-such-argument 3": (
        LLAMA,
        "changes the run, perhaps: Kielo does not know this argument of Megatron",
    ),
    "--load /other": (LLAMA, "the line `weights`"),
    "--data-args-path absent.txt": (LLAMA, "this file is not here"),
    "stray": (LLAMA.replace("--lr-decay-style cosine", "--swiglu"), "it belongs to no argument"),
    "--lora_r 8": (CLM, "all weights are trained"),
    "--optim adafactor": (CLM, "the recipe has AdamW"),
}


@pytest.mark.parametrize(("given", "case"), NOT.items(), ids=NOT)
def test_what_is_not_honoured_is_said_with_its_line(given, case, tmp_path) -> None:
    base, why = case
    base = base.replace("pretrain_gpt.py", "pretrain_gpt.py stray") if given == "stray" else f"{base} {given}"
    found = translated(base, tmp_path)
    rows = [row for row in found.rows if row.argument == given]
    assert len(rows) == 1 and rows[0].place and why in rows[0].meaning and rows[0].verdict == NOT_HONOURED


REFUSED = {
    "two precisions": (f"{LLAMA} --fp16", "--bf16 (line 4) and --fp16 (line 5): contradict each other"),
    "two lengths": (f"{LLAMA} --train-samples 9", "--train-iters 100 (line 3) and --train-samples 9"),
    "a batch": (f"{LLAMA} --micro-batch-size 3", "64 sequences are no multiple of 3 × 16 data-parallel"),
    "devices": (f"{LLAMA} --tensor-model-parallel-size 3", "16 devices of the job are no multiple of 3"),
    "heads": (f"{LLAMA} --num-attention-heads 7", "256 is no multiple of 7"),
    "stages": (f"{LLAMA} --pipeline-model-parallel-size 8", "4 is no multiple of 8"),
    "a ramp": (LLAMA.replace("--train-iters 100", "--train-samples 6400") + " --rampup-batch-size 16 5 640",
               "do not arrive at 64"),
    "no number": (f"{LLAMA} --lr fast", "line 5: --lr: 'fast' is no number"),
    "a flag with a value": (f"{LLAMA} --sequence-parallel 1", "takes no value"),
    "no value": (f"{LLAMA} --min-lr --tp-comm-overlap", "--min-lr: has no value"),
    "a variable": (f"{LLAMA} --min-lr $MIN", "line 5: --min-lr: $MIN has no value in the script. Fix: --v"),
    "a command's output": (f"A=$(cat x)\n{LLAMA} --min-lr $A", "$(cat x) is known only when it runs"),
    "no model": (f"{LLAMA} --normalization LayerNorm", "--model-type llama for the nearest"),
    "no training": ("echo --num-layers 3 --lr 1 --seq-length 9\n", "no command has arguments of a training"),
    "two trainings": (f"{LLAMA}\n{LLAMA} --seed 2\n", "2 commands train (lines 2, 7)"),
    "a blend": (f"{LLAMA} --data-path 1 a 2", "is no list of WEIGHT PREFIX"),
    "DeepSpeed elsewhere": (f"{LLAMA} --deepspeed_config absent.json", "absent.json is not here"),
    "DeepSpeed's batch": (
        "echo '{\"train_batch_size\": 32}' > ds.json" + f"{LLAMA} --deepspeed_config ds.json",
        "DeepSpeed's file has 32",
    ),
    "DeepSpeed's precision": (
        'cat > ds.json <<E\n{"fp16": {"enabled": true}}\nE' + f"{LLAMA} --deepspeed_config ds.json",
        "another precision",
    ),
    "two precisions of transformers": (f"{CLM} --bf16 --fp16", "contradict each other"),
    "devices of transformers": (CLM.replace("--nproc_per_node 4", ""), "--nproc_per_node of torchrun"),
    "a configuration elsewhere": (
        CLM.replace("torchrun", "accelerate launch --config_file a.yaml"), "a.yaml is not here",
    ),
    "accumulation": (
        "cat > a.yaml <<E\ngradient_accumulation_steps: 2\nnum_processes: 4\nE"
        + CLM.replace("torchrun", "accelerate launch --config_file a.yaml")
        + " --gradient_accumulation_steps 3",
        "have 2. Fix: one value",
    ),
    "an override": (f"{CLM} --config_overrides n_embd=3,colour=4", "'colour=4' is no key of [model]"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), REFUSED.values(), ids=REFUSED)
def test_a_contradiction_is_refused_by_its_line(text, expected, tmp_path) -> None:
    with pytest.raises(KieloError, match="Fix: ") as refusal:
        translated(text + "\n", tmp_path)
    assert expected in str(refusal.value) and "script.sh" in str(refusal.value)


def test_a_variable_from_outside(tmp_path) -> None:
    assert translated(f"{LLAMA} --min-lr $MIN\n", tmp_path, MIN="2e-4").keys[
        "train.final_learning_rate_ratio"
    ][0] == pytest.approx(0.2)


def test_a_configuration_here_is_taken_and_the_rest_of_it_said(tmp_path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "head_dim": 24,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 999,
        "attention_bias": True, "rms_norm_eps": 1e-6, "initializer_range": 0.01, "embedding_multiplier": 12,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}, "use_cache": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = re.sub(r"--config_overrides \S+", f"--config_name {tmp_path}", CLM)
    found = translated(f"{command}\n", tmp_path)
    model = recipe(found, tmp_path).model
    assert (model.head_dim, model.attention_bias, model.rms_norm_eps) == (24, True, 1e-6)
    assert (model.initializer_range, model.rope_theta) == (0.01, 5000.0)
    assert model.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert [row.argument for row in found.rows if row.changes_the_run] == ["embedding_multiplier"]


# Lines of #SBATCH and a launcher → nodes and devices of a node.
MACHINES = {
    "one launcher a node": ("gpus-per-node=8 ntasks-per-node=1 nodes=4", "python", (4, 8)),
    "a task a device": ("ntasks-per-node=8 nodes=4", "srun python", (4, 8)),
    "a launcher in a task": ("ntasks-per-node=1 nodes=4", "srun torchrun --nproc_per_node 8", (4, 8)),
    "devices of the job": ("gpus=32 nodes=4", "srun python", (4, 8)),
    "devices of the job in one task a node": ("gpus=a100:32 ntasks-per-node=1 nodes=4", "python", (4, 8)),
    "processes of MPI": ("nodes=4", "mpirun -np 32 python", (4, 8)),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "launcher", "expected"), MACHINES.values(), ids=MACHINES)
def test_the_devices_of_a_job(lines, launcher, expected, tmp_path) -> None:
    head = "".join(f"#SBATCH --{line}\n" for line in lines.split())
    command = LLAMA.replace("torchrun --nproc_per_node 8 --nnodes 2", launcher).lstrip()
    machine = translated(f"{head}{command}\n", tmp_path).machine
    assert (machine.nodes, machine.devices_per_node) == expected


# --- The tables


@pytest.mark.parametrize("engine", ["megatron", "trainer"])
def test_a_table_names_keys_and_rules_that_exist(engine) -> None:
    arguments = table(engine)
    files = Path(from_script.__path__[0]).glob(f"{engine}_*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert not [key for _, key in arguments.same.values() if field_of(key, Recipe) is None]
    assert not [name for name in arguments.translated if f'"{name}"' not in source]
    assert set(arguments.also.values()) <= {*arguments.same, *arguments.translated}
    assert set(arguments.defaults) <= set(arguments.same)
    assert not arguments.names() & set(arguments.not_honoured)


def test_a_queue_names_its_cluster() -> None:
    assert (cluster_of("standard-g"), cluster_of("gpu"), cluster_of("")) == ("lumi_g", None, None)


def test_the_recipe_is_toml_with_any_text(tmp_path) -> None:
    """Quotes, brackets and signs of control in a script stay inside of strings and comments."""
    found = translated(
        LLAMA + " --data-path '/a/\"]\n[x' --wandb-project $'a\\tb' --no-such $'\\x1b'\n", tmp_path
    )
    text = script_recipe("", {"name": "run", "language": "fi"}, found)
    assert tomllib.loads(text)["corpus"]["sources"][0]["name"]
