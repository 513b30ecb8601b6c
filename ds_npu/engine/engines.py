"""DeepSpeed's three training engines, with the topology of a ``"ds_npu"`` section and the gradient rule.

The rule, for every stage of ZeRO: losses, gradients and the gradient norm are those of one process doing the whole
batch. Context peers return shares of a loss that add up to it, which is DeepSpeed's own convention for sequence
parallelism: gradients are summed over cp and averaged over dp.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import TrainSchedule
from deepspeed.runtime.sparse_tensor import SparseTensor
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_npu.capability import try_import
from ds_npu.comm.communicator import open_links
from ds_npu.engine.checkpoints.any_layout import AnyLayoutCheckpoints
from ds_npu.engine.checkpoints.atomic_checkpoints import AtomicCheckpoints
from ds_npu.engine.checkpoints.full_values import know_grid, link_every_group
from ds_npu.engine.checkpoints.weights import WholeWeights
from ds_npu.engine.checkpoints.weights_only import WeightsOnly
from ds_npu.engine.clients.refusals import check_not_quantized, check_whole, trains_in_float64
from ds_npu.engine.expert_view import ExpertView, check_no_own_experts
from ds_npu.engine.failures.joint_calls import joint_calls_of_this_world
from ds_npu.engine.matrix_steps import WholeMatrices
from ds_npu.engine.mpu import CUT_INTO_STAGES, WHOLE_ON_EACH_STAGE, mpu_of
from ds_npu.engine.pipeline.engine_pipeline import EnginePipeline, own_layout
from ds_npu.engine.pipeline.scheduled_module import scheduled_module
from ds_npu.engine.pipeline.stage_groups import agree_on_groups, give_own_parameters
from ds_npu.engine.pipeline.staged_engine import StagedEngine
from ds_npu.engine.placements import complete_placements, equalise_copies
from ds_npu.engine.same_batch import agree_on_first_batch
from ds_npu.engine.session import ContextGrid, use_own_device
from ds_npu.engine.shard_protection import protect_shards
from ds_npu.engine.zero_init import shards_from_partitions
from ds_npu.features.build import Build
from ds_npu.features.context_parallel.sharded_sequences import algorithm_choice_of, has_sharded_sequences
from ds_npu.features.driver import apply_features, change_by_plan, values_in
from ds_npu.features.hccl.opened_communicators import communicator_plan, open_others
from ds_npu.features.modules.listed_experts import gathered_whole
from ds_npu.features.pipeline.stages import refuse_saving_a_stage
from ds_npu.features.tensor_parallel.sharded_model import sharded_model_of
from ds_npu.log import logger, warn_once
from ds_npu.models.guards import check_engine_may_compile
from ds_npu.parallel.runtime.placement import has_experts
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.planner.communicators import MIB, Communicator, CommunicatorPlan
from ds_npu.topology.degrees import AXES, Axis
from ds_npu.zero_ext.bucketed_zero import install_buckets
from ds_npu.zero_ext.earlier_engines import let_gradients_go_to
from ds_npu.zero_ext.gradient_buffer import remove_gradient_buffers
from ds_npu.zero_ext.gradient_norm import clip_gradients
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method
from ds_npu.zero_ext.optimizer_trial import Verdict, tried
from ds_npu.zero_ext.pending_gradients import equalise_tied
from ds_npu.zero_ext.scattered_gradients import scatter_gradients
from ds_npu.zero_ext.stage_1_2_corrections import attach_hooks_again, reduce_in_float64, wait_for_norm_only
from ds_npu.zero_ext.stage_3_corrections import (
    add_up_experts,
    average_over_data_ranks,
    gather_after_steps,
    gathered_as_one,
    let_go_when_destroyed,
    reduce_behind_the_next_forward,
)
from ds_npu.zero_ext.swapped_states import keep_in_checkpoints
from ds_npu.zero_ext.training_engine import EngineEvents
from ds_npu.zero_ext.weight_gathers import install_gathers


def time_without_waiting(engine: DeepSpeedEngine) -> None:
    """Make the throughput timer of ``engine`` read the host's clock only, unless the config sets ``synchronized``.

    DeepSpeed 0.19.8 (utils/timer.py, ThroughputTimer) waits for the device at both ends of each micro-batch, from the
    third step on. Steps wait for the device themselves, so that over some of them the host's clock tells the same.
    """
    settings = engine.tput_timer.config
    if "synchronized" not in settings.model_fields_set:
        settings.synchronized = False


class NpuEngine(AnyLayoutCheckpoints, WeightsOnly, ExpertView, WholeMatrices, WholeWeights, AtomicCheckpoints):
    """DeepSpeedEngine over the topology: the features of the section, and how gradients are reduced."""

    optimizer_verdict = Verdict()
    is_made_narrow = False
    """Whether a ZeRO optimizer for float64 is being made as if gradients travelled in float32 (reduce_in_float64)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        use_own_device(kwargs.get("args"))
        session, model = kwargs["config_class"].ds_npu, kwargs["model"]
        for check in (check_whole, check_no_own_experts, check_not_quantized):
            check(model, session.topology.degrees)
        is_pipeline = isinstance(model, PipelineModule)
        self.build = Build(
            session.topology,
            model,
            session.config.plan,
            get_accelerator().device_name(),
            kwargs["config_class"]._param_dict,
            is_pipeline=is_pipeline,
            probes=session.config.parallel.probe,
        )
        self.topology = session.topology
        self.events = EngineEvents(self)
        self.joint_calls = joint_calls_of_this_world()
        self.is_float64 = trains_in_float64(model, kwargs["config_class"], self.build.device_type)
        with shards_from_partitions(model, session.topology):
            apply_features(values_in(session.config), self.build)
        self.model_axes = CUT_INTO_STAGES if self.build.is_cut_into_stages else WHOLE_ON_EACH_STAGE
        layout = None if is_pipeline else own_layout(session.config.pipeline, model, self.topology)
        if layout is not None:
            equalise_tied(model, self.topology, layout.rank_of)
            give_own_parameters(kwargs, model, self.topology)
        stage_axes: tuple[Axis, ...] = ("pp",) if "pp" in self.model_axes else ()
        complete_placements(model, self.topology, stage_axes, kwargs["config_class"].zero_optimization_stage)
        # A mesh would take precedence over the mpu (deepspeed/utils/groups.py) and knows no tensor or pipeline axis.
        mpu = mpu_of(self.topology, self.model_axes)
        super().__init__(*args, **{**kwargs, "mpu": mpu, "mesh_device": None})
        if not (self.zero_optimization() or is_pipeline or layout is not None):
            wrap_method(self, "backward", backward_of_a_view, MethodLevel.CORRECTION)
        self._agree_on_optimizer()
        time_without_waiting(self)
        attach_hooks_again(model)
        # PEFT may have been put around a stage.
        refuse_saving_a_stage(model)
        know_grid(model, self.topology)
        if protect_shards(model, self.topology):
            # A client's own optimizer steps the parameters that it was given, shards too.
            self.events.around_step(MethodLevel.SHARD_ACCESS, allow_shard_access)
        if not is_pipeline and layout is None:
            agree_on_first_batch(model, self.topology, partial(self.open_other_communicators, model))
        remove_gradient_buffers(model)
        if layout is not None:
            # Only now is it known that the model is in stages; other engines pay for none of its calls.
            self.__class__ = NpuStagedEngine
            agree_on_groups(self)
            self.run_in_stages(EnginePipeline(self, layout, session.config.pipeline.micro_batches))
        self._install_parts()

    def _install_parts(self) -> None:
        link_every_group(self.optimizer)
        for install in self.build.when_built:
            for line in install(self):
                logger().info("%s", line)
        if self.build.makes_plans:
            self.events.before_step(MethodLevel.PLANNED_CHANGES, partial(change_by_plan, self.build))

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """Try the optimizer that steps this rank's weights, before ZeRO puts flat tensors in their place."""
        sizes = {axis: self.topology.size(axis) for axis in AXES}
        self.optimizer_verdict = tried(basic_optimizer, sizes, self.zero_optimization_stage())
        return super()._do_optimizer_sanity_check(basic_optimizer)

    def _agree_on_optimizer(self) -> None:
        """Raise ValueError on every rank where the optimizer of any rank is not exact over the axes of this layout.

        Then plan the steps of whole matrices, if there are any.
        """
        verdicts = [self.optimizer_verdict] * dist.get_world_size()
        # Once: pipeline stages have different weights, and no rank may go on alone.
        dist.all_gather_object(verdicts, self.optimizer_verdict)
        if refusal := next((each.refusal for each in verdicts if each.refusal), None):
            raise ValueError(refusal)
        if warning := next((each.warning for each in verdicts if each.warning), None):
            warn_once(warning)
        self.plan_matrices()

    def communicator_bytes(self) -> int:
        """Bytes of device memory that HCCL's buffers take on this rank; 0 on another backend, or in a world of one."""
        if dist.get_backend() != "hccl" or dist.get_world_size() == 1:
            return 0
        return MIB * sum(each.device_mib for each in self._planned_communicators(self.module))

    def _planned_communicators(self, model: nn.Module) -> list[Communicator]:
        choice = algorithm_choice_of(model)
        algorithm = None if choice is None or choice.is_open else choice.axis.algorithm
        return self._communicator_plan.communicators(algorithm, in_stages=not self.build.is_pipeline)

    @property
    def _communicator_plan(self) -> CommunicatorPlan:
        return communicator_plan(self._config.ds_npu.config.hccl, self.build)

    def open_other_communicators(self, model: nn.Module) -> None:
        """Over hccl, open communicators of experts, and of a context algorithm once chosen; every rank calls it."""
        if dist.get_backend() == "hccl" and dist.get_world_size() > 1:
            planned = self._planned_communicators(model)
            open_others(self._communicator_plan, self.topology, planned, has_experts(model))
            choice = algorithm_choice_of(model)
            if choice is not None and not choice.is_open and choice.axis.ring is not None:
                open_links(choice.axis.ring.links(), "ring")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's; raises ValueError where the model is divided over tensor or context ranks."""
        divides = {"tensor": self.topology.size("tp") > 1, "context": has_sharded_sequences(self.module)}
        check_engine_may_compile(self.module, divides)
        super().compile(*args, **kwargs)

    def _configure_distributed_model(self, model: nn.Module) -> None:
        # DeepSpeed's method broadcasts the weights of experts.
        self.open_other_communicators(model)
        super()._configure_distributed_model(model)
        equalise_copies(model, self.topology)

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if "pp" not in self.model_axes and self.topology.rank("pp") > 0:
            # The first pipeline rank writes what all of them hold, and all of them read it.
            self.save_non_zero_checkpoint = self.save_zero_checkpoint = False

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        sharded = sharded_model_of(self.module)
        self.is_made_narrow = self.is_float64 and self.has_experts and self.zero_optimization_stage() < 3
        whole = [*(sharded.jointly_gathered if sharded else ()), *gathered_whole(self.module)]
        with gathered_as_one(whole):
            zero: Any = super()._configure_zero_optimizer(optimizer)
        if self.is_made_narrow:
            self.is_made_narrow = False
            reduce_in_float64(zero)
        let_gradients_go_to(zero, self.module)
        wait_for_norm_only(zero)
        if reason := install_buckets(self, zero):
            logger().debug("DeepSpeed's own code reduces gradients and gathers weights: %s", reason)
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            average_over_data_ranks(zero, self.topology)
            keep_in_checkpoints(zero)
            let_go_when_destroyed(zero)
            reduce_behind_the_next_forward(zero, scatter_gradients(self, zero, self.topology))
            if reason := install_gathers(self, zero):
                logger().debug("DeepSpeed's own code gathers weights: %s", reason)
                gather_after_steps(zero)
            if self.has_experts:
                add_up_experts(zero, self.topology)
        return zero

    def _reduce_non_expert_gradients(self, grads: list[Any], elements_per_buffer: int) -> None:
        """Reduce over dp x cp, in a pipeline too, where DeepSpeed leaves cp out."""
        self._reduce(grads, elements_per_buffer, self.topology.group("dp", "cp"))

    def _reduce_expert_gradients(self, expert_grads: dict[str, list[Any]], elements_per_buffer: int) -> None:
        for name, grads in expert_grads.items():
            self._reduce(grads, elements_per_buffer, deepspeed_groups._get_expert_data_parallel_group(name))

    def _reduce(self, grads: list[Any], elements_per_buffer: int, group: dist.ProcessGroup) -> None:
        """Sum over ``group`` and divide by dp, in any dtype; DeepSpeed knows four."""
        over = {"dp_group": group, "dp_world_size": self.topology.size("dp")}
        buckets: dict[Any, list[Any]] = {}
        for grad in grads:
            buckets.setdefault((isinstance(grad, SparseTensor), grad.dtype), []).append(grad)
        for (sparse, _), bucket in buckets.items():
            if sparse:
                self.sparse_allreduce_no_retain(bucket, **over)
            else:
                self.allreduce_no_retain(bucket, numel_per_bucket=elements_per_buffer, **over)

    def clip_fp32_gradients(self) -> None:
        weights, clip_norm = self.module.parameters(), self.gradient_clipping()
        self._global_grad_norm = clip_gradients(weights, clip_norm, self.topology, self.model_axes)

    # A float64 model keeps float64 gradients. DeepSpeed knows three dtypes and would round them to float32; its
    # reduce-scatter accepts no other.

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of the model and of accumulated gradients for ZeRO; outside of it DeepSpeed wraps all but float32."""
        types: tuple[torch.dtype, torch.dtype] = super().get_data_types()
        zero = self.zero_optimization()
        return (torch.float64, torch.float64) if self.is_float64 and zero else types

    def zero_reduce_scatter(self) -> bool:
        narrow = not self.is_float64 or (self.has_experts and self.zero_optimization_stage() < 3)
        return bool(narrow and super().zero_reduce_scatter())

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        narrow: torch.dtype = super().communication_data_type
        return torch.float64 if self.is_float64 and not self.is_made_narrow else narrow

    @communication_data_type.setter
    def communication_data_type(self, dtype: torch.dtype) -> None:
        DeepSpeedEngine.communication_data_type.fset(self, dtype)


class NpuPipelineEngine(NpuEngine, PipelineEngine):  # type: ignore[misc]
    """PipelineEngine over the topology: a context axis, and ds_npu's schedules."""

    has_own_schedule = False
    """Whether its modules have two stages on each rank, for DualPipeV."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        topology = kwargs["config_class"].ds_npu.topology
        grid = model._grid
        if topology.size("cp") > 1 and not isinstance(grid, ContextGrid):
            raise RuntimeError(
                f"ds_npu.parallel.context is {topology.size('cp')}, but the PipelineModule was made before ds_npu "
                "could see this config: name its file in DS_NPU_CONFIG, or on the command line after --deepspeed_config"
            )
        # The engine counts batches over dp; the module, whose weights are tied and saved over dp x cp, keeps its own.
        model._grid = narrowed(grid, topology)
        super().__init__(*args, **kwargs)
        model._grid = grid
        self.scheduled = scheduled_module(self, kwargs["config_class"].ds_npu.config.pipeline)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        if self.scheduled is None or not isinstance(pipe_schedule, TrainSchedule):
            super()._exec_schedule(pipe_schedule)
        else:
            self.scheduled.train()

    def _next_batch(self) -> Any:
        micro_batch = super()._next_batch()
        if self.scheduled is not None:
            self.scheduled.has_read(micro_batch)
        return micro_batch

    def reset_activation_shape(self) -> None:
        super().reset_activation_shape()
        if self.scheduled is not None:
            self.scheduled.shapes += 1

    def _aggregate_total_loss(self) -> Any:
        if self.is_last_stage():
            dist.all_reduce(self.total_loss, group=self.topology.group("cp"))
        return super()._aggregate_total_loss()


def backward_of_a_view(backward: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """As DeepSpeed's, but right also for the very tensor that the forward returned, unscaled.

    DeepSpeed divides its gradient by the accumulation steps once more, in a hook of the forward's outputs that runs
    before the one that would stop it (runtime/engine.py of 0.19.8, ``_backward_prologue_per_tensor``).
    """
    return backward(loss.view_as(loss), *args, **kwargs)


def narrowed(grid: Any, topology: Any) -> Any:
    """A copy of a pipeline's grid whose data axis is dp alone, and whose pipeline group is the mpu's.

    The last stage broadcasts the loss over the mpu's, the others wait for it in the grid's (DeepSpeed 0.19.8
    runtime/pipe/engine.py:619, :627): two groups of the same ranks would wait for each other.
    """
    narrow = copy.copy(grid)
    narrow.pp_proc_group = topology.group("pp")
    narrow.data_parallel_size, narrow.data_parallel_id = topology.size("dp"), topology.rank("dp")
    return narrow


class NpuStagedEngine(StagedEngine, NpuEngine):
    """DeepSpeedEngine over the topology, of a model in pipeline stages."""


ENGINES: dict[type, type] = {DeepSpeedEngine: NpuEngine, PipelineEngine: NpuPipelineEngine}

_dualpipev, _ = try_import("deepspeed.runtime.pipe.dualpipev")
if _dualpipev is not None:  # DeepSpeed has it from 0.19.8 on.

    class NpuDualPipeVEngine(NpuPipelineEngine, _dualpipev.DualPipeVEngine):  # type: ignore[name-defined,misc]
        """DualPipeVEngine over the topology."""

        has_own_schedule = True

    ENGINES[_dualpipev.DualPipeVEngine] = NpuDualPipeVEngine
