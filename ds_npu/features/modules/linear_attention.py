"""The forward of a layer of linear attention, whose sequences may be divided over ranks.

A layer projects each token, mixes tokens by a short convolution and a recurrence, and projects each token again. How
sequences are mixed is given as ``Sequences``. The number of heads is read from the shapes of what is projected: over
tensor ranks a layer has some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from ds_npu.models.attributes import attribute
from ds_npu.models.linear_attention import (
    CONVOLUTIONS,
    NORMS,
    OUTPUTS,
    LinearAttention,
    linear_attention_of,
    part_of,
)
from ds_npu.ops.linear_attention import Recurrence
from ds_npu.ops.precision import accumulation_dtype, for_accumulation

EPSILON = 1e-6
"""Added to the squared length of queries and keys: transformers' and flash-linear-attention's."""


class Sequences(Protocol):
    """How the tokens [B, S] of a batch are mixed."""

    @property
    def kept(self) -> torch.Tensor | None:
        """[B, S, 1]: False for padding that layers must not see; None where there is none."""

    def compute(self, mixer: Callable[..., torch.Tensor], *of_tokens: torch.Tensor) -> torch.Tensor:
        """Call ``mixer`` with tensors [P, L, ...], rearranged for ``convolve`` and ``attend``.

        They are made of tensors [B, S, ...], and the result is rearranged back.
        """

    def convolve(self, x_PLC: torch.Tensor, convolution: nn.Module) -> torch.Tensor:
        """The causal convolution with the weight and bias of ``convolution``."""

    def attend(self, tokens: Recurrence) -> torch.Tensor:
        """Linear attention: [P, L, H, V]."""


def linear_attention_forward(layer: nn.Module, hidden_BSD: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """The output [B, S, D] of ``layer``, a LinearAttention, for ``hidden`` [B, S, D]."""
    hidden = hidden_BSD if sequences.kept is None else hidden_BSD * sequences.kept
    kind = linear_attention_of(layer)
    assert kind is not None, "the caller has looked"
    return MIXERS[kind](layer, hidden, sequences)


def _gated_delta(layer: nn.Module, hidden: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    key = _number(layer, "head_k_dim")
    value = _number(layer, "head_v_dim")
    shared = _number(layer, "num_v_heads") // _number(layer, "num_k_heads")
    mixed, z, b, a = _delta_projections(layer, hidden, shared)
    key_heads = mixed.shape[-1] // (2 * key + shared * value)
    widths = [key_heads * key, key_heads * key, key_heads * shared * value]
    largest = 2.0 if attribute(layer, "allow_neg_eigval", bool) else 1.0

    def mix(mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.split(functional.silu(sequences.convolve(mixed, part_of(layer, *CONVOLUTIONS))), widths, -1)
        q, k = (_normalised(each, key).repeat_interleave(shared, 2) for each in (q, k))
        step = functional.softplus(for_accumulation(a) + _parameter(layer, "dt_bias"))
        decay = -_parameter(layer, "A_log").exp() * step
        beta = largest * b.sigmoid()
        return sequences.attend(Recurrence(q * key**-0.5, k, torch.unflatten(v, -1, (-1, value)), decay, beta))

    out = sequences.compute(mix, mixed, b, a)
    out = part_of(layer, *NORMS)(out.flatten(0, 2), z.reshape(-1, value)).view(*hidden.shape[:2], -1)
    found: torch.Tensor = part_of(layer, *OUTPUTS)(out)
    return found


def _delta_projections(layer: nn.Module, hidden: torch.Tensor, shared: int) -> tuple[torch.Tensor, ...]:
    """(all queries, then all keys, then all values; z; b; a): each [B, S, ...]."""
    parts = dict(layer.named_children())

    def projected(*names: str) -> torch.Tensor:
        found: torch.Tensor = part_of(layer, *names)(hidden)
        return found

    if "in_proj_qkvz" not in parts:
        separate = "q_proj" in parts
        mixed = torch.cat([projected(f"{name}_proj") for name in "qkv"], -1) if separate else projected("in_proj_qkv")
        return (
            mixed,
            projected("g_proj", "in_proj_z"),
            projected("b_proj", "in_proj_b"),
            projected("a_proj", "in_proj_a"),
        )
    # Head of keys by head of keys, with the heads of values that share it.
    key = _number(layer, "head_k_dim")
    values = shared * _number(layer, "head_v_dim")
    by_head = torch.unflatten(projected("in_proj_qkvz"), -1, (-1, 2 * key + 2 * values))
    q, k, v, z = (each.flatten(2) for each in torch.split(by_head, [key, key, values, values], -1))
    b, a = (each.flatten(2) for each in torch.unflatten(projected("in_proj_ba"), -1, (-1, 2 * shared)).chunk(2, -1))
    return torch.cat([q, k, v], -1), z, b, a


def _normalised(x: torch.Tensor, width: int) -> torch.Tensor:
    """Heads of length 1 [P, L, H, K], in the accumulation dtype."""
    wide = torch.unflatten(for_accumulation(x), -1, (-1, width))
    return wide * (wide.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def _state_space(layer: nn.Module, hidden: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    width = _number(layer, "head_dim")
    state = _number(layer, "ssm_state_size")
    groups = _number(layer, "n_groups")
    heads = len(_parameter(layer, "A_log"))
    inner = heads * width
    least, most = attribute(layer, "time_step_limit", tuple) or (0.0, torch.inf)
    # Falcon-H1 multiplies what goes in, and each column of what comes out.
    scale = attribute(layer, "ssm_in_multiplier", float)
    scales = dict(layer.named_buffers(recurse=False))
    projected = layer.get_submodule("in_proj")(hidden if scale is None else hidden * scale)
    projected = projected * scales["mup_vector"] if "mup_vector" in scales else projected
    gate, mixed, dt = torch.split(projected, [inner, inner + 2 * groups * state, heads], -1)

    def mix(mixed: torch.Tensor, dt: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
        mixed = functional.silu(sequences.convolve(mixed, part_of(layer, *CONVOLUTIONS)))
        for each in kept:
            mixed = mixed * each
        x, b, c = torch.split(for_accumulation(mixed), [inner, groups * state, groups * state], -1)
        x = torch.unflatten(x, -1, (heads, width))
        k, q = (torch.unflatten(each, -1, (groups, state)).repeat_interleave(heads // groups, 2) for each in (b, c))
        bias = layer.get_parameter("dt_bias").to(dt.dtype)
        step = for_accumulation(functional.softplus(dt + bias).clamp(least, most))
        decay = -_parameter(layer, "A_log").exp() * step
        out = sequences.attend(Recurrence(q, k, x * step[..., None], decay))
        return out + _parameter(layer, "D")[:, None] * x

    out = sequences.compute(mix, mixed, dt, *[] if sequences.kept is None else [sequences.kept]).flatten(2)
    # Falcon-H1's norm can be left out.
    norm = part_of(layer, *NORMS)
    out = out * functional.silu(gate) if type(norm) is nn.Identity else norm(out, gate)
    found: torch.Tensor = part_of(layer, *OUTPUTS)(out.to(hidden.dtype))
    return found


def _short_convolution(layer: nn.Module, hidden: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    gate_in, gate_out, x = part_of(layer, "in_proj")(hidden).chunk(3, -1)
    convolution = part_of(layer, *CONVOLUTIONS)
    out = sequences.compute(lambda mixed: sequences.convolve(mixed, convolution), gate_in * x)
    found: torch.Tensor = part_of(layer, *OUTPUTS)(gate_out * out)
    return found


MIXERS: dict[LinearAttention, Callable[[nn.Module, torch.Tensor, Sequences], torch.Tensor]] = {
    LinearAttention.GATED_DELTA: _gated_delta,
    LinearAttention.MAMBA_2: _state_space,
    LinearAttention.SHORT_CONVOLUTION: _short_convolution,
}


def _number(layer: nn.Module, name: str) -> int:
    found = attribute(layer, name, int)
    if found is None:
        raise ValueError(f"{type(layer).__name__} has no number {name}, as transformers' layers of its kind have")
    return found


def _parameter(layer: nn.Module, name: str) -> torch.Tensor:
    """The parameter ``name`` in the accumulation dtype."""
    weight = layer.get_parameter(name)
    return weight.to(accumulation_dtype(weight.dtype))
