"""A CANN of our own: what torch_npu's unmodified wheel needs from one, computed on the CPU.

``build`` compiles ``csrc`` into the libraries that torch_npu links; ``environment`` says what a process needs so that
torch_npu finds them. ``ds_npu sim`` puts the two together.
"""
