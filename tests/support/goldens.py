"""Records, bit for bit, what 49 runs compute and send, and compares two records.

    python tests/support/goldens.py record FILE   losses, norms, weights and collectives, in order, of every rank
    python tests/support/goldens.py compare A B   say what differs; exit with 1 where anything does

For changes that must change nothing: record at the commit before and at the one after, on one machine with one torch.
Bits differ between machines, so no record is committed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from pathlib import Path

import deepspeed
import gradient_rule
import tensor_parallel_rule as rule
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from wire import Wire

STEPS = 2
ON = {"flash_attention": True, "rms_norm": True, "swiglu": True, "rotary": True, "cross_entropy": True}


def _case(family: str, stage: int = 1, dtype: str = "float32", fused: bool = False, **section: object) -> dict:
    return {"family": family, "stage": stage, "dtype": dtype, "section": section | ({"fused_ops": ON} if fused else {})}


def _context(degree: int, algorithm: str, tensor: int = 1, **keys: object) -> dict[str, object]:
    sequence_parallel = tensor > 1
    parallel = {"context": degree, "tensor": tensor, "sequence_parallel": sequence_parallel}
    return {"parallel": parallel, "context_parallel": {"algorithm": algorithm, **keys}}


def cases(world: int) -> dict[str, dict]:
    """By name, the runs of a world of ``world`` ranks."""
    split = {"parallel": {"tensor": world}}
    sequence = {"parallel": {"tensor": world, "sequence_parallel": True}}
    found = {}
    if world == 4:
        both = {"parallel": {"tensor": 2, "sequence_parallel": True}}
        found |= {f"llama tp2 dp2 zero{stage}": _case("llama", stage, **both) for stage in range(4)}
        found["mixtral tp4"] = _case("mixtral", 2, **split)
        found["llama hybrid"] = _case("llama", **_context(4, "hybrid", ulysses=2))
        found["llama double ring"] = _case("llama", **_context(4, "ring", window=2))
        found["qwen3 tp2 cp2"] = _case("qwen3", 3, **_context(2, "ulysses", tensor=2))
        found["llama tp2 cp2 ring fused"] = _case("llama", 2, fused=True, **_context(2, "ring", tensor=2))
        return found
    for family in tiny_models.FAMILIES:
        found[f"{family} tp2"] = _case(family, 3, **split)
        # Rotary positions of images are no sequence to shard.
        found[f"{family} tp2 sp"] = _case(family, 1, **sequence)
    for stage in range(4):
        found[f"llama float64 zero{stage}"] = _case("llama", stage, "float64", **sequence)
        found[f"llama bf16 zero{stage}"] = _case("llama", stage, "bfloat16", fused=True, **split)
    for algorithm in ("ulysses", "ring", "allgather"):
        found[f"llama {algorithm}"] = _case("llama", **_context(2, algorithm))
        found[f"qwen3 {algorithm} full"] = _case("qwen3", 3, **_context(2, algorithm, kv_cache="full"))
    found["mistral ring"] = _case("mistral", **_context(2, "ring"))
    found["gpt2 ulysses"] = _case("gpt2", **_context(2, "ulysses"))
    found["llama pipelined"] = _case("llama", tensor_overlap="pipelined", **sequence)
    found["llama chosen"] = _case("llama", parallel={"context": 2})
    return found


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def run(case: dict) -> dict[str, object]:
    dtype = getattr(torch, case["dtype"])
    model = tiny_models.tiny(case["family"], torch.float32).to(dtype)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    config = rule.config(case["stage"], dtype, case["section"])
    found: dict[str, object] = {"losses": [], "norms": []}
    with Wire() as wire:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        dp = engine.topology.size("dp")
        micro, steps = gradient_rule.MICRO, gradient_rule.ACCUMULATION
        tokens = rule.batches(micro * steps * dp).view(steps, dp, micro, rule.LENGTH)[:, engine.topology.rank("dp")]
        for _ in range(STEPS):
            for batch in tokens:
                loss = rule.loss_of(engine, batch, dtype)
                found["losses"].append(loss.item().hex())
                engine.backward(loss)
                engine.step()
            found["norms"].append(float(engine.get_global_grad_norm() or 0.0).hex())
    found["sent"] = [f"{name} {size}" for name, size in wire.sent]
    found["weights"] = digest(engine.whole_state_dict())
    engine.destroy()
    return found


def record(world: int, folder: str) -> None:
    gradient_rule.without_extension()
    found = {}
    for name, case in cases(world).items():
        try:
            found[name] = run(case)
        except Exception as error:
            # What is refused is refused in the same words.
            found[name] = {"refused": f"{type(error).__name__}: {error}"}
        gc.collect()
    Path(folder, f"{world}-{dist.get_rank()}.json").write_text(json.dumps(found))


def compare(before: dict, after: dict) -> list[str]:
    said = [f"{name}: only in one record" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        for key in before[name].keys() | after[name].keys():
            one, other = before[name].get(key), after[name].get(key)
            if one != other:
                said.append(f"{name}: {key}: {str(one)[:300]} became {str(other)[:300]}")
    return sorted(said)


def main(action: str, *files: str) -> int:
    if action == "compare":
        said = compare(*(json.loads(Path(file).read_text()) for file in files))
        print("\n".join(said) or "the same, bit for bit")
        return bool(said)
    scratch = Path(f"{files[0]}.ranks")
    scratch.mkdir(parents=True, exist_ok=True)
    found = {}
    for world in (2, 4):
        run_on_ranks(world, record, world, str(scratch), deadline_s=1500)
        for rank in range(world):
            part = json.loads((scratch / f"{world}-{rank}.json").read_text())
            found |= {f"{name}, rank {rank} of {world}": run for name, run in part.items()}
    Path(files[0]).write_text(json.dumps(found, indent=1))
    refused = {name: run["refused"] for name, run in found.items() if "refused" in run}
    print(
        len(found), "records of ranks,", len(refused), "refused:", *(f"{n}: {w}" for n, w in refused.items()), sep="\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
