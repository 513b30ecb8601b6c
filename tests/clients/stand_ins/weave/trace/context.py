"""The name that TRL 0.24 imports."""

weave_client_context = None
