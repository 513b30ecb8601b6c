"""Estimates what attention costs a rank with an algorithm of context parallelism, from sizes and a Machine.

Pure: neither torch nor DeepSpeed. Letters: B samples of S tokens; u Ulysses ranks, r ring ranks, u * r context ranks,
each with T = B S / (u r) tokens; n query heads and m key heads of a rank after the Ulysses exchange, D and V their
widths; e bytes a number, w where sums are kept. A block is the keys and values of a ring rank: T u m (D + V) numbers.

Simplifications: all of a Ulysses exchange counts as exposed, though some of it overlaps with projections; a causal mask
is balanced and halves the work, a sliding window counts as a whole mask; links do not contend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import accumulate

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.models.plan import AttentionShape
from ds_npu.operator_costs import Shape, attention_backward_cost, attention_forward_cost
from ds_npu.parallel.context.ring_schedule import Link, Step, ring_steps
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import Machine

CAUSAL_ROWS = 0.75
"""The mean part of a rank's rows that sees another's block in a zigzag ring: all rows, or the later half."""


@dataclass(frozen=True)
class Layer:
    """Attention of one layer, with all tensor ranks' heads, in a micro-batch of ``samples`` of ``length`` tokens."""

    shape: AttentionShape
    length: int
    samples: int = 1
    number_bytes: int = 2
    causal: bool = True


@dataclass(frozen=True)
class Pass:
    """A forward or backward of one layer, on the rank with the most work; far bytes go to other nodes."""

    near_bytes: float = 0.0
    far_bytes: float = 0.0
    messages: int = 0
    attention_s: float = 0.0
    exposed_s: float = 0.0
    """Seconds of communication that does not overlap with attention."""
    copy_s: float = 0.0
    """Seconds of packing and unpacking messages, and of summing results of blocks."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer on a rank."""

    forward: Pass
    backward: Pass
    kept_bytes: float
    """Bytes kept from forward to backward for each layer, without the rank's own queries, keys, values and result."""
    working_bytes: float

    @cached_property
    def both(self) -> Pass:
        return _sum((self.forward, self.backward))

    @property
    def seconds(self) -> float:
        return self.both.attention_s + self.both.exposed_s + self.both.copy_s


def impossible(layer: Layer, algorithm: ContextAlgorithm, degrees: Degrees) -> str | None:
    """Why ``algorithm`` is impossible; None where it is possible."""
    fewest = layer.shape.heads // degrees.tp
    if fewest < algorithm.ulysses:
        return f"{algorithm.ulysses} Ulysses ranks need a query head each, and a tensor rank has {fewest}"
    if layer.length < algorithm.fewest_tokens:
        return f"a sequence of {layer.length} tokens is too short; at least {algorithm.fewest_tokens} are needed"
    return None


def layer_cost(layer: Layer, algorithm: ContextAlgorithm, degrees: Degrees, machine: Machine) -> LayerCost:
    """The cost of a possible ``algorithm`` on the tensor rank with the most heads."""
    rank = _Rank(layer, algorithm, degrees, machine)
    routes = [_gather] if algorithm.gather else [_ring] if algorithm.ring > 1 else []
    forward = [rank.exchange(), rank.attention(), *(route(rank) for route in routes)]
    backward = [rank.exchange_back(), rank.attention(backward=True), *(route(rank, backward=True) for route in routes)]
    return LayerCost(_sum(forward), _sum(backward), rank.kept_bytes(), rank.working_bytes())


def _sum(passes: Iterable[Pass]) -> Pass:
    return Pass(*(sum(column) for column in zip(*map(astuple, passes), strict=True)))


def shared_heads(shape: AttentionShape, tensor: int, ulysses: int) -> tuple[list[int], list[int]]:
    """Query heads of each Ulysses rank, and the key heads that they need, of the tensor rank with the most heads."""
    short, longer = divmod(math.ceil(shape.heads / tensor), ulysses)
    queries = [short + (rank < longer) for rank in range(ulysses)]
    share = shape.heads // shape.kv_heads
    ends = accumulate(queries)
    return queries, [(end - 1) // share - (end - count) // share + 1 for end, count in zip(ends, queries, strict=True)]


@dataclass(frozen=True)
class _Rank:
    layer: Layer
    algorithm: ContextAlgorithm
    degrees: Degrees
    machine: Machine

    @cached_property
    def near(self) -> int:
        return self.machine.near(self.degrees)

    @cached_property
    def heads(self) -> tuple[list[int], list[int]]:
        return shared_heads(self.layer.shape, self.degrees.tp, self.algorithm.ulysses)

    @property
    def widths(self) -> tuple[int, int]:
        """D and V."""
        return self.layer.shape.head_dim, self.layer.shape.value_dim

    @property
    def tokens(self) -> float:
        """T of all samples."""
        return self.layer.samples * self.layer.length / self.algorithm.size

    @property
    def wide(self) -> int:
        return max(4, self.layer.number_bytes)

    @property
    def block(self) -> float:
        """Numbers of a ring rank's keys and values."""
        return self.tokens * self.algorithm.ulysses * max(self.heads[1]) * sum(self.widths)

    @property
    def again(self) -> list[int]:
        """Widths of the received keys and values that backward communicates again."""
        return {"none": [*self.widths], "half": [self.widths[1]], "full": []}[self.algorithm.kv_cache]

    @property
    def share_again(self) -> float:
        return sum(self.again) / sum(self.widths)

    def attention(self, backward: bool = False) -> Pass:
        """Attention's FLOP at the kernel's rate for the keys of one call, and the least time of each call."""
        layer = self.layer
        ring = self.algorithm.ring
        key, value = self.widths
        pairs = layer.samples * layer.length**2 / ring / (2 if layer.causal else 1)
        # Gathered, the two chunks of a zigzag rank are a call each; a block of a ring is one.
        calls, keys = (1 + layer.causal, layer.length) if self.algorithm.gather else (ring, layer.length / ring)
        rows = math.ceil(layer.length / ring)
        e = layer.number_bytes
        q = Shape((layer.samples, rows, max(self.heads[0]), key), e)
        k, v = (Shape((layer.samples, layer.length, max(self.heads[1]), width), e) for width in (key, value))
        cost = attention_backward_cost(q, k, v, pairs) if backward else attention_forward_cost(q, k, v, pairs)
        return Pass(attention_s=self.machine.attention_seconds(cost.flop, keys) + calls * self.machine.kernel)

    def exchange(self) -> Pass:
        """Ulysses, forward: a rank sends each other rank its heads of q, k, v, and receives its own tokens' result."""
        queries, keys = self.heads
        key, value = self.widths
        sent = _others(queries) * key + _others(keys) * (key + value) + _returned(queries) * value
        return self._exchanged(sent, sum(queries) * (key + value) + sum(keys) * (key + value), 4)

    def exchange_back(self) -> Pass:
        """Ulysses, backward: the gradient of the result one way, those of q, k and v the other."""
        queries, keys = self.heads
        key, value = self.widths
        again = self.again if self.algorithm.ring == 1 else []
        sent = _others(queries) * value + _returned(queries) * key + _returned(keys) * (key + value)
        copied = sum(queries) * (key + value) + sum(keys) * (key + value + sum(again))
        return self._exchanged(sent + _others(keys) * sum(again), copied, 4 + len(again))

    def _exchanged(self, sent: int, copied: int, messages: int) -> Pass:
        """All-to-alls of ``sent`` numbers a token, with ``copied`` numbers a token read and written to pack them."""
        peers = self.algorithm.ulysses - 1
        number_bytes = self.tokens * self.layer.number_bytes
        if not peers:
            return Pass()
        near_peers = math.gcd(self.algorithm.ulysses, self.near) - 1
        near = sent * number_bytes * near_peers / peers
        far = sent * number_bytes - near
        seconds = self.machine.sending_seconds(near, near_peers, far) + messages * self.machine.message
        return Pass(
            near, far, messages, exposed_s=seconds, copy_s=self.machine.memory_seconds(2 * copied * number_bytes)
        )

    def kept_bytes(self) -> float:
        """Received keys and values that ``kv_cache`` keeps; with Ulysses, only what exceeds the rank's own."""
        layer = self.layer
        ring = self.algorithm.ring
        kept = 1 - self.share_again
        share = layer.shape.heads // layer.shape.kv_heads
        own_heads = (sum(self.heads[0]) - 1) // share + 1
        more = max(self.block - self.tokens * own_heads * sum(self.widths), 0.0)
        return (more + (ring - 1) * self.block * kept if ring > 1 else more * kept) * layer.number_bytes

    def working_bytes(self) -> float:
        """Ulysses: what is sent of q, k and v, and what is fetched again. Ring: two blocks (three in a double ring) and
        three sums of gradients. Gathered: all blocks, and their gradients twice."""
        e = self.layer.number_bytes
        algorithm = self.algorithm
        queries, keys = map(sum, self.heads)
        sent = self.tokens * (queries * self.widths[0] + keys * sum(self.widths)) if algorithm.ulysses > 1 else 0.0
        blocks = e * self.share_again
        if algorithm.gather:
            blocks = algorithm.ring * (e + 2 * self.wide)
        elif algorithm.ring > 1:
            blocks = (2 if algorithm.window == 1 else 3) * e + 3 * self.wide
        return sent * e + self.block * blocks


def _others(heads: Sequence[int]) -> int:
    """The most heads that a rank sends of its own tokens: all but its own heads, where these are the fewest."""
    return sum(heads) - min(heads)


def _returned(heads: Sequence[int]) -> int:
    """The most heads that a rank sends back: all of its own, to each other rank for that rank's tokens."""
    return (len(heads) - 1) * max(heads)


def _gather(rank: _Rank, backward: bool = False) -> Pass:
    """All-gather of a block, and in backward reduce-scatter of its gradient; a block reaches each other node once.

    With g of r ranks on each node, a rank sends r / g - 1 blocks to other nodes, then (g - 1) r / g within its node.
    """
    e = rank.layer.number_bytes
    machine = rank.machine
    ranks = rank.algorithm.ring
    near = rank.near
    again = rank.share_again if backward else 1.0
    # Bytes of a block in each collective, and bytes read and written to put all blocks in order.
    collectives = [rank.block * e * again] if again else []
    copied = 2 * sum(collectives) * ranks
    if backward:
        collectives.append(rank.block * rank.wide)
        copied += rank.block * (e + rank.wide) * ranks
    far = sum(collectives) * (ranks // near - 1)
    within = sum(collectives) * (near - 1) * (ranks // near)
    seconds = (
        machine.sending_seconds(within, near - 1, 0)
        + machine.sending_seconds(0, 0, far)
        + len(collectives) * machine.message
    )
    return Pass(within, far, len(collectives), exposed_s=seconds, copy_s=machine.memory_seconds(copied))


def _ring(rank: _Rank, backward: bool = False) -> Pass:
    """Blocks go from rank to rank while attention to the present one is computed, gradients one step later.

    After the first of r steps, results are summed in wide numbers: out in forward, dq and the block's gradients in
    backward.
    """
    layer = rank.layer
    algorithm = rank.algorithm
    machine = rank.machine
    steps = ring_steps(0, algorithm.ring, algorithm.inner)
    moved = rank.block * layer.number_bytes * (rank.share_again if backward else 1.0)
    summed = rank.block * rank.wide if backward else 0.0
    sent = [*_sent(steps, moved, summed)]
    far = sum(size for link, size in sent if _is_far(rank, link))

    def seconds(link: Link, size: float) -> float:
        within = machine.sending_seconds(size, 1, 0)
        return machine.message + (max(within, machine.sending_seconds(0, 0, size)) if _is_far(rank, link) else within)

    attention = rank.attention(backward).attention_s
    waited = _waited(steps, attention / algorithm.ring, moved, summed, seconds)
    e, w = layer.number_bytes, rank.wide
    rows = rank.tokens * algorithm.ulysses * max(rank.heads[0]) * (CAUSAL_ROWS if layer.causal else 1)
    added = rows * rank.widths[0] + rank.block if backward else rows * rank.widths[1]
    # Read and written: a part, the same made wide, and the sum.
    copies = (algorithm.ring - 1) * machine.memory_seconds(added * (e + 4 * w))
    return Pass(sum(size for _, size in sent) - far, far, len(sent), exposed_s=waited, copy_s=copies)


def _is_far(rank: _Rank, link: Link) -> bool:
    """Whether a hop over ``link`` goes to another node for some rank."""
    reach = rank.algorithm.ulysses * rank.algorithm.inner if link == "inner" else rank.algorithm.size
    return rank.near % reach != 0


def _sent(steps: Sequence[Step], moved: float, summed: float) -> Iterable[tuple[Link, float]]:
    """Link and size of each message that is not empty."""
    for step in steps:
        if moved:
            yield from ((hop.link, moved) for hop in step.hops)
        if summed and step.gradient:
            yield step.gradient.link, summed


def _waited(
    steps: Sequence[Step], step_s: float, moved: float, summed: float, seconds: Callable[[Link, float], float]
) -> float:
    """Seconds that a rank waits, if all ranks do the same at the same time; a link carries one message at a time."""
    now = 0.0
    there = {0: 0.0}
    free = dict.fromkeys(("inner", "outer", "home"), 0.0)
    coming, home = 0.0, [0.0]

    def send(link: Link, size: float) -> float:
        free[link] = max(now, free[link]) + seconds(link, size)
        return free[link]

    for step in steps:
        now = max(now, there.get(step.source, 0.0))
        if moved:
            there |= {hop.received: send(hop.link, moved) for hop in step.hops}
        now += step_s
        if summed and step.adds:
            now = max(now, coming)
        if summed and step.gradient:
            coming = send(step.gradient.link, summed)
            home += [coming] * (step.gradient.received == 0)
    return max(now, *home) - step_s * len(steps)
