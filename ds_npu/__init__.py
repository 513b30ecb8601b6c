"""A DeepSpeed backend for Huawei Ascend NPUs. Importing it activates it (``ds_npu.engine.activation``)."""

from ds_npu.engine.activation import imported

__version__ = "0.1.0"

imported()
