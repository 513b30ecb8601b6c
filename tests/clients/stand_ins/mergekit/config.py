"""The name that TRL 0.24 imports."""

MergeConfiguration = None
