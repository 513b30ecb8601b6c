"""Whether Muon can step whole matrices, as far as DeepSpeed's config tells it; settings of its parameter groups."""

from __future__ import annotations

from collections.abc import Iterator

from ds_npu.config.deepspeed_keys import value_at
from ds_npu.config.problems import Config, Problem

MUON = "use_muon"
"""DeepSpeed's setting of the parameter groups that Muon steps."""
BY_ELEMENT = "momentum_by_element"
"""The setting of groups whose momenta have the order of the weights; in ZeRO 1 and 2 DeepSpeed's own have another."""
ZERO = "zero_optimization"
OFFLOADS = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")


def is_muon(ds_config: Config) -> bool:
    """Whether the config asks for Muon; a script may give DeepSpeed one of its own as well."""
    return str(value_at(ds_config, "optimizer.type")).lower() == "muon"


def muon_problems(ds_config: Config) -> Iterator[Problem]:
    """The keys of ``ds_config`` with which Muon cannot step whole matrices; none where it asks for no Muon."""
    if is_muon(ds_config):
        yield from against_whole_matrices(ds_config)


def against_whole_matrices(ds_config: Config) -> Iterator[Problem]:
    """The keys of ``ds_config`` with which no optimizer can step whole matrices."""
    for key in OFFLOADS:
        if (found := value_at(ds_config, key)) not in (None, "none"):
            accepted = "'none', or left out, with optimizer.type Muon, whose matrices are orthogonalised on the device"
            yield Problem(key, found, accepted)
    if (found := value_at(ds_config, f"{ZERO}.zenflow")) is not None:
        yield Problem(f"{ZERO}.zenflow", found, "left out with optimizer.type Muon: it steps parts of weights")
