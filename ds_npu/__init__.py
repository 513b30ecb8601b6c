"""A DeepSpeed backend for Huawei Ascend NPUs. Importing it activates it (``ds_npu.engine.activation``)."""
