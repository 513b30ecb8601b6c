"""What two dumps or two logs say of each other: statistics that combine, rounding, curves, pictures, errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_npu.cli.main import main
from ds_npu.comparison.curves import CurveError, curves_of, parting, partings
from ds_npu.comparison.merged_records import MergedOutput, SamplePieces, numbers_of
from ds_npu.comparison.rounding import Numbers, Rounding, coarsest, error_of, least_error
from ds_npu.comparison.weight_elements import WeightElements
from ds_npu.dump_hooks import BatchTokens, DumpFile, ForwardRecords, hash_of_bits, record_weight, statistics

HEADER = {"rank": 0, "world": 1, "layout": {}, "ranks": {}, "what": "statistics"}


def numbers(x: torch.Tensor) -> Numbers:
    found = statistics(x.reshape(1, -1))[:, 0].tolist()
    return Numbers(x.numel(), *found)


@given(st.integers(1, 40), st.integers(0, 39), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_statistics_and_fingerprints_of_parts_add_up(rows, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    cut = min(cut, rows)
    first, second = (
        WeightElements((rows, 6), {0: torch.arange(cut)}),
        WeightElements((rows, 6), {0: torch.arange(cut, rows)}),
    )
    parts = [(whole[:cut], first), (whole[cut:], second)]
    added = Numbers()
    for part, _ in parts:
        added.add(numbers(part)) if part.numel() else None
    expected = numbers(whole)
    assert added.count == expected.count and math.isclose(added.squares, expected.squares)
    assert (added.least, added.largest) == (expected.least, expected.largest)
    prints = sum(int(hash_of_bits(part, held.indices), 16) for part, held in parts) % 2**64
    assert f"{prints:016x}" == hash_of_bits(whole)
    columns = (
        WeightElements((rows, 6), {1: torch.tensor([4, 5, 0])}),
        WeightElements((rows, 6), {1: torch.tensor([1, 2, 3])}),
    )
    prints = sum(int(hash_of_bits(whole[:, held.dims[1]], held.indices), 16) for held in columns) % 2**64
    assert f"{prints:016x}" == hash_of_bits(whole)
    window = WeightElements((rows, 6), {}, first=3)
    assert window.indices(0, 2).tolist() == [3, 4]


def test_a_fingerprint_sees_every_bit_and_each_element_s_index():
    x = torch.randn(100, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    assert hash_of_bits(x) == hash_of_bits(x.double())
    swapped = x.clone()
    swapped[[3, 7]] = x[[7, 3]]
    assert hash_of_bits(swapped) != hash_of_bits(x)
    for bit in range(32):
        flipped = x.clone()
        flipped[9:10].view(torch.int32).bitwise_xor_(1 << bit if bit < 31 else -(2**31))
        assert hash_of_bits(flipped) != hash_of_bits(x), bit


@given(st.integers(0, 5), st.floats(1e-12, 1e-1))
@settings(max_examples=50, deadline=None)
def test_statistics_claim_no_larger_error_than_there_is(seed, size):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(500, dtype=torch.float64, generator=generator)
    b = a + size * torch.randn(500, dtype=torch.float64, generator=generator)
    # Of extremes by elements, of means and squares by norms.
    assert least_error(numbers(a), numbers(b)) <= max(error_of(a, b), float((a - b).abs().max() / a.abs().max())) * (
        1 + 1e-9
    )


def test_errors_of_what_is_not_finite():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])
    assert error_of(a, b) == math.inf and error_of(b, b) == 0
    assert least_error(numbers(a), numbers(b)) == math.inf and least_error(numbers(b), numbers(b)) == 0
    assert least_error(Numbers(3, 0, 0, 0, 0), Numbers(3, 0, 0, 0, 0)) == 0


@pytest.mark.parametrize(
    ("copies", "odd"), [((9, 1, 1), [0]), ((1, 1, 9), [2]), ((1, 9, 1 + 1e-7), [1]), ((1, 9), [1])]
)
def test_of_copies_the_ranks_with_the_rarest_are_named(copies, odd):
    x = torch.arange(1.0, 13.0)
    held = [(rank, numbers(x * scale)) for rank, scale in enumerate(copies)]
    merged = MergedOutput("float32", (0,), {"sample": [SamplePieces((0, 0, 0), copies={"0:12": held})]})
    assert merged.differing(1e-6) == odd and merged.differing(10.0) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_explains_a_stack_of_layers_and_not_much_more(dtype):
    """Layers in ``dtype`` against float64: the bound holds, and is no more than 100 times what there is."""
    torch.manual_seed(0)
    x = torch.randn(64, 128).to(dtype)
    exact, terms = x.double(), 128
    for depth in range(1, 13):
        weight = (torch.randn(128, 128) / 128**0.5).to(dtype)
        x, exact = torch.nn.functional.layer_norm(torch.relu(x @ weight) + x, (128,)), exact
        exact = torch.nn.functional.layer_norm(torch.relu(exact @ weight.double()) + exact, (128,))
        explained = Rounding(str(dtype)[6:], terms).explains(depth)
        assert error_of(x, exact) < explained < 100 * error_of(x, exact), depth


def test_the_coarsest_dtype():
    assert coarsest(["float32", "bfloat16", "int64"]) == "bfloat16" and coarsest([]) == "float64"


def write_dump(folder: Path, scale: float = 1.0, steps: tuple[int, ...] = (0,)) -> Path:
    file = DumpFile(folder, HEADER)
    for step in steps:
        weight = torch.arange(12.0).view(3, 4)
        record_weight(file, {"kind": "weight", "name": "a.weight", "shape": [3, 4], "order": [0]}, weight)
        forward = ForwardRecords(file, BatchTokens(((torch.arange(6).view(2, 3),), {})), 0)
        forward.output("a", torch.arange(24.0).view(2, 3, 4))
        forward.output("b", scale * torch.arange(24.0).view(2, 3, 4))
        file.write(step)
    return folder


def compare(capsys, *arguments: object) -> tuple[int, str]:
    code = main(["compare", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_command_names_the_first_output_that_is_off_and_draws_it(tmp_path, capsys):
    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", 1.01)
    code, said = compare(capsys, a, write_dump(tmp_path / "same"))
    assert code == 0 and said.startswith("nothing is further off than rounding explains, of 3 tensors")
    code, said = compare(capsys, a, b, "--svg", tmp_path / "errors.svg")
    assert code == 1 and said.startswith("step 0: b (output) is the first that is further off"), said
    assert "error 9.9e-03, rounding explains 1.4e-06" in said and "<--" in said
    drawn = (tmp_path / "errors.svg").read_text()
    assert drawn.startswith("<svg") and "first further off: b (output)" in drawn and drawn.count("<circle") >= 3
    code, said = compare(capsys, a, b, "--dtype", "bfloat16")
    assert code == 0, said


def test_two_dumps_that_cannot_be_compared_are_one_line(tmp_path, capsys):
    a = write_dump(tmp_path / "a")
    later = write_dump(tmp_path / "later", steps=(5,))
    cases = {
        (a, tmp_path / "none"): "there is no such file or folder",
        (a, later): "both runs have no step in common: found 0 and 5",
        (a, a / "rank-00000.jsonl"): "one of A and B is a folder and one a file",
    }
    (tmp_path / "empty").mkdir()
    cases[a, tmp_path / "empty"] = "it has no rank-*.jsonl"
    for name, text in (("text", "no JSON\n"), ("other", '{"ds_npu dump": 99}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.jsonl").write_text(text)
    cases[a, tmp_path / "text"] = "it is no whole file of a dump"
    cases[a, tmp_path / "other"] = "it is no dump of version 1"
    two = write_dump(tmp_path / "two")
    path = two / "rank-00000.jsonl"
    path.write_text(path.read_text().replace('"world": 1', '"world": 2', 1))
    cases[a, two] = "the files of 1 ranks are there, and its run had 2"
    for both, expected in cases.items():
        code, said = compare(capsys, *both)
        assert code == 2 and said.count("\n") == 1 and expected in said, (both, said)


def test_a_step_that_is_cut_off_is_not_read(tmp_path, capsys):
    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", steps=(0, 1))
    path = b / "rank-00000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    code, said = compare(capsys, a, b)
    assert code == 0 and "of steps 0" in said.split("B: ")[1]


def test_a_step_that_was_dumped_again_is_the_later_one(tmp_path, capsys):
    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", 1.01)
    code, _ = compare(capsys, a, write_dump(b))
    assert code == 0


LOGS = {
    "trainer_state.json": json.dumps(
        {"log_history": [{"step": step, "loss": 4 / step, "grad_norm": 1.0} for step in range(1, 31)]}
    ),
    "log.jsonl": "\n".join(json.dumps({"step": step, "loss": 4 / step, "grad_norm": 1.0}) for step in range(1, 31)),
    "log.csv": "\n".join(["step, loss, grad_norm", *(f"{step}, {4 / step}, 1.0" for step in range(1, 31))]),
    "log.txt": "\n".join(f"step {step}: loss={4 / step:.12f} grad_norm: 1.0, 3 s" for step in range(1, 31)),
    "megatron.log": "\n".join(
        f" iteration {step:8d}/ 100 | lm loss: {4 / step:.10E} | grad norm: 1.000 |" for step in range(1, 31)
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_each_kind_of_log_is_read(tmp_path, name):
    (tmp_path / name).write_text(LOGS[name])
    found = curves_of(tmp_path / name)
    assert found["loss"] == pytest.approx({step: 4 / step for step in range(1, 31)})
    assert found["grad_norm"] == dict.fromkeys(range(1, 31), 1.0)


def test_the_step_from_which_curves_part_is_named(tmp_path, capsys):
    noise = [1e-4, -2e-4, 1.5e-4]
    a = {step: 5 / (step + 1) for step in range(100)}
    b = {step: value * (1 + noise[step % 3] + (0.02 if step >= 60 else 0)) for step, value in a.items()}
    b[30] *= 1.05  # One step that is apart is no parting.
    found = parting("loss", a, b)
    assert found.parts_at == 60 and parting("loss", a, a).parts_at is None
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"step": step, "loss": loss}) for step, loss in a.items()))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"step": step, "loss": loss}) for step, loss in b.items()))
    code, said = compare(capsys, tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert code == 1 and "they part from step 60 on" in said
    code, said = compare(capsys, tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    assert code == 0 and "they do not part" in said
    with pytest.raises(CurveError, match="no step in common"):
        partings({"loss": {1: 1.0}}, {"loss": {2: 1.0}})
    (tmp_path / "text").write_text("hello")
    code, said = compare(capsys, tmp_path / "a.jsonl", tmp_path / "text")
    assert code == 2 and "found no steps with a loss" in said
    assert parting("loss", {1: 1.0, 2: math.nan}, {1: 1.0, 2: 1.0}).parts_at == 2


def test_tokens_are_numbered_without_padding():
    ids = torch.tensor([[0, 0, 5, 6], [5, 6, 0, 0], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    batch = BatchTokens(((), {"input_ids": ids, "attention_mask": mask}))
    assert batch.samples[0] == batch.samples[1] != batch.samples[2]
    x = torch.arange(12.0).view(3, 4, 1)
    _, found = batch.of(x)
    assert found.tolist() == [[-1, -1, 0, 1], [0, 1, -1, -1], [0, 1, 2, 3]]
    assert batch.of(x.view(12, 1))[0].shape == (3, 4, 1) and batch.of(x.view(4, 3, 1)) is None
    shard = BatchTokens(((), {"input_ids": ids}), shard=(1, 3))
    own, found = shard.of(x[:, :2])
    assert own.shape == (3, 2, 1) and found.tolist() == [[2, 3]] * 3


def test_padding_does_not_count(tmp_path):
    file = DumpFile(tmp_path, HEADER)
    ids, mask = torch.tensor([[3, 4, 0]]), torch.tensor([[1, 1, 0]])
    records = ForwardRecords(file, BatchTokens(((ids,), {"attention_mask": mask})), 0)
    records.output("a", torch.tensor([[[1.0, 2.0], [3.0, 4.0], [99.0, -99.0]]]))
    file.write(0)
    record = json.loads(file.path.read_text().splitlines()[2])
    assert numbers_of(record) == Numbers(4, 10.0, pytest.approx(30.0), 1.0, 4.0)


def test_samples_are_told_from_whatever_a_model_is_given():
    ids, embeds = torch.arange(6).view(2, 3), torch.randn(2, 3, 4)
    by_name = BatchTokens(((), {"labels": ids + 1, "input_ids": ids}))
    assert by_name.samples == BatchTokens(((ids,), {})).samples == BatchTokens((({"x": [ids]},), {})).samples
    batch = BatchTokens(
        ((), {"attention_mask": torch.ones(2, 3), "inputs_embeds": embeds}), held=torch.tensor([[0, 2]])
    )
    assert len(set(batch.samples)) == 2 and batch.of(torch.ones(2, 2, 5))[1].tolist() == [[0, 2], [0, 2]]
    images = BatchTokens(((torch.randn(2, 3, 8, 8),), {}))
    assert images.of(torch.ones(2, 7))[1] is None and images.of(torch.ones(3, 7)) is None
    assert BatchTokens(((), {})).of(torch.ones(2, 3, 4)) is None
