"""What attention costs a rank with each algorithm of context parallelism: an estimate, from sizes and a Machine.

Pure: neither torch nor DeepSpeed. Letters: B samples of S tokens; u Ulysses ranks, r ring ranks, u * r context ranks,
each with T = B S / (u r) tokens; n query heads and m key heads of a rank after the Ulysses exchange, D and V their
widths; e bytes a number, w where sums are kept. A block is the keys and values of a ring rank: T u m (D + V) numbers.

Kept simple: all of a Ulysses exchange counts as exposed, though some of it hides behind the projections; a causal mask
is balanced and halves the work, a sliding window is taken for a whole one; links do not get in each other's way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from ds_npu.models.plan import AttentionShape
from ds_npu.parallel.context.ring import Link, Step, ring_steps
from ds_npu.topology.context import ContextAlgorithm
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import Machine

CAUSAL_ROWS = 0.75
"""Of a rank's rows, what sees some of another's block in a zigzag ring: all of them, or the later half."""


@dataclass(frozen=True)
class Layer:
    """One layer's attention to a micro batch of ``samples`` of ``length`` tokens; the heads are the whole model's."""

    shape: AttentionShape
    length: int
    samples: int = 1
    number_bytes: int = 2
    causal: bool = True


@dataclass(frozen=True)
class Pass:
    """A forward or a backward of one layer, of the rank that has most to do."""

    near_bytes: float = 0.0
    """Sent to ranks of the node."""
    far_bytes: float = 0.0
    """Sent to other nodes."""
    messages: int = 0
    """Messages and collectives."""
    attention_s: float = 0.0
    """The kernels, with what calling them costs."""
    exposed_s: float = 0.0
    """Communication that no attention hides."""
    copy_s: float = 0.0
    """Messages packed and unpacked, and results of blocks summed."""


@dataclass(frozen=True)
class Cost:
    """What one layer costs a rank."""

    forward: Pass
    backward: Pass
    kept_bytes: float
    """Kept from forward to backward, of each layer, beside the rank's own queries, keys, values and result."""
    working_bytes: float
    """Buffers while the layer runs."""

    @cached_property
    def both(self) -> Pass:
        return _sum((self.forward, self.backward))

    @property
    def seconds(self) -> float:
        return self.both.attention_s + self.both.exposed_s + self.both.copy_s


def impossible(layer: Layer, algorithm: ContextAlgorithm, degrees: Degrees) -> str | None:
    """Why ``algorithm`` cannot do it; None where it can."""
    fewest = layer.shape.heads // degrees.tp
    if fewest < algorithm.ulysses:
        return f"{algorithm.ulysses} Ulysses ranks need a query head each, and a tensor rank has {fewest}"
    if layer.length < algorithm.fewest_tokens:
        return f"a sequence of {layer.length} tokens is too short; at least {algorithm.fewest_tokens} are needed"
    return None


def cost(layer: Layer, algorithm: ContextAlgorithm, degrees: Degrees, machine: Machine) -> Cost:
    """The cost of ``algorithm``, which must not be ``impossible``, on the tensor rank with most heads."""
    rank = _Rank(layer, algorithm, degrees, machine)
    route = _gather if algorithm.gather else _ring if algorithm.ring > 1 else _stay
    forward = [rank.exchange(), rank.attention(), route(rank)]
    backward = [rank.exchange_back(), rank.attention(backward=True), route(rank, backward=True)]
    return Cost(_sum(forward), _sum(backward), rank.kept_bytes(), rank.working_bytes())


def _sum(passes: Iterable[Pass]) -> Pass:
    return Pass(*(sum(column) for column in zip(*map(astuple, passes), strict=True)))


def shared_heads(shape: AttentionShape, tensor: int, ulysses: int) -> tuple[list[int], list[int]]:
    """Query heads of each Ulysses rank, and the key heads that they need, of a tensor rank with most heads."""
    short, longer = divmod(math.ceil(shape.heads / tensor), ulysses)
    queries = [short + (rank < longer) for rank in range(ulysses)]
    share, keys, begin = shape.heads // shape.kv_heads, [], 0
    for count in queries:
        keys.append((begin + count - 1) // share - begin // share + 1)
        begin += count
    return queries, keys


@dataclass(frozen=True)
class _Rank:
    """A rank, its sizes and its speeds."""

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
    def tokens(self) -> float:
        """T, of all samples."""
        return self.layer.samples * self.layer.length / self.algorithm.size

    @property
    def group_tokens(self) -> float:
        return self.tokens * self.algorithm.ulysses

    @property
    def wide(self) -> int:
        return max(4, self.layer.number_bytes)

    @property
    def kv_width(self) -> int:
        return self.layer.shape.head_dim + self.layer.shape.value_dim

    @property
    def block(self) -> float:
        """Numbers of a ring rank's keys and values."""
        return self.group_tokens * max(self.heads[1]) * self.kv_width

    @property
    def fetched_again(self) -> float:
        """Of keys and values that came in forward, the part that backward needs again, by their widths."""
        values = self.layer.shape.value_dim / self.kv_width
        return {"none": 1.0, "half": values, "full": 0.0}[self.algorithm.kv_cache]

    def attention(self, backward: bool = False) -> Pass:
        """2 products of B S^2 n / r scores with D and V forward (2 FLOPs each), 3 with D and 2 with V backward."""
        shape, ring = self.layer.shape, self.algorithm.ring
        scores = self.layer.samples * self.layer.length**2 / ring * max(self.heads[0]) / (2 if self.layer.causal else 1)
        width = 3 * shape.head_dim + 2 * shape.value_dim if backward else shape.head_dim + shape.value_dim
        # Gathered, the two chunks of a zigzag rank are a call each; a block of a ring is one.
        calls = 1 + self.layer.causal if self.algorithm.gather else ring
        return Pass(attention_s=2 * scores * width / self.machine.attention + calls * self.machine.call)

    def exchange(self) -> Pass:
        """Ulysses, forward: a rank sends each other one its heads of q, k and v, and gets its own tokens' result."""
        queries, keys = self.heads
        key, value = self.layer.shape.head_dim, self.layer.shape.value_dim
        sent = _others(queries) * key + _others(keys) * self.kv_width + self._returned(queries) * value
        copied = sum(queries) * (key + value) + sum(keys) * self.kv_width
        return self._exchanged(self.tokens * sent, self.tokens * copied, 4)

    def exchange_back(self) -> Pass:
        """Ulysses, backward: the gradient of the result the one way, those of q, k and v the other."""
        queries, keys = self.heads
        key, value = self.layer.shape.head_dim, self.layer.shape.value_dim
        sent = _others(queries) * value + self._returned(queries) * key + self._returned(keys) * self.kv_width
        copied = sum(queries) * (key + value) + sum(keys) * self.kv_width
        if self.algorithm.ring > 1:
            return self._exchanged(self.tokens * sent, self.tokens * copied, 4)
        again = self.fetched_again * self.kv_width
        messages = 4 + {"none": 2, "half": 1, "full": 0}[self.algorithm.kv_cache]
        return self._exchanged(
            self.tokens * (sent + _others(keys) * again), self.tokens * (copied + sum(keys) * again), messages
        )

    def _returned(self, heads: Sequence[int]) -> int:
        """Heads that a rank sends back, counted for each rank whose tokens they are of."""
        return (self.algorithm.ulysses - 1) * max(heads)

    def _exchanged(self, sent: float, copied: float, messages: int) -> Pass:
        """All-to-alls of ``sent`` numbers, of which ``copied`` are read and written once to stand side by side."""
        peers = self.algorithm.ulysses - 1
        if not peers:
            return Pass()
        near_peers = math.gcd(self.algorithm.ulysses, self.near) - 1
        near = sent * self.layer.number_bytes * near_peers / peers
        far = sent * self.layer.number_bytes - near
        seconds = self.machine.seconds(near, near_peers, far) + messages * self.machine.message
        copies = 2 * copied * self.layer.number_bytes / self.machine.memory
        return Pass(near, far, messages, exposed_s=seconds, copy_s=copies)

    def kept_bytes(self) -> float:
        """Keys and values that came, as ``kv_cache`` says; after Ulysses, heads that several ranks have."""
        block, ring = self.block * self.layer.number_bytes, self.algorithm.ring
        own = self.tokens * self.heads_of_own * self.kv_width * self.layer.number_bytes
        kept = 1 - self.fetched_again
        return block - own + (ring - 1) * block * kept if ring > 1 else max(block - own, 0.0) * kept

    @property
    def heads_of_own(self) -> int:
        """Key heads of the rank's own tokens, before the exchange."""
        share = self.layer.shape.heads // self.layer.shape.kv_heads
        return (sum(self.heads[0]) - 1) // share + 1

    def working_bytes(self) -> float:
        """Ulysses: what is sent of q, k and v, and what is fetched again. Ring: two blocks (three in a double ring) and
        three sums of gradients. Gathered: all blocks, and their gradients twice."""
        e, algorithm = self.layer.number_bytes, self.algorithm
        found = 0.0
        if algorithm.ulysses > 1:
            queries, keys = map(sum, self.heads)
            found += self.tokens * (queries * self.layer.shape.head_dim + keys * self.kv_width) * e
        if algorithm.gather:
            found += algorithm.ring * self.block * (e + 2 * self.wide)
        elif algorithm.ring > 1:
            found += self.block * ((2 if algorithm.window == 1 else 3) * e + 3 * self.wide)
        else:
            found += self.block * e * self.fetched_again
        return found


def _others(heads: Sequence[int]) -> int:
    """Heads of the other ranks, for the rank that has fewest itself: what it sends them of its tokens."""
    return sum(heads) - min(heads)


def _stay(rank: _Rank, backward: bool = False) -> Pass:
    return Pass()


def _gather(rank: _Rank, backward: bool = False) -> Pass:
    """All-gather of a block, and in backward reduce-scatter of its gradient: within nodes what goes between them once.

    Of r ranks, g of each node: r / g - 1 blocks to other nodes, then (g - 1) r / g to the node.
    """
    e, machine, ranks, near = rank.layer.number_bytes, rank.machine, rank.algorithm.ring, rank.near
    again = rank.fetched_again if backward else 1.0
    # Bytes of a block in each collective, and what is read and written to put all blocks in their places.
    collectives = [rank.block * e * again] if again else []
    copied = 2 * sum(collectives) * ranks
    if backward:
        collectives.append(rank.block * rank.wide)
        copied += rank.block * (e + rank.wide) * ranks
    far = sum(collectives) * (ranks // near - 1)
    within = sum(collectives) * (near - 1) * (ranks // near)
    seconds = machine.seconds(within, near - 1, 0) + machine.seconds(0, 0, far) + len(collectives) * machine.message
    return Pass(within, far, len(collectives), exposed_s=seconds, copy_s=copied / machine.memory)


def _ring(rank: _Rank, backward: bool = False) -> Pass:
    """Blocks from rank to rank while attention to the one at hand is computed, gradients one step behind them.

    After the first of r steps, results are summed in wide numbers: of out forward, of dq and the block's backward.
    """
    layer, algorithm, machine = rank.layer, rank.algorithm, rank.machine
    steps = ring_steps(0, algorithm.ring, algorithm.inner)
    moved = rank.block * layer.number_bytes * (rank.fetched_again if backward else 1.0)
    summed = rank.block * rank.wide if backward else 0.0
    near_bytes = far_bytes = 0.0
    messages = 0
    for link, size in _sent(steps, moved, summed):
        near_bytes += 0 if _is_far(rank, link) else size
        far_bytes += size if _is_far(rank, link) else 0
        messages += 1

    def seconds(link: Link, size: float) -> float:
        within = machine.seconds(size, 1, 0)
        return machine.message + (max(within, machine.seconds(0, 0, size)) if _is_far(rank, link) else within)

    attention = rank.attention(backward).attention_s
    waited = _waited(steps, attention / algorithm.ring, moved, summed, seconds)
    e, w = layer.number_bytes, rank.wide
    rows = rank.group_tokens * max(rank.heads[0]) * (CAUSAL_ROWS if layer.causal else 1)
    # Read and written: a part, the same made wide, and the sum; a block's gradient is also added to what comes.
    of_rows = rows * (layer.shape.head_dim if backward else layer.shape.value_dim) * (e + 4 * w)
    of_block = rank.block * (e + 4 * w) if backward else 0.0
    copies = (algorithm.ring - 1) * (of_rows + of_block) / machine.memory
    return Pass(near_bytes, far_bytes, messages, exposed_s=waited, copy_s=copies)


def _is_far(rank: _Rank, link: Link) -> bool:
    """Whether a hop of some rank goes to another node."""
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
    """Seconds a rank waits, where all do the same at the same time; a link carries one message after the other."""
    now, there, free = 0.0, {0: 0.0}, dict.fromkeys(("inner", "outer", "home"), 0.0)
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
