"""Models that compute parts of themselves in float32, all in float64."""

import torch
from torch.overrides import TorchFunctionMode

WIDE = {torch.float32: torch.float64}


class Float64(TorchFunctionMode):
    """Makes ``.float()``, ``.to(torch.float32)`` and ``dtype=torch.float32`` mean float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: self.wide(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*map(self.wide, args), **kwargs)

    @staticmethod
    def wide(value):
        return WIDE.get(value, value) if isinstance(value, torch.dtype) else value
