"""Writes a tiny Llama with a tokenizer, and data sets, as LLaMA-Factory and ms-swift read them.

    python client_inputs.py FOLDER

Run in the client's environment: its transformers writes what it reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system")
WORDS = tuple(f"w{index}" for index in range(56))
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] + ' <|im_end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
ROWS = 32


def write_model(folder: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, additional_special_tokens=["<|im_start|>", "<|im_end|>"], **roles
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
    tokens = {"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **tokens, dtype="float32"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape))
    model.save_pretrained(folder)


def write_data(folder: Path) -> None:
    folder.mkdir()
    numbers = torch.Generator().manual_seed(2)

    def some(count: int) -> str:
        return " ".join(WORDS[index] for index in torch.randint(0, len(WORDS), (count,), generator=numbers).tolist())

    texts = [some(12 + row % 7) for row in range(ROWS)]
    asked = [some(4 + row % 3) for row in range(ROWS)]
    good = [some(5 + row % 5) for row in range(ROWS)]
    bad = [some(4 + row % 4) for row in range(ROWS)]
    talks = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": g}] for a, g in zip(asked, good, strict=True)
    ]
    rows = {
        "pt.json": [{"text": text} for text in texts],
        "sft.json": [{"instruction": a, "output": g} for a, g in zip(asked, good, strict=True)],
        "dpo.json": [{"instruction": a, "chosen": g, "rejected": b} for a, g, b in zip(asked, good, bad, strict=True)],
        "swift_pt.json": [{"messages": [{"role": "assistant", "content": text}]} for text in texts],
        "swift_sft.json": [{"messages": talk} for talk in talks],
        "swift_dpo.json": [{"messages": talk, "rejected_response": b} for talk, b in zip(talks, bad, strict=True)],
    }
    named = {"prompt": "instruction", "response": "output"}
    pair = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    rows["dataset_info.json"] = {
        "tiny_pt": {"file_name": "pt.json", "columns": {"prompt": "text"}},
        "tiny_sft": {"file_name": "sft.json", "columns": named},
        "tiny_dpo": {"file_name": "dpo.json", "ranking": True, "columns": pair},
    }
    for name, content in rows.items():
        (folder / name).write_text(json.dumps(content))


if __name__ == "__main__":
    write_model(Path(sys.argv[1]) / "model")
    write_data(Path(sys.argv[1]) / "data")
