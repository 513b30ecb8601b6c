"""LoRA on experts over expert ranks, with the real DeepSpeed engine, against one process in float64."""

from __future__ import annotations

import deepspeed
import gradient_rule as rule
import peft
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(family: str, dtype: torch.dtype = torch.float64, **changes: object) -> peft.PeftModel:
    """Adapters of all experts and of queries, with factors of which every number matters."""
    model = tiny_models.tiny(family, torch.float32, output_router_logits=False, **changes)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=TARGETS)
    model = peft.get_peft_model(model, config)
    noise = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=noise) / 4)
    return model.to(dtype)


def step(family: str, section: dict, stages: tuple[int, ...], folder: str) -> None:
    """Gradients of the factors, and the whole model that comes of a step."""
    rule.without_extension()
    dp = dist.get_world_size() // section["parallel"].get("tensor", 1)
    tokens = dense.batches(rule.MICRO * rule.ACCUMULATION * dp)
    plain = adapted(family)
    for micro in tokens.split(rule.MICRO):
        (dense.loss_of(plain, micro, torch.float64) / (rule.ACCUMULATION * dp)).backward()
    trained = {name: each for name, each in plain.named_parameters() if each.requires_grad}
    expected = {name: each.grad for name, each in trained.items()}
    assert sum("experts" in name for name in expected) in (4, 8)
    for stage in stages:
        model = adapted(family)
        own = [each for each in model.parameters() if each.requires_grad]
        config = dense.config(stage, torch.float64, section)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=own, config=config)
        mine = tokens.view(rule.ACCUMULATION, dp, rule.MICRO, -1)[:, engine.topology.rank("dp")]
        for index, micro in enumerate(mine):
            engine.backward(dense.loss_of(engine, micro, torch.float64))
            if index == rule.ACCUMULATION - 1:
                gradients = rule.reduced_gradients(engine, model)
            engine.step()
        named = dict(model.named_parameters())
        whole = {name: dense.assembled(engine.topology, named[name], each) for name, each in gradients.items()}
        assert whole.keys() == expected.keys()
        error = rule.relative(whole, expected)
        assert error <= dense.EXACT, (family, section, stage, error)
        save_and_load(engine, model, family, f"{folder}/{stage}")


def save_and_load(engine, model: peft.PeftModel, family: str, folder: str) -> None:
    """Adapters, saved apart, put on the plain model: the weights that the engine says it has."""
    weights = dense.shared(engine.whole_state_dict())
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=weights, is_main_process=True)
    dist.barrier()
    plain = tiny_models.tiny(family, torch.float32, output_router_logits=False).double()
    loaded = peft.PeftModel.from_pretrained(plain, folder, torch_device="cpu").state_dict()
    lora = [name for name in weights if "lora_" in name]
    assert len(lora) > 4 and all(torch.equal(loaded[name].double(), weights[name]) for name in lora)
    dist.barrier()


def refused() -> None:
    import pytest

    rule.without_extension()
    for parallel, said in (
        ({"tensor": 2}, r"experts\.base_layer\.base_layer .* has an adapter\. What to do: ds_npu\.parallel\.expert or"),
        ({"expert_tensor": 2}, r"lora_A\.default\.weight has 31 numbers of each .*: a divisor of 31"),
    ):
        model = adapted("mixtral") if "tensor" in parallel else adapted("mixtral", hidden_size=31, head_dim=8)
        config = dense.config(1, torch.float64, {"parallel": parallel})
        with pytest.raises(ValueError, match=said):
            deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
