"""A training loop of one's own with accelerate, over tensor and context ranks, against one process without ds_npu."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from ranks import run_on_ranks
from safetensors.torch import load_file
from trainer_lives import Said, Stream, assert_close, ds_config, told
from trainer_script import Rows, collate

pytestmark = pytest.mark.slow

SINGLE = 1e-6
"""Relative error in float32."""


class Script:
    """What a script has after ``accelerator.prepare``."""

    def __init__(self, config: dict[str, object]) -> None:
        import accelerate

        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.PartialState(cpu=True)
        self.accelerator = accelerate.Accelerator(
            deepspeed_plugin=accelerate.utils.DeepSpeedPlugin(hf_ds_config=config),
            gradient_accumulation_steps=2,
            dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True),
        )
        accelerate.utils.set_seed(3)
        model = tiny_models.tiny("llama", torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loaders = [
            torch.utils.data.DataLoader(Rows(22), batch_size=2, shuffle=True, collate_fn=collate),
            torch.utils.data.DataLoader(Rows(11), batch_size=2, collate_fn=collate),
            torch.utils.data.DataLoader(Stream(11), batch_size=2, collate_fn=collate),
        ]
        prepared = self.accelerator.prepare(model, optimizer, rates, *loaders)
        self.model, self.optimizer, self.rates, self.loader, self.evaluated, self.stream = prepared
        self.said: Said = {"losses": [], "norms": [], "rates": []}

    def train(self, batches: Iterable[dict[str, torch.Tensor]], most: int = 100) -> None:
        for number, batch in enumerate(batches, start=1):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.said["norms"].append(float(norm))
                self.optimizer.step()
                self.rates.step()
                self.optimizer.zero_grad()
            self.said["losses"].append(loss.item())
            self.said["rates"].append(self.rates.get_last_lr()[0])
            if number == most:
                break

    def evaluate(self) -> None:
        self.model.eval()
        for name, loader in (("map", self.evaluated), ("stream", self.stream)):
            guesses, firsts = [], []
            for batch in loader:
                with torch.no_grad():
                    logits = self.model(**batch).logits
                # Logits of padding are nobody's, and others with context ranks.
                guessed = logits.argmax(-1) * batch["attention_mask"]
                found = self.accelerator.gather_for_metrics({"guessed": guessed, "ids": batch["input_ids"]})
                guesses.append(found["guessed"])
                firsts += self.accelerator.gather_for_metrics([f"row {row[0]}" for row in batch["input_ids"].tolist()])
                assert [f"row {row[0]}" for row in found["ids"].tolist()] == firsts[-len(found["ids"]) :]
            self.said |= {f"{name} guesses": torch.cat(guesses).numpy(), f"{name} rows": firsts}
        self.model.train()


def script(folder: Path, config: dict[str, object]) -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    rule.without_extension()
    first = Script(config)
    accelerator = first.accelerator
    first.train(first.loader, most=4)
    accelerator.save_state(folder / "state")
    first.train(accelerator.skip_first_batches(first.loader, 4))
    first.evaluate()
    with accelerator.split_between_processes(list(range(5))) as mine:
        first.said["mine"] = mine
    assert accelerator.unwrap_model(first.model) is first.model.module
    accelerator.unwrap_model(first.model).save_pretrained(
        folder / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(first.model),
    )
    accelerator.save_model(first.model, folder / "weights")
    again = Script(config)
    again.accelerator.load_state(folder / "state")
    again.train(again.accelerator.skip_first_batches(again.loader, 4))
    assert again.said["losses"] == first.said["losses"][4:] and len(again.said["losses"]) > 1
    torch.save({"script": first.said}, folder / f"said by {dist.get_rank()}.pt")
    transformers.integrations.unset_hf_deepspeed_config()


def config(stage: int, parallel: dict[str, object] | None) -> dict[str, object]:
    return ds_config(stage, parallel) | {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A function from the number of data ranks to the folder of a run without ds_npu, and what its ranks say."""
    found = {}

    def of(ranks: int):
        if ranks not in found:
            folder = tmp_path_factory.mktemp("alone")
            run_on_ranks(ranks, script, folder, config(1, None))
            found[ranks] = folder, told(folder, ranks)
        return found[ranks]

    return of


CASES = {
    "sequences": (2, {"tensor": 2, "sequence_parallel": True}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "both": (4, {"tensor": 2, "context": 2}),
    "data, tensor": (4, {"tensor": 2}),
}


@pytest.mark.parametrize(
    ("layout", "stage"),
    [("sequences", 3)]
    + [(layout, stage) for layout in ("tensor", "context", "both") for stage in range(4)]
    + [("data, tensor", stage) for stage in (1, 3)],
)
def test_a_script_of_ones_own(layout: str, stage: int, alone, tmp_path: Path):
    ranks, parallel = CASES[layout]
    run_on_ranks(ranks, script, tmp_path, config(stage, parallel))
    data_ranks = 2 if layout.startswith("data") else 1
    folder, expected = alone(data_ranks)
    for rank, each in enumerate(told(tmp_path, ranks)):
        assert_close(each, expected[rank * data_ranks // ranks], SINGLE, f"rank {rank}")
    weights = load_file(folder / "model" / "model.safetensors")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert rule.relative(read.state_dict(), weights) <= SINGLE
    assert rule.relative(load_file(tmp_path / "weights" / "model.safetensors"), weights) <= SINGLE
