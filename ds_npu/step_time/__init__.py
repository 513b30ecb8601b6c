"""Where the time of a step goes: the reports of ``ds_npu predict`` and of ``ds_npu.profile``."""
