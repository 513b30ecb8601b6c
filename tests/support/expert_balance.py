"""Balance losses in one process, written by their formulas, token by token; and the gradient rule with them."""

from __future__ import annotations

from unittest import mock

import deepspeed
import expert_rule
import gradient_rule as rule
import pytest
import tensor_parallel_rule as dense
import tiny_models
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def formula(logits: torch.Tensor, ids: torch.Tensor, kind: str) -> torch.Tensor:
    """E * sum of f * P over one set of tokens: logits [T, E], ids [T, K]."""
    tokens, experts = logits.shape
    scores = torch.exp(logits) if kind == "softmax" else 1 / (1 + torch.exp(-logits))
    scores = scores / scores.sum(1, keepdim=True)
    chosen = [sum(int(expert == each) for row in ids.tolist() for each in row) for expert in range(experts)]
    return sum(
        experts * chosen[expert] / (tokens * ids.shape[1]) * scores[:, expert].sum() / tokens
        for expert in range(experts)
    )


class Recorded:
    """The logits and choices of a plain model's routers, in the order of its layers."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                kind = "sigmoid" if "Deepseek" in type(module).__name__ else "softmax"
                module.register_forward_hook(lambda _, args, out, kind=kind: self.calls.append((out[0], out[2], kind)))
            if type(module).__name__ == "Llama4Router":
                module.register_forward_hook(
                    lambda router, args, out: self.calls.append((out[1], out[1].topk(router.top_k).indices, "sigmoid"))
                )

    def loss(self, moe: dict, samples: int) -> torch.Tensor:
        """Of the last forward, of one micro-batch or of all that ranks have at a time, in layers of ``samples``."""
        calls, self.calls = self.calls, []
        assert calls
        total, aux = torch.zeros((), dtype=torch.float64), moe.get("aux_loss", {})
        for logits, ids, kind in calls:
            total = total + moe.get("z_loss", 0) * sum(row.exp().sum().log() ** 2 for row in logits) / len(logits)
            pieces = samples if aux.get("over") == "sequence" else 1
            parts = zip(logits.chunk(pieces), ids.chunk(pieces), strict=True)
            total = total + aux.get("coefficient", 0) / pieces * sum(formula(*each, kind) for each in parts)
        return total


def reference(family: str, dp: int, moe: dict, **changes: object) -> rule.Reference:
    """As ``dense.reference``, with the balance losses; of the global batch, those of all ranks' tokens at a time."""
    model = tiny_models.tiny(family, torch.float32, **changes).double()
    recorded, total = Recorded(model), 0.0
    is_global = moe.get("aux_loss", {}).get("over") == "global_batch"
    for at_a_time in dense.batches(rule.MICRO * rule.ACCUMULATION * dp).split(rule.MICRO * dp):
        for micro in [at_a_time] if is_global else at_a_time.split(rule.MICRO):
            share = len(micro) / (rule.MICRO * rule.ACCUMULATION * dp)
            # The model's own auxiliary loss, of each micro-batch, is left out where all are one.
            loss = dense.loss_of(model, micro, torch.float64) + recorded.loss(moe, len(micro))
            (loss * share).backward()
            total += loss.item() * share
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}
    norm = torch.cat([each.flatten() for each in gradients.values()]).norm()
    scale = (rule.CLIP / (norm + 1e-6)).clamp(max=1)
    trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    weights = {name: each - rule.LR * scale * gradients[name] for name, each in trained.items()}
    return rule.Reference(total, gradients, norm.item(), weights)


def hold_to_one_process(family: str, parallel: dict, moe: dict, stages: tuple[int, ...]) -> None:
    """The gradient rule with the losses of ``moe``."""
    changes = {} if family == "deepseek_v3" else {"output_router_logits": False}

    def balanced(family: str, dp: int, dtype: torch.dtype, start: torch.dtype, **changes: object) -> rule.Reference:
        return reference(family, dp, moe, **changes)

    more = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    with mock.patch.object(dense, "reference", balanced):
        expert_rule.hold_to_one_process(family, parallel, moe, stages, more, **changes)


def adapters_get_gradients(parallel: dict, stage: int) -> None:
    """LoRA around a model whose sequences are sharded: gradients of the adapters, against one process."""
    rule.without_extension()
    moe = {"aux_loss": {"coefficient": 0.3}, "z_loss": 0.1}

    def adapted() -> nn.Module:
        model = tiny_models.tiny("qwen3_moe", torch.float32, output_router_logits=False)
        torch.manual_seed(4)
        wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        return wrapped.double()

    plain = adapted()
    recorded = Recorded(plain)
    tokens = dense.batches(rule.MICRO * rule.ACCUMULATION)
    for micro in tokens.split(rule.MICRO):
        ((dense.loss_of(plain, micro, torch.float64) + recorded.loss(moe, 2)) / rule.ACCUMULATION).backward()
    expected = {name: each.grad for name, each in plain.named_parameters() if each.requires_grad}
    model = adapted()
    trained = [each for each in model.parameters() if each.requires_grad]
    section = {"parallel": parallel, "moe": moe, "context_parallel": {"algorithm": "ring"}}
    config = dense.config(stage, torch.float64, section)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    for index, micro in enumerate(tokens.split(rule.MICRO)):
        engine.backward(dense.loss_of(engine, micro, torch.float64))
        if index == rule.ACCUMULATION - 1:
            found = rule.reduced_gradients(engine, model)
        engine.step()
    assert rule.relative(found, expected) <= dense.EXACT, rule.relative(found, expected)


def other_losses_are_refused(parallel: dict) -> None:
    """A loss made of logits, beside labels that were given, does not train routers without their balance."""
    rule.without_extension()
    model = tiny_models.tiny("qwen3_moe", torch.float32, output_router_logits=False).double()
    section = {"parallel": parallel, "moe": {"z_loss": 0.1}}
    config = dense.config(0, torch.float64, section)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    (tokens,) = dense.batches(rule.MICRO).split(rule.MICRO)

    def own_loss(out) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    with tiny_models.Float64():
        out = engine(input_ids=tokens, labels=tokens)
        engine.backward(out.loss + own_loss(out))
        out = engine(input_ids=tokens, labels=tokens)
        with pytest.raises(ValueError, match=r"moe\.aux_loss and z_loss are .* that does not contain it"):
            engine.backward(own_loss(out))
