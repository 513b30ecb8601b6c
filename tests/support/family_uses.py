"""Loading, generation, saving and LoRA of a family over two ranks: the same as in one process, or refused.

Over tensor ranks, and with LoRA over context ranks, too.

    python tests/support/family_uses.py FAMILY ...

prints ``yes``, ``refused: <the message>``, ``wrong: <what>`` or ``error: <what was raised>`` for each.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import decoder_families as families
import family_axes
import gradient_rule as rule
import peft
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from zero_init import zero_init_by_transformers

SECTION: dict[str, object] = {"parallel": {"tensor": 2}}
CONTEXT: dict[str, object] = {"parallel": {"context": 2}}
CLOSE = 2e-4
"""Of float32, relative to the largest logit."""
NEW_TOKENS = 3


def single(kind: str) -> nn.Module:
    """In float32, as scripts load it."""
    return families.made(kind).float().eval()


def config(zero: int = 0, section: dict[str, object] = SECTION) -> dict[str, object]:
    """A config of steps of one micro-batch."""
    return dense.config(zero, torch.float32, section) | {"gradient_accumulation_steps": 1}


def engine_of(model: nn.Module, zero: int = 0, section: dict[str, object] = SECTION) -> Any:
    import deepspeed

    rule.without_extension()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config(zero, section))[0]


def saved_plain(kind: str, folder: Path) -> nn.Module:
    """The model, which is saved in ``folder``, too."""
    plain = single(kind)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "plain")
    dist.barrier()
    return plain


def loaded(kind: str, folder: Path) -> nn.Module:
    from ds_npu.engine.pretrained import from_pretrained

    plain = saved_plain(kind, folder)
    model: nn.Module = from_pretrained(type(plain), folder / "plain", config())
    return model.float().eval()


def difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    gap = float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())
    return "yes" if gap <= CLOSE else f"wrong: by {gap:.1e}"


def load(kind: str, folder: Path) -> str:
    ids = tiny_models.tokens(2, 9)
    model = loaded(kind, folder)
    engine = engine_of(model)
    engine.eval()
    with torch.no_grad():
        return difference(engine(input_ids=ids).logits, single(kind)(input_ids=ids).logits)


def generate(kind: str, folder: Path) -> str:
    ids = tiny_models.tokens(2, 6)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    engine = engine_of(single(kind))
    engine.eval()
    found = engine.module.generate(ids, **options)
    return "yes" if found.equal(single(kind).generate(ids, **options)) else "wrong: other tokens"


def save(kind: str, folder: Path) -> str:
    plain = single(kind)
    engine = engine_of(single(kind))
    engine.save_pretrained(str(folder / "saved"))
    dist.barrier()
    again = type(plain).from_pretrained(folder / "saved", torch_dtype=torch.float32).state_dict()
    other = [name for name, each in plain.state_dict().items() if not each.equal(again[name])]
    return f"wrong: {other[0]}" if other else "yes"


def adapted(kind: str) -> nn.Module:
    torch.manual_seed(7)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(single(kind), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model.train()


def same_step(engine: Any, plain: nn.Module) -> str:
    """The loss and the gradients of a step of ``engine`` against those of ``plain``."""
    ids = tiny_models.tokens(2, 9)
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    engine.train()
    loss = family_axes.loss_of(engine, {"input_ids": ids, "labels": ids})
    engine.backward(loss)
    gradients = rule.reduced_gradients(engine, engine.module)
    named = dict(engine.module.named_parameters())
    for name, weight in plain.named_parameters():
        if weight.requires_grad and weight.grad is not None:
            whole = dense.assembled(engine.topology, named[name], gradients[name])
            largest = max(float(weight.grad.abs().max()), 1e-3)
            if not float((whole - weight.grad).abs().max()) <= 10 * CLOSE * largest:
                return f"wrong: the gradient of {name}"
    return difference(loss, expected)


def lora(kind: str, folder: Path) -> str:
    return same_step(engine_of(copy.deepcopy(adapted(kind))), adapted(kind))


def lora_in_context(kind: str, folder: Path) -> str:
    return same_step(engine_of(copy.deepcopy(adapted(kind)), section=CONTEXT), adapted(kind))


def zero_init(kind: str, folder: Path) -> str:
    """Loaded by transformers under zero.Init."""
    plain = saved_plain(kind, folder)
    with zero_init_by_transformers(config(3)):
        model = type(plain).from_pretrained(folder / "plain", dtype=torch.float32)
    if not all(hasattr(weight, "ds_tensor") for weight in model.parameters()):
        return "wrong: not partitioned"
    return same_step(engine_of(model, 3), plain.train())


USES: dict[str, Callable[[str, Path], str]] = {
    "load": load,
    "generate": generate,
    "save": save,
    "lora": lora,
    "lora, context": lora_in_context,
    "zero.Init": zero_init,
}


def outcome(use: Callable[[str, Path], str], kind: str, folder: Path) -> str:
    try:
        return use(kind, folder)
    except Exception as error:
        return family_axes.refused(error, "")


def print_outcomes(kind: str, folder: str) -> None:
    for name, use in USES.items():
        found = outcome(use, kind, Path(folder) / name)
        if dist.get_rank() == 0:
            print(f"{kind} {name}: {found}", flush=True)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            partial(run_on_ranks, 2, print_outcomes, each, directory)()
