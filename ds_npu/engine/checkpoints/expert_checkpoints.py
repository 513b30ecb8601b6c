"""DeepSpeed's checkpoints of a model whose experts are on ranks: dense weights as ever, experts in files of their own.

DeepSpeed (0.19.8) writes what the first data rank holds, which has only some of the experts, and files of experts only
for layers of its own (runtime/engine.py, _save_moe_checkpoint). Here rank r of the n expert ranks writes
``experts_rank_r_of_n_model_states.pt``: its experts' weights and, without ZeRO, the state of their optimizer. Under
ZeRO 3 each rank's file holds all it has, as without experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES

from ds_npu.engine.checkpoints.reassembly import REASSEMBLED, Overlaid, State
from ds_npu.engine.failures.joint_calls import joint
from ds_npu.engine.topology_engine import TopologyEngine
from ds_npu.features.experts.relocation import EXPERT_MAP, restore_maps, state_of_maps
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.runtime.placement import has_experts, placement_of

MODULE, OPTIMIZER = "module", "optimizer"
"""Keys of DeepSpeed's files."""
LAYOUT = "ds_npu_expert_ranks"
"""The key, in a dense file, of the numbers of ranks along ep and etp over which experts were sharded."""
STATE, GROUPS = "state", "param_groups"
INNER = "optimizer_state_dict"
"""The key of the inner optimizer's state dict in that of DeepSpeed's 16-bit optimizers."""
MASTERS = ("fp32_groups", "fp32_groups_flat")
"""Keys of the float32 weights, by group, in the state dict of DeepSpeed's 16-bit optimizers."""
OF_EXPERTS = "moe"
"""DeepSpeed's mark on a parameter group of experts."""


class ExpertCheckpoints(TopologyEngine):
    """How an engine whose model has experts on ranks saves and loads; every rank calls it together."""

    expert_maps: State
    """The expert maps in the checkpoint that is being written."""

    @property
    def has_experts(self) -> bool:
        """Whether the model has weights on the expert view."""
        return has_experts(self.module)

    @joint("engine.save_checkpoint")
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """As DeepSpeed's; the files of experts are written, too."""
        self.expert_maps = state_of_maps(self.module, self.topology)
        with self._without_moe_of_deepspeed():
            return bool(super().save_checkpoint(*args, **kwargs))

    def put_own_files(self, *args: Any, **kwargs: Any) -> None:
        """Save this rank's files, its experts' too.

        Every rank calls it, since the loads of experts are summed over ranks.
        """
        self.expert_maps = state_of_maps(self.module, self.topology)
        with self._without_moe_of_deepspeed():
            super().put_own_files(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; raises ValueError for a checkpoint whose experts cannot be put on this run's ranks."""
        if not self.has_experts:
            return super().load_checkpoint(*args, **kwargs)
        plain = self.checkpoint_engine
        self.checkpoint_engine = Overlaid(plain, load=partial(self._load_merged, plain))
        try:
            with self._without_moe_of_deepspeed():
                return super().load_checkpoint(*args, **kwargs)
        finally:
            self.checkpoint_engine = plain

    def _save_checkpoint(
        self, save_dir: str, tag: str, client_state: State, exclude_frozen_parameters: bool = False
    ) -> None:
        super()._save_checkpoint(save_dir, tag, client_state, exclude_frozen_parameters)
        if self.writes_experts:
            states = self._states_of_experts(exclude_frozen_parameters)
            self.checkpoint_engine.save(states, str(self.expert_file(Path(save_dir, str(tag)))))

    def _common_checkpoint_state(self, module_state_dict: State, *args: Any) -> State:
        state: State = super()._common_checkpoint_state(module_state_dict, *args)
        if stages_in(self.module) and self.topology.size("ep", "etp") > 1:
            # Also for a stage without experts: the ranks of all stages read its file in DeepSpeed.
            state[LAYOUT] = self.layout
        if self.has_experts:
            state |= {LAYOUT: self.layout, EXPERT_MAP: self.expert_maps}
            if not self.zero_optimization_partition_weights():
                names = self._names_of_experts()
                state[MODULE] = {name: each for name, each in state[MODULE].items() if name not in names}
                state[OPTIMIZER] = _part_of(state[OPTIMIZER], of_experts=False)
                for key in (FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS):
                    if state.get(key) is not None:
                        state[key] = {name: each for name, each in state[key].items() if name not in names}
        return state

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the axes over which experts are sharded."""
        return {"ep": self.topology.size("ep"), "etp": self.topology.size("etp")}

    def expert_file(self, folder: Path) -> Path:
        """The file of this rank's experts in the ``folder`` of a checkpoint."""
        rank = self.topology.rank("ep", "etp")
        ranks = self.topology.size("ep", "etp")
        stage = f"stage_{self.topology.rank('pp'):02d}_" if self.topology.size("pp") > 1 else ""
        return folder / f"experts_{stage}rank_{rank:03d}_of_{ranks:03d}_model_states.pt"

    def _load_merged(self, plain: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        """Load the file at ``path``; into a dense one, merge the content of this rank's file of experts."""
        dense = plain.load(path, *args, **kwargs)
        if not isinstance(dense, dict) or MODULE not in dense or dense.get(REASSEMBLED):
            return dense
        folder = Path(path).parent
        written = dense.get(LAYOUT)
        if written != self.layout:
            wrote = f"expert {written['ep']}, expert_tensor {written['etp']}" if written else "no experts on ranks"
            raise ValueError(
                f"ds_npu.parallel.expert: the checkpoint in {folder} was written with {wrote}, without manifests of "
                f"what is where, and this run has expert {self.layout['ep']}, expert_tensor {self.layout['etp']}. What "
                "to do: the same sizes, or weights only: engine.save_pretrained in the former run, from_pretrained in "
                "this one"
            )
        restore_maps(self.module, dense.get(EXPERT_MAP), self.topology)
        if self.zero_optimization_partition_weights():
            return dense
        experts = plain.load(str(self.expert_file(folder)), map_location="cpu")
        merged = {**dense, MODULE: {**dense[MODULE], **experts[MODULE]}}
        # Earlier commits wrote an empty dict for none; below ZeRO 3 the model's own state has all weights.
        frozen = dense.get(FROZEN_PARAM_FRAGMENTS)
        merged[FROZEN_PARAM_FRAGMENTS] = {**frozen, **experts[MODULE]} if frozen else None
        if experts[OPTIMIZER] is not None:
            merged[OPTIMIZER] = _joined(dense[OPTIMIZER], experts[OPTIMIZER])
        return merged

    @property
    def writes_experts(self) -> bool:
        """Whether this rank writes a file of experts."""
        has_files = self.has_experts and not self.zero_optimization_partition_weights()
        return has_files and self.topology.rank("edp") == 0

    def _states_of_experts(self, leaves_out_frozen: bool) -> State:
        names = self._names_of_experts()
        weights = self.module_state_dict(exclude_frozen_parameters=leaves_out_frozen)
        has_own_states = self.optimizer is not None and not self.zero_optimization()
        return {
            MODULE: {name: each for name, each in weights.items() if name in names},
            OPTIMIZER: _part_of(self.optimizer.state_dict(), of_experts=True) if has_own_states else None,
        }

    def _names_of_experts(self) -> set[str]:
        return {name for name, each in self.module.named_parameters() if placement_of(each).is_expert}

    @contextmanager
    def _without_moe_of_deepspeed(self) -> Iterator[None]:
        """Within the block DeepSpeed takes the model for one without layers of its own MoE."""
        before = self.has_moe_layers
        self.has_moe_layers = before and not self.has_experts
        try:
            yield
        finally:
            self.has_moe_layers = before


def _part_of(optimizer: State | None, of_experts: bool) -> State | None:
    """The state dict of an optimizer with the states of experts' groups only, or of the other groups only.

    torch's optimizers keep states by the parameter's index in the groups. DeepSpeed's 16-bit optimizers without ZeRO
    (0.19.8 runtime/fp16/) put the state dict of the inner optimizer next to the float32 weights, by group.
    """
    if optimizer is None:
        return None
    inner: State = optimizer.get(INNER, optimizer)
    is_chosen = [bool(group.get(OF_EXPERTS)) == of_experts for group in inner[GROUPS]]
    groups = zip(inner[GROUPS], is_chosen, strict=True)
    indices = {index for group, chosen in groups if chosen for index in group["params"]}
    part = {**inner, STATE: {index: each for index, each in inner[STATE].items() if index in indices}}
    if inner is optimizer:
        return part
    masters = {
        key: [group if chosen else None for group, chosen in zip(optimizer[key], is_chosen, strict=True)]
        for key in MASTERS
        if key in optimizer
    }
    return {**optimizer, INNER: part, **masters}


def _joined(dense: State, experts: State) -> State:
    """The state dict of which ``dense`` and ``experts`` are the parts."""
    inner = dense.get(INNER, dense)
    of_experts = experts.get(INNER, experts)
    whole = {**inner, STATE: {**inner[STATE], **of_experts[STATE]}}
    if inner is dense:
        return whole
    masters = {
        key: [other if group is None else group for group, other in zip(dense[key], experts[key], strict=True)]
        for key in MASTERS
        if key in dense
    }
    return {**dense, INNER: whole, **masters}
