"""The kernels of torch_npu, each with the signature and the result of its reference in ``ds_npu.ops``."""
