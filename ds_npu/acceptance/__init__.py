"""What ``ds_npu accept`` runs on NPUs, against references on the CPU, and what it writes down."""
