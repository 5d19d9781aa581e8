"""A whole job on a machine without a network: from text and weights that were brought to the report."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kielo.artifact.manifest import read_manifest
from kielo.cli.main import main
from tests.launch.hub import COMMIT, TEXT

# The namespace has a loopback of its own, which is down at first; ranks of one node need it.
LOOPBACK_UP = (
    "import fcntl, socket, struct, sys, os\n"
    "flags = struct.pack('16sh14x', b'lo', 1)\n"  # 1: IFF_UP, 0x8914: SIOCSIFFLAGS (linux/if.h, sockios.h)
    "fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, flags)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
)
UNSHARE = shutil.which("unshare")  # asked here: the hub's fixture finds no program
RECIPE = """
name = "mine"
language = "et"
[tokenizer]
path = "hf:org/one"
[model]
weights = "hf:org/one"
[[corpus.sources]]
name = "wiki"
huggingface_dataset = "org/one"
huggingface_subset = "et"
clean = false
[dataset]
sequence_length = 32
heldout_share = 0.2
[train]
tokens = 2048
tokens_per_step = 256
"""


def weights_on_hub(folder: Path) -> dict[str, bytes]:
    """Path on the hub → bytes: transformers' own files of a tiny model and its tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    ))  # fmt: skip
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=304,
        max_position_embeddings=64, eos_token_id=0, bos_token_id=0,
    )).save_pretrained(folder)  # fmt: skip
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def without_network(*command: str) -> subprocess.CompletedProcess:
    """Runs Python with arguments in a network namespace that has its own loopback and nothing else."""
    return subprocess.run(
        [UNSHARE, "-rn", sys.executable, "-c", LOOPBACK_UP, *command],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("ranks", (1, 2))
def test_a_job_without_a_network(tmp_path, monkeypatch, hub, ranks):
    """Two ranks too. The same job without the folder is refused, which shows that there is no network."""
    if UNSHARE is None or without_network("-c", "").returncode:
        pytest.skip("no network namespace may be made here")
    monkeypatch.chdir(tmp_path)
    hub.files = weights_on_hub(tmp_path / "theirs") | {"datasets/et/0.jsonl": TEXT.encode()}
    Path("mine.toml").write_text(RECIPE)
    assert main(["prefetch", "mine.toml", "--to", "brought"]) == 0
    shutil.move("brought", "carried")
    refused = without_network("-m", "kielo", "run", "mine.toml", "--only", "corpus")
    assert refused.returncode == 1, refused.stderr
    monkeypatch.setenv("KIELO_PREFETCHED", str(tmp_path / "carried"))
    done = without_network("-m", "kielo", "run", "mine.toml", "--ranks", str(ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/mine"
    (source,) = read_manifest(run / "corpus").counts["sources"]
    assert source["origin"] == f"Hugging Face dataset org/one et revision {COMMIT}"
    assert (run / "report.html").is_file()
