"""The gradient rule for Hugging Face models in pipeline stages, with the real engine and nothing but its config."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import gradient_rule as rule
import peft
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist
from expert_balance import Recorded
from gradient_rule import CLIP, LR
from torch import nn

from ds_npu.models.logits import IGNORED_LABEL

EXACT, SINGLE = dense.EXACT, dense.SINGLE
SAMPLES, ACCUMULATION, LENGTH, BLOCKS = 4, 2, 10, 4


def model_of(
    family: str, dtype: torch.dtype, adapters: dict | None = None, checkpointing: bool = False, **changes: object
) -> nn.Module:
    """A tiny model; ``adapters``: of PEFT's LoraConfig; ``checkpointing``: each block is computed again in backward."""
    blocks = "n_layer" if family == "gpt2" else "num_hidden_layers"
    model = tiny_models.tiny(family, torch.float32, **{blocks: BLOCKS} | changes)
    if adapters:
        torch.manual_seed(7)
        model = peft.get_peft_model(model, peft.LoraConfig(**adapters))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.to(dtype).train()


def batches(dp: int) -> list[list[dict[str, torch.Tensor]]]:
    """[ACCUMULATION][dp]: batches in which samples have few, many, or (the third) no labels, and some padding."""
    found = []
    tokens = tiny_models.tokens(SAMPLES * ACCUMULATION * dp, LENGTH).view(ACCUMULATION, dp, SAMPLES, LENGTH)
    for step in range(ACCUMULATION):
        found.append([])
        for rank in range(dp):
            labels, mask = tokens[step, rank].clone(), torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
            labels[0, :4], labels[2] = IGNORED_LABEL, IGNORED_LABEL
            mask[1, 7 + step :], labels[1, 7 + step :] = 0, IGNORED_LABEL
            found[-1].append({"input_ids": tokens[step, rank], "labels": labels, "attention_mask": mask})
    return found


def samples_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: each[index : index + 1] for name, each in batch.items()} for index in range(SAMPLES)]


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype, **more: object) -> torch.Tensor:
    if dtype != torch.float64:
        return model(**batch, **more).loss
    with tiny_models.Float64():
        return model(**batch, **more).loss


def reference(model: nn.Module, dp: int, dtype: torch.dtype, moe: dict | None = None) -> rule.Reference:
    """One step of one process on all batches, which it does one after the other.

    With losses of ``moe`` sample by sample, as they are means over micro-batches, which count by their labels.
    """
    total, recorded = 0.0, Recorded(model)
    with tiny_models.Float64() if dtype == torch.float64 else nullcontext():
        for batch in (each for step in batches(dp) for each in step):
            items = (batch["labels"][:, 1:] != IGNORED_LABEL).sum()
            for part in [batch] if moe is None else samples_of(batch):
                own = (part["labels"][:, 1:] != IGNORED_LABEL).sum()
                loss = model(**part, num_items_in_batch=items).loss
                loss = loss if moe is None else loss + recorded.loss(moe, 1) * own / items
                loss = loss / (ACCUMULATION * dp)
                loss.backward()
                total += loss.item()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    gradients = {name: weight.grad.cpu().double() for name, weight in trained.items()}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    scale = (CLIP / (norm + 1e-6)).clamp(max=1)
    weights = {name: w.detach().cpu().double() - LR * scale * gradients[name] for name, w in trained.items()}
    return rule.Reference(total, gradients, norm.item(), weights)


def engine_of(model: nn.Module, stage: int, dtype: torch.dtype, section: dict, **keys: object):
    import deepspeed

    rule.without_extension()
    config = dense.config(stage, dtype, section)
    config |= {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": ACCUMULATION} | keys
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def over_stages(mine: dict, topology) -> dict:
    """What the ranks along pp have, together."""
    every: list = [None] * topology.size("pp")
    dist.all_gather_object(every, mine, group=topology.group("pp"))
    return {name: value for each in every for name, value in each.items()}


def step_of(engine, dtype: torch.dtype, loss_of=loss_of) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one step, on every rank, and all gradients before it."""
    topology, share = engine.topology, 0.0
    dp = topology.size("dp")
    for index, step in enumerate(batches(dp)):
        batch = {name: each.to(engine.device) for name, each in step[topology.rank("dp")].items()}
        loss = loss_of(engine, batch, dtype)
        share += loss.item() / ACCUMULATION
        engine.backward(loss)
        if index == ACCUMULATION - 1:
            gradients = rule.reduced_gradients(engine, engine.module)
        engine.step()
    named = dict(engine.module.named_parameters())
    whole = {name: dense.assembled(topology, named[name], part).cpu() for name, part in gradients.items()}
    return rule.mean_loss(share / topology.size("cp"), topology), over_stages(whole, topology)


def errors_of_step(engine, dtype: torch.dtype, expected: rule.Reference) -> dense.Errors:
    """The errors of one step of ``engine``, which has every gradient of ``expected``."""
    loss, gradients = step_of(engine, dtype)
    assert gradients.keys() >= expected.gradients.keys()
    norm = float(engine.get_global_grad_norm())
    weights = {name: weight.double() for name, weight in dense.shared(engine.whole_state_dict()).items()}
    return dense.errors_of(expected, loss, gradients, norm, weights)


def taking_batches_to(device: str, model: nn.Module) -> nn.Module:
    """``model`` on ``device``, to which it takes its batches."""

    def moved(_: nn.Module, args: tuple, batch: dict) -> tuple[tuple, dict]:
        return args, {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()}

    model.register_forward_pre_hook(moved, with_kwargs=True)
    return model.to(device)


def hold(family: str, stage: int, section: dict, dtype: torch.dtype, expected: rule.Reference, changes: dict) -> None:
    found = errors_of_step(engine_of(model_of(family, dtype, **changes), stage, dtype, section), dtype, expected)
    where = (family, stage, section, found)
    exact = EXACT if dtype == torch.float64 else SINGLE
    assert found.loss <= exact and found.gradient <= exact, where
    loose = exact if stage == 0 else SINGLE
    assert found.norm <= loose and found.weight <= loose, where


def hold_all(family: str, stages: Sequence[int], sections: Sequence[dict], changes: dict) -> None:
    """Hold each section and stage of ZeRO to one process, in float64."""
    dtype = torch.float64
    if changes.get("checkpointing"):
        tiny_models.compute_again_in_float64(model_of(family, dtype))
    pp = sections[0]["parallel"]["pipeline"] * sections[0]["parallel"].get("tensor", 1)
    dp = dist.get_world_size() // (pp * sections[0]["parallel"].get("context", 1))
    expected = reference(model_of(family, dtype, **changes), dp, dtype, sections[0].get("moe"))
    for section in sections:
        for stage in stages:
            hold(family, stage, section, dtype, expected, changes)


def same_bits(family: str, sections: Sequence[dict]) -> None:
    """Losses and gradients of a step are the same by each of the ``sections``."""
    found = []
    for section in sections:
        loss, gradients = step_of(engine_of(model_of(family, torch.float64), 1, torch.float64, section), torch.float64)
        found.append((loss, gradients))
    for section, (loss, gradients) in zip(sections, found, strict=True):
        assert loss == found[0][0], (section, loss, found[0][0])
        other = [name for name, each in gradients.items() if not torch.equal(each, found[0][1][name])]
        assert gradients.keys() == found[0][1].keys() and not other, (section, other)
