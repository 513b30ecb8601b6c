"""More of what users do with split models: hidden states, autocast, frozen layers, optimizers, exceptions, copies."""

from __future__ import annotations

import contextlib
import copy

import gradient_rule as rule
import pytest
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from sharded_models import LENGTH, Pair, close, first_fast, pair
from torch import nn

from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with tiny_models.Float64():
        return model(input_ids=tokens, labels=tokens).loss


def insides(family: str, sequence_parallel: bool) -> None:
    both = pair(family, sequence_parallel)
    tokens = tiny_models.tokens(2, LENGTH)
    options = {"input_ids": tokens, "labels": tokens, "output_hidden_states": True, "output_attentions": True}
    with tiny_models.Float64():
        found, expected = (each(**options) for each in (both.model, both.plain))
    for each in (found, expected):
        squares = [(place + 1) * state.square().sum() for place, state in enumerate(each.hidden_states)]
        (each.loss + sum(squares)).backward()
    both.same_gradients()
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        close(one, other, "hidden states")
    tuples = both.model(**options, return_dict=False)
    assert [state.shape for state in tuples[2]] == [state.shape for state in expected.hidden_states]
    heads = expected.attentions[0].shape[1] // 2
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        close(one, other[:, both.topology.rank("tp") * heads :][:, :heads], "attentions")


@SEQUENCE
@first_fast("family", ["llama", "gpt2"])
def test_hidden_states_and_attentions(family, sequence_parallel):
    run_on_ranks(2, insides, family, sequence_parallel)


def insides_under_zero3() -> None:
    """DeepSpeed's hooks stand between the blocks and whoever looks at what they return."""
    import deepspeed

    rule.without_extension()
    model, plain = (tiny_models.tiny("llama", torch.float32).eval() for _ in range(2))
    section = {"parallel": {"tensor": 2, "sequence_parallel": True}}
    config = tensor_parallel_rule.config(3, torch.float32, section)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.eval()
    for length in (LENGTH, 1):
        tokens = tiny_models.tokens(2, length)
        with torch.no_grad():
            found, expected = (each(input_ids=tokens, output_hidden_states=True) for each in (engine, plain))
        for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_hidden_states_under_zero3():
    run_on_ranks(2, insides_under_zero3)


def autocast(family: str, sequence_parallel: bool) -> None:
    """bf16 around a float32 model: within twice the error of one process under the same autocast."""
    both = pair(family, sequence_parallel, torch.float32)
    exact = tiny_models.tiny(family, torch.float64)
    tokens = tiny_models.tokens(2, LENGTH)
    loss_of(exact, tokens).backward()
    expected = {name: weight.grad for name, weight in exact.named_parameters() if weight.grad is not None}
    for model in (both.model, both.plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    plain = {name: weight.grad for name, weight in both.plain.named_parameters() if weight.grad is not None}
    found = both.gradients()
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    error, bound = rule.relative(found, expected), 2 * rule.relative(plain, expected)
    assert 1e-4 < error <= bound, (error, bound)


@SEQUENCE
@first_fast("family", ["llama", "gpt2", "mixtral"])
def test_autocast(family, sequence_parallel):
    run_on_ranks(2, autocast, family, sequence_parallel)


def frozen(sequence_parallel: bool) -> None:
    both = pair("llama", sequence_parallel)
    tokens = tiny_models.tokens(2, LENGTH)
    for part in ("embed_tokens", "layers.0", "norm", "q_proj", "down_proj"):
        for model in (both.model, both.plain):
            model.zero_grad()
            for name, weight in model.named_parameters():
                weight.requires_grad_(part not in name)
            loss_of(model, tokens).backward()
        both.same_gradients()


@SEQUENCE
def test_frozen_layers(sequence_parallel):
    run_on_ranks(2, frozen, sequence_parallel)


def thawed(sequence_parallel: bool) -> None:
    """A layer frozen while the model is split, and trained later on."""
    topology = Topology(Degrees(tp=dist.get_world_size()))
    model = tiny_models.tiny("llama").requires_grad_(False)
    shard_model(model, plan_for(model, {}), topology, sequence_parallel)
    model.requires_grad_(True)
    both = Pair(model, tiny_models.tiny("llama"), topology)
    for each in (both.model, both.plain):
        loss_of(each, tiny_models.tokens(2, LENGTH)).backward()
    both.same_gradients()


@SEQUENCE
def test_layers_that_are_thawed_later(sequence_parallel):
    run_on_ranks(2, thawed, sequence_parallel)


def exceptions(family: str, sequence_parallel: bool) -> None:
    """Wherever a forward ends early, the next one is right."""
    both = pair(family, sequence_parallel)
    tokens = tiny_models.tokens(2, LENGTH)
    loss_of(both.plain, tokens).backward()

    def interrupt(*_: object) -> None:
        raise InterruptedError

    places = [name for name, module in both.model.named_modules() if name and not isinstance(module, nn.ModuleList)]
    for name in places:
        module = both.model.get_submodule(name)
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            handle = register(interrupt)
            with contextlib.suppress(InterruptedError):
                loss_of(both.model, tiny_models.tokens(1, 5))
            handle.remove()
    both.model.zero_grad()
    loss_of(both.model, tokens).backward()
    both.same_gradients()
    both.model.eval()
    with tiny_models.Float64():
        assert both.model(input_ids=tokens, labels=tokens).logits.shape[-1] == tiny_models.VOCABULARY


@SEQUENCE
@first_fast("family", ["llama", "gpt2"])
def test_an_exception_in_a_forward_leaves_nothing_behind(family, sequence_parallel):
    run_on_ranks(2, exceptions, family, sequence_parallel)


def two_models() -> None:
    first, second = pair("llama"), pair("mixtral", True)
    tokens = tiny_models.tokens(2, LENGTH)
    losses = [loss_of(each.model, tokens) for each in (first, second)]
    for each in (first, second):
        loss_of(each.plain, tokens).backward()
    sum(losses).backward()
    first.same_gradients()
    second.same_gradients()


def test_two_models_in_one_process():
    run_on_ranks(2, two_models)


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Weight decay by name, as scripts have it."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    whole = [weight for name, weight in trained if name.endswith("bias") or "norm" in name]
    others = [weight for name, weight in trained if not (name.endswith("bias") or "norm" in name)]
    return [{"params": others, "weight_decay": 0.3}, {"params": whole, "weight_decay": 0.0}]


def grouped(stage: int, client: bool) -> None:
    """Two steps with groups of parameters, or with an optimizer, that were made before the model was split."""
    import deepspeed

    rule.without_extension()
    torch.manual_seed(0)
    plain, model = (tiny_models.tiny("qwen2", torch.float32) for _ in range(2))
    section = {"parallel": {"tensor": dist.get_world_size()}}
    config = tensor_parallel_rule.config(stage, torch.float32, section) | {"gradient_clipping": 0.0}
    expected = torch.optim.SGD(groups_of(plain), lr=0.1, momentum=0.9)
    if client:
        del config["optimizer"]
        optimizer = torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    else:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    for seed in range(2):
        expected.zero_grad()
        for micro in tensor_parallel_rule.batches(2 * tensor_parallel_rule.MICRO).split(tensor_parallel_rule.MICRO):
            tokens = (micro + seed) % tiny_models.VOCABULARY
            (plain(input_ids=tokens, labels=tokens).loss / 2).backward()
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        expected.step()
    found = tensor_parallel_rule.shared(engine.whole_state_dict())
    assert rule.relative(found, {name: weight.detach() for name, weight in plain.named_parameters()}) <= 1e-6


@pytest.mark.parametrize("client", [False, True], ids=["groups", "client optimizer"])
@first_fast("stage", [3, 0, 1])
def test_parameters_keep_their_groups(stage, client):
    run_on_ranks(2, grouped, stage, client)


def refused(folder: str) -> None:
    model = pair("llama").model
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight, \(32, 32\) of 64 .* engine\.save_pretrained"):
        model.save_pretrained(folder)
    with pytest.raises(RuntimeError, match="as if it were the whole"):
        model.save_pretrained(folder, state_dict=model.state_dict())
    with pytest.raises(RuntimeError, match="was given no weights: global rank 0 alone holds the whole ones"):
        model.save_pretrained(folder, state_dict={})
    with pytest.raises(RuntimeError, match="LlamaForCausalLM is sharded over ranks and cannot"):
        copy.deepcopy(model)


def test_parts_are_neither_saved_nor_copied_as_the_whole(tmp_path):
    run_on_ranks(2, refused, str(tmp_path / "model"))
    assert not list(tmp_path.iterdir())
