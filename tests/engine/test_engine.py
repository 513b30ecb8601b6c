"""The engine around the gradient rule: batches, loaders, checkpoints, DeepSpeed's own names, and what is refused."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import gradient_rule as rule
import pytest
import torch
from ranks import run_on_ranks
from torch import nn

from ds_npu.config.problems import ConfigError
from ds_npu.engine import session
from ds_npu.engine.announcement import announced

ROOT = Path(__file__).resolve().parents[2]


def start(stage: int, parallel: dict[str, int], **more):
    import deepspeed

    rule.without_extension()
    model = nn.Sequential(*rule.layers())
    config = {**rule.config(stage, torch.float32, parallel), **more}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config), model


def loaders_share_out(parallel: dict[str, int], count: int) -> None:
    import deepspeed
    import torch.distributed as dist

    rule.without_extension()
    model = nn.Sequential(*rule.layers())
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=list(torch.arange(count)),
        config=rule.config(1, torch.float32, parallel),
    )
    topology = engine.topology
    dp = topology.size("dp")
    assert engine.train_batch_size() == rule.MICRO * rule.ACCUMULATION * dp
    assert len(loader) == count // (rule.MICRO * dp)
    batches = torch.stack(list(loader))
    assert batches.shape[1] == rule.MICRO
    peers = [torch.empty_like(batches) for _ in range(dist.get_world_size())]
    dist.all_gather(peers, batches)
    for rank, theirs in enumerate(peers):
        same_sample = topology.degrees.coordinates(rank)["dp"] == topology.rank("dp")
        assert torch.equal(theirs, batches) == same_sample
    one_of_each = [peers[rank] for rank in topology.degrees.groups("dp")[0]]
    assert sorted(torch.cat(one_of_each).flatten().tolist()) == list(range(count))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {}), (4, {"context": 2}), (4, {"tensor": 2}), (4, {"tensor": 2, "context": 2})],
    ids=str,
)
def test_each_dp_rank_gets_its_share_and_its_peers_the_same(world, parallel):
    run_on_ranks(world, loaders_share_out, parallel, 32)


def what_deepspeed_is_told(parallel: dict[str, int]) -> None:
    from deepspeed.utils import groups

    (engine, *_), _ = start(1, parallel)
    degrees, place = engine.topology.degrees, engine.topology.coordinates
    assert (groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()) == (degrees.dp, place["dp"])
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, place["cp"])
    assert groups._get_sequence_data_parallel_world_size() == degrees.dp * degrees.cp
    assert engine.dp_world_size == degrees.dp and engine.seq_dp_world_size == degrees.dp * degrees.cp
    assert engine.optimizer.partition_count == [degrees.dp * degrees.cp]
    assert engine.mpu.get_tensor_model_parallel_rank() == place["tp"]
    assert engine.mpu.get_model_parallel_group_ranks() == engine.topology.ranks("tp")


@pytest.mark.slow
def test_deepspeed_is_told_the_topology():
    run_on_ranks(8, what_deepspeed_is_told, {"context": 2, "tensor": 2})


def the_same_asked_twice() -> None:
    """DeepSpeed makes a mesh from these keys, which would take precedence over the mpu and lose the sum over cp."""
    (engine, *_), model = start(1, {"context": 2}, sequence_parallel_size=2, data_parallel_size=1)
    for inputs, labels in rule.my_batches(engine.topology):
        engine.backward(rule.token_loss(engine(inputs), labels))
        engine.step()
    expected = rule.reference(rule.MICRO * rule.ACCUMULATION, nn.Sequential(*rule.layers()))
    assert rule.relative(rule.whole_weights(model), expected.weights) <= 1e-6


def test_deepspeeds_keys_may_ask_for_the_same():
    run_on_ranks(2, the_same_asked_twice)


def trained(engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        for inputs, labels in rule.my_batches(engine.topology):
            loss = rule.token_loss(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def saved_and_resumed(stage: int, parallel: dict[str, int], folder: str) -> None:
    (engine, *_), _ = start(stage, parallel)
    trained(engine, 2)
    engine.save_checkpoint(folder)
    after = trained(engine, 2)
    (other, *_), model = start(stage, parallel)
    with torch.no_grad():
        for weight in model.parameters():
            weight.data.mul_(0.5)
    path, _ = other.load_checkpoint(folder)
    assert path is not None
    assert trained(other, 2) == after


@pytest.mark.matrix(corners=2, drawn=2)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "parallel"), [(4, {"context": 2, "tensor": 2}), (4, {"context": 2})], ids=str)
def test_a_checkpoint_resumes_exactly(tmp_path, stage, world, parallel):
    run_on_ranks(world, saved_and_resumed, stage, parallel, str(tmp_path))
    places = {"cp2": 2, "tp": parallel.get("tensor", 1)}
    written = sorted(path.name for path in tmp_path.glob("*/*.pt"))
    models = [name for name in written if name.endswith("model_states.pt")]
    shards = world // parallel.get("tensor", 1)
    assert len(models) == places["tp"] * (shards if stage == 3 else 1)
    assert len(written) - len(models) == (places["tp"] * shards if stage else 0)


SCRIPT = """
import json, os, sys
mode, folder = sys.argv[1:]
if mode != "plain":
    import ds_npu
import deepspeed, deepspeed.ops, torch
from torch import nn
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)
found = {}
for stage in range(4):
    for bf16 in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
        }
        if mode == "empty section":
            config["ds_npu"] = {}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for step in range(6):
            batch = torch.randn(4, 16, generator=generator).to(torch.bfloat16 if bf16 else torch.float32)
            loss = engine(batch).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
        found[f"ZeRO {stage} {'bf16' if bf16 else 'fp32'}"] = [type(engine).__name__, *losses]
with open(f"{folder}/{mode} {rank}.json", "w") as file:
    json.dump(found, file)
torch.distributed.barrier()
# torch 2.13's gloo threads may release Python objects while the interpreter ends, and then abort it.
os._exit(0)
"""


def losses_of(mode: str, folder: Path) -> list[dict[str, list[str]]]:
    """For each of two ranks and each kind of run: the engine, and the losses bit for bit."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, mode, folder],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / f"{mode} {rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_an_unchanged_script_gives_bitwise_the_same_losses(tmp_path):
    """Without a section DeepSpeed's own engine runs; with an empty one ours, whose arithmetic is the same."""
    plain = losses_of("plain", tmp_path)
    assert len(plain[0]) == 8 and all(run[0] == "DeepSpeedEngine" for run in plain[0].values())
    assert plain[0] != plain[1]
    assert losses_of("active", tmp_path) == plain
    for ours, theirs in zip(losses_of("empty section", tmp_path), plain, strict=True):
        assert {kind: run[1:] for kind, run in ours.items()} == {kind: run[1:] for kind, run in theirs.items()}
        assert all(run[0] == "NpuEngine" for run in ours.values())


def test_a_wrong_config_reaches_no_process_group(monkeypatch):
    import deepspeed
    import torch.distributed as dist

    monkeypatch.setenv("WORLD_SIZE", "4")
    config = rule.config(0, torch.float32, {"tensor": 3})
    with pytest.raises(ConfigError, match=r"ds_npu\.parallel\.tensor: found 3"):
        deepspeed.initialize(model=nn.Linear(1, 1), config=config)
    assert not dist.is_initialized()


def test_a_world_that_only_mpi_knows_is_not_judged(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config, _ = session.validate(rule.config(0, torch.float32, {"tensor": 3}))
    assert config.parallel.tensor == 3
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError):
        session.validate(rule.config(0, torch.float32, {"tensor": 3}))


@pytest.mark.parametrize("how", ["flag", "trainer", "variable"])
def test_an_announced_config_is_checked_before_the_scripts_own_process_group(monkeypatch, tmp_path, how):
    import deepspeed
    import torch.distributed as dist

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"ds_npu": {"parallel": {"tensor": "2"}}}))
    if how == "variable":
        monkeypatch.setenv("DS_NPU_CONFIG", str(path))
    else:
        flag = {"flag": f"--deepspeed_config={path}", "trainer": f"--deepspeed={path}"}[how]
        monkeypatch.setattr(sys, "argv", ["train.py", "--deepspeed", flag])
    with pytest.raises(ConfigError, match=r"ds_npu\.parallel\.tensor"):
        deepspeed.init_distributed()
    assert not dist.is_initialized()


def test_a_variable_that_names_no_file_is_an_error(monkeypatch, tmp_path):
    config = {"ds_npu": {"parallel": {"tensor": 2}}}
    monkeypatch.setenv("DS_NPU_CONFIG", str(tmp_path / "moved.json"))
    with pytest.raises(
        ConfigError, match=r"1 mistake in the environment:\n  DS_NPU_CONFIG: found .*moved\.json.*a file"
    ):
        announced()
    monkeypatch.setenv("DS_NPU_CONFIG", base64.urlsafe_b64encode(json.dumps(config).encode()).decode())
    assert announced() == config
    monkeypatch.setenv("DS_NPU_CONFIG", base64.urlsafe_b64encode(b'{"train_batch_size": 1}').decode())
    assert announced() is None


def test_an_mpu_of_the_users_own_is_refused():
    import deepspeed

    with pytest.raises(ValueError, match="ds_npu section"):
        deepspeed.initialize(model=nn.Linear(1, 1), config=rule.config(0, torch.float32, {}), mpu=object())
