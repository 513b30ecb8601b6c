"""Device memory is counted, given back and as large as it was said to be."""

import gc

import pytest
import torch

MIB = 2**20


@pytest.fixture(autouse=True)
def emptied():
    # What earlier tests left in cycles would be given back in the middle of this one.
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()


def test_what_is_allocated_is_counted_and_given_back():
    before = torch.npu.memory_allocated()
    held = torch.empty(32 * MIB, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - before >= 32 * MIB
    del held
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before >= 32 * MIB


def test_the_device_tells_how_much_is_free():
    free_before, total = torch.npu.mem_get_info()
    reserved = torch.npu.memory_reserved()
    # What earlier tests keep (a mask) may stand in a piece of memory whose rest can be had.
    spare = reserved - torch.npu.memory_allocated()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
    free, _ = torch.npu.mem_get_info()
    assert free_before - free == torch.npu.memory_reserved() - reserved >= 64 * MIB - spare
    del held
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info() == (free_before, total)
    assert total == torch.npu.get_device_properties(0).total_memory


def test_freed_memory_can_be_had_again_whatever_the_sizes():
    total = torch.npu.mem_get_info()[1]
    for part in (3, 5, 2, 7):
        held = torch.empty(total // part - 64 * MIB, dtype=torch.uint8, device="npu")
        del held
        torch.npu.empty_cache()


def test_more_than_the_device_has_is_torchs_out_of_memory_error():
    total = torch.npu.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(total + MIB, dtype=torch.uint8, device="npu")
    assert torch.ones(4, device="cpu").npu().cpu().sum() == 4
