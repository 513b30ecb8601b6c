"""Every mark, hook and wrap that an engine of ds_npu leaves on a model, each explained by a placement or a feature."""

from __future__ import annotations

import gradient_rule as rule
import tiny_models
import torch
from ranks import run_on_ranks
from tensor_parallel_rule import config
from torch import nn

from ds_npu.features.loss.model_loss import LossLevel
from ds_npu.parallel.runtime.forward_wraps import WrappedForward
from ds_npu.parallel.runtime.placement import Placement, placement_of
from ds_npu.topology.topology import Topology


def is_of_product(placement: Placement) -> bool:
    return len(placement.shape) == 2 and "embed" not in placement.name


MARKS = {
    "ds_npu_placement": lambda placement, stage: True,
    "tensor_model_parallel": lambda placement, stage: placement.part("tp") != "replicated",
    "ds_npu_grid": lambda placement, stage: placement.part("tp") != "replicated",
    # The guard of a shard, on models that ds_npu has sharded itself.
    "shard": lambda placement, stage: placement.part("tp") != "replicated",
    "ds_zero_partition_process_group": lambda placement, stage: stage == 3,
    # fused_ops.matmul_accumulate: where products are added. ZeRO 3 accumulates no whole gradients.
    "ds_npu_gradient_sink": lambda placement, stage: is_of_product(placement) and stage < 3,
}
"""An attribute that ds_npu sets on a parameter -> whether its placement and the stage of ZeRO ask for it."""
MODEL_ATTRIBUTES = {
    "ds_npu": "the record below",
    "_loss_function": "the links below",
    "forward": "the wraps below",
    "save_pretrained": "parallel.tensor: saves whole weights",
    "__deepcopy__": "parallel.tensor, parallel.context: refuses copies",
    "compile": "parallel.tensor, parallel.context: refuses torch.compile",
}


def marks_of(model: nn.Module) -> dict[str, set[str]]:
    return {name: {*vars(parameter)} for name, parameter in model.named_parameters()}


def wraps_of(module: nn.Module) -> list[str]:
    """The functions around the forward of ``module``, outermost first."""
    found, forward = [], vars(module).get("forward")
    while isinstance(forward, WrappedForward):
        wrapper = forward.wrapper
        found.append(getattr(wrapper, "__qualname__", type(wrapper).__name__).rpartition(".")[2])
        forward = forward.inner
    return found


def check_placement(placement: Placement, parameter: nn.Parameter, plain: torch.Size, topology: Topology) -> None:
    assert placement.shape == tuple(plain), placement
    sharding = placement.sharded.get("tp")
    held = list(plain)
    if sharding is not None:
        held[sharding.dim] = sharding.length(topology.rank("tp"))
    assert held == list(vars(parameter).get("ds_shape", parameter.shape)), placement
    assert bool(parameter._backward_hooks) == bool(placement.partial), placement
    assert placement.view == ("pp", "dp", "cp", "tp") and placement.data_axes == ("dp", "cp")


def model_of_deepspeed(stage: int) -> nn.Module:
    """The model in an engine without ds_npu."""
    import deepspeed

    rule.without_extension()
    model = tiny_models.tiny("llama", torch.float32)
    usual = {key: value for key, value in config(stage, torch.float32, {}).items() if key != "ds_npu"}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=usual)
    return model


def check_marks(stage: int, plain: nn.Module) -> None:
    import deepspeed

    shapes = {name: parameter.shape for name, parameter in tiny_models.tiny("llama", torch.float32).named_parameters()}
    model = tiny_models.tiny("llama", torch.float32)
    before = {*vars(model)}
    section = {"parallel": {"tensor": 2, "sequence_parallel": True}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, torch.float32, section)
    )
    found = marks_of(model)
    # ZeRO marks some parameters only, by where its partitions end.
    of_deepspeed = set().union(*marks_of(plain).values())
    assert {*found} == {*marks_of(plain)}
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        check_placement(placement, parameter, shapes[name], engine.topology)
        assert placement.name == name
        new = found[name] - of_deepspeed
        assert new <= {*MARKS}, (name, new - {*MARKS})
        for mark, is_asked_for in MARKS.items():
            assert (mark in found[name]) == (is_asked_for(placement, stage) or mark in of_deepspeed), (name, mark)
    assert {*vars(model)} - before - {*vars(plain)} <= {*MODEL_ATTRIBUTES}, {*vars(model)} - before
    assert {*vars(model)["ds_npu"]} == {"plan", "changed for", "sharded model", "model loss"}
    assert model.loss_function.keys == {LossLevel.VOCABULARY: "parallel.tensor"}
    wraps = {name: wraps_of(module) for name, module in model.named_modules() if "forward" in vars(module)}
    expected = {
        # The forward's MicroBatch begins, outermost where several are called of.
        "": ["_in_forward", "begin", "whole", "sharded"],
        "model": ["begin"],
        "model.layers": ["begin"],
        "model.layers.0": ["run", "first", "in_block"],
        "model.layers.1": ["run", "last", "partial", "in_block"],
        **{f"model.layers.{index}.{part}": ["region"] for index in (0, 1) for part in ("self_attn", "mlp")},
        **{
            f"model.layers.{index}.{row}": ["checked"]
            for index in (0, 1)
            for row in ("self_attn.o_proj", "mlp.down_proj")
        },
        "lm_head": ["logits"],
    }
    found_wraps = {name: each for name, each in wraps.items() if each}
    assert found_wraps == expected, found_wraps


def check_all_marks() -> None:
    # DeepSpeed keeps the mpu of an earlier engine, so those without one come first.
    plain = {stage: model_of_deepspeed(stage) for stage in (0, 1, 3)}
    for stage, model in plain.items():
        check_marks(stage, model)


def test_what_an_engine_leaves_on_a_model_is_explained():
    run_on_ranks(2, check_all_marks)
