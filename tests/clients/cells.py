"""What was tried of which client over which ranks: the table in docs/clients.md, and the test that each cell rests on.

Printed by ``python tests/clients/cells.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

DOES = ("train", "eval", "save", "resume")
HEADER = ("client", "ranks", "ZeRO", *DOES, "test")


@dataclass(frozen=True)
class Cell:
    """A client over some ranks, as ``test`` runs it against one process."""

    client: str
    ranks: str
    zero: str
    does: str
    """Of DOES; what is missing was not tried. "refused": an error before the first step, by name."""
    test: str
    """Name of a file in tests, and of a test in it."""

    @property
    def row(self) -> str:
        does = ["refused"] * len(DOES) if self.does == "refused" else ["yes" * (each in self.does) for each in DOES]
        return f"| {' | '.join([self.client, self.ranks, self.zero, *does, f'`{self.test}`'])} |"


EVERY_STAGE = dict.fromkeys(("tensor", "context", "tensor, context"), "0-3")
DATA = {"data, tensor": "1, 3", "data, context": "1, 3"}
SEQUENCES = {"tensor, sequence_parallel": "3"}
SOME = SEQUENCES | {"context": "1", "tensor, context": "2", "data, tensor": "1", "tensor": "0"}
ALL, TRAINS = "train eval save resume", "train eval save"
LIFE, PEFT_LIFE, TRL = "clients/test_trainer_life.py::", "clients/test_peft_life.py::", "clients/test_trl.py::"
KEYS, TWICE = "clients/test_deepspeed_keys.py::", "clients/test_clients_asked_twice.py::"


def cells(client: str, zero: dict[str, str], does: str, test: str) -> tuple[Cell, ...]:
    """Those of ``test``, over the ranks that are the keys of ``zero``; one for all ranks with the same stages."""
    stages = dict.fromkeys(zero.values())
    ranks = {stage: "; ".join(each for each in zero if zero[each] == stage) for stage in stages}
    return tuple(Cell(client, ranks[stage], stage, does, test) for stage in stages)


CLM = {"tensor": "1, 3", "data, context": "2"}
CLM |= dict.fromkeys(("context", "tensor, context", "expert", "expert, tensor"), "1")
ONE = dict.fromkeys(EVERY_STAGE, "1")
STAGED = {"pipeline": "0-2", "data, pipeline": "1", "pipeline, tensor": "2", "pipeline, context": "1"}
MEMORY = {"pipeline": "1", "context": "1", "pipeline, tensor": "1", "tensor": "2, 3", "data": "3"}
CELLS = (
    *cells("Trainer", EVERY_STAGE | SEQUENCES | DATA | STAGED, ALL, f"{LIFE}test_a_whole_life"),
    *cells(
        "Trainer",
        {"expert": "0-3", "expert, tensor": "1", "expert_tensor, context": "1", "data, expert, tensor": "1"},
        ALL,
        "clients/test_experts_life.py::test_a_whole_life",
    ),
    *cells(
        "Trainer: swap, optimizer_memory, memory_report, in bf16",
        MEMORY,
        ALL,
        "clients/test_trainer_memory.py::test_a_whole_life",
    ),
    *cells("Trainer: samplers, streams, losses of one's own", SOME, "train", f"{LIFE}test_samplers_streams_and_losses"),
    *cells("Trainer: SIGTERM", SOME, "train save resume", f"{LIFE}test_a_checkpoint_on_sigterm"),
    Cell("Trainer: NEFTune", "context", "0-3", "refused", f"{LIFE}test_noise_over_context_ranks_is_refused"),
    *cells(
        "accelerate",
        EVERY_STAGE | SEQUENCES | {"data, tensor": "1, 3"},
        ALL,
        "clients/test_accelerate_life.py::test_a_script_of_ones_own",
    ),
    Cell("accelerate: ParallelismConfig", "any", "0-3", "refused", f"{TWICE}test_accelerates_parallelism_config"),
    Cell("transformers: tp_plan=", "any", "0-3", "refused", f"{TWICE}test_a_model_that_transformers_has_sharded"),
    *cells("PEFT: LoRA, rsLoRA", EVERY_STAGE | SEQUENCES, ALL, f"{PEFT_LIFE}test_adapters_are_those_of_one_process"),
    Cell("PEFT: DoRA", "context", "0-3", ALL, f"{PEFT_LIFE}test_adapters_are_those_of_one_process"),
    Cell(
        "PEFT: DoRA, target_parameters",
        "tensor",
        "0-3",
        "refused",
        f"{PEFT_LIFE}test_what_is_more_than_two_factors_is_refused_on_tensor_ranks",
    ),
    Cell(
        "PEFT: target_parameters",
        "context",
        "1",
        TRAINS,
        f"{PEFT_LIFE}test_adapters_of_experts_over_context_ranks",
    ),
    Cell(
        "PEFT: LoRA, DoRA, merged in place",
        "context",
        "1",
        "train save",
        f"{PEFT_LIFE}test_adapters_are_merged_on_context_ranks",
    ),
    Cell(
        "PEFT: LoRA, merged in place",
        "tensor",
        "1",
        "refused",
        f"{PEFT_LIFE}test_adapters_are_not_merged_into_shards",
    ),
    Cell("PEFT: QLoRA", "tensor; context", "0-3", "refused", f"{PEFT_LIFE}test_qlora_is_refused"),
    *(
        each
        for client in ("SFT, packed, padding-free, of answers only", "DPO", "GRPO", "RLOO")
        for each in cells(f"TRL: {client}", ONE, TRAINS, f"{TRL}test_losses_norms_and_metrics_are_those_of_one_process")
    ),
    *cells(
        "TRL: SFT, padding-free, of answers only",
        {"pipeline": "1", "pipeline, tensor": "1"},
        TRAINS,
        f"{TRL}test_losses_norms_and_metrics_are_those_of_one_process",
    ),
    Cell(
        "TRL: SFT of experts, with TRL's `router_aux_loss_coef`",
        "tensor, expert",
        "1",
        TRAINS,
        f"{TRL}test_losses_norms_and_metrics_are_those_of_one_process",
    ),
    Cell("TRL: SFT with `moe.aux_loss`", "tensor, expert", "1", "refused", f"{TRL}test_balance_losses_are_refused"),
    Cell("TRL: SFT dft, DPO, GRPO", "pipeline", "1", "refused", f"{TRL}test_other_losses_are_refused_in_stages"),
    Cell("TRL: SFT, DPO, GRPO, RLOO", "tensor", "3", "refused", f"{TRL}test_a_head_that_zero_3_partitions_is_refused"),
    Cell("TRL: Reward", "tensor", "1", TRAINS, f"{TRL}test_losses_norms_and_metrics_are_those_of_one_process"),
    Cell("TRL: Reward", "context", "1", "refused", f"{TRL}test_scores_of_sequences_are_refused"),
    *cells(
        "Trainer, TRL: SFT: bf16, recomputed, on simulated NPUs",
        ONE | {"pipeline": "1", "pipeline, tensor": "1"},
        TRAINS,
        "npu/test_clients_npu.py::test_a_script_in_bf16",
    ),
    *cells("run_clm.py", CLM, ALL, "clients/test_run_clm.py::test_a_whole_run_is_that_of_one_process"),
    *cells(
        "run_clm.py: bf16, recomputed, on simulated NPUs",
        ONE | {"expert": "1"},
        ALL,
        "npu/test_run_clm_npu.py::test_within_twice_the_error_of_one_process",
    ),
    *cells(
        "run_clm.py: the same to the bit with chaos seeds 1 to 3",
        ONE,
        TRAINS,
        "npu/test_run_clm_npu.py::test_the_same_in_whatever_order_the_devices_work",
    ),
    *(
        Cell(client, "tensor; context", "1", TRAINS, f"clients/test_{file}.py::test_every_stage_is_that_of_one_process")
        for client, file in (
            ("LLaMA-Factory: pretrain, SFT, DPO, full and LoRA", "llama_factory"),
            ("ms-swift: pretrain, SFT, DPO", "ms_swift"),
        )
    ),
    Cell("DeepSpeed: ZeRO-Offload", "tensor; context", "1-3", "train", f"{KEYS}test_offload_and_second_copies"),
    Cell("DeepSpeed: ZeRO++ hpZ", "context", "3", "train", f"{KEYS}test_offload_and_second_copies"),
    Cell(
        "DeepSpeed: ZeRO++ hpZ",
        "tensor",
        "3",
        "refused",
        "unit/test_config.py::test_a_mistake_says_where_what_and_what_would_do",
    ),
    Cell(
        "DeepSpeed: weights on NVMe under zero.Init",
        "tensor; expert",
        "3",
        "refused",
        "engine/test_zero_init.py::test_weights_on_nvme_are_refused",
    ),
)


def table() -> str:
    return "\n".join(["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|", *(each.row for each in CELLS)])


if __name__ == "__main__":
    print(table())
