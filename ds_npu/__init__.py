"""A DeepSpeed backend for Huawei Ascend NPUs. Importing it activates it (``ds_npu.engine.activation``).

Public: ``from_pretrained`` here, ``ds_npu.parallel`` (layers, attention, the grid of ranks) and ``ds_npu.ops``.
"""

from ds_npu.engine.activation import imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ds_npu.engine.pretrained import from_pretrained

__all__ = ["__version__", "from_pretrained"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Every Python that starts imports this module: what needs torch waits until it is asked for.
    if name == "from_pretrained":
        from ds_npu.engine.pretrained import from_pretrained

        return from_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


imported()
