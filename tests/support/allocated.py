"""How much memory a call takes at its peak: exactly, as PyTorch's allocators report it.

Mapping a file is reported as well, though it takes no memory: its pages are the system's cache, shared by all ranks
and dropped at need. Those of the files that are named are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], mapped: Iterable[Path] = ()) -> int:
    """The most bytes of tensors that ``call`` held at once, in addition to what there was before."""
    files = {path.stat().st_size for path in mapped}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()
    del kept
    events = profiled.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes = [(time, change) for time, change in changes if abs(change) not in files]
    assert changes, "the profiler reported no allocation"
    return max(itertools.accumulate(change for _, change in sorted(changes, key=lambda each: each[0])))
