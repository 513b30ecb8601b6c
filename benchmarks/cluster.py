"""Ten training runs on clusters that nobody here has: the best layout of ds_npu against the best of plain DeepSpeed.

    python benchmarks/cluster.py --formula                      # the candidates, ranked; runs nothing
    python benchmarks/cluster.py --only llama3-8b-8k --json cluster.json
    python benchmarks/cluster.py --show cluster.json --svg docs/images/cluster.svg

For each case a formula (``cluster_layouts.py``) ranks all layouts of both sides that fit by it, and ``ds_npu predict``
runs the two best of each that do not take too long. Plain DeepSpeed here is ZeRO 1 to 3 with AutoTP, Ulysses, AutoEP or
none of them, with gradient checkpointing or without, in models of transformers with fused attention. All figures are
simulated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster_layouts import GIB, Case, Estimate, Layout, Model, deepspeed_layouts, ds_npu_layouts, estimate
from cluster_picture import picture, rate, ratio, table

from ds_npu.topology.machine import A2, MACHINES, Machine

CHOSEN = 2
"""Layouts of each side that the twin runs and that fit."""
TRIED = 5
"""Layouts that it runs at most to find those."""
MOST_BLOCKS = 1300
"""Layers times micro-batches of a layout that the twin runs: longer steps take more than ten minutes on two cores."""
SHOWN = 5
"""Layouts of each side that --formula shows."""
SIDES = {"ds_npu": ds_npu_layouts, "DeepSpeed": deepspeed_layouts}


def decoder(kind: str, architecture: str, sizes: Sequence[int], **more: Any) -> Model:
    """``sizes``: layers, hidden size, feed-forward width, heads, heads of keys, words."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    values = dict(zip((*names, "vocab_size"), sizes, strict=True))
    common = {"model_type": kind, "architectures": [architecture], "max_position_embeddings": 131072}
    return Model(common | values | {"tie_word_embeddings": False} | more)


def llama(*sizes: int) -> Model:
    return decoder("llama", "LlamaForCausalLM", sizes)


LLAMA_7B, LLAMA_13B = llama(32, 4096, 11008, 32, 32, 32000), llama(40, 5120, 13824, 40, 40, 32000)
LLAMA_70B, LLAMA3_8B = llama(80, 8192, 28672, 64, 8, 32000), llama(32, 4096, 14336, 32, 8, 128256)
QWEN3_32B = decoder("qwen3", "Qwen3ForCausalLM", (64, 5120, 25600, 64, 8, 151936), head_dim=128)
QWEN3_30B = decoder(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (48, 2048, 6144, 32, 4, 151936),
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
)
MIXTRAL = decoder(
    "mixtral", "MixtralForCausalLM", (32, 4096, 14336, 32, 8, 32000), num_local_experts=8, num_experts_per_tok=2
)
CASES = [
    Case("llama2-7b", LLAMA_7B, 8, 4096, 64),
    Case("llama2-13b", LLAMA_13B, 8, 4096, 64),
    Case("llama2-13b-16", LLAMA_13B, 16, 4096, 64),
    Case("llama2-70b", LLAMA_70B, 64, 4096, 64),
    Case("llama3-8b-8k", LLAMA3_8B, 8, 8192, 32),
    Case("llama3-8b-128k", LLAMA3_8B, 16, 131072, 4),
    Case("llama3-8b-128k-64", LLAMA3_8B, 64, 131072, 8),
    Case("qwen3-32b", QWEN3_32B, 32, 4096, 64),
    Case("qwen3-30b-a3b", QWEN3_30B, 16, 4096, 32),
    Case("mixtral-8x7b", MIXTRAL, 32, 4096, 64),
]


def ranked(case: Case, side: str, machine: Machine) -> list[tuple[Layout, Estimate]]:
    """The layouts of ``side`` that fit by the formula, the fastest first."""
    found = [(layout, estimate(case, layout, machine)) for layout in SIDES[side](case)]
    fitting = [each for each in found if each[1].memory <= machine.hbm]
    return sorted(fitting, key=lambda each: each[1].total)


def formula_lines(case: Case, machine: Machine) -> Iterator[str]:
    """The fastest layouts of each side by the formula."""
    for side in SIDES:
        found = ranked(case, side, machine)
        yield f"{case.name} on {case.npus}, {side}: {len(found)} layouts fit by the formula"
        for layout, said in found[:SHOWN]:
            parts = ", ".join(f"{name} {part:.2f}" for name, part in said.seconds.items() if part >= 0.005)
            yield f"  {said.total:8.2f} s  {said.memory / GIB:5.1f} GiB  {layout}  ({parts})"


def predicted(case: Case, layout: Layout, machine: str, folder: Path) -> dict[str, Any]:
    """The twin's answer: what ``ds_npu predict --json`` writes, or {"error"}."""
    (folder / "config.json").write_text(json.dumps(case.model.config))
    (folder / "ds_config.json").write_text(json.dumps(layout.ds_config(case)))
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ds_npu.cli.main", "predict", str(folder / "ds_config.json")]
    command += ["--model", str(folder), "--world-size", str(case.npus), "--sequence-length", str(case.length)]
    command += ["--machine", machine, "--json", str(out)]
    command += ["--gradient-checkpointing"] * (layout.recompute == "all" and layout.side != "ds_npu")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not out.exists():
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return dict(json.loads(out.read_text()))


def holding_back(answer: dict[str, Any]) -> str:
    """The largest parts of a step that are no computing."""
    parts: dict[str, float] = {}
    for stage in answer["stages"]:
        for name, seconds in stage["activities"].items():
            share = seconds / answer["figures"]["step_seconds"] / len(answer["stages"])
            parts[name] = parts.get(name, 0.0) + share
    largest = sorted(((part, name) for name, part in parts.items() if name != "computes"), reverse=True)
    return ", ".join(f"{name} {part:.0%}" for part, name in largest[:2] if part >= 0.01) or "nothing but computing"


def run_case(case: Case, machine: Machine) -> dict[str, Any]:
    """Predict the best layouts of both sides of ``case`` and print a line for each."""
    rows: list[dict[str, Any]] = []
    for side in SIDES:
        fitting = 0
        layers = case.model.num_hidden_layers
        short = [each for each in ranked(case, side, machine) if each[0].micro_batches(case) * layers <= MOST_BLOCKS]
        for layout, formula in short[:TRIED]:
            rows.append(_row(case, side, layout, formula, machine))
            fitting += rate(rows[-1]) > 0
            if fitting == CHOSEN:
                break
    found = {"case": case.name, "npus": case.npus, "length": case.length, "rows": rows}
    print(f"{case.name:18} best / best: {ratio(found)}", flush=True)
    return found


def _row(case: Case, side: str, layout: Layout, formula: Estimate, machine: Machine) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = predicted(case, layout, machine.name, Path(folder))
    figures, error = answer.get("figures"), answer.get("error")
    row = {"side": side, "layout": str(layout), "formula": formula.total, "error": error}
    if figures is None:
        print(f"{case.name:18} {side:9} {error}: {layout}", flush=True)
        return row
    row |= {"figures": figures, "holds back": holding_back(answer)}
    fits = "fits" if figures["fits"] else "DOES NOT FIT"
    speed = f"{figures['tokens_per_second_and_npu']:7,.0f} tokens/s a NPU, MFU {figures['mfu']:5.1%}"
    print(
        f"{case.name:18} {side:9} {speed}, {figures['peak_gib']:.1f} GiB, {fits}: {layout}; {row['holds back']}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these cases (all)")
    parser.add_argument("--machine", choices=MACHINES, default=A2.name)
    parser.add_argument("--formula", action="store_true", help="show the ranked layouts, and run nothing")
    parser.add_argument("--json", type=Path, help="write all answers there")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="a table of what --json has written")
    parser.add_argument("--svg", type=Path, help="with --show: draw a picture there")
    arguments = parser.parse_args()
    if arguments.show:
        shown = [case for file in arguments.show for case in json.loads(file.read_text())]
        print("\n".join(table(shown)))
        if arguments.svg is not None:
            arguments.svg.write_text(picture(shown), encoding="utf-8")
        return
    machine = MACHINES[arguments.machine]
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    if arguments.formula:
        for case in cases:
            print("\n".join(formula_lines(case, machine)))
        return
    found = []
    for case in cases:
        found.append(run_case(case, machine))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
