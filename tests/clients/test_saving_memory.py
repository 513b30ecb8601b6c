"""Memory for saving under tensor ranks: what is there in addition to the run, on each rank.

The first rank needs the model that it writes, every other one shards of one weight or two, where ZeRO 3 gathers them:
here less than one weight. What is asked for is its shard of the model and one weight.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from ranks import run_on_ranks
from trainer_lives import Life, Rows, collate, ds_config

from ds_npu.memory.storage_record import StorageRecord

pytestmark = pytest.mark.slow

WIDE = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 1024, "num_hidden_layers": 4}
LARGEST = 1024 * 128 * 4
SMALL = 4096
"""Of agreements."""


def peak_of(call) -> int:
    """The most bytes of storages that ``call`` made and that were there at once."""
    record = StorageRecord("cpu", lambda: "")
    record.see_all()
    before = len(record.changes)
    with record:
        call()
    record.close()
    return max(accumulate((change.size for change in record.changes[before:]), initial=0))


def trainer_of(stage: int, folder: Path) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        deepspeed=ds_config(stage, {"tensor": 2}),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = tiny_models.tiny("llama", torch.float32, **WIDE)
    trainer = Life(model=model, args=arguments, train_dataset=Rows(2), data_collator=collate)
    trainer.train()
    return trainer


def save(folder: str) -> None:
    rule.without_extension()
    transformers.logging.set_verbosity_error()
    whole = sum(each.nbytes for each in tiny_models.tiny("llama", torch.float32, **WIDE).parameters())
    for stage in (1, 3):
        target = Path(folder, f"{stage}")
        trainer = trainer_of(stage, target)
        engine = trainer.model_wrapped
        calls = {
            "engine.save_pretrained": lambda: engine.save_pretrained(target / "engine"),  # noqa: B023
            "Trainer.save_model": lambda: trainer.save_model(str(target / "trainer")),  # noqa: B023
            "a checkpoint of the Trainer": lambda: trainer._save_checkpoint(trainer.model, None),  # noqa: B023
        }
        for name, call in calls.items():
            found = peak_of(call)
            print(f"rank {dist.get_rank()}, ZeRO {stage}, {name}: {found:,} bytes of {whole:,}")
            if dist.get_rank() == 0:
                assert whole <= found <= whole + LARGEST + SMALL, (stage, name, found)
            else:
                # Two shards, where gloo's thread lets go of the one before late (seen once).
                assert found <= LARGEST + SMALL, (stage, name, found)
            dist.barrier()


def test_no_rank_but_the_first_holds_the_model(tmp_path):
    run_on_ranks(2, save, str(tmp_path))
