"""`kielo chat` beside transformers: greedy answers, the history, probabilities, and another checkpoint."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kielo.cli.main import main
from tests.tokenizer.test_text_frame import write_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY = ["--temperature", "0", "--tokens", "12"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_tokenizer(tmp_path / "hf", "llama 3")
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=261, bos_token_id=1, eos_token_id=0, initializer_range=0.4, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """chat(MODEL, lines, *flags) → what was printed: (stdout, stderr)."""

    def call(model: Path, lines: list[str], *flags: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        assert main(["chat", str(model), *flags]) == 0
        return capsys.readouterr()

    return call


def greedy(folder: Path, ids: list[int], tokens: int = 12) -> tuple[str, torch.Tensor]:
    """The likeliest answer by transformers alone, and its tokens with the token that ends it."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([ids])
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False,
        eos_token_id=0, pad_token_id=0,
    )[0, len(ids) :]  # fmt: skip
    return tokenizer.decode(written, skip_special_tokens=True), written


def test_plain_turns_continue_one_text(folder, chat) -> None:
    """The second prompt follows the first and its answer, on a line of its own."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, _ = greedy(folder, tokenizer("lumi").input_ids)
    second, _ = greedy(folder, tokenizer(f"lumi{first}\nöösel").input_ids)
    alone, _ = greedy(folder, tokenizer("öösel").input_ids)
    out, err = chat(folder, ["lumi", "", "öösel", "/reset", "öösel", "/quit", "never"], *GREEDY)
    assert out == f"{first}\n{second}\n{alone}\n" and second != alone
    assert "plain continuation; " in err


def test_a_chat_template_lays_out_the_turns(folder, chat) -> None:
    """As `apply_chat_template` does; --plain leaves the template out."""
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer, messages, expected = AutoTokenizer.from_pretrained(folder), [], ""
    for prompt in ("lumi", "kaks"):
        messages.append({"role": "user", "content": prompt})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer, _ = greedy(folder, ids)
        messages.append({"role": "assistant", "content": answer})
        expected += f"{answer}\n"
    out, err = chat(folder, ["lumi", "kaks"], *GREEDY)
    assert out == expected and "its chat template; " in err
    plain, _ = greedy(folder, tokenizer("lumi").input_ids)
    out, err = chat(folder, ["lumi"], *GREEDY, "--plain")
    assert out == f"{plain}\n" and "plain continuation; " in err


def test_each_token_has_its_probability(folder, chat) -> None:
    """By one forward of transformers over prompt and answer."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("lumi").input_ids
    _, answer = greedy(folder, ids, 3)
    with torch.no_grad():
        chances = model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1].softmax(-1)
    out, _ = chat(folder, ["lumi", "/probabilities"], "--temperature", "0", "--tokens", "3")
    rows = [line.split("\t") for line in out.splitlines()[-3:]]
    for row, token, of_token in zip(rows, answer, chances, strict=True):
        best = of_token.topk(3).values.tolist()
        assert row[1] == f"{of_token[token]:.1%}" == f"{best[0]:.1%}"
        assert [cell.split()[-1] for cell in row[2:]] == [f"{share:.1%}" for share in best[1:]]


def test_a_command_changes_the_temperature_or_is_refused(folder, chat) -> None:
    lines = ["/compare 3", "/nothing", "/temperature hot", "/temperature 0", "lumi", "/compare 3", "/help"]
    out, err = chat(folder, lines, "--tokens", "12")
    answer, _ = greedy(folder, AutoTokenizer.from_pretrained(folder)("lumi").input_ids)
    assert out.startswith(f"{answer}\n/probabilities ")
    for said in ("no answer yet", "/nothing: no such command", "/temperature hot: give", "has one model"):
        assert said in err


def test_ctrl_c_stops_an_answer_and_not_the_program(folder, chat, monkeypatch) -> None:
    answer, tokens = greedy(folder, AutoTokenizer.from_pretrained(folder)("lumi").input_ids)
    asked: list[str] = []

    def interrupt(self: object, text: str, stream_end: bool = False) -> None:
        asked.append(text)
        if not stream_end:
            raise KeyboardInterrupt

    monkeypatch.setattr("kielo.evaluate.generate.Printer.on_finalized_text", interrupt)
    out, _ = chat(folder, ["lumi", "/probabilities"], *GREEDY)
    assert answer.startswith("".join(asked[:1])) and 1 <= len(out.splitlines()) - 1 < len(tokens)


def test_a_checkpoint_is_compared_with_another(finished, chat, tmp_path) -> None:
    """The answer of step 10 is that of its export."""
    run = finished[0].parent / "run"
    step = run / "train" / "checkpoints" / "step_00000010"
    assert main(["export", str(step), "--to", str(tmp_path / "ten")]) == 0
    shutil.copytree(run / "hf", tmp_path / "newest")
    expected = []
    for folder in (tmp_path / "newest", tmp_path / "ten"):
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        text = tokenizer("Kord", add_special_tokens=False).input_ids
        ids = torch.tensor([[model.config.bos_token_id or model.config.eos_token_id, *text]])
        new = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(new, skip_special_tokens=True))
    flags = ("--temperature", "0", "--tokens", "4")
    out, err = chat(run, ["Kord", "/compare 10", "/compare 11", "/compare"], *flags)
    assert f"the model is {step}\n" in err  # both answers may be the same
    flat = [text.replace("\n", "") for text in expected]
    assert out.splitlines()[-2:] == [f"this\t{flat[0]}", f"step 10\t{flat[1]}"]
    assert err.count("no such checkpoint. Fix: /compare STEP with one of 10, 20") == 2


def test_an_encoder_has_no_conversation(tmp_path, capsys) -> None:
    assert main(["chat", "demo_estonian_bert"]) == 1
    assert "an encoder writes no answers. Fix: kielo generate" in capsys.readouterr().err
