"""Uses exported LTG-BERTs as a program without Kielo does: `python -P use_ltg_bert.py FOLDER OUT …`.

In: exports, and FOLDER/batch.pt with the arguments of a forward. Out: of each OUT/found.pt, what was
computed, and OUT/saved, what `save_pretrained` wrote.
"""

import sys

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

sys.modules["kielo"] = None  # as where it is not installed


def loaded(kind, folder, **options):
    return kind.from_pretrained(folder, trust_remote_code=True, **options)


def use(folder, out):
    batch = torch.load(f"{folder}/batch.pt")
    tokens, padding = batch["tokens"], batch["padding"]
    found = {"version": transformers.__version__, "code": transformers.__file__}

    model, report = loaded(AutoModelForMaskedLM, folder, dtype=torch.float64, output_loading_info=True)
    found["report"] = {key: sorted(value) for key, value in report.items()}
    found["tied"] = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    found["config"] = loaded(AutoConfig, folder).to_dict()
    model.train()
    output = model(tokens, padding, labels=batch["labels"], output_hidden_states=True, output_attentions=True)
    output.loss.backward()
    found["logits"], found["loss"] = output.logits.detach(), output.loss.detach()
    found["hidden_states"], found["attentions"] = len(output.hidden_states), output.attentions[0].detach()
    found["gradients"] = {name: value.grad.clone() for name, value in model.named_parameters()}

    model.gradient_checkpointing_enable()
    model.zero_grad()
    model(tokens, padding, labels=batch["labels"]).loss.backward()
    found["recomputed"] = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.gradient_checkpointing_disable()
    model.eval()

    with torch.no_grad():
        length = tokens.shape[1]
        causal = torch.ones(length, length).tril().expand(len(tokens), -1, -1)
        found["causal"] = model(tokens, causal).logits
        added = torch.zeros(len(tokens), 1, 1, length).masked_fill(padding[:, None, None] == 0, float("-inf"))
        found["added mask"] = model(tokens, added).logits
        words = model.get_input_embeddings()(tokens)
        found["embedded"] = model(inputs_embeds=words, attention_mask=padding).logits
        found["tuple"] = model(tokens, padding, return_dict=False)[0]
        found["base"] = loaded(AutoModel, folder, dtype=torch.float64)(tokens, padding).last_hidden_state
        found["states"] = output.hidden_states[-1]

        model.save_pretrained(f"{out}/saved")
        again = loaded(AutoModelForMaskedLM, f"{out}/saved", dtype=torch.float64)
        found["saved"] = again(tokens, padding).logits
        again.resize_token_embeddings(tokens.max() + 100)
        found["resized"] = again(tokens, padding).logits
        for dtype in (torch.float16, torch.bfloat16):
            narrow = loaded(AutoModelForMaskedLM, folder, dtype=dtype)
            found[str(dtype)] = narrow(tokens, padding).logits
            found[f"{dtype} parameters"] = {value.dtype for value in narrow.parameters()}

    for kind in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        torch.manual_seed(1)
        tuned, report = loaded(kind, folder, num_labels=3, hidden_dropout_prob=0.3, output_loading_info=True)
        labels = torch.zeros(len(tokens), dtype=torch.int64)
        labels = labels if kind is AutoModelForSequenceClassification else torch.zeros_like(tokens)
        tuned.train()
        output = tuned(tokens, padding, labels=labels)
        output.loss.backward()
        tuned.save_pretrained(f"{out}/tuned")
        tuned.eval()
        again = loaded(kind, f"{out}/tuned").eval()
        found[kind.__name__] = {
            "missing": sorted(report["missing_keys"]),
            "shape": tuple(output.logits.shape),
            "gradients": all(value.grad.abs().max() > 0 for value in tuned.parameters()),
            "before": tuned(tokens, padding).logits.detach(),
            "again": again(tokens, padding).logits.detach(),
        }

    for name, arguments in {
        "too long": {"input_ids": torch.zeros(1, 99, dtype=torch.int64)},
        "positions": {"input_ids": tokens, "position_ids": tokens},
        "nothing": {},
    }.items():
        try:
            model(**arguments)
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    torch.save(found, f"{out}/found.pt")


for pair in zip(sys.argv[1::2], sys.argv[2::2]):
    use(*pair)
