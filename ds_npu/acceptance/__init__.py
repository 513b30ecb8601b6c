"""The cases that ``ds_npu accept`` runs on NPUs, against references on the CPU, and the file that it writes."""
