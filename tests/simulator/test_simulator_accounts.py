"""What a simulated operator costs and touches, in the lines of a trace: as Python says it, call by call."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest
import simulated

from ds_npu.topology.machine import MACHINES

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet


def accounts(folder) -> dict[str, Iterator[dict]]:
    """By name of a task: what the trace says of each, in order."""
    found = defaultdict(list)
    for path in folder.glob("*.json"):
        lines = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:]]
        for line in sorted(lines, key=lambda line: line["args"]["place"]):
            found[line["name"]].append(line["args"])
    return {name: iter(each) for name, each in found.items()}


@pytest.mark.parametrize(("soc", "seeds"), [("910B2", ("1", "2", "3")), ("910B3", ("4", "5")), ("910_9391", ("6",))])
def test_python_and_the_simulator_compute_the_same(soc, seeds, tmp_path):
    command = ("--devices", "1", "--soc", soc, "--trace", str(tmp_path), "--")
    done = simulated.sim(*command, sys.executable, "tests/npu/operator_accounts.py", *seeds, timeout=300)
    said = [json.loads(line) for line in simulated.printed(done)]
    traced, machine = accounts(tmp_path), MACHINES["A3" if soc.startswith("910_") else soc]
    assert len(said) == 21 * len(seeds)
    for each in said:
        found = next(traced[each["name"]])
        moved = found["read"] + found["written"]
        if "seconds" in each:
            assert found["seconds"] == pytest.approx(each["seconds"], rel=1e-9), (each, found)
            continue
        assert found["flop"] == each["flop"] and moved == each.get("bytes", moved), (each, found)
        seconds = machine.operator_seconds(each["arithmetic"], moved)
        assert found["seconds"] == pytest.approx(seconds, rel=1e-9), (each, found)


TOUCHES = """
import torch, torch_npu
x, y = torch.zeros(8, 4, device="npu"), torch.ones(8, 4, device="npu")
torch._foreach_add_([x, y], 1.0)
x.split([3, 5])
torch.split_with_sizes_copy(x, [3, 5])
norm = torch.nn.LayerNorm(4).npu()
norm(x.requires_grad_()).sum().backward()
x.detach().mul_(y)
torch.empty(8, 4, pin_memory=True).copy_(x.detach(), non_blocking=True)
torch.npu.synchronize()
"""


def test_results_in_lists_and_optional_results_are_written(tmp_path):
    simulated.printed(simulated.python(TOUCHES, "--devices", "1", "--trace", str(tmp_path)))
    found = {name: next(each) for name, each in accounts(tmp_path).items()}
    bytes_of = {name: (each.get("read"), each.get("written")) for name, each in found.items()}
    whole, row = 8 * 4 * 4, 4 * 4
    assert bytes_of["aclnnForeachAddScalarV2"] == (2 * whole, 2 * whole)
    assert bytes_of["aclnnLayerNorm"] == (whole + 2 * row, whole + 2 * 8 * 4)
    assert bytes_of["aclnnLayerNormBackward"][1] == whole + 2 * row
    assert bytes_of["aclnnInplaceMul"] == (2 * whole, whole)
    assert bytes_of["aclrtMemcpyAsync"] == (whole, whole) and found["aclrtMemcpyAsync"]["kind"] == "copy"
    host = MACHINES["910B2"].operator_seconds(whole / MACHINES["910B2"].host, 2 * whole)
    assert found["aclrtMemcpyAsync"]["seconds"] == pytest.approx(host, rel=1e-9)
    assert not any("kind" in each for name, each in found.items() if "event" in name)


PACKED = """
import torch, torch_npu
shapes = (8, 4, 16), (8, 2, 16), (8, 2, 16), (8, 4, 4), (8, 2, 4)
q, k, v, q_rope, k_rope = (torch.randn(s, dtype=torch.bfloat16, device="npu").requires_grad_() for s in shapes)
options = dict(query_rope=q_rope, key_rope=k_rope, scale=1.0, actual_seq_qlen=[3, 8], actual_seq_kvlen=[3, 8])
mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
out, *_ = torch_npu.npu_fusion_attention_v2(q, k, v, 4, "TND", atten_mask=mask, sparse_mode=3, **options)
out.sum().backward()
torch.npu.synchronize()
"""


def test_attention_counts_what_each_document_sees_and_the_rotary_part_of_its_heads(tmp_path):
    simulated.printed(simulated.python(PACKED, "--devices", "1", "--trace", str(tmp_path)))
    found = {name: next(each)["flop"] for name, each in accounts(tmp_path).items() if "FlashAttention" in name}
    forward, backward = sorted(found.values())
    pairs = 3 * 4 // 2 + 5 * 6 // 2
    assert forward == 2 * pairs * 4 * (20 + 16)
    assert backward == 2 * pairs * 4 * (3 * 20 + 2 * 16)


def test_collectives_take_what_python_says_within_nodes_and_between_them(tmp_path):
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "tests/npu/collective_accounts.py",
    )
    done = simulated.sim("--devices", "16", "--trace", str(tmp_path), "--", *command, timeout=300)
    assert done.returncode == 0, done.stderr
    found, machine, own = accounts(tmp_path), MACHINES["910B2"], 4 * 4096
    for name, kind, size in [
        ("HcclAllGather", "all_gather", 4 * own),
        ("HcclReduceScatter", "reduce_scatter", 4 * own),
        ("HcclAllReduce", "all_reduce", 4 * own),
        ("HcclAlltoAll", "all_to_all", 4 * own),
        ("HcclBroadcast", "broadcast", own),
    ]:
        calls = [each for each in found[name] if max(each["read"], each["written"]) == size]
        assert len(calls) == 4, (name, calls)
        seconds = machine.collective_seconds(kind, size, near=2, nodes=2)
        assert [each["seconds"] for each in calls] == pytest.approx([seconds] * 4, rel=1e-9), name
    near, far = (machine.message + own / rate for rate in (machine.link, machine.network))
    assert sorted(each["seconds"] for each in found["HcclSend"]) == pytest.approx(sorted([near, far]), rel=1e-9)
    assert sorted(each["seconds"] for each in found["HcclRecv"]) == pytest.approx(sorted([near, far]), rel=1e-9)
