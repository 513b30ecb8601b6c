"""TRL's fused head, as its trainers put it into a model, over tensor and context ranks: one process's scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from sequence_sharded_models import SequenceSharded, algorithm, ends, packed, padded, tokens
from sharded_models import agree, close
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from ds_npu.engine.shard_protection import protect_shards
from ds_npu.features.context_parallel.sharded_sequences import shard_sequences
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow

SINGLE = 1e-6
"""Of gradients: TRL's backward accumulates in float32, whatever the model."""
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
Loss = Callable[[object], torch.Tensor]


def likelihood(out) -> torch.Tensor:
    """SFTTrainer's, loss_type "nll"."""
    return -out.log_probs.sum() / out.label_mask.sum()


def dynamic(out) -> torch.Tensor:
    """SFTTrainer's, loss_type "dft"."""
    return -(out.log_probs * out.log_probs.exp().detach()).sum() / 17


def preference(out) -> torch.Tensor:
    """DPOTrainer's: of the log-probabilities of sequences; with entropies, as GRPO can."""
    chosen, *rejected = out.log_probs.sum(1)
    return -nn.functional.logsigmoid(0.1 * (chosen - sum(rejected))) - 0.01 * out.entropy.mean()


def own(out) -> torch.Tensor:
    """What the forward itself returns."""
    return out.loss


def shard(family: str, degrees: Degrees, sequence_parallel: bool, **options: object) -> SequenceSharded:
    """As deepspeed.initialize does with the model of a trainer."""
    topology = Topology(degrees)
    model, plain = (tiny_models.tiny(family, attn_implementation="sdpa", **options) for _ in range(2))
    for each in (model, plain):
        add_fused_lm_head(each, temperature=1.3, outputs=OUTPUTS)
    plan = plan_for(model, {})
    if degrees.tp > 1:
        shard_model(model, plan, topology, sequence_parallel)
        protect_shards(model, topology)
    if degrees.cp > 1:
        shard_sequences(model, plan, topology, algorithm("ring", degrees.cp))
    return SequenceSharded(model, plain, topology)


def batches() -> dict[str, dict[str, torch.Tensor]]:
    ids = tokens()
    labels = ids.clone()
    labels[:, :4] = -100
    shifted = {"shift_labels": nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]}
    documents = {"position_ids": packed(1), "labels": ids[:1].masked_fill(packed(1) == 0, -100)}
    number = torch.tensor([0] * 5 + [1] + [2] * 7, dtype=torch.int32)[None]
    return {
        "completions": {"input_ids": ids, "labels": labels},
        "shifted, counted by the caller": {"input_ids": ids, "num_items_in_batch": torch.tensor(40)} | shifted,
        "padded": padded("right"),
        "padding-free": {"input_ids": ids[:1], "seq_idx": number} | documents | ends(),
        "no targets": {"input_ids": ids, "labels": torch.full_like(ids, -100)},
    }


def compare(pair: SequenceSharded, given: dict[str, torch.Tensor], loss_of: Loss, what: str) -> None:
    outs, losses = [], []
    for model in (pair.plain, pair.model):
        model.zero_grad()
        with tiny_models.Float64():
            # sdpa sees documents in the positions.
            left_out = () if model is pair.model else OF_DOCUMENTS
            seen = {name: each for name, each in given.items() if name not in left_out}
            out = model(**seen, use_cache=False, fused_lm_head=True)
            loss = loss_of(out)
            loss.backward()
        outs.append(out)
        losses.append(loss.detach())
    expected, found = outs
    assert agree(losses[1]), (what, losses, found.log_probs.dtype)
    close(losses[1], losses[0], what)
    for name in (*OUTPUTS, "label_mask", "loss"):
        assert found[name].dtype == expected[name].dtype, (what, name)
        close(found[name].detach().double(), expected[name].detach().double(), f"{what}: {name}")
    gradients = pair.gradients()
    for name, weight in pair.plain.named_parameters():
        wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad
        error, largest = float((gradients[name] - wanted).abs().max()), float(wanted.abs().max())
        assert error <= SINGLE * largest, (what, name, error, largest)


def scores(family: str, degrees: Degrees, sequence_parallel: bool = False, **options: object) -> None:
    pair = shard(family, degrees, sequence_parallel, **options)
    losses = {"completions": (likelihood, dynamic, preference, own), "padded": (preference,)}
    for what, given in batches().items():
        for loss_of in losses.get(what, (own,)):
            compare(pair, given, loss_of, f"{what}, {loss_of.__name__}")
    pair.model.eval()
    pair.plain.eval()
    with torch.no_grad(), tiny_models.Float64():
        given = batches()["completions"]
        found, expected = (each(**given, use_cache=False, fused_lm_head=True) for each in (pair.model, pair.plain))
        close(found.log_probs, expected.log_probs)
        # What label smoothing and compute_metrics read.
        found, expected = (each(input_ids=given["input_ids"]).logits for each in (pair.model, pair.plain))
        close(found, expected)


CASES = {
    "context": ("llama", Degrees(cp=2), False),
    "tensor": ("llama", Degrees(tp=2), False),
    "tensor and context": ("qwen2", Degrees(tp=2, cp=2), True),
    "experts over context ranks": ("qwen3_moe", Degrees(cp=2), False),
}


@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize("case", CASES)
def test_scores_losses_and_gradients_are_those_of_one_process(case):
    family, degrees, sequence_parallel = CASES[case]
    run_on_ranks(degrees.world_size, scores, family, degrees, sequence_parallel)
