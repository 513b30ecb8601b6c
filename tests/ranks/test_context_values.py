"""Values that depart for their Ulysses ranks right behind their projection: when, and that nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from sequence_sharded_models import sequence_sharded, step, tokens
from torch import nn

pytestmark = pytest.mark.slow


def events(pair, **given: object) -> list[str]:
    """In which order the layer projects, exchanges and waits, in forward and backward."""
    found: list[str] = []
    attention = pair.model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        module = getattr(attention, name)
        module.register_forward_pre_hook(lambda *_, name=name: found.append(name))
        module.weight.register_hook(lambda _, name=name: found.append(f"gradient of {name}"))
    plain = dist.all_to_all_single

    def recorded(output: torch.Tensor, *args: object, **kwargs: object) -> object:
        number = sum(each.startswith("exchange") for each in found)
        found.append(f"exchange {output.numel()}")
        work = plain(output, *args, **kwargs)
        return SimpleNamespace(wait=lambda: (found.append(f"wait for {number}"), work.wait()))

    dist.all_to_all_single = recorded
    try:
        step(pair.model, **given)
    finally:
        dist.all_to_all_single = plain
    return found


def departs_before_the_queries() -> None:
    ids = tokens(1, 16)
    pair = sequence_sharded("llama", "ulysses", num_hidden_layers=1, num_key_value_heads=2)
    step(pair.model, input_ids=ids, labels=ids)
    found = events(pair, input_ids=ids, labels=ids)
    # 16 tokens of 1 key head and 2 query heads, and 8 tokens of all 4 heads of the result, each 8 wide.
    keys, queries, result = "exchange 128", "exchange 256", "exchange 256"
    assert found[:12] == [
        *("q_proj", "k_proj", "v_proj", keys, queries, keys, "wait for 1", "wait for 2", "wait for 0"),
        *(result, "wait for 3", "o_proj"),
    ]
    # The gradient of values is waited for last, while those of queries and keys are turned back.
    waits = [each for each in found[12:] if each.startswith("wait")]
    assert found.count(queries) + found.count(keys) == 8 and len(waits) == 4
    last_sent = max(place for place, each in enumerate(found) if each.startswith("exchange"))
    assert found.index(waits[0]) < last_sent < found.index(waits[1])
    assert found.index(waits[-1]) < found.index("gradient of v_proj")
    step(pair.plain, input_ids=ids, labels=ids)
    pair.same_gradients()


def same_with(family: str, changed: bool) -> None:
    ids = tokens()
    pair = sequence_sharded(family, "ulysses")
    if changed:
        for layer in pair.model.model.layers:
            doubled(layer.self_attn.v_proj)
        for layer in pair.plain.model.layers:
            doubled(layer.self_attn.v_proj)
    for _ in range(2):
        loss = step(pair.model, input_ids=ids, labels=ids)
        torch.testing.assert_close(loss, step(pair.plain, input_ids=ids, labels=ids), rtol=1e-13, atol=0)
        pair.same_gradients()


def doubled(projection: nn.Module) -> None:
    """A hook of the user's, behind which values are no longer what the linear made."""
    projection.register_forward_hook(lambda _module, _args, out: 2 * out)


def test_values_depart_while_queries_and_keys_are_turned():
    run_on_ranks(2, departs_before_the_queries)


@pytest.mark.parametrize(("family", "changed"), [("qwen3", False), ("llama", True), ("gemma", False)])
def test_losses_and_gradients_stay(family, changed):
    run_on_ranks(2, same_with, family, changed)
