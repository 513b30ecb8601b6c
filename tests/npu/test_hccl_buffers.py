"""The device memory of HCCL's communicators after a step, against the sum that ``ds_npu check`` prints."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
import toy_experts
from ranks import run_on_ranks

from ds_npu.cli.main import main
from ds_npu.planner.communicators import MIB, PAIR_BUFFER, default_mib

RANKS = 4
PAIRS = ("ring, pairs", "outer ring, pairs", "neighbouring stages")
"""Rows of communicators of two ranks each, which torch_npu does not name."""
BUCKETS = {"reduce_bucket_size": 2**21, "allgather_bucket_size": 2**20, "stage3_prefetch_bucket_size": 10}
"""Elements; 8 MiB is the largest."""
CASES = {
    "plain ZeRO": (1, {}, {}),
    "tensor x data": (3, {"parallel": {"tensor": 2}}, {}),
    "tensor x context": (
        1,
        {"parallel": {"tensor": 2, "context": 2}, "context_parallel": {"algorithm": "ring"}},
        BUCKETS,
    ),
    "double ring": (2, {"parallel": {"context": 4}, "context_parallel": {"algorithm": "ring", "window": 2}}, {}),
    "hybrid": (1, {"parallel": {"context": 4}, "context_parallel": {"algorithm": "hybrid", "ulysses": 2}}, {}),
    "experts": (3, {"parallel": {"expert": 2}}, BUCKETS),
    "experts x tensor": (0, {"parallel": {"expert": 2, "tensor": 2}, "plan": rule.REPLICAS}, {}),
    "PipelineModule x data": (1, {"parallel": {"pipeline": 2}}, BUCKETS),
    "PipelineModule x tensor": (0, {"parallel": {"pipeline": 2, "tensor": 2}, "plan": rule.REPLICAS}, {}),
    "stages x data": (1, {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_v"}}, BUCKETS),
    "stages x tensor": (0, {"parallel": {"pipeline": 2, "tensor": 2}}, {}),
    "stages x context": (1, {"parallel": {"pipeline": 2, "context": 2}, "context_parallel": {"algorithm": "ring"}}, {}),
    "4 stages": (2, {"parallel": {"pipeline": 4}}, {}),
    "set": (1, {"parallel": {"tensor": 2}, "hccl": {"buffer_mib": {"tensor": 3, "world": 5, "data": 7}}}, {}),
    "4 stages, tied": (2, {"parallel": {"pipeline": 4}, "pipeline": {"schedule": "zb_h1"}}, {}),
    "4 stages, twice": (1, {"parallel": {"pipeline": 4}, "pipeline": {"virtual_stages": 2}}, {}),
}


def tiny_model(tied: bool) -> torch.nn.Module:
    return tiny_models.tiny("llama", torch.float32, num_hidden_layers=8, tie_word_embeddings=tied)


def model_step(config: dict, tied: bool = False) -> None:
    import deepspeed

    model = tiny_model(tied)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = tiny_models.tokens(rule.MICRO, 16).to(engine.device)
    for _ in range(rule.ACCUMULATION):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


def expert_step(config: dict) -> None:
    import deepspeed

    from ds_npu.engine.session import open_session, use_own_device

    use_own_device()
    model = toy_experts.Net(open_session(config).topology)  # The engine's: another topology has other communicators.
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(rule.ACCUMULATION):
        tokens = rule.samples(rule.MICRO).to(engine.device)
        engine.backward(rule.token_loss(engine(tokens[:, :-1]), tokens[:, 1:]))
        engine.step()


def pipeline_step(config: dict) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    deepspeed.init_distributed("hccl")
    parallel = config["ds_npu"]["parallel"]
    stages, tensor = parallel["pipeline"], parallel.get("tensor", 1)
    grid = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=RANKS // stages // tensor)
    model = PipelineModule(rule.layers(), topology=grid, loss_fn=rule.token_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = rule.samples(rule.MICRO)
    engine.train_batch(iter([(tokens[:, :-1], tokens[:, 1:])] * rule.ACCUMULATION))


def opened_groups() -> int:
    """The groups of this rank that have a communicator, the pairs of ranks left out."""
    device = torch.device("npu")
    mine = [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == "hccl"]
    backends = [(group._get_backend(device), dist.get_rank(group)) for group in mine]
    return sum(bool(backend.get_hccl_comm_name(rank, init_comm=False)) for backend, rank in backends)


def count(config_path: str, name: str, groups: int, mib: int, of_tied: int) -> None:
    rule.without_extension()
    os.environ["DS_NPU_CONFIG"] = config_path
    config = json.loads(Path(config_path).read_text())
    parallel = config["ds_npu"].get("parallel", {})
    step = expert_step if "expert" in parallel else partial(model_step, tied="tied" in name)
    step = pipeline_step if is_module(name) else step
    step(config)
    dist.barrier()  # As DeepSpeed's checkpoints do.
    torch.npu.synchronize()
    free, total = torch.npu.mem_get_info()
    # What the caching allocator has not taken belongs to communicators.
    found = (opened_groups(), (total - free - torch.npu.memory_reserved()) / MIB)
    ends_of_pipeline = parallel.get("pipeline", 1) == RANKS and dist.get_rank() in (0, RANKS - 1)
    if ends_of_pipeline and "virtual_stages" not in config["ds_npu"].get("pipeline", {}):
        # The first and the last stage have one neighbour; check prints those of the others.
        mib += of_tied * ("tied" in name) - 2 * 2 * default_mib(PAIR_BUFFER)
        groups += "tied" in name
    assert found == (groups, mib)


def has_hugging_face_model(name: str) -> bool:
    return not is_module(name) and "expert" not in CASES[name][1].get("parallel", {})


def is_module(name: str) -> bool:
    return name.startswith("PipelineModule")


def printed(text: str, name: str) -> tuple[int, int, int]:
    """(communicators of groups, MiB of all, MiB of tied weights') in what ``ds_npu check`` prints."""
    if is_module(name):
        ((number, mib),) = re.findall(r"A deepspeed.PipelineModule has (\d+): ([\d,]+) MiB", text)
        # It has two stages here: one communicator of the pair.
        return int(number) - 1, int(mib.replace(",", "")), 0
    _, table = text.split("HCCL communicators of each rank")
    found = re.findall(r"^  (\S.{23}) +(\d+) +([\d,]+)(?:   |$)", table, re.MULTILINE)
    rows = {name.strip(): (int(number), int(mib.replace(",", ""))) for name, number, mib in found}
    pairs = sum(number for name, (number, _) in rows.items() if name in PAIRS)
    number, mib = rows["all"]
    tied = re.findall(r"share a weight, the two ranks with them have one more, tied weights: (\d+) MiB", text)
    return number - pairs, mib, int(*tied)


@pytest.mark.parametrize("name", CASES)
def test_check_prints_what_communicators_take(tmp_path, capsys, name):
    stage, section, buckets = CASES[name]
    config = rule.config(stage, torch.float32, {}, **buckets) | {"ds_npu": section}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    command = ["check", str(path), "--world-size", str(RANKS)]
    if has_hugging_face_model(name):
        # Of its positions, and so its longest hidden states, the buffers between tensor ranks are made.
        tiny_model("tied" in name).config.to_json_file(tmp_path / "config.json")
        command += ["--model", str(tmp_path / "config.json")]
    assert main(command) == 0
    said = printed(capsys.readouterr().out, name)
    run_on_ranks(RANKS, count, str(path), name, *said, backend="hccl", sets_device=False)
