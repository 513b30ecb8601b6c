"""Weights on their way: whoever reads their values waits, and whoever reads their metadata does not."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from ds_npu.parallel.runtime.arrival import arrive
from ds_npu.parallel.tensor.awaited_weights import AwaitedWeight, AwaitedWeights, is_read_unseen, uses_of
from ds_npu.parallel.tensor.shard_access import GuardedParameter, Shard, ShardAccessError, protect


class Message:
    """A gather that writes its weight when it is waited for."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.waits = memory, 0

    def wait(self) -> None:
        self.waits += 1
        self.memory.fill_(7.0)


@pytest.fixture
def awaited() -> tuple[nn.Parameter, Message]:
    weight = nn.Parameter(torch.zeros(4, 4))
    message = Message(weight.data)
    AwaitedWeights([weight]).wait_for(lambda _: [message])
    return weight, message


class Square(torch.autograd.Function):
    """Code of a user that torch does not tell of the use of a weight before ``forward``."""

    @staticmethod
    def forward(ctx, x, weight):
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient


def saved(weight: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


X = torch.ones(1, 4)
READS = {
    "linear": lambda weight: functional.linear(X, weight)[0, 0] / 4,
    "embedding": lambda weight: functional.embedding(torch.tensor([1]), weight)[0, 0],
    "autograd function": lambda weight: Square.apply(X, weight)[0, 0] / 4,
    "operator": lambda weight: torch.ops.aten.mm(X, weight)[0, 0] / 4,
    "list of tensors": lambda weight: torch._foreach_add([weight, weight], 0.0)[1][0, 0],
    "keyword": lambda weight: functional.linear(input=X, weight=weight)[0, 0] / 4,
    "data": lambda weight: weight.data[0, 0],
    "detach": lambda weight: weight.detach()[0, 0],
    "numpy": lambda weight: torch.tensor(weight.detach().numpy()[0, 0]),
    "tolist": lambda weight: torch.tensor(weight.tolist()[0][0]),
    "stride": lambda weight: weight.as_strided((1,), weight.stride()[1:])[0],
    "index": lambda weight: weight[0, 0],
    "deepcopy": lambda weight: copy.deepcopy(weight)[0, 0],
    "module copy": lambda weight: next(copy.deepcopy(nn.ParameterList([weight])).parameters())[0, 0],
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight))[0, 0],
    "file": lambda weight: saved(weight)[0, 0],
    "state dict": lambda weight: nn.ParameterList([weight]).state_dict()["0"][0, 0],
    "functional call": lambda weight: (
        torch.func.functional_call(nn.Linear(4, 4, bias=False), {"weight": weight}, (X,))[0, 0] / 4
    ),
    "storage": lambda weight: torch.empty(0).set_(weight.untyped_storage())[0],
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_values_has_them(awaited, read):
    weight, message = awaited
    assert READS[read](weight).item() == 7.0
    assert message.waits > 0
    assert type(weight) is nn.Parameter


def test_metadata_and_gradients_are_read_without_waiting(awaited):
    weight, message = awaited
    assert (weight.shape, weight.dtype, weight.numel(), weight.device.type) == ((4, 4), torch.float32, 16, "cpu")
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    weight.grad = torch.ones(4, 4)
    assert weight.grad.sum() == 16
    weight.grad = None
    weight.register_hook(lambda gradient: gradient)
    weight.name_of_a_user = 3
    assert isinstance(weight, nn.Parameter)
    assert nn.ParameterList([weight]).parameters()
    assert message.waits == 0
    assert isinstance(weight, AwaitedWeight)


class Foreign(torch.Tensor):
    """A class of a user, whose functions of tensors torch tells no other class of."""


def hooks() -> int:
    return len(torch.nn.modules.module._global_forward_pre_hooks)


def test_layers_of_foreign_tensors_have_their_weights():
    nn.Identity()(X)  # What other tests have left is removed.
    before = hooks()
    layer = nn.Linear(4, 4)
    layer.weight.data.fill_(7.0), layer.bias.data.zero_()
    message = Message(torch.zeros(1))
    AwaitedWeights(list(layer.parameters())).wait_for(lambda _: [message])
    assert layer(X.as_subclass(Foreign))[0, 0] == 28.0
    assert message.waits == 2
    assert hooks() == before


def test_nothing_is_left_of_a_model_that_is_gone():
    layer = nn.Linear(4, 4)
    AwaitedWeights(list(layer.parameters())).wait_for(lambda _: [Message(torch.zeros(1))])
    gone, before = weakref.ref(layer.weight), hooks()
    del layer
    gc.collect()
    nn.Identity()(X)
    assert gone() is None
    assert hooks() < before


def test_who_goes_round_reads_nan(awaited):
    with torch._C.DisableTorchFunctionSubclass():
        assert awaited[0].sum().isnan()
    assert not arrive(awaited[0])
    assert awaited[0][0, 0] == 7.0


def test_a_write_comes_behind_the_message(awaited):
    weight, _ = awaited
    with torch.no_grad():
        weight.fill_(1.0)
    assert weight[0, 0] == 1.0


def test_a_text_of_it_shows_its_values(awaited):
    assert "7." in repr(awaited[0])


def test_each_weight_of_a_message_waits_by_itself():
    """Their readers may be on different streams."""
    memory = torch.zeros(8)
    message = Message(memory)
    weights = [nn.Parameter(memory[:4]), nn.Parameter(memory[4:])]
    AwaitedWeights(weights).wait_for(lambda _: [message])
    arrive(weights[0])
    assert (message.waits, type(weights[1]) is nn.Parameter) == (1, False)
    arrive(weights[1])
    arrive(weights[1])
    assert message.waits == 2


def test_a_gradient_comes_to_a_weight_that_was_awaited(awaited):
    weight, _ = awaited
    functional.linear(X, weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(4, 4))


def test_a_shard_is_awaited_and_guarded(awaited):
    weight = nn.Parameter(torch.zeros(4, 4))
    protect(weight, Shard("w is sharded", "ask for the whole"))
    message = Message(torch.zeros(1))
    AwaitedWeights([weight]).wait_for(lambda _: [message])
    assert weight.shape == (4, 4)
    assert message.waits == 0
    with pytest.raises(ShardAccessError):
        weight.sum()
    assert message.waits == 1
    assert type(weight) is GuardedParameter


def test_modules_that_read_unseen_are_found():
    model = nn.Sequential(nn.Linear(2, 2))
    assert not is_read_unseen(model)
    assert is_read_unseen(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    assert is_read_unseen(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    model[0].compile()
    assert is_read_unseen(model)


def test_tensors_in_the_memory_of_weights_are_counted():
    flat = torch.zeros(8)
    weight, before = nn.Parameter(flat[:4]), uses_of(flat)
    weight[0].item()
    assert uses_of(flat) == before
    alias = weight.detach()
    assert uses_of(flat) == before + 1
    del alias
    assert uses_of(flat) == before
