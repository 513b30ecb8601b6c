"""The names that TRL 0.24 imports."""

MergeOptions = None
run_merge = None
