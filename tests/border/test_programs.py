"""Other people's programs read what Kielo exports: `make test-border` installs them and asks for these tests.

Each program runs in an interpreter of its own, from another folder, without Kielo.
"""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.cli.main import main
from kielo.evaluate.contender import load_checkpoint, token_stream_bits
from kielo.models import families
from kielo.resolve.resolved import read
from kielo.tokenizer.load import encode
from kielo.verify.round_trip import verify_round_trip
from tests.border.test_models import FAMILIES
from tests.cli.test_instructions import SMALL, write_chats
from tests.cli.test_run import write_recipe
from tests.models.equality import batch, pair

PLACE = os.environ.get("KIELO_TEST_BORDER")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PLACE is None, reason="asked for by make test-border"),
]
# One program's fp32 beside another's: other kernels add in another order.
TOLERANCE = 1e-4


def program(script: str, folder: Path, *arguments: Any, old_transformers: bool = False) -> Any:
    """Run a script with arguments in `folder`, and return the JSON of the last line that it prints."""
    place = Path(PLACE or "").resolve()
    python = place / "programs" / "bin" / "python"
    assert python.exists(), f"{place}: the programs are not there; make border-peers installs them"
    path = str(place / "transformers4") if old_transformers else ""
    assert not path or Path(path, "transformers").is_dir(), f"{path}: transformers 4 is not there"
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [python, "-c", script, *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


LOGITS = """
import json, sys, torch, transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
assert transformers.__version__.startswith("4."), transformers.__version__
out = {}
for name, kind, folder, tokens in json.loads(open(sys.argv[1]).read()):
    load = AutoModelForMaskedLM if kind == "encoder" else AutoModelForCausalLM
    model, found = load.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    with torch.no_grad():
        logits = model.float().eval()(input_ids=torch.tensor(tokens)).logits
    out[name] = {"missing": list(found["missing_keys"]), "logits": logits[:, -1, :8].tolist()}
print(json.dumps(out))
"""


def test_transformers_4_computes_the_same_of_every_family(tmp_path: Path) -> None:
    """The export of each family's model: logits as in the installed transformers, nothing made up."""
    asked, expected = [], {}
    for name in FAMILIES:
        _, theirs = pair(FAMILIES[name], tmp_path / name)
        export = tmp_path / f"{name} again"
        verify_round_trip(f"hf:{tmp_path / name}", keep=export)
        kind = "encoder" if families.FAMILIES[name].is_encoder else "decoder"
        load = AutoModelForMaskedLM if kind == "encoder" else AutoModelForCausalLM
        again = load.from_pretrained(export, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            expected[name] = again(input_ids=batch()[0]).logits[:, -1, :8]
        asked.append((name, kind, str(export), batch()[0].tolist()))
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    found = program(LOGITS, tmp_path, tmp_path / "asked.json", old_transformers=True)
    assert set(found) == set(FAMILIES)
    for name, answer in found.items():
        assert answer["missing"] == [], name
        np.testing.assert_allclose(
            answer["logits"], expected[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a small run of a decoder, with its export."""
    recipe = write_recipe(tmp_path_factory.mktemp("a decoder"))
    assert main(["run", str(recipe), "--to", "export"]) == 0
    return recipe.parent / "run"


LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
model = HFLM(pretrained=sys.argv[1], dtype="float32", device="cpu", batch_size=1, max_length=int(sys.argv[2]))
asked = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(sys.argv[3:])]
print(json.dumps(model.loglikelihood_rolling(asked, disable_tqdm=True)))
"""


def test_lm_eval_measures_what_kielo_measures(run: Path, tmp_path: Path) -> None:
    """Log-likelihoods of texts of one window, in nats: those of the checkpoint that was exported."""
    resolved = read(run / "resolved.toml")
    contender = load_checkpoint(newest_checkpoint(run), resolved, run / "tokenizer")
    texts = ["Tere, maailm", "Keel on rikas"]
    found = program(LM_EVAL, tmp_path, run / "hf", contender.sequence_length, *texts)
    for text, nats in zip(texts, found, strict=True):
        ids = np.asarray(encode(contender.tokenizer, [text])[0], dtype=np.int64)
        assert len(ids) <= contender.sequence_length
        ours = token_stream_bits(contender, ids) * math.log(2)
        assert -nats == pytest.approx(ours, rel=TOLERANCE), text


TRL = """
import json, sys, torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
folder, to = sys.argv[1:3]
messages = json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder)
config = SFTConfig(output_dir=to, assistant_only_loss=True, max_steps=2, per_device_train_batch_size=2,
                   report_to="none", use_cpu=True, max_length=64, save_strategy="no", learning_rate=1e-2,
                   bf16=False, gradient_checkpointing=False)
trainer = SFTTrainer(model=AutoModelForCausalLM.from_pretrained(folder).float(), args=config,
                     train_dataset=Dataset.from_list([{"messages": messages}] * 4),
                     processing_class=tokenizer)
(batch,) = list(trainer.get_train_dataloader())[:1]
loss = trainer.train().training_loss
print(json.dumps({"ids": batch["input_ids"][0].tolist(), "labels": batch["labels"][0].tolist(),
                  "pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id, "loss": loss}))
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """The export of a model that was trained on conversations."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder)
    recipe = write_recipe(folder)
    source = '{name="chats", path="' + str(folder / "my_chats.jsonl") + '", kind="instructions"}'
    sets = [*SMALL.split(), f"corpus.sources=[{source}]", "dataset.sequence_length=64"]
    flags = [part for value in sets for part in ("--set", value)]
    assert main(["run", str(recipe), "--to", "export", *flags]) == 0
    return folder / "run" / "hf"


def test_trl_trains_on_answers_alone(chat_model: Path, tmp_path: Path) -> None:
    """`assistant_only_loss` finds the answers in our template, and padding is no end of a text."""
    messages = [
        {"role": "user", "content": "Mis on keel?"},
        {"role": "assistant", "content": "Keel on rikas."},
    ]
    found = program(TRL, tmp_path, chat_model, tmp_path / "out", json.dumps(messages))
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    learned = [token for token, label in zip(found["ids"], found["labels"]) if label != -100]
    assert "Keel on rikas." in tokenizer.decode(learned) and "Mis" not in tokenizer.decode(learned)
    assert found["pad"] not in (None, found["eos"])
    assert math.isfinite(found["loss"]) and found["loss"] > 0


SENTENCES = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps(model.encode(json.loads(sys.argv[2])).tolist()))
"""


@pytest.mark.parametrize("model_type", ["modernbert", "ltg_bert"])
def test_sentence_transformers_reads_an_encoder(model_type: str, tmp_path: Path) -> None:
    """Mean of the states of a sentence's tokens, as plain transformers gives them for each sentence alone."""
    recipe = write_recipe(tmp_path)
    key = {"modernbert": "model.sliding_window=9", "ltg_bert": "model.position_bucket_size=8"}[model_type]
    sets = [f"model.model_type={model_type}", key, "train.objective=masked_tokens"]
    flags = [part for value in sets for part in ("--set", value)]
    assert main(["run", str(recipe), "--to", "export", *flags]) == 0
    folder, sentences = tmp_path / "run" / "hf", ["Tere, maailm", "Keel"]
    script = SENTENCES
    if model_type == "ltg_bert":
        script = SENTENCES.replace('device="cpu"', 'device="cpu", trust_remote_code=True')
    found = program(script, tmp_path, folder, json.dumps(sentences))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    for sentence, vector in zip(sentences, found, strict=True):
        with torch.no_grad():
            states = model(
                **tokenizer(sentence, return_tensors="pt"), output_hidden_states=True
            ).hidden_states
        assert len(vector) == states[-1].shape[-1]
        base = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state.detach()
        np.testing.assert_allclose(vector, base[0].mean(0), rtol=1e-3, atol=TOLERANCE)
