"""A sharded weight read by somebody else: the whole of it, or an error that names the weight and the reader."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import deepspeed
import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from torch.nn import functional
from torch.overrides import get_overridable_functions

from ds_npu.parallel.tensor.awaited_weights import AwaitedWeight
from ds_npu.parallel.tensor.shard_access import (
    ShardAccessError,
    ShardCopy,
    ShardedParameter,
    WeightShard,
    allow_shard_access,
    local_shard,
    protect,
)
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.parallel.tensor.whole_weight import whole_weight

EXACT = 1e-12
SINGLE = 1e-6
"""ZeRO keeps weights in float32."""
ROWS, COLUMNS = 6, 4


def shard_of_a_weight() -> ShardedParameter:
    """Rows 0 to 3 of 6."""
    parameter = nn.Parameter(torch.arange(12.0).view(3, COLUMNS))
    sharding = Sharding(0, ROWS, (((0, 3),), ((3, ROWS),)))
    protect(parameter, WeightShard.of("head.weight", (ROWS, COLUMNS), sharding, group=None))
    return parameter


# ---- others and a parameter: in one process ----


def test_metadata_is_free_and_a_computation_names_the_weight_and_the_reader():
    parameter = shard_of_a_weight()
    assert parameter.shape == (3, COLUMNS) and parameter.dtype == torch.float32 and parameter.device.type == "cpu"
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.grad is None
    assert parameter.numel() == 12 and len(parameter) == 3 and "head.weight [6, 4] is sharded" in repr(parameter)
    with pytest.raises(ShardAccessError, match=r"head.weight \[6, 4\] is sharded .*test_shard_access.py:\d+"):
        parameter @ torch.ones(COLUMNS)
    with pytest.raises(ShardAccessError, match="linear"):
        functional.linear(torch.ones(COLUMNS), parameter)
    with pytest.raises(ShardAccessError):
        torch.stack([torch.zeros(3, COLUMNS), parameter])


def test_what_knows_shards_computes_with_them():
    parameter = shard_of_a_weight()
    parameter.grad = torch.ones(3, COLUMNS)
    torch.optim.SGD([parameter], lr=1.0).step()
    assert torch.equal(local_shard(parameter), torch.arange(12.0).view(3, COLUMNS) - 1)
    with allow_shard_access():
        assert type(parameter * 2) is torch.Tensor
    assert type(local_shard(parameter)) is torch.Tensor


def test_copies_stay_shards_and_are_not_written():
    head = nn.Linear(COLUMNS, 3, bias=False)
    head.weight = shard_of_a_weight()
    kept = copy.deepcopy(head.state_dict())
    for held in (kept["weight"], head.weight.detach().clone().to(torch.float64), head.weight.data):
        assert isinstance(held, ShardCopy)
        with pytest.raises(ShardAccessError):
            held.sum()
        for write in (lambda held=held: torch.save(held, io.BytesIO()), held.data_ptr, held.numpy):
            with pytest.raises(ShardAccessError):
                write()
    with torch.no_grad(), allow_shard_access():
        head.weight.zero_()
    head.load_state_dict(kept)
    assert torch.equal(local_shard(head.weight), torch.arange(12.0).view(3, COLUMNS))


def values_in(result: object) -> bool:
    """Whether somebody got a tensor or number made of the values."""
    if isinstance(result, torch.Tensor):
        return type(result) is not ShardCopy and not isinstance(result, ShardedParameter)
    return isinstance(result, float | complex) or hasattr(result, "__array_interface__")


def test_no_function_of_torch_gives_values_away():
    """Every function that tensors may override, with a shard and as many plain tensors as it takes."""
    asked, refused, given = 0, 0, []
    for namespace, functions in get_overridable_functions().items():
        for func in functions:
            for more in range(1 if func.__name__ == "__get__" else 3):
                plain = [torch.ones(3, COLUMNS) for _ in range(more)]
                for arguments in (
                    [shard_of_a_weight(), *plain],
                    [*plain, shard_of_a_weight()],
                    [[shard_of_a_weight(), *plain]],
                ):
                    asked += 1
                    try:
                        result = func(*arguments)
                    except ShardAccessError:
                        refused += 1
                    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError, AssertionError, KeyError):
                        pass  # Not called so, by anybody.
                    else:
                        if values_in(result):
                            given.append((getattr(namespace, "__name__", namespace), func.__name__))
    assert refused > 1000 and asked > refused
    # torch asks only the tensor that is changed.
    assert set(given) == {("Tensor", "set_")}


# ---- others and a split model: in a world ----


class _Fused(torch.autograd.Function):
    """What fused losses do: the product by hand, forward and backward, some words at a time."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        tiles = [hidden @ weight[start : start + 16].t() for start in range(0, weight.shape[0], 16)]
        log_z = torch.cat(tiles, -1).logsumexp(-1)
        ctx.save_for_backward(hidden, weight, targets, log_z)
        return (log_z - (hidden * weight[targets]).sum(-1)).mean()

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, targets, log_z = ctx.saved_tensors
        probabilities = (hidden @ weight.t() - log_z[:, None]).exp()
        dlogits = (probabilities - functional.one_hot(targets, weight.shape[0])) * dy / len(targets)
        return dlogits @ weight, dlogits.t() @ hidden, None


def with_fused_head(model: nn.Module, penalty: float) -> nn.Module:
    """As TRL's trainers do it: a forward of the script's own, which multiplies by the head's weight itself."""
    kind = type(model)

    class WithFusedHead(kind):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
            head = self.get_output_embeddings()
            assert head.weight.shape == (tiny_models.VOCABULARY, hidden.shape[-1]) and head.weight.requires_grad
            loss = _Fused.apply(hidden.flatten(0, 1), head.weight, labels[:, 1:].flatten())
            # Of a projection in a region, and of the embedding.
            loss = loss + penalty * self.model.layers[0].mlp.down_proj.weight.square().sum()
            loss = loss + penalty * functional.embedding(labels, self.get_input_embeddings().weight).square().mean()
            return {"loss": loss}

    WithFusedHead.__name__ = kind.__name__
    model.__class__ = WithFusedHead
    return model


def fused_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with tiny_models.Float64():
        return model(input_ids=tokens, labels=tokens)["loss"]


def steps_with_a_fused_head(tied: bool) -> None:
    rule.without_extension()
    tokens = tensor_rule.batches(4)
    plain = with_fused_head(tiny_models.tiny("llama", tie_word_embeddings=tied), 0.01)
    expected_loss = fused_loss(plain, tokens)
    expected_loss.backward()
    expected = {name: weight.grad for name, weight in plain.named_parameters()}
    for stage, sequence_parallel in ((0, False), (0, True), (1, False), (2, True)):
        model = with_fused_head(tiny_models.tiny("llama", tie_word_embeddings=tied), 0.01)
        section = {"parallel": {"tensor": 2, "sequence_parallel": sequence_parallel}}
        settings = tensor_rule.config(stage, torch.float64, section) | {
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": 4,
        }
        engine, *_ = deepspeed.initialize(model=model, config=settings)
        engine.train()
        loss = fused_loss(engine, tokens)
        engine.backward(loss)
        found = {
            name: tensor_rule.assembled(engine.topology, model.get_parameter(name), part)
            for name, part in rule.reduced_gradients(engine, model).items()
        }
        assert abs(loss.item() / expected_loss.item() - 1) < EXACT, (stage, sequence_parallel)
        assert rule.relative(found, expected) < EXACT, (stage, sequence_parallel)
        engine.step()
        engine.eval()
        with torch.no_grad():
            fused_loss(engine, tokens)


def fused_heads() -> None:
    for tied in (False, True):
        steps_with_a_fused_head(tied)


def test_a_fused_head_of_the_scripts_own_equals_one_process():
    run_on_ranks(2, fused_heads)


def steps_beside_data_ranks(stage: int) -> None:
    """From the second step on the head's weight is on its way from other data ranks when it is read."""
    rule.without_extension()
    tokens = tensor_rule.batches(4)
    plain = with_fused_head(tiny_models.tiny("llama"), 0.01)
    optimizer = torch.optim.SGD(plain.parameters(), lr=rule.LR)
    model = with_fused_head(tiny_models.tiny("llama"), 0.01)
    settings = tensor_rule.config(stage, torch.float64, {"parallel": {"tensor": 2}}) | {
        **{"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    mine = tokens.chunk(2)[engine.topology.rank("dp")]
    for step in range(3):
        assert any(isinstance(each, AwaitedWeight) for each in model.parameters()) == (step > 0)
        loss = fused_loss(engine, mine)
        engine.backward(loss)
        engine.step()
        whole = torch.stack([fused_loss(plain, each) for each in tokens.chunk(2)])
        assert loss.item() == pytest.approx(whole[engine.topology.rank("dp")].item(), rel=SINGLE), step
        whole.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_fused_head_beside_data_ranks_waits_for_its_weight(stage):
    run_on_ranks(4, steps_beside_data_ranks, stage)


def readers() -> dict[str, Callable[[nn.Module], object]]:
    """What scripts do with weights where not every rank need be."""
    return {
        "a norm of a parameter": lambda model: dict(model.named_parameters())["lm_head.weight"].norm(),
        "a norm of an attribute": lambda model: model.lm_head.weight.norm(),
        "a penalty": lambda model: sum(each.square().sum() for each in model.parameters()),
        "get_parameter": lambda model: model.get_parameter("lm_head.weight").sum(),
        "the data": lambda model: model.lm_head.weight.data + 1,
        "numpy": lambda model: model.lm_head.weight.detach().cpu().numpy(),
        "a file": lambda model: torch.save(model.state_dict(), io.BytesIO()),
        "an initialisation": lambda model: nn.init.zeros_(model.lm_head.weight),
        "a write": lambda model: setattr(model.lm_head.weight, "data", torch.zeros(64, 32)),
        "a projection": lambda model: model.model.layers[0].self_attn.q_proj.weight.t(),
        "an expert": lambda model: model.model.layers[0].mlp.experts.gate_up_proj[0] * 2,
        "an average": lambda model: copy.deepcopy(dict(model.named_parameters())["lm_head.weight"]).mul_(0.5),
    }


def one_rank_reads(zero_stage: int) -> None:
    """Rank 0 alone: an error at once, and no message that nobody answers."""
    rule.without_extension()
    model = tiny_models.tiny("mixtral")
    engine, *_ = deepspeed.initialize(
        model=model, config=tensor_rule.config(zero_stage, torch.float64, {"parallel": {"tensor": 2}})
    )
    if dist.get_rank() == 0:
        for what, read in readers().items():
            try:
                result = read(engine.module)
            except ShardAccessError as error:
                assert "is sharded over 2 tensor ranks" in str(error), what
            else:
                raise AssertionError(f"{what}: {result}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedParameter) and zero_stage < 3:
            whole = whole_weight(parameter)
            assert whole.shape == tiny_models.tiny("mixtral").get_parameter(name).shape
    kept = model.state_dict()
    model.load_state_dict(kept)


def reads_in_a_region() -> None:
    """Where ranks compute different things, the whole would give a wrong gradient."""
    rule.without_extension()
    model = tiny_models.tiny("llama")
    attention = model.model.layers[0].self_attn
    engine, *_ = deepspeed.initialize(
        model=model, config=tensor_rule.config(1, torch.float64, {"parallel": {"tensor": 2}})
    )
    attention.o_proj.register_forward_pre_hook(lambda module, args: (args[0] + module.weight.mean(),))
    with pytest.raises(ShardAccessError, match=r"model.layers.0.self_attn.o_proj.weight \[32, 32\] is sharded over 2"):
        tensor_rule.loss_of(engine, tensor_rule.batches(2), torch.float64)


def refused_readers() -> None:
    for zero_stage in (0, 2, 3):
        one_rank_reads(zero_stage)
    reads_in_a_region()


def test_readers_that_are_refused():
    run_on_ranks(2, refused_readers)


def reads_logits() -> None:
    """In training on labels; of all words in evaluation."""
    rule.without_extension()
    tokens = tensor_rule.batches(2)
    for parallel in ({"tensor": 2}, {"context": 2}):
        model = tiny_models.tiny("llama")
        engine, *_ = deepspeed.initialize(
            model=model, config=tensor_rule.config(1, torch.float64, {"parallel": parallel})
        )
        out = engine(input_ids=tokens, labels=tokens)
        with pytest.raises(ShardAccessError, match=f"logits of .*parallel.{next(iter(parallel))}"):
            out.logits.argmax(-1)
        engine.backward(out.loss)
        engine.eval()
        with torch.no_grad():
            assert engine(input_ids=tokens, labels=tokens).logits.argmax(-1).shape == tokens.shape


def test_logits_of_some_words_or_tokens_are_refused():
    run_on_ranks(2, reads_logits)
