"""The gradient rule on the expert view of the grid, by a toy layer of experts."""

from __future__ import annotations

import expert_precision
import gradient_rule as rule
import pytest
import torch
import toy_experts
from ranks import run_on_ranks

from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology


def all_stages(parallel: dict[str, int]) -> None:
    for stage in (0, 1, 2, 3):
        toy_experts.step(stage, parallel)


WORLDS = [
    (2, {"expert": 2}),
    (2, {"expert": 2, "context": 2}),
    (2, {"expert": 2, "tensor": 2}),
    (4, {"expert": 2}),
    (4, {"expert": 4, "tensor": 2}),
    (4, {"expert": 2, "tensor": 2}),
    (4, {"expert": 2, "context": 2}),
    (4, {"expert": 2, "context": 2, "tensor": 2}),
    (8, {"expert": 2, "context": 2, "tensor": 2}),
    (8, {"expert": 4, "context": 2, "tensor": 2}),
]


@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [pytest.param(*each, id=f"{each}", marks=() if each[0] == 2 else pytest.mark.slow) for each in WORLDS],
)
def test_experts_train_as_in_one_process(ranks, parallel):
    run_on_ranks(ranks, all_stages, parallel)


def checkpoint_of_own_layers(folder: str) -> None:
    import deepspeed

    rule.without_extension()
    model = toy_experts.Net(Topology(Degrees(ep=2, dp=2)))
    config = rule.config(1, torch.float32, {"expert": 2})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    written = {name: each.detach().clone() for name, each in model.named_parameters()}
    engine.save_checkpoint(folder)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1)
    engine.load_checkpoint(folder)
    assert all(torch.equal(each, written[name]) for name, each in model.named_parameters())


def test_layers_of_ones_own_are_saved_and_loaded(tmp_path):
    run_on_ranks(2, checkpoint_of_own_layers, str(tmp_path))
    files = {path.name for path in tmp_path.glob("*/experts_*")}
    assert files == {f"experts_rank_00{rank}_of_002_model_states.pt" for rank in (0, 1)}


class OwnedByDeepSpeed(torch.nn.Module):
    """A mixture of experts that DeepSpeed dispatches, and whose groups it makes."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.dense, self.moe = torch.nn.Linear(8, 8), MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=2, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, auxiliary, _ = self.moe(self.dense(x))
        return out.square().mean() + auxiliary / 100


def losses_of(stage: int, section: dict) -> list[float]:
    import deepspeed

    model = OwnedByDeepSpeed()
    config = {key: value for key, value in rule.config(stage, torch.float32, {}).items() if key != "ds_npu"}
    config |= section | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)
    losses = []
    for step in range(3 * rule.ACCUMULATION):
        torch.manual_seed(step + 10 * torch.distributed.get_rank())
        loss = engine(torch.randn(rule.MICRO, 4, 8))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def moe_of_deepspeed() -> None:
    rule.without_extension()
    for stage in (0, 2):
        alone = losses_of(stage, {})
        assert losses_of(stage, {"ds_npu": {}}) == alone and alone[0] != alone[-1], stage


PRECISE = [(2, {"expert": 2}), (2, {"expert": 2, "tensor": 2}), (4, {"expert": 2, "context": 2}), (4, {"expert": 4})]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("ranks", "parallel"), PRECISE)
def test_bf16_without_zero(ranks, parallel):
    run_on_ranks(ranks, expert_precision.all_of, parallel)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, {"expert": 2}), (4, {"expert": 2, "tensor": 4})])
def test_bf16_without_zero_is_resumed(ranks, parallel, tmp_path):
    run_on_ranks(ranks, expert_precision.resumed, parallel, str(tmp_path))


def test_fp16_without_zero_is_refused():
    run_on_ranks(2, expert_precision.fp16_is_refused)


def moe_of_deepspeed_beside_other_axes() -> None:
    rule.without_extension()
    for parallel, said in (({"expert": 2}, "expert 2"), ({"context": 2}, "context 2"), ({"tensor": 2}, "tensor 2")):
        section = {"ds_npu": {"parallel": parallel, "plan": {"**": "replicated"}}}
        with pytest.raises(ValueError, match=rf"found {said} for a model with moe \(deepspeed\.moe\.layer\.MoE\)"):
            losses_of(1, section)


def test_moe_of_deepspeeds_own_is_refused_beside_other_axes():
    run_on_ranks(2, moe_of_deepspeed_beside_other_axes)


def test_moe_of_deepspeeds_own_trains_as_without_ds_npu():
    run_on_ranks(2, moe_of_deepspeed)
