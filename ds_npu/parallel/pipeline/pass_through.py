"""Stand-ins for the modules of a model that other stages hold.

A stage is the same module tree: each absent module is replaced by one without parameters that passes hidden states on.
Hidden states [B, S, H] that arrive from the stage before enter the first block of this stage, whatever the model
computes before its blocks; the input of the first absent module behind the blocks leaves for the next stage. Both
belong to one forward, and are facts of its MicroBatch. With sequence parallelism they are shards [B, S / tp, H], unless
no blocks follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import nn

from ds_npu.parallel.pipeline.transfers import Tensors
from ds_npu.parallel.runtime.forward_wraps import first_parameter_name
from ds_npu.parallel.runtime.micro_batch import LEAVING_LENGTH, SEQUENCE_LENGTH, Fact, new_forward, running
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute


class Side(Enum):
    """The position of an absent module in the model."""

    EMBEDDING = "before all blocks"
    BEFORE = "before the blocks of this stage"
    AFTER = "behind the blocks of this stage"
    INPUTS = "beside the embedding, for inputs other than tokens"


@dataclass(frozen=True)
class Stage:
    """The stage ``index`` of the ``count`` stages of a model."""

    index: int
    count: int
    blocks: int
    before: int = 0
    """The number of blocks of all stages before it."""
    behind: int = 0
    """The number of blocks of all stages behind it."""

    def __str__(self) -> str:
        return f"stage {self.index} of 0..{self.count - 1}"


@dataclass
class BorderStates:
    """The hidden states and other tensors that cross the borders of ``stage`` in one forward."""

    stage: Stage
    arrived: torch.Tensor | None
    """Hidden states from the stage before; None in the first stage."""
    arrived_extra: Tensors = ()
    """Other tensors that blocks of this or of a later stage take (deep-stacked visual features)."""
    leaving: torch.Tensor | None = None
    """Hidden states for the next stage; None in the last stage."""
    leaving_extra: Tensors = ()
    losses: list[torch.Tensor] = field(default_factory=list)
    """Scalars that the layers of this stage add to the loss of the batch (routers' auxiliary losses)."""
    blocks_run: int = 0
    _unknown: torch.Tensor | None = None

    def unknown(self, tokens: Sequence[int]) -> torch.Tensor:
        """A stand-in for the embeddings [B, S, H] of ``tokens``, [B, S], or [S] for positions.

        No block of this stage may use it: it is NaN, and a backward to it raises.
        """
        assert self.arrived is not None
        if self._unknown is None:
            self._unknown = self.arrived.new_full((), torch.nan)
            if torch.is_grad_enabled():
                self._unknown.requires_grad_().register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        # A model may scale its embeddings in place.
        return self._unknown.expand(*tokens, self.arrived.shape[-1]).clone()


def _refuse_gradient(gradient: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "the blocks of a stage use the embeddings themselves, beside the hidden states of the block before, which are "
        "all that travels between stages: this model cannot be cut into stages"
    )


UNUSED = (None,)
FURTHER_OUTPUTS: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("BambaDecoderLayer", "BloomBlock", "CodeGenBlock", "FalconDecoderLayer"), UNUSED),
    **dict.fromkeys(("FalconH1DecoderLayer", "GPTJBlock", "GPTNeoBlock", "GPTNeoXJapaneseLayer", "MptBlock"), UNUSED),
    **{"Block": UNUSED, "xLSTMBlock": UNUSED, "RwkvBlock": (None, None)},
    **dict.fromkeys(("GlmMoeDsaDecoderLayer", "HYV4DecoderLayer"), ("prev_topk_indices",)),
    "ZayaDecoderLayer": ("prev_router_hidden_states",),
}
"""Block classes of transformers that return more than hidden states.

For each further output: the argument of the next block that takes it. None: the model uses the output for nothing that
stages serve (attention weights, caches).
"""
TIED_APART = TensorAttribute[bool]("ds_npu_tied_apart")
"""Marks a weight that embedding and head share, where this rank has only one of the two."""
BORDER_STATES: Fact[BorderStates] = Fact(while_running=True)


class AbsentWeight(nn.Module):
    """Stand-in for a weight of another stage: only a ``device`` and a ``dtype``, to which models cast inputs."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.device, self.dtype = like.device, like.dtype


class PassThrough(nn.Module):
    """Stand-in for ``absent``, the module ``name`` of other stages, of which it keeps names and shapes only.

    Before the blocks of the running stage it returns the hidden states that have arrived, after them its input; as an
    embedding it returns ``unknown``. Raises RuntimeError where it is called outside of a forward of a stage
    (``crossing``), or stands for a module whose results the stage cannot use.
    """

    whose = ""
    weights: Mapping[str, torch.Size] = MappingProxyType({})
    """The shapes of the absent module's parameters and persistent buffers, by name in it."""
    absent_names: tuple[str, ...] = ()
    """The names in the whole model of the absent module and its submodules."""

    def __init__(self, absent: nn.Module, name: str, sides: Mapping[int, Side], held: OwnStages) -> None:
        """``sides``: the position of ``absent``, by the index of each stage of ``held`` that does not have it."""
        super().__init__()
        self.sides, self.held = dict(sides), held
        self.whose = f"{name} ({type(absent).__name__})"
        self.weights = {
            each: weight.shape
            for each, weight in absent.state_dict(keep_vars=True).items()
            if isinstance(weight, torch.Tensor)
        }
        self.absent_names = tuple(inner for inner, _ in absent.named_modules(prefix=name))
        self.first_parameter = first_parameter_name(absent)
        self.further = further_outputs(absent)
        self.parameters_of_forward = tuple(inspect.signature(absent.forward).parameters) if self.further else ()
        self.train(absent.training)

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        x = self._passed(*args, **kwargs)
        if not self.further:
            return x
        states = BORDER_STATES.of(running())
        assert states is not None, "it was looked at"
        travelled = iter(states.arrived_extra if self.sides[states.stage.index] is Side.BEFORE else ())
        return x, *(None if name is None else next(travelled, None) for name in self.further)

    def _passed(self, *args: object, **kwargs: object) -> torch.Tensor:
        micro_batch = running()
        states = BORDER_STATES.of(micro_batch)
        if micro_batch is None or states is None:
            here = " and ".join(map(str, self.held.stages))
            raise RuntimeError(
                f"{self.whose} is not in {here}, and its model was called as if it were whole. What to do: call the "
                "engine, which runs all stages; or run_stage(model, stage, arrived, ...) of "
                "ds_npu.features.pipeline.stages, which is given the hidden states of the stage before and returns "
                "those for the next one"
            )
        stage, side = states.stage, self.sides[states.stage.index]
        if side is Side.INPUTS:
            raise RuntimeError(
                f"{self.whose} is in the first stage only, and this is {stage}: inputs other than tokens cannot "
                "be used in a model that is cut into stages"
            )
        if states.blocks_run != (stage.blocks if side is Side.AFTER else 0):
            raise RuntimeError(
                f"{self.whose} stands {side.value}, and is called when {states.blocks_run} of "
                f"{stage.blocks} blocks have run. What to do: if the model uses it there only, give it the role "
                "norm or final_norm in ds_npu.plan; if in both places, do not cut it into stages"
            )
        if side is not Side.AFTER and states.arrived is None:
            raise RuntimeError(f"{self.whose}: this is {stage}, and no hidden states have arrived")
        if side is Side.BEFORE:
            assert states.arrived is not None, "it was looked at"
            return states.arrived
        x = args[0] if args else kwargs[self.first_parameter]
        assert isinstance(x, torch.Tensor), "modules around the blocks of a stage are given tokens or hidden states"
        if side is Side.EMBEDDING:
            tokens = x.shape[:2]
            SEQUENCE_LENGTH.set(micro_batch, tokens[-1])
            return states.unknown(tokens)
        if states.leaving is None:
            states.leaving = x
            given = dict(zip(self.parameters_of_forward, args, strict=False)) | kwargs
            later = (given.get(name) for name in self.further if name is not None)
            states.leaving_extra += tuple(each for each in later if isinstance(each, torch.Tensor))
        length = LEAVING_LENGTH.of(micro_batch)
        # The model goes on with the shape of whole sequences; nothing of it is used.
        return x if length is None else x.new_empty(()).expand(x.shape[0], length, x.shape[2])

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            states = BORDER_STATES.of(running())
            hidden = None if states is None else states.leaving if states.arrived is None else states.arrived
            if name in self.weights and hidden is not None:
                return AbsentWeight(hidden)
            raise AttributeError(
                f"{self.whose} is in another stage, and its {name} is not known in this one. What to do, if the model "
                "reads it in all stages: ds_npu.parallel.pipeline 1"
            ) from error

    def extra_repr(self) -> str:
        return f"{self.whose} of another stage"


def further_outputs(block: nn.Module) -> tuple[str | None, ...]:
    """The entry of ``block`` in FURTHER_OUTPUTS; empty where it returns hidden states alone, as far as is known."""
    is_known = type(block).__module__.startswith("transformers.models.")
    return FURTHER_OUTPUTS.get(type(block).__name__, ()) if is_known else ()


def follow_block(block: nn.Module, name: str) -> None:
    """Count the forwards of a ``block`` of this stage; they raise TypeError for outputs that stages cannot pass on."""

    def follow(module: nn.Module, args: object, out: object) -> None:
        is_known = isinstance(out, tuple | list) and bool(further_outputs(module))
        if not isinstance(out, torch.Tensor) and not is_known:
            raise TypeError(
                f"{name} ({type(module).__name__}) returns a {type(out).__name__}: only a model whose blocks return "
                "hidden states, and nothing else, can be cut into stages"
            )
        states = BORDER_STATES.of(running())
        if states is not None:
            states.blocks_run += 1

    block.register_forward_hook(follow)


@contextmanager
def crossing(stage: Stage, arrived: Tensors | None) -> Iterator[BorderStates]:
    """A context of one forward of ``stage``, whose inputs are the tensors ``arrived`` (None in the first stage)."""
    states = BorderStates(stage, None) if arrived is None else BorderStates(stage, arrived[0], arrived[1:])
    with new_forward() as micro_batch:
        BORDER_STATES.set(micro_batch, states)
        yield states


class OwnStages:
    """The stages of one model that this rank has, and the stand-ins of each stage for modules of the others."""

    def __init__(self, stages: Sequence[Stage], tied: tuple[str, str] | None = None) -> None:
        """``tied``: the names of the embedding's and the head's weight, if the whole model ties them."""
        self.stages, self.tied = tuple(stages), tied
        self._pass_throughs: list[tuple[nn.Module, str, PassThrough]] = []

    def add(self, parent: nn.Module, name: str, passing: PassThrough) -> None:
        """Let ``passing`` stand for the child ``name`` of ``parent`` in the stages of its ``sides``."""
        self._pass_throughs.append((parent, name, passing))

    @contextmanager
    def only(self, stage: Stage) -> Iterator[None]:
        """A context in which the model is the one ``stage``: modules of this rank's other stages are replaced.

        The recomputation of a checkpointed block in backward calls the block itself, so it needs no context.
        """
        absent = [(parent, name, each) for parent, name, each in self._pass_throughs if stage.index in each.sides]
        present = [parent._modules[name] for parent, name, _ in absent]
        try:
            for parent, name, passing in absent:
                parent._modules[name] = passing
            yield
        finally:
            for (parent, name, _), module in zip(absent, present, strict=True):
                parent._modules[name] = module


def pass_throughs(model: nn.Module) -> dict[str, PassThrough]:
    """The stand-ins in ``model`` for modules of other ranks, by name; empty if the model is not cut into stages."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PassThrough)}


def stages_in(model: nn.Module) -> tuple[Stage, ...]:
    """The stages of ``model`` that this rank has; empty if the model is not cut into stages."""
    return next((each.held.stages for each in pass_throughs(model).values()), ())


def tied_in(model: nn.Module) -> tuple[str, str] | None:
    """The names of the embedding's and the head's weight, if ``model`` tied them before it was cut into stages."""
    return next((each.held.tied for each in pass_throughs(model).values()), None)


def absent_weights(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the weights that other ranks hold, by name in ``model``."""
    found = pass_throughs(model).items()
    return {f"{name}.{inner}": shape for name, each in found for inner, shape in each.weights.items()}
