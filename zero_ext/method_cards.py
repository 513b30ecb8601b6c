"""The one table of DeepSpeed's methods that ds_npu wraps on the engine, optimizer and monitor of a training run.

DeepSpeed has no hook there. ``wrap_method`` wraps what is in this table and nothing else. Names of modules and classes
that are replaced when DeepSpeed is imported stand in ``ds_npu.engine.patches``. Lines are those of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
FP16 = "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer"
FP16_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
MONITOR = "deepspeed.monitor.monitor:MonitorMaster"
OPTIMIZERS = (ZERO_1_2, ZERO_3, BF16, FP16, FP16_UNFUSED)
ADAM = ("torch.optim.adam:Adam", "torch.optim.adamw:AdamW", "deepspeed.ops.adam.fused_adam:FusedAdam")
FRAGMENT = "deepspeed.utils.tensor_fragment"
_PRIVATE_3 = "_DeepSpeedZeroOptimizer_Stage3__"


@dataclass(frozen=True)
class MethodCard:
    """One method that is wrapped on instances."""

    classes: tuple[str, ...]
    """``module:class`` of each class that has it; a module alone for a function that DeepSpeed binds to weights."""
    name: str
    parameters: tuple[str, ...]
    """The parameters after ``self`` that the original must begin with."""
    what: str
    why: str
    upstream: str
    until: str


_EVENTS = "DeepSpeed calls engines nothing back around a step, a backward, a load or their end"
_EVENTS_UNTIL = "DeepSpeed has callbacks of engines"
_STATE = "masters and the state of the optimizer are kept in another form between steps (ds_npu.optimizer_memory)"
_STATE_WHY = "the state is an attribute that many methods read and write, without an accessor"
_STATE_UNTIL = "DeepSpeed's optimizers take a store of their state"
_NORM_UNTIL = "DeepSpeed takes the norm of gradients by the process groups that its mpu names"
_SKIP = "ds_npu.watch.finite is asked before the gradients of a step that is skipped are dropped"
_SKIP_WHY = "the step is skipped without a word of which tensor was not finite"

_BUCKETS = "gradients are reduce-scattered and weights gathered bucket by bucket, behind other work"
_BUCKETS_WHY = "they are all-reduced, and gathered in one message that the step waits for"
_BUCKETS_UNTIL = "DeepSpeed's partitions are parts of buckets"

_SCATTERED = "gradients are copied once or not at all; one that comes twice between two forwards is an error"
_SCATTERED_WHY = "they are copied twice and divided before they are sent; a second is written over the first"
_SCATTERED_UNTIL = "DeepSpeed sends gradients from where they are, and adds up backwards behind several forwards"

CARDS: tuple[MethodCard, ...] = (
    MethodCard(
        (ENGINE, PIPELINE),
        "_take_model_step",
        ("lr_kwargs",),
        "subscribers are called before and after each optimizer step",
        _EVENTS,
        "runtime/engine.py:3505",
        _EVENTS_UNTIL,
    ),
    MethodCard(
        (ENGINE, PIPELINE),
        "backward",
        (),
        "subscribers are told of the loss of each micro-batch; storages are recorded; without ZeRO it is given a view",
        f"{_EVENTS}, and divides the gradient of the very tensor that a forward has returned twice by the steps",
        "runtime/engine.py:3382, runtime/pipe/engine.py:1300",
        _EVENTS_UNTIL,
    ),
    MethodCard(
        (ENGINE, PIPELINE),
        "forward",
        (),
        "storages are recorded while a forward runs, and its arguments are kept",
        _EVENTS,
        "runtime/engine.py:2983, runtime/pipe/engine.py:1296",
        _EVENTS_UNTIL,
    ),
    MethodCard(
        (PIPELINE,),
        "train_batch",
        ("data_iter",),
        "storages are recorded while a batch runs",
        _EVENTS,
        "runtime/pipe/engine.py",
        _EVENTS_UNTIL,
    ),
    MethodCard(
        (ENGINE, PIPELINE),
        "load_checkpoint",
        ("load_dir", "tag"),
        "subscribers are told that a checkpoint has been loaded",
        _EVENTS,
        "runtime/engine.py:4395",
        _EVENTS_UNTIL,
    ),
    MethodCard(
        (ENGINE, PIPELINE),
        "destroy",
        (),
        "subscribers are told that the engine has been destroyed",
        _EVENTS,
        "runtime/engine.py:1243",
        _EVENTS_UNTIL,
    ),
    MethodCard(
        (ZERO_3,),
        "destroy",
        (),
        "lists and caches of DeepSpeed's let its modules go",
        "they keep the model of every engine as long as the process lives",
        "runtime/zero/stage3.py:539",
        "DeepSpeed lets them go itself",
    ),
    MethodCard(
        (MONITOR,),
        "write_events",
        ("event_list",),
        "the time of steps and tokens per second are written beside DeepSpeed's events",
        "the monitor writes what the engine gives it, which no one can add to",
        "monitor/monitor.py:50",
        "DeepSpeed's monitor takes sources of events",
    ),
    MethodCard(
        OPTIMIZERS,
        "step",
        (),
        "ZeRO 3's stream of gathers waits for the step; masters and state in another form are stepped by chunks",
        "the stream that gathers parameters waits for no step; state is an attribute without an accessor",
        "runtime/zero/partitioned_param_coordinator.py:400; step of each optimizer",
        "the stream waits upstream, and DeepSpeed's optimizers take a store of their state",
    ),
    MethodCard(ADAM, "step", ("closure",), _STATE, _STATE_WHY, "torch/optim, ops/adam/fused_adam.py", _STATE_UNTIL),
    *(
        MethodCard(classes, name, parameters, _STATE, _STATE_WHY, f"{name} of each optimizer", _STATE_UNTIL)
        for classes, name, parameters in (
            (OPTIMIZERS, "state_dict", ()),
            (OPTIMIZERS, "load_state_dict", ()),
            (OPTIMIZERS, "refresh_fp32_params", ()),
            ((ZERO_1_2, ZERO_3, BF16), "_restore_from_bit16_weights", ()),
            ((ZERO_1_2, BF16), "update_lp_params", ()),
            ((ZERO_1_2, ZERO_3), "offload_states", ("include", "device")),
            ((ZERO_1_2, ZERO_3), "reload_states", ("non_blocking",)),
            ((ZERO_3,), "get_full_hp_param", ("param", "optim_state_key")),
            ((ZERO_3,), "set_full_hp_param", ("value", "param", "optim_state_key")),
            ((ZERO_3,), "get_local_fp32_param", ("param", "optim_state_key")),
            ((ZERO_3,), "set_local_hp_param", ("value", "param", "optim_state_key")),
            ((FRAGMENT,), "get_full_hp_param", ("optim_state_key",)),
            ((FRAGMENT,), "set_full_hp_param", ("value", "optim_state_key")),
            ((ZERO_1_2,), "_get_preflattened_grad_partition", ("group_idx",)),
            ((ZERO_3,), "_prepare_fp32_grad_for_sub_group", ("sub_group_id",)),
            ((ZERO_1_2,), "unscale_and_clip_grads", ("grad_groups_flat", "total_norm")),
            ((ZERO_3,), "unscale_and_clip_grads", ("sub_group_id", "total_norm")),
        )
    ),
    MethodCard(
        (FP16_UNFUSED,),
        "unscale_and_clip_grads",
        ("total_norm", "apply_scale"),
        "gradients are clipped by the norm of all of them, experts and tensor shards too",
        "it clips by a norm that leaves out experts, and what tensor ranks but the first hold",
        "runtime/fp16/unfused_optimizer.py:243",
        _NORM_UNTIL,
    ),
    MethodCard(
        (BF16,),
        "get_grads_for_norm",
        ("for_clipping",),
        "a rank that counts no dense gradient takes part in the norm",
        "an empty list is stacked",
        "runtime/utils.py:956",
        "fixed upstream",
    ),
    *(
        MethodCard(
            (ZERO_3,),
            name,
            parameters,
            "the squares of experts' gradients are added over all ranks that hold experts",
            "they are added over the tensor ranks",
            f"runtime/zero/stage3.py, {name}",
            _NORM_UNTIL,
        )
        for name, parameters in (
            ("get_grad_norm_direct", ("gradients", "params", "norm_type")),
            ("complete_grad_norm_calculation_for_cpu_offload", ("params",)),
        )
    ),
    *(
        MethodCard(
            (ZERO_3,),
            name,
            parameters,
            "states on NVMe are saved in a rank's own file, and loaded from it",
            "the swapped files are copied, and all else of the optimizer is left out",
            f"runtime/zero/stage3.py, {name}; runtime/engine.py:4456, :4937",
            "a run that is resumed with states on NVMe goes on as if it had not ended",
        )
        for name, parameters in (("_rigid_state_dict", ()), ("_rigid_load_state_dict", ("state_dict",)))
    ),
    MethodCard(
        (ZERO_1_2,),
        "scaled_global_norm",
        ("norm_type",),
        "a pipeline stage with fewer groups of parameters takes part in the norms of the others' groups",
        "the norm of each group is reduced over the pipeline ranks, which wait for each other",
        "runtime/zero/stage_1_and_2.py:2943",
        _NORM_UNTIL,
    ),
    MethodCard(
        (ZERO_1_2,),
        "has_overflow",
        ("partition_gradients",),
        "the host waits for the norm, and not for this before it",
        "it reads all gradients, and the host waits for the device once more",
        "runtime/zero/stage_1_and_2.py:3237",
        "DeepSpeed's step asks the norm alone",
    ),
    MethodCard(
        (ZERO_1_2,),
        "_lazy_init_hp_params_optimizer_state",
        (),
        "weights of every parameter group know where the state of their optimizer is",
        "experts have a group of their own, and safe_get_full_optimizer_state finds nothing for them",
        "runtime/zero/stage_1_and_2.py:2987 links all groups behind the step of the first",
        "fixed upstream",
    ),
    MethodCard(
        (ZERO_1_2,),
        "allreduce_bucket",
        ("bucket", "communication_data_type"),
        "gradients in float64 are reduced in float64 over context ranks, too",
        "they would be rounded to float32",
        "runtime/zero/stage_1_and_2.py:2359",
        "DeepSpeed reduces any dtype as it is",
    ),
    *(
        MethodCard((ZERO_1_2,), name, parameters, _BUCKETS, _BUCKETS_WHY, f"stage_1_and_2.py, {name}", _BUCKETS_UNTIL)
        for name, parameters in (
            ("process_gradients", ("param", "i")),
            ("setup_buckets", ()),
            ("reduce_ready_partitions_and_remove_grads", ("param", "i")),
            ("reduce_gradients", ("pipeline_parallel",)),
            ("overlapping_partition_gradients_reduce_epilogue", ()),
            ("clear_backward_seen_flag", ()),
            ("backward_prologue", ()),
            ("_update_model_bit16_weights", ("group_index",)),
            ("_link_all_hp_params", ()),
        )
    ),
    *(
        MethodCard((ZERO_3,), name, parameters, _SCATTERED, _SCATTERED_WHY, f"stage3.py, {name}", _SCATTERED_UNTIL)
        for name, parameters in (
            ("reduce_independent_p_g_buckets_and_remove_grads", ("param",)),
            ("clear_backward_seen_flag", ()),
        )
    ),
    MethodCard(
        (ZERO_3,),
        "independent_gradient_partition_epilogue",
        (),
        "the last gradients of a micro-batch are reduced behind the next forward",
        "the host waits for them, and the device computes nothing meanwhile",
        "runtime/zero/stage3.py:1407",
        "the computing stream waits upstream",
    ),
    MethodCard(
        (ZERO_3,),
        "_post_step",
        ("timer_names",),
        "small weights, which stay gathered, are gathered in one message",
        "each of them is gathered by itself, and the host waits",
        "runtime/zero/stage3.py:2835",
        "DeepSpeed gathers them together",
    ),
    *(
        MethodCard((FRAGMENT,), name, parameters, _BUCKETS, _BUCKETS_WHY, "utils/tensor_fragment.py", _BUCKETS_UNTIL)
        for name, parameters in (("get_full_hp_grad", ()), ("set_full_hp_grad", ("value",)))
    ),
    *(
        MethodCard(
            (ZERO_3,),
            f"{_PRIVATE_3}{name}",
            parameters,
            "reduced gradients are the sum over all ranks divided by the data-parallel size",
            "they are divided by the number of ranks that shard the parameter",
            f"runtime/zero/stage3.py:{line}; issues 5555 and 6841",
            "DeepSpeed divides by the data-parallel size",
        )
        for name, parameters, line in (
            ("avg_scatter_grads", ("params_to_reduce", "communication_data_type"), 1912),
            ("avg_scatter_contiguous_grads", ("buffer_to_reduce", "communication_data_type"), 1863),
        )
    ),
    MethodCard((BF16,), "clear_hp_grads", (), _SKIP, _SKIP_WHY, "runtime/bf16_optimizer.py:605", _EVENTS_UNTIL),
    MethodCard(
        (FP16, FP16_UNFUSED),
        "_skip_invalid_grad_norm",
        (),
        _SKIP,
        _SKIP_WHY,
        "runtime/fp16/fused_optimizer.py:151, unfused_optimizer.py:125",
        _EVENTS_UNTIL,
    ),
    MethodCard(
        (ZERO_1_2, ZERO_3),
        "_update_scale",
        ("has_overflow",),
        _SKIP,
        _SKIP_WHY,
        "runtime/zero/stage_1_and_2.py:3290, stage3.py:3328",
        _EVENTS_UNTIL,
    ),
)
