"""Calls of HCCL's C functions on the communicator of torch's process group, for what torch_npu never asks for."""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

HCCL_TYPES = {
    torch.int8: 0,
    torch.int16: 1,
    torch.int32: 2,
    torch.float16: 3,
    torch.float32: 4,
    torch.int64: 5,
    torch.uint64: 6,
    torch.uint8: 7,
    torch.uint16: 8,
    torch.uint32: 9,
    torch.float64: 10,
    torch.bfloat16: 11,
}
REDUCTIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3}


def communicator(group: dist.ProcessGroup | None = None) -> ctypes.c_void_p:
    """The HcclComm of ``group`` on this rank's NPU."""
    group = group or dist.distributed_c10d._get_default_group()
    return ctypes.c_void_p(group._get_backend(torch.device("npu")).get_hccl_comm(torch.npu.current_device()))


def _argument(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, list):
        return (ctypes.c_uint64 * len(value))(*value)
    if isinstance(value, torch.dtype):
        return HCCL_TYPES[value]
    if isinstance(value, str):
        return REDUCTIONS[value]
    return value


def call(name: str, *arguments: object, group: dist.ProcessGroup | None = None) -> int:
    """The code that the function ``name`` returns, called on the current stream after what torch has queued.

    Tensors go as addresses, lists as uint64 arrays, dtypes and reductions by name as HCCL's numbers; ints are uint64.
    """
    torch.npu.synchronize()  # torch_npu's own queue of calls is empty after it
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    converted = [ctypes.c_uint64(one) if isinstance(one, int) else _argument(one) for one in arguments]
    return getattr(ctypes.CDLL("libhccl.so"), name)(*converted, communicator(group), stream)


def succeed(name: str, *arguments: object) -> None:
    """As ``call``, which must return 0, and waited for."""
    code = call(name, *arguments)
    assert code == 0, (name, code, recent_error())
    torch.npu.synchronize()


def recent_error() -> str:
    """The words of this thread's last failed call."""
    function = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
    function.restype = ctypes.c_char_p
    return (function() or b"").decode()
