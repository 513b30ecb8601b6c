"""Keys that save memory change nothing: losses and weights of an engine with them are those without, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import gradient_rule as rule
import tensor_parallel_rule as tensor_rule
import torch

from ds_npu.parallel.tensor.shard_access import local_shard

WORLDS: dict[str, tuple[int, dict[str, object]]] = {
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "sequence parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "context 2": (2, {"context": 2}),
    "expert 2": (2, {"expert": 2}),
    "tensor 2 x context 2": (4, {"tensor": 2, "context": 2, "sequence_parallel": True}),
}
"""By name, (ranks, ``ds_npu.parallel``)."""
DROPS: dict[str, dict[str, float]] = {
    "gpt2": {"attn_pdrop": 0.3, "embd_pdrop": 0.2, "resid_pdrop": 0.1},
    "llama": {"attention_dropout": 0.3},
}
"""By family, what of a model drops."""


def trained(model: torch.nn.Module, stage: int, section: dict[str, object]) -> list[torch.Tensor]:
    """The losses of two steps, and the weights after them."""
    import deepspeed

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    config = tensor_rule.config(stage, torch.float32, section)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=weights, config=config)
    rule.hold_to_whole_weights(model)
    torch.manual_seed(7)
    losses = []
    for ids in tensor_rule.batches(2 * rule.MICRO * rule.ACCUMULATION).split(rule.MICRO):
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.detach().clone())
        engine.backward(loss)
        engine.step()
    if stage == 3:
        kept = [name for name, weight in model.named_parameters() if weight.ds_status.name != "NOT_AVAILABLE"]
        assert not kept, f"gathered still: {kept}"
    return [*losses, *map(local_shard, rule.whole_weights(model).values())]


def same(
    model: Callable[[], torch.nn.Module], stage: int, section: dict[str, object], variants: dict[str, dict[str, object]]
) -> None:
    """Hold each variant, more keys of the section, to a run without; ``model`` makes the same one at every call."""
    expected = trained(model(), stage, section)
    for name, more in variants.items():
        found = trained(model(), stage, section | more)
        assert len(found) == len(expected) > 10
        assert all(map(torch.equal, found, expected)), (name, stage, section)
