"""Log-probabilities from sharded heads and sequences, against the whole logits of one process, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from allocated import peak_bytes
from ranks import run_on_ranks
from vocabulary import EXACT, as_near
from wire import Wire

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.parallel.context.load_balance import shard_evenly
from ds_npu.parallel.tensor import log_probs
from ds_npu.parallel.tensor.log_probs import LogitTransform, TokenScores, VocabParallelLogProbs
from ds_npu.parallel.tensor.sharding import shard_sections
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

B, S, H, V = 2, 11, 6, 13
IGNORED = -100
TRANSFORMS = {
    "plain": LogitTransform(),
    "all": LogitTransform(scale=1.5, softcap=3.0, temperature=0.7),
    "hot": LogitTransform(temperature=2.0),
}


@dataclass
class Inputs:
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    upstream: torch.Tensor
    """Gradients of log-probabilities and entropies, [2, B, S]."""

    @staticmethod
    def of(has_bias: bool, dtype: torch.dtype = torch.float64) -> Inputs:
        draw = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            # Multiples of 1/8, whose products are exact: two words may be equally likely.
            return (8 * torch.randn(*shape, dtype=torch.float64, generator=draw)).round().div(8).to(dtype)

        targets_BS = torch.randint(0, V, (B, S), generator=draw)
        targets_BS[:, ::4] = IGNORED
        weight_VH, hidden_BSH = random(V, H), random(B, S, H)
        bias_V = random(V) if has_bias else None
        # The most likely words of some tokens are 2 and 8, of two ranks; the first of them is the top one.
        for each in (weight_VH, bias_V):
            if each is not None:
                each[8] = each[2]
        hidden_BSH[:, 1:4] = 4 * weight_VH[2]
        targets_BS[:, 1:4] = torch.tensor([2, 8, 3])
        return Inputs(hidden_BSH, weight_VH, bias_V, targets_BS, torch.randn(2, B, S, generator=draw).double())


def reference(inputs: Inputs, transform: LogitTransform) -> tuple[TokenScores, list[torch.Tensor | None]]:
    """Plain PyTorch from the whole logits: the scores and the gradients of hidden states, weight and bias."""
    leaves = [
        each if each is None else each.clone().requires_grad_() for each in (inputs.hidden, inputs.weight, inputs.bias)
    ]
    logits = torch.nn.functional.linear(*leaves).to(torch.promote_types(leaves[0].dtype, torch.float32))
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = torch.tanh(logits / transform.softcap) * transform.softcap
    logits = logits / transform.temperature
    counted = inputs.targets != IGNORED
    log_p = logits.log_softmax(-1)
    index = inputs.targets.clamp(min=0)
    found = TokenScores(
        log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1) * counted,
        -(log_p.exp() * log_p).sum(-1) * counted,
        (log_p.exp() ** 2).sum(-1).log() * counted,
        logits.mean(-1) * counted,
        (logits.argmax(-1) == index) & counted,
    )
    ((found.log_probs * inputs.upstream[0]).sum() + (found.entropy * inputs.upstream[1]).sum()).backward()
    return TokenScores(*(each.detach() for each in found)), [None if each is None else each.grad for each in leaves]


def on_a_grid(degrees: Degrees) -> None:
    """Each rank has its words of the head and its tokens of the sequences, in blocks of three and a shorter last."""
    log_probs.TOKENS = 3
    topology = Topology(degrees)
    vocabulary = shard_sections(0, [V], degrees.tp)
    tokens = shard_evenly(S, ContextAlgorithm(ring=degrees.cp))
    index = tokens.index(topology.rank("cp"))[0]
    for name, transform in TRANSFORMS.items():
        for has_bias in (False, True):
            inputs = Inputs.of(has_bias)
            expected, gradients = reference(inputs, transform)
            hidden = inputs.hidden[:, index].clone().requires_grad_()
            rank = topology.rank("tp")
            weight = vocabulary.take(inputs.weight, rank).requires_grad_()
            bias = None if inputs.bias is None else vocabulary.take(inputs.bias, rank).requires_grad_()
            head = VocabParallelLogProbs(topology.group("tp"), vocabulary, transform)
            found = head(hidden, weight, inputs.targets[:, index], bias)
            assert expected.is_top1[:, 1:4].tolist() == B * [[True, False, False]]
            for field, mine, whole in zip(TokenScores._fields, found, expected, strict=True):
                near(mine.detach(), whole[:, index], (name, field))
            upstream = inputs.upstream[..., index]
            ((found.log_probs * upstream[0]).sum() + (found.entropy * upstream[1]).sum()).backward()
            near(hidden.grad, gradients[0][:, index], (name, "hidden"))
            for mine, whole in ((weight, gradients[1]), (bias, gradients[2])):
                if mine is not None:
                    # As the engine does: a weight's gradient is the sum over the context ranks.
                    dist.all_reduce(mine.grad, group=topology.group("cp"))
                    near(mine.grad, vocabulary.take(whole, rank), (name, tuple(mine.shape)))


def near(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    if found.dtype == torch.bool:
        assert torch.equal(found, expected), what
    else:
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        assert error <= EXACT, (what, error)


@pytest.mark.parametrize(
    "degrees", [Degrees(tp=2), Degrees(cp=2), Degrees(tp=2, cp=2), Degrees(tp=4), Degrees()], ids=str
)
def test_scores_and_gradients_are_those_of_whole_logits(degrees):
    run_on_ranks(degrees.world_size, on_a_grid, degrees)


def in_bfloat16() -> None:
    topology = Topology(Degrees(tp=2))
    vocabulary, rank = shard_sections(0, [V], 2), topology.rank("tp")
    given = Inputs.of(True, torch.bfloat16)
    wide = Inputs(given.hidden.double(), given.weight.double(), given.bias.double(), given.targets, given.upstream)
    exact, exact_gradients = reference(wide, LogitTransform())
    torchs, torchs_gradients = reference(given, LogitTransform())
    hidden, weight = given.hidden.clone().requires_grad_(), vocabulary.take(given.weight, rank).requires_grad_()
    found = VocabParallelLogProbs(topology.group("tp"), vocabulary)(
        hidden, weight, given.targets, vocabulary.take(given.bias, rank)
    )
    assert found.log_probs.dtype == torch.float32
    for field in ("log_probs", "entropy"):
        as_near(*(getattr(each, field).detach() for each in (found, torchs, exact)))
    ((found.log_probs * given.upstream[0]).sum() + (found.entropy * given.upstream[1]).sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    as_near(hidden.grad, torchs_gradients[0], exact_gradients[0])
    as_near(weight.grad, *(vocabulary.take(each[1], rank) for each in (torchs_gradients, exact_gradients)))


def test_bfloat16_is_as_near_as_torchs():
    run_on_ranks(2, in_bfloat16)


def messages_and_memory() -> None:
    topology = Topology(Degrees(tp=2))
    log_probs.TOKENS = 16
    words, tokens, hidden_size = 4096, 512, 8
    vocabulary = shard_sections(0, [words], 2)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(words // 2, hidden_size, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    head = VocabParallelLogProbs(topology.group("tp"), vocabulary)
    with Wire() as wire:
        found = head(hidden, weight, targets)
        assert wire.sent == [("allreduce_", 2 * tokens * 4), ("allreduce_", 5 * tokens * 4)]
        found.log_probs.sum().backward()
        assert wire.sent[2:] == [("allreduce_", tokens * hidden_size * 4)]
    peak = peak_bytes(lambda: head(hidden, weight, targets).log_probs.sum().backward())
    logits = tokens * words // 2 * 4
    assert peak < logits // 4, (peak, logits)
    with pytest.raises(ValueError, match=r"a head of 5 words was given; this rank's has the 2048 from (0|2048) on"):
        head(hidden, weight[:5], targets)


def test_messages_and_memory():
    run_on_ranks(2, messages_and_memory)
