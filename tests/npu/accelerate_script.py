"""A script for accelerate as people have it: it knows nothing of context ranks. Run by a test: CONFIG FOLDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"

import accelerate
import deepspeed.ops
import tiny_models
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    config, folder = sys.argv[1:]
    plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=config)
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
    accelerate.utils.set_seed(1)
    loader = torch.utils.data.DataLoader(tiny_models.tokens(16, 16), 2, shuffle=True)
    model = tiny_models.tiny("llama", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    said: dict[str, list] = {"samples": [], "losses": [], "rates": []}
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        said["samples"].append(batch[:, 0].tolist())
        said["losses"].append(loss.item())
        said["rates"] += schedule.get_last_lr()
    (Path(folder) / f"said by {accelerator.process_index}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
    # Not by the interpreter: gloo may abort a process that ends while its threads are at work.
    sys.stdout.flush()
    os._exit(0)
