"""A DeepSpeed backend for Huawei Ascend NPUs. Importing it activates it (``ds_npu.engine.activation``)."""

from ds_npu.engine.activation import activate

__version__ = "0.1.0"

activate()
