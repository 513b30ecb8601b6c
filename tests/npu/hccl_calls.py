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


def communicator() -> ctypes.c_void_p:
    """The HcclComm of the world on this rank's NPU."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
    return ctypes.c_void_p(backend.get_hccl_comm(torch.npu.current_device()))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libhccl.so")


def openings() -> list[tuple[str, tuple[int, int, int, int, int]]]:
    """Of each communicator that this process opened by a root info, in their order, what HCCL was given.

    torch_npu's name of the group; ranks, MiB of a buffer, hcclOpExpansionMode, hcclRdmaTrafficClass and
    hcclRdmaServiceLevel, as hccl_types.h has them.
    """
    text = ctypes.create_string_buffer(2**16)
    _library().ds_npu_sim_openings(text, ctypes.c_size_t(len(text)))
    rows = (line.split(" ") for line in text.value.decode().splitlines())
    return [(name, (int(a), int(b), int(c), int(d), int(e))) for a, b, c, d, e, name in rows]


def split(members: list[int], rank: int, number: int) -> ctypes.c_void_p:
    """A communicator of the world's ranks ``members``, of which this is ``rank``; all call it with ``number``."""
    made = ctypes.c_void_p()
    code = _library().HcclCreateSubCommConfig(
        ctypes.byref(communicator()),
        ctypes.c_uint32(len(members)),
        (ctypes.c_uint32 * len(members))(*members),
        ctypes.c_uint64(number),
        ctypes.c_uint32(rank),
        None,
        ctypes.byref(made),
    )
    assert code == 0, recent_error()
    return made


def join_all(devices: list[int]) -> list[ctypes.c_void_p]:
    """A communicator of several NPUs of this process, as each of them sees it."""
    made = (ctypes.c_void_p * len(devices))()
    code = _library().HcclCommInitAll(ctypes.c_uint32(len(devices)), (ctypes.c_int32 * len(devices))(*devices), made)
    assert code == 0, recent_error()
    return [ctypes.c_void_p(one) for one in made]


def destroy(handle: ctypes.c_void_p) -> None:
    assert _library().HcclCommDestroy(handle) == 0, recent_error()


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


def call(name: str, *arguments: object, on: ctypes.c_void_p | None = None) -> int:
    """The code that the function ``name`` returns, called on the current stream after what torch has queued.

    Tensors go as addresses, lists as uint64 arrays, dtypes and reductions by name as HCCL's numbers; ints are uint64.
    ``on`` is the communicator, by default the world's.
    """
    torch.npu.synchronize()  # torch_npu's own queue of calls is empty after it
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    converted = [ctypes.c_uint64(one) if isinstance(one, int) else _argument(one) for one in arguments]
    return getattr(_library(), name)(*converted, on or communicator(), stream)


def succeed(name: str, *arguments: object, on: ctypes.c_void_p | None = None) -> None:
    """As ``call``, which must return 0, and waited for."""
    code = call(name, *arguments, on=on)
    assert code == 0, (name, code, recent_error())
    torch.npu.synchronize()


def recent_error() -> str:
    """The words of this thread's last failed call."""
    function = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
    function.restype = ctypes.c_char_p
    return (function() or b"").decode()
