"""The device of a process is made current before ds_npu uses one, or the world, on every road to an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import gradient_rule as rule
import pytest
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from ds_npu.engine import session

COLLECTIVES = [
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast",
    "broadcast_object_list gather reduce reduce_scatter reduce_scatter_tensor scatter send recv isend irecv",
]
RANDOM = "get_rng_state set_rng_state manual_seed"


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The record of what ds_npu does: set_device, collectives, and random states that are read or set."""
    from deepspeed.accelerator import get_accelerator

    record: list[str] = []
    monkeypatch.setattr(get_accelerator(), "set_device", lambda index: record.append(f"set_device({index})"))

    def watched(module, name: str):
        original = vars(module)[name]

        def call(*args, **kwargs):
            record.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in " ".join(COLLECTIVES).split():
        watched(dist, name)
    for name in RANDOM.split():
        watched(torch.random, name)
    return record


def section(**degrees: int) -> dict[str, object]:
    return {"parallel": degrees}


def by_initialize(**degrees: int) -> None:
    import deepspeed

    model = tiny_models.tiny("gpt2", torch.float32, attn_pdrop=0.1, resid_pdrop=0.1)
    config = tensor_parallel_rule.config(1, torch.float32, section(**degrees))
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


def by_from_pretrained(folder: str) -> None:
    import transformers

    from ds_npu.engine.pretrained import from_pretrained

    config = tensor_parallel_rule.config(1, torch.float32, section(tensor=2))
    from_pretrained(transformers.AutoModelForCausalLM, folder, config, dtype=torch.float32)


def by_zero_init() -> None:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=tensor_parallel_rule.config(3, torch.float32, section(context=2))):
        torch.nn.Linear(4, 4)


def by_pipeline(config_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.pipe import PipelineModule

    monkeypatch.setenv("DS_NPU_CONFIG", config_file)
    PipelineModule(rule.layers(), num_stages=1, loss_fn=rule.token_loss)


def each_road(folder: str, config_file: str) -> None:
    rule.without_extension()
    import deepspeed

    deepspeed.init_distributed()
    own = f"set_device({dist.get_rank()})"
    for road in (
        lambda: by_initialize(tensor=2),
        lambda: by_initialize(context=2),
        lambda: by_from_pretrained(folder),
        by_zero_init,
        lambda: by_pipeline(config_file, monkeypatch),
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            record = watch(monkeypatch)
            road()
        assert record[0] == own, record[:5]


def test_on_every_road_the_device_is_set_before_it_or_the_world_is_used(tmp_path):
    tiny_models.tiny("llama", torch.float32).save_pretrained(tmp_path / "model")
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(rule.config(1, torch.float32, {"context": 2})))
    run_on_ranks(2, each_road, str(tmp_path / "model"), str(config_file))


@pytest.mark.parametrize(
    ("environ", "arguments", "expected"),
    [
        ({"LOCAL_RANK": "1"}, None, 1),
        ({"LOCAL_RANK": "1"}, SimpleNamespace(local_rank=1), 1),
        ({"LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, None, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, None, 1),
        ({"LOCAL_RANK": "1"}, SimpleNamespace(device_rank=0), 0),
        ({"LOCAL_RANK": "1"}, SimpleNamespace(device_rank=-1), None),
    ],
)
def test_the_device_is_the_one_that_deepspeeds_engine_takes(monkeypatch, environ, arguments, expected):
    from deepspeed.runtime.engine import DeepSpeedEngine

    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    record = watch(monkeypatch)
    session.use_own_device(arguments)
    assert record == ([] if expected is None else [f"set_device({expected})"])
    # DeepSpeed's own, which sets LOCAL_RANK from Open MPI's first.
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 2)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    record.clear()
    theirs = SimpleNamespace(local_rank=int(environ.get("LOCAL_RANK", environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))))
    DeepSpeedEngine._set_distributed_vars(theirs, arguments)
    assert record == ([] if expected is None else [f"set_device({expected})"])


def test_without_a_local_rank_there_is_one_error(monkeypatch):
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"^LOCAL_RANK is not set.*deepspeed, torchrun or accelerate launch"):
        session.use_own_device()


def test_no_other_module_of_ds_npu_makes_the_engines_communicators():
    """Whoever opens a topology, and so the world's groups, has a road above, or only names groups."""
    root = Path(session.__file__).parents[1]
    users = {str(path.relative_to(root)) for path in root.rglob("*.py") if "open_session(" in path.read_text()}
    assert users == {"engine/session.py", "engine/hooks.py", "engine/pretrained.py"}
