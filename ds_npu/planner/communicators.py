"""The HCCL communicators of a rank and the size of their buffers: arithmetic only, for the engine and ``ds_npu check``.

HCCL takes two buffers of ``hccl_buffer_size`` MiB of device memory for each communicator, when it is opened, and cuts
longer messages into pieces of that size. Sources: CANN's HCCL user guide, HCCL_BUFFSIZE; Ascend/pytorch,
docs/zh/developer_notes/distributed/parameter_setting/setting_HCCL_communicator_parameter.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_npu.capability import BUFFER_SIZE, SETTINGS
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.config.deepspeed_keys import value_at
from ds_npu.config.hccl import HcclSection
from ds_npu.config.hccl_groups import MATRICES, TIED, WORLD, Size, context_groups, names_of_grid, traffic_of
from ds_npu.config.problems import Config
from ds_npu.config.whole_matrices import is_muon
from ds_npu.topology.degrees import Box, Degrees, box_of

MIB = 2**20
SIZES = ("hidden_size", "max_position_embeddings", "num_experts_per_tok")
"""Settings of a model's config that tell how large its messages are."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
GROUP_BUFFER, PAIR_BUFFER = "HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE"


@dataclass(frozen=True)
class Communicator:
    """``count`` communicators of a rank for the same ``messages``, each with two buffers of ``mib`` MiB."""

    name: str
    messages: str
    mib: int
    count: int = 1
    box: Box = ()
    """The layout of its ranks; empty for communicators of pairs, and for second ones of the same ranks."""
    is_set: bool = False
    """Whether the section says how large its buffers are."""
    only_checkpoints: bool = False
    """Whether only checkpoints use it."""

    @property
    def device_mib(self) -> int:
        return 2 * self.mib * self.count


@dataclass(frozen=True)
class MessageSizes:
    """MiB of the largest messages of a rank whose sizes a model's config tells; None: they are not known.

    No sequence is longer than the positions that the model has, so batches only have smaller messages. A wrong size
    costs time or memory, and is never an error: HCCL cuts longer messages into pieces.
    """

    hidden: int | None = None
    """Hidden states of a micro-batch."""
    tokens: int | None = None
    """Hidden states of a micro-batch, once for each expert that a token chooses."""

    @staticmethod
    def of(ds_config: Config, degrees: Degrees, model: Mapping[str, int | None]) -> MessageSizes:
        """The sizes for a ``model`` with these values of SIZES; None where it does not say one."""
        micro = value_at(ds_config, "train_micro_batch_size_per_gpu")
        hidden, positions, chosen = map(model.get, SIZES)
        if not (isinstance(micro, int) and hidden and positions):
            return MessageSizes()
        size = micro * -(-positions // degrees.cp) * hidden * number_bytes(ds_config)
        return MessageSizes(-(-size // MIB), None if chosen is None else -(-size * chosen // MIB))


def number_bytes(ds_config: Config) -> int:
    """Bytes of a number of an activation; "auto" counts as 16 bits."""
    parts = (ds_config.get(key) for key in ("bf16", "bfloat16", "fp16"))
    return 2 if any(isinstance(part, dict) and part.get("enabled") for part in parts) else 4


def default_mib(variable: str) -> int:
    """The value of GROUP_BUFFER or PAIR_BUFFER in the environment, else its default, in MiB."""
    text = os.environ.get(variable, "")
    return int(text if text.isdecimal() else next(default for name, default, _ in SETTINGS if name == variable))


def bucket_mib(ds_config: Config) -> int | None:
    """The largest of ZeRO's buckets in MiB, None unless the config states them all.

    Elements are counted as float32, the widest that DeepSpeed reduces.
    """
    elements = [value_at(ds_config, f"zero_optimization.{key}") for key in BUCKETS]
    if not all(isinstance(value, int | float) for value in elements):
        return None
    return -(-int(max(elements)) * 4 // MIB)


@dataclass(frozen=True)
class CommunicatorPlan:
    """The communicators of each rank of a world of ``degrees``, and the options with which they are opened."""

    degrees: Degrees
    ds_config: Config = field(default_factory=dict)
    hccl: HcclSection = field(default_factory=HcclSection)
    sizes: MessageSizes = field(default_factory=MessageSizes)

    def buffer_mib(self, box: Box) -> int:
        """MiB of each buffer of a communicator of ranks laid out as ``box``, unless set: its largest message.

        At most HCCL_BUFFSIZE, which is also taken where the size of a message is not known. A communicator serves all
        axes with the same ranks. Messages of checkpoints go through it in pieces.
        """
        most = default_mib(GROUP_BUFFER)
        known: dict[Size, int | None] = {
            "buckets": bucket_mib(self.ds_config),
            "scalars": 1,
            "hidden states": self.sizes.hidden,
            "tokens": self.sizes.tokens,
        }
        # Whether a model is in stages, or a PipelineModule, is not known before it is made.
        traffic = traffic_of(self.degrees, in_stages=False)
        sent = [each for own, _, each in traffic if own == box and not each.only_checkpoints]
        sizes = [known.get(each.size) for each in sent] or [None]
        return max([1, *(most if size is None else min(most, size) for size in sizes)])

    def boxes(self) -> set[Box]:
        """The layouts of all groups along axes."""
        return {*names_of_grid(self.degrees), *names_of_grid(self.degrees, in_stages=False)}

    def is_in_grid(self, ranks: Sequence[int]) -> bool:
        """Whether ``ranks`` are a group along axes."""
        return box_of(ranks) in self.boxes()

    def options(self, ranks: Sequence[int], name: str = "") -> dict[str, int]:
        """The ``hccl_config`` of torch_npu for the communicator of ``ranks``.

        ``name``: of a context group, of ranks that share a tied weight, or of a second communicator of the same ranks,
        whose messages are taken to be large; empty for groups along axes.
        """
        if name:
            return self.hccl.options(name, default_mib(GROUP_BUFFER))
        box = box_of(ranks)
        every = {**names_of_grid(self.degrees, in_stages=False), **names_of_grid(self.degrees)}
        # The script makes the world's; its size is the environment's, or in the options of the script.
        mib = None if len(ranks) == self.degrees.world_size else self.buffer_mib(box)
        return self.hccl.options(every.get(box, ""), mib)

    def tied_mib(self) -> int:
        """MiB of each buffer of the communicator of two pipeline ranks that share a weight."""
        return self.hccl.options(TIED, default_mib(GROUP_BUFFER))[BUFFER_SIZE]

    def communicators(
        self, algorithm: ContextAlgorithm | None, shown: Mapping[Size, int] | None = None, in_stages: bool = True
    ) -> list[Communicator]:
        """The communicators that a rank opens by the end of a step and a checkpoint, the most of all ranks.

        ``algorithm`` shards the sequences of a Hugging Face model; None: nothing does, or it is not known yet. With
        pipeline ranks ds_npu cuts the model (``in_stages``), or it is a PipelineModule. Experts' communicators are
        counted where the degrees have them, although only a model with weights on the expert view opens them.
        ``shown``: sizes of messages that the texts tell.
        """
        degrees = self.degrees
        stated: dict[Size, int | None] = {"buckets": bucket_mib(self.ds_config), **(shown or {})}
        world = degrees.box("pp", "dp", "cp", "tp")
        messages: dict[Box, list[str]] = {world: ["barriers, checkpoints"]}
        names = {**names_of_grid(degrees, in_stages), world: WORLD}
        in_steps = {world}
        for box, _, each in traffic_of(degrees, in_stages):
            size = stated.get(each.size)
            text = each.messages if size is None else f"{each.messages} ({size:,} MiB)"
            messages.setdefault(box, []).append(text)
            in_steps |= set() if each.only_checkpoints else {box}
        if is_muon(self.ds_config) and (box := degrees.box("dp", "cp", "tp")):
            messages.setdefault(box, []).append("pieces of Muon's matrices")
            names.setdefault(box, MATRICES)
            in_steps.add(box)
        mib = {box: default_mib(GROUP_BUFFER) if box == world else self.buffer_mib(box) for box in messages}
        more: list[Communicator] = []
        for group in context_groups(degrees, algorithm):
            if group.in_pairs and default_mib(PAIR_BUFFER):
                # A rank's links to the next and from the previous one have a communicator each.
                more.append(Communicator(f"{group.name}, pairs", group.messages, default_mib(PAIR_BUFFER), 2))
                continue
            names.setdefault(group.box, group.name)
            mib.setdefault(group.box, default_mib(GROUP_BUFFER))
            messages.setdefault(group.box, []).append(group.messages)
            in_steps.add(group.box)
            if group.in_pairs and group.box[0][1] % 2 == 0:
                more.append(Communicator(f"{group.name}, second", group.messages, default_mib(GROUP_BUFFER)))
        return [
            *(self._one(names[box], box, texts, mib[box], box in in_steps) for box, texts in messages.items()),
            *more,
            *self._between_stages(in_stages),
        ]

    def _one(self, name: str, box: Box, texts: list[str], mib: int, in_steps: bool) -> Communicator:
        own = self.hccl.buffer_mib.get(name)
        return Communicator(
            name, "; ".join(texts), own or mib, box=box, is_set=own is not None, only_checkpoints=not in_steps
        )

    def _between_stages(self, in_stages: bool) -> Iterator[Communicator]:
        """Communicators of hidden states and their gradients, on a rank between two other stages."""
        pairs = min(self.degrees.pp - 1, 2)
        mib = default_mib(PAIR_BUFFER)
        if pairs and mib:
            # In stages, messages to higher and to lower ranks have a group each, with a communicator for each pair;
            # DeepSpeed's pipelines send over the world's group (runtime/pipe/p2p.py).
            yield Communicator("neighbouring stages", "hidden states and gradients", mib, (1 + in_stages) * pairs)
        elif pairs and in_stages:
            yield Communicator("stages, up and down", "hidden states and gradients", default_mib(GROUP_BUFFER), 2)
