"""A replacement for CANN, computed on the CPU, under torch_npu's unmodified wheel.

``build`` compiles ``csrc`` into the libraries that torch_npu links; ``environment`` has the environment variables with
which a process loads them. ``ds_npu sim`` uses both.
"""
