"""Allocations of a simulated NPU that fail from one on, as where memory is used up; and what a run then holds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import deepspeed
import kept_state as rig
import tiny_models
import torch
from kept_state import Case

from ds_npu.memory import state_chunks

DEVICE, SEGMENT, HOST = "aclrtMallocAlign32", "aclrtMallocPhysical", "aclrtMallocHost"
"""What torch_npu calls for memory of the device, without its cache and with it, and for pinned memory of the host."""
USED_UP = 207001
"""ACL_ERROR_RT_MEMORY_ALLOCATION."""
ALL_KEYS: dict[str, object] = {
    "recompute": {"norm": True, "activation_function": True},
    "swap": {"activations": True},
    "chunked_loss": 4,
}


def _fail_from(name: str, first: int) -> int:
    library = ctypes.CDLL("libascendcl.so")
    library.ds_npu_sim_fail_from.restype = ctypes.c_long
    return library.ds_npu_sim_fail_from(name.encode(), ctypes.c_long(first), USED_UP)


@contextmanager
def shortage(name: str, first: int) -> Iterator[list[int]]:
    """Within it, calls of ``name`` fail from number ``first`` on; yields a list, which has their number afterwards."""
    _fail_from(name, first)
    made: list[int] = []
    try:
        yield made
    finally:
        made.append(_fail_from("", 0))


def counts(name: str, phases: Iterator[None]) -> list[int]:
    """The calls of ``name`` in each of ``phases``."""
    _fail_from(name, 0)
    found = [_fail_from(name, 0) for _ in phases]
    _fail_from("", 0)
    return found


def count(name: str, run: Callable[[], object]) -> int:
    """The calls of ``name`` in ``run``."""
    _fail_from(name, 0)
    run()
    torch.npu.synchronize()
    return _fail_from("", 0)


def engine_of(stage: int, section: dict[str, object], memory: dict[str, object]):
    """An engine in bf16 of a tiny Llama, one micro-batch a step."""
    model = tiny_models.tiny("llama", torch.float32, num_hidden_layers=3, attention_dropout=0.2).to(torch.bfloat16)
    config = Case(stage).config(memory) | {"gradient_accumulation_steps": 1}
    config["ds_npu"] |= section
    with mock.patch.object(state_chunks, "CHUNK", rig.CHUNK):
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


class Run:
    """Steps of an engine, which say how far they came."""

    def __init__(self, engine) -> None:
        self.engine, self.phase = engine, ""
        self.loss = torch.tensor(float("nan"))

    def step(self, seed: int, rows: int = 2) -> torch.Tensor:
        """One step; its loss."""
        for _ in self.phases(seed, rows):
            pass
        return self.loss

    def phases(self, seed: int, rows: int = 2) -> Iterator[None]:
        """One step, in which nothing is under way when a phase has ended: forward, backward and step."""
        torch.manual_seed(seed)
        self.phase = "forward"
        ids = torch.randint(0, tiny_models.VOCABULARY, (rows, rig.LENGTH)).to(self.engine.device)
        loss = self.engine(input_ids=ids, labels=ids).loss
        torch.npu.synchronize()
        yield
        self.phase = "backward"
        self.engine.backward(loss)
        torch.npu.synchronize()
        yield
        self.phase = "step"
        self.engine.step()
        torch.npu.synchronize()
        self.loss = loss.detach()
        yield

    def held(self) -> list[torch.Tensor]:
        """This rank's weights, masters and moments, in host memory."""
        weights = [getattr(each, "ds_tensor", each) for each in self.engine.module.parameters()]
        state = rig.arrays(self.engine.optimizer.state_dict())
        return [each.detach().cpu().clone() for each in [*weights, *state]]
