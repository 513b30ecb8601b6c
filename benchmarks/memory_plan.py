"""A plan for a memory budget against plans set by hand: CPU time of a step of a Llama of 12 blocks, one thread.

    python benchmarks/memory_plan.py

The plan is made as ``ds_npu.recompute.budget_gib`` makes it, from one recorded step, with this processor's own speed of
products and of memory in place of an NPU's. By hand: one kind of recomputation for the first so many blocks, as few as
the budget allows. All run in one process and take turns; ``plan again / plan`` shows what chance does.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

BLOCKS = 12
PLAN, AGAIN = "plan", "plan again"
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "norm": lambda count: {"norm": _first(count)},
    "activation_function": lambda count: {"activation_function": _first(count)},
    "both": lambda count: {"norm": _first(count), "activation_function": _first(count)},
    "attention": lambda count: {"modules": [f"{each}.self_attn" for each in _first(count)]},
    "mlp": lambda count: {"modules": [f"{each}.mlp" for each in _first(count)]},
    "attention, both": lambda count: KINDS["attention"](count) | KINDS["both"](count),
    "layers": lambda count: {"layers": count, "method": "block"},
    "keep matmul": lambda count: {"layers": count, "method": "block", "keep": ["matmul"]},
    "keep both": lambda count: {"layers": count, "method": "block", "keep": ["matmul", "attention"]},
}
"""By name, the section ``recompute`` of so many blocks."""


def _first(count: int) -> list[str]:
    return [f"model.layers.{{0..{count - 1}}}"]


def from_module(name: str, attribute: str) -> Any:
    return getattr(importlib.import_module(name), attribute)


class Bench:
    """A model, its batch, and what a step of it needs and takes."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        self.torch: Any = importlib.import_module("torch")
        sys.modules["torch_npu"] = None  # type: ignore[assignment]  # as if it were not installed
        self.torch.set_num_threads(1)
        self.args = args
        ranks = from_module("ds_npu.topology.degrees", "Degrees")()
        self.topology = from_module("ds_npu.topology.topology", "PlannedTopology")(ranks)
        self.ids = self.torch.randint(0, 512, (args.samples, args.length))

    def build(self, section: dict[str, Any]) -> Any:
        """A model that is changed as ds_npu's engine does on one rank."""
        transformers: Any = importlib.import_module("transformers")
        self.torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=self.args.hidden,
            intermediate_size=self.args.hidden * 11 // 4,
            num_attention_heads=self.args.hidden // 64,
            num_hidden_layers=BLOCKS,
            attn_implementation="sdpa",
            use_cache=False,
        )
        build = from_module("ds_npu.features.build", "Build")(
            self.topology, transformers.LlamaForCausalLM(config).train()
        )
        driver: Any = importlib.import_module("ds_npu.features.driver")
        keys = from_module("ds_npu.config.sections", "DsNpuConfig").model_validate({"recompute": section})
        driver.apply_features(driver.values_in(keys), build)
        for parameter in build.model.parameters():
            parameter.grad = self.torch.zeros_like(parameter)
        return build

    def step(self, model: Any) -> None:
        model(input_ids=self.ids, labels=self.ids).loss.backward()

    def peak_bytes(self, section: dict[str, Any]) -> int:
        """Of a step, beside weights and gradients."""
        record, meter = self.meter()
        model = self.build(section).model
        with record:
            self.step(model)
        return int(meter.peak())

    def meter(self) -> Any:
        record = from_module("ds_npu.memory.storage_record", "StorageRecord")("cpu", lambda: "")
        return record, from_module("ds_npu.memory.storage_record", "StorageMeter")(record)

    def machine(self) -> Any:
        """With this processor's speeds: a product of this model, and a copy."""
        torch, rows = self.torch, self.ids.numel()
        x, weight = torch.randn(rows, self.args.hidden), torch.randn(self.args.hidden, self.args.hidden * 11 // 4)
        rate = 2 * rows * weight.numel() / seconds(lambda: x @ weight)
        wide = torch.randn(rows, self.args.hidden * 11 // 4)
        copied = 2 * wide.nbytes / seconds(lambda: wide * 1.5)
        print(f"products {rate / 1e9:.1f} GFLOP/s, elementwise {copied / 1e9:.1f} GB/s")
        of_an_npu = from_module("ds_npu.topology.machine", "A2")
        rates = {"matmul": rate, "matmul_float32": rate, "attention": ((1, rate),), "memory": ((1, copied),)}
        # A core that computes one tile at a time rounds nothing up here.
        return dataclasses.replace(of_an_npu, **rates, cores=1, kernel=5e-6)

    def planner(self) -> Callable[[float], tuple[dict[str, Any], int, float]]:
        """A function from a share between the least and the most bytes to a plan's section, its budget and seconds."""
        build, (record, meter) = self.build({}), self.meter()
        planner: Any = importlib.import_module("ds_npu.planner.memory_plan")
        table: Any = importlib.import_module("ds_npu.planner.memory_plan_table")
        steps = from_module("ds_npu.features.recompute.recorded_steps", "RecordedSteps")(build, meter, self.machine())
        steps.wrap()
        with record:
            self.step(build.model)
            steps.end_of_backward()
        layers, moments = steps.layers, steps.moments
        modules = {
            each.name: {part: steps.modules(each.name, part) for part in ("attention", "mlp")} for each in layers
        }
        ends = [
            planner.measured(layers, moments, list(map(choose, layers))).peak_bytes
            for choose in (planner.smallest, planner.fastest)
        ]

        def plan(share: float) -> tuple[dict[str, Any], int, float]:
            budget = int(ends[0] + share * (ends[1] - ends[0]))
            found = planner.best_plan(layers, moments, budget)
            section = table.section_of([table.StagePlan(0, layers, moments, modules, found)])
            return section.get("recompute", {}), budget, found.seconds

        return plan


def seconds(function: Callable[[], Any]) -> float:
    """The least CPU time of a call."""
    times = []
    for _ in range(20):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def by_hand(bench: Bench, budget: int) -> dict[str, dict[str, Any]]:
    """Of each kind the fewest blocks that stay within the budget."""
    found = {}
    for name, make in KINDS.items():
        low, high = 1, BLOCKS
        if bench.peak_bytes(make(high)) > budget:
            continue
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if bench.peak_bytes(make(middle)) <= budget else (middle + 1, high)
        found[f"{name}, {low} blocks"] = make(low)
    return found


def compare(bench: Bench, title: str, sections: dict[str, dict[str, Any]]) -> None:
    models = {name: bench.build(section).model for name, section in sections.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(bench.args.cycles):
        for name in (*models, *reversed(models)):
            start = time.process_time()
            bench.step(models[name])
            times[name].append(time.process_time() - start)
    base = statistics.median(times[PLAN])
    print(f"{title}: {PLAN} {1e3 * base:.0f} ms a step (CPU time, median of {len(times[PLAN])})")
    for name in models:
        ratios = [own / plan for own, plan in zip(times[name], times[PLAN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        peak = bench.peak_bytes(sections[name])
        print(
            f"  {name + ' / ' + PLAN:<32} {middle:.4f}  quartiles {low:.4f} to {high:.4f}  {peak:>13,} bytes",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256, help="size of hidden states (default 256)")
    parser.add_argument("--samples", type=int, default=2, help="of a step (default 2)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample (default 256)")
    parser.add_argument("--cycles", type=int, default=10, help="of turns, forth and back (default 10)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.5, 0.8], help="budgets (default .2 .5 .8)")
    args = parser.parse_args()
    bench = Bench(args)
    plan = bench.planner()
    for share in args.shares:
        section, budget, extra = plan(share)
        print(f"budget {budget:,} bytes: {section}, estimated {1e3 * extra:.1f} ms more")
        compare(bench, f"{share:g}", {PLAN: section, AGAIN: section, "nothing": {}} | by_hand(bench, budget))


if __name__ == "__main__":
    main()
