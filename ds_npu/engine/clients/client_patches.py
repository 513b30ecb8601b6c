"""The type of a row of the patch table, and its rows for accelerate, transformers and TRL."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One name of DeepSpeed, accelerate, transformers or TRL that ds_npu replaces."""

    module: str
    name: str
    """Attribute path in ``module``, as ``DeepSpeedConfig.__init__``."""
    factory: str
    """``module:function`` of ds_npu, called with the original, returning what replaces it."""
    parameters: tuple[str, ...]
    """Names with which the original's parameters must begin."""
    what: str
    why: str
    upstream: str
    until: str
    parameters_of: str = ""
    """The function of a replaced class to which ``parameters`` belong; "" is the original itself."""
    optional: bool = False
    """Whether results are the same without it, at a higher cost: a config is then not refused."""
    also: tuple[str, ...] = ()
    """``module:name`` of copies that ``from ... import`` made, for an ``import ds_npu`` after ``import deepspeed``."""

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


_THAT_GENERATE = tuple(f"trl.trainer.{kind}_trainer" for kind in ("grpo", "rloo"))

CLIENT_PATCHES: tuple[Patch, ...] = (
    Patch(
        module="accelerate.data_loader",
        name="prepare_data_loader",
        factory="ds_npu.engine.clients.accelerate:prepare_data_loader",
        parameters=("dataloader", "device", "num_processes", "process_index"),
        what="accelerate's loaders, the Hugging Face Trainer's too, give ranks that share samples the same ones",
        why="it counts every process as a data rank, but for those that DeepSpeed's own autotp_size names",
        upstream="accelerate/data_loader.py:1129 (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
        also=("accelerate.accelerator:prepare_data_loader",),
    ),
    Patch(
        module="accelerate.data_loader",
        name="DataLoaderDispatcher.__init__",
        factory="ds_npu.engine.clients.accelerate:dispatcher_init",
        parameters=("self", "dataset", "split_batches"),
        what="of what global rank 0 reads for all ranks (IterableDataset), ranks that share samples take the same ones",
        why="it counts every process as a data rank",
        upstream="accelerate/data_loader.py, DataLoaderDispatcher (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="accelerate.state",
        name="PartialState.split_between_processes",
        factory="ds_npu.engine.clients.accelerate:split_between_processes",
        parameters=("self", "inputs", "apply_padding"),
        what="ranks that share a model are given the same inputs",
        why="it counts every process as a data rank",
        upstream="accelerate/state.py, PartialState.split_between_processes (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator._prepare_deepspeed",
        factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
        parameters=("self", "args"),
        what="the batch size and the length of the schedule that accelerate fills in are those of the data ranks",
        why="it counts every process as a data rank",
        upstream="accelerate/accelerator.py, Accelerator._prepare_deepspeed (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="accelerate.scheduler",
        name="AcceleratedScheduler.step",
        factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
        parameters=("self",),
        what="a script's own schedule goes on by as many steps as there are data ranks",
        why="it steps once for each process, as if each of them had had other samples",
        upstream="accelerate/scheduler.py, AcceleratedScheduler.step (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.gather_for_metrics",
        factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
        parameters=("self", "input_data"),
        what="what is gathered of evaluated samples has each of them once",
        why="it joins what every process has, and ranks that share samples have the same",
        upstream="accelerate/accelerator.py, Accelerator.gather_for_metrics (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.get_state_dict",
        factory="ds_npu.engine.clients.accelerate:get_state_dict",
        parameters=("self", "model"),
        what="of a model sharded over tensor ranks accelerate and the Hugging Face Trainer save whole weights",
        why="it takes the module's own state dict, which is one rank's part, but for DeepSpeed's own autotp_size",
        upstream="accelerate/accelerator.py:4070 (1.15.0)",
        until="accelerate asks the engine for its weights",
    ),
    *(
        Patch(
            module="accelerate.utils.operations",
            name=name,
            factory=f"ds_npu.engine.clients.accelerate:{factory}",
            parameters=(parameter,),
            what="a trainer that generates joins the rewards and lengths of each sample once",
            why="it joins what every process has, and ranks that share samples have the same",
            upstream="accelerate/utils/operations.py (1.15.0)",
            until="accelerate asks DeepSpeed's mpu for data ranks",
            also=tuple(
                f"{holder}:{name}" for holder in ("accelerate.utils", "accelerate.accelerator", *_THAT_GENERATE)
            ),
        )
        for name, factory, parameter in (
            ("gather", "gather_of_data_ranks", "tensor"),
            ("gather_object", "gather_objects_of_data_ranks", "object"),
        )
    ),
    Patch(
        module="accelerate.utils.random",
        name="set_seed",
        factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
        parameters=("seed", "device_specific"),
        what="ranks that share samples draw the same random numbers where each process is given another seed",
        why="TRL's GRPOTrainer samples completions on each process; tensor ranks would sample different ones",
        upstream="accelerate/utils/random.py, set_seed (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
        also=tuple(f"{holder}:set_seed" for holder in ("accelerate.utils", *_THAT_GENERATE)),
    ),
    Patch(
        module="accelerate.parallelism_config",
        name="ParallelismConfig._validate_accelerator",
        factory="ds_npu.engine.clients.accelerate:validate_parallelism",
        parameters=("self", "accelerator"),
        what="accelerate's own tensor and sequence parallelism beside the section's is refused by name",
        why="both would distribute one model; left alone it ends in an error about numbers of processes, or in none",
        upstream="accelerate/parallelism_config.py, ParallelismConfig._validate_accelerator (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for the grid",
    ),
    Patch(
        module="transformers.integrations.deepspeed",
        name="HfTrainerDeepSpeedConfig.trainer_config_process",
        factory="ds_npu.engine.clients.accelerate:fill_in_for_data_ranks",
        parameters=("self", "args"),
        what="the train_batch_size that the Hugging Face Trainer fills in, or compares, is that of the data ranks",
        why="it counts every process as a data rank",
        upstream="transformers/integrations/deepspeed.py, trainer_config_process (5.23.0)",
        until="transformers asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="transformers.trainer",
        name="rotate_checkpoints",
        factory="ds_npu.engine.clients.trainer:keep_whole_checkpoints",
        parameters=("output_dir", "save_total_limit"),
        what="with save_total_limit 1 the last whole checkpoint stays until the next one is on the disk",
        why="it is removed when the engine's save returns, and an asynchronous one is being written then",
        upstream="transformers/trainer.py, Trainer._save_checkpoint (5.23.0)",
        until="transformers asks the engine whether a checkpoint is whole",
        optional=True,
    ),
    Patch(
        module="transformers.trainer",
        name="Trainer.get_total_train_batch_size",
        factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
        parameters=("self", "args"),
        what="the Trainer logs the batch size, and the samples per second, of the data ranks",
        why="it counts every process as a data rank, but for those that DeepSpeed's own autotp_size names",
        upstream="transformers/trainer.py, Trainer.get_total_train_batch_size (5.23.0)",
        until="transformers asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="transformers.training_args",
        name="TrainingArguments.__post_init__",
        factory="ds_npu.engine.clients.trl:know_data_ranks",
        parameters=("self",),
        what="the arguments of TRL's trainers that generate know the data ranks once DeepSpeed's config is read",
        why="they are made of these arguments, in the same call",
        upstream="transformers/training_args.py, TrainingArguments.__post_init__ (5.23.0)",
        until="TRL asks DeepSpeed's mpu for data ranks",
    ),
    *(
        Patch(
            module=f"trl.trainer.{kind.lower()}_{module}",
            name=f"{kind}{name}",
            factory=f"ds_npu.engine.clients.{factory}",
            parameters=("self",),
            what="ranks that share samples generate the same completions, and each is counted once",
            why="it counts every process as a data rank: prompts would be left out, and others taken twice",
            upstream=f"trl/trainer/{kind.lower()}_{module}.py (1.16)",
            until="TRL asks DeepSpeed's mpu for data ranks",
        )
        for kind in ("GRPO", "RLOO")
        for module, name, factory in (
            ("config", "Config.__post_init__", "trl:count_generated_samples"),
            ("trainer", "Trainer._generate_and_score_completions", "accelerate:called_as_data_rank"),
            ("trainer", "Trainer._compute_loss", "accelerate:called_as_data_rank"),
        )
    ),
    Patch(
        module="trl.trainer.utils",
        name="_ChunkedLogProbFunction",
        factory="ds_npu.engine.clients.trl:log_probs_of_shards",
        parameters=("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
        parameters_of="forward",
        optional=True,
        what="with a head sharded over tensor ranks, TRL's scores of tokens are computed from each rank's words",
        why="left alone each rank gathers the head's whole weight and computes all of its words",
        upstream="trl/trainer/utils.py, add_fused_lm_head (1.16)",
        until="TRL calls the head in place of reading its weight",
    ),
    Patch(
        module="swift.dataloader.shard",
        name="BatchSamplerShard",
        factory="ds_npu.engine.clients.ms_swift:sampler_of_data_ranks",
        parameters=("self", "total_samples", "batch_size"),
        parameters_of="__init__",
        what="ms-swift's own loader of training samples gives ranks that share samples the same ones",
        why="it counts every process as a data rank, but for those that DeepSpeed's own autotp_size names",
        upstream="swift/dataloader/shard.py, BatchSamplerShard (ms-swift 4.6.0)",
        until="ms-swift asks DeepSpeed's mpu for data ranks",
        also=("swift.dataloader:BatchSamplerShard", "swift.trainers.mixin:BatchSamplerShard"),
    ),
    Patch(
        module="swift.trainers.mixin",
        name="SwiftMixin._compute_acc",
        factory="ds_npu.engine.clients.ms_swift:accuracy_of_sharded_logits",
        parameters=("self", "outputs", "labels"),
        what="ms-swift's accuracy of tokens is that of whole logits",
        why="it reads the logits of a training step, of which each tensor or context rank has a part",
        upstream="swift/trainers/mixin.py, SwiftMixin._compute_acc (ms-swift 4.6.0)",
        until="ms-swift takes the accuracy from the loss",
    ),
    Patch(
        module="swift.trainers.mixin",
        name="SwiftMixin.get_use_logits_to_keep",
        factory="ds_npu.engine.clients.ms_swift:keep_all_logits",
        parameters=("self", "default_value"),
        what="with context ranks, ms-swift gives a model all labels, and asks for no part of the logits",
        why="the tokens whose logits it saves, those before the first answer, are divided over the ranks as all are",
        upstream="swift/trainers/mixin.py, SwiftMixin.get_use_logits_to_keep (ms-swift 4.6.0)",
        until="ms-swift leaves it out under sequence parallelism other than its own",
    ),
    Patch(
        module="transformers.trainer",
        name="Trainer._get_dataloader",
        factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
        parameters=("self", "dataset", "description", "batch_size"),
        what="samplers that know of ranks (batch_rebalance), and seeds of loader workers, are those of the data rank",
        why="they are given the number of all processes, and the global rank",
        upstream="transformers/trainer.py, _get_dataloader and _get_train_sampler (5.23.0)",
        until="transformers asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="transformers.trainer",
        name="Trainer.compute_loss",
        factory="ds_npu.engine.clients.trainer:compute_loss",
        parameters=("self", "model", "inputs"),
        what="with ds_npu.chunked_loss, label_smoothing_factor is a part of the loss that the model computes",
        why="it is computed of the logits of all tokens, which do not exist",
        upstream="transformers/trainer.py, Trainer.compute_loss (5.23.0)",
        until="transformers gives its models' loss functions the smoothing",
    ),
    Patch(
        module="transformers.trainer",
        name="Trainer._track_num_input_tokens",
        factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
        parameters=("self", "inputs"),
        what="num_input_tokens_seen, and tokens per second, count each token once",
        why="it adds up the tokens of every process, and ranks that share samples have the same",
        upstream="transformers/trainer.py, Trainer._track_num_input_tokens (5.23.0)",
        until="transformers asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="transformers.trainer",
        name="Trainer._get_num_items_in_batch",
        factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
        parameters=("self", "batch_samples", "device"),
        what="num_items_in_batch counts each label once",
        why="it adds up the labels of every process; a user's loss, and the auxiliary loss of experts, come out wrong",
        upstream="transformers/trainer.py, Trainer._get_num_items_in_batch (5.23.0)",
        until="transformers asks DeepSpeed's mpu for data ranks",
    ),
    *(
        Patch(
            module="transformers.trainer",
            name=f"Trainer.{name}",
            factory="ds_npu.engine.clients.accelerate:called_as_data_rank",
            parameters=("self", "model", "inputs"),
            what="a loss is multiplied by the number of data ranks, over which DeepSpeed averages its gradients; also "
            "where a trainer computes it in its own way (TRL)",
            why="it is multiplied by the number of processes, the auxiliary loss of experts, too",
            upstream="transformers/trainer.py, Trainer.compute_loss, loss_scale (5.23.0)",
            until="transformers asks DeepSpeed's mpu for data ranks",
        )
        for name in ("training_step", "prediction_step")
    ),
    *(
        Patch(
            module="transformers.trainer_jit_checkpoint",
            name=f"JITCheckpointCallback.{event}",
            factory=f"ds_npu.engine.clients.trainer:{factory}",
            parameters=("self", "args", "state", "control"),
            what="with the section, a checkpoint on SIGTERM is saved at the end of a step or epoch, by all ranks",
            why="ranks that learn of the signal at different times wait for each other for ever; within a step the "
            "weights are those after it (DeepSpeed steps in backward), and the number of the step is not",
            upstream="transformers/trainer_jit_checkpoint.py, JITCheckpointCallback (5.23.0)",
            until="transformers lets the ranks agree, and saves between steps under DeepSpeed",
        )
        for event, factory in {
            "on_step_begin": "save_later",
            "on_pre_optimizer_step": "save_later",
            "on_step_end": "agree_on_saving",
            "on_epoch_end": "agree_on_saving",
        }.items()
    ),
    Patch(
        module="transformers.trainer_jit_checkpoint",
        name="CheckpointManager.execute_jit_checkpoint",
        factory="ds_npu.engine.clients.trainer:save_on_all_ranks",
        parameters=("self",),
        what="with the section, only a rank that writes the checkpoint marks its folder as incomplete",
        why="every rank makes and removes the one file that marks it, and fails where another was faster",
        upstream="transformers/trainer_jit_checkpoint.py, CheckpointManager (5.23.0)",
        until="transformers marks it on the ranks that save",
    ),
)
