"""The check of a DeepSpeed config and its ``"ds_npu"`` section for a world: it names every mistake at once.

It is pure: no process group, no device, neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ds_npu.config.batch import Batch, batch_of
from ds_npu.config.deepspeed_keys import conflicts, misspelt, value_at, zero_stage
from ds_npu.config.deepspeed_readers import deepspeed_problems
from ds_npu.config.hccl import wrong_names
from ds_npu.config.loading import flaws
from ds_npu.config.parallel import ParallelSection, fit
from ds_npu.config.problems import Config, ConfigError, Problem
from ds_npu.config.reading import read
from ds_npu.config.rules import broken_rules
from ds_npu.config.sections import DsNpuConfig
from ds_npu.config.whole_matrices import is_muon, muon_problems
from ds_npu.topology.degrees import Degrees

PIPELINES_REFUSE = "a deepspeed.PipelineModule trains with: DeepSpeed's pipelines refuse stages 2 and 3"


@dataclass(frozen=True)
class Checked:
    """A config in which no mistake was found."""

    config: DsNpuConfig
    degrees: Degrees
    """The grid of the world; without a world size, the smallest that fits."""
    batch: Batch
    zero_stage: int | None
    """None where it is not known ("auto")."""
    warnings: tuple[str, ...]


def check(
    ds_config: Config,
    world_size: int | None,
    stages: int | None = None,
    unmet: Callable[[DsNpuConfig], Iterable[Problem]] = lambda config: (),
) -> Checked:
    """Check ``ds_config`` for a world of ``world_size`` ranks (None: not known) and raise ConfigError if it is wrong.

    ``stages`` is the number of stages of the model where it is a deepspeed.PipelineModule. ``unmet`` yields what this
    machine cannot do of the features that are on. A config without the section is DeepSpeed's matter: nothing is
    checked.
    """
    if wrong := [*flaws(ds_config)]:
        raise ConfigError(wrong)
    warnings = misspelt(ds_config)
    if "ds_npu" not in ds_config:
        degrees, _ = fit(ParallelSection(), world_size)
        return Checked(DsNpuConfig(), degrees, Batch(), zero_stage(ds_config), tuple(warnings))
    reading = read(ds_config["ds_npu"])
    config, doubtful = reading.config, reading.doubtful
    degrees, misfits = fit(config.axes, world_size)
    uncertain = world_size is None or misfits or _doubts(doubtful, "parallel.")
    dp = None if uncertain else degrees.dp
    named = not uncertain and not _doubts(doubtful, "context_parallel.")
    batch, batch_problems = batch_of(ds_config, dp)
    problems = [
        *reading.problems,
        *broken_rules(config, doubtful),
        *misfits,
        *(wrong_names(config.hccl, degrees, config.context_parallel, is_muon(ds_config)) if named else ()),
        *_pipeline(ds_config, config.parallel.pipeline, stages, doubtful),
        *conflicts(ds_config, config, dp, doubtful),
        *deepspeed_problems(ds_config),
        *muon_problems(ds_config),
        *batch_problems,
        *unmet(config),
    ]
    if problems:
        raise ConfigError(problems)
    if config.parallel.context > 1 and stages is not None:
        warnings.append(
            f"ds_npu.parallel.context is {config.parallel.context}: a deepspeed.PipelineModule's sequences are not "
            "divided: the script must give each of its ranks other tokens, and return each one's share of the loss; "
            "shares are added up"
        )
    if config.parallel.pipeline > 1 and stages is None and zero_stage(ds_config) == 2:
        warnings.append(f"zero_optimization.stage is 2: 0 and 1 are all that {PIPELINES_REFUSE}")
    if config.parallel.pipeline > 1 and stages is None and value_at(ds_config, "flops_profiler.enabled"):
        warnings.append("flops_profiler.enabled is true: it is refused for a Hugging Face model in pipeline stages")
    return Checked(config, degrees, batch, zero_stage(ds_config), tuple(warnings))


def _doubts(doubtful: frozenset[str], section: str) -> bool:
    return any(path.startswith(section) for path in doubtful)


def _pipeline(ds_config: Config, ranks: int, stages: int | None, doubtful: frozenset[str]) -> Iterator[Problem]:
    stage = zero_stage(ds_config)
    if stages not in (None, ranks) and "parallel.pipeline" not in doubtful:
        yield Problem("ds_npu.parallel.pipeline", ranks, f"{stages}, the stages of the deepspeed.PipelineModule")
    if stages is not None and stage in (2, 3):
        yield Problem("zero_optimization.stage", stage, f"0 or 1, all that {PIPELINES_REFUSE}")
    elif ranks > 1 and stage == 3:
        yield Problem(
            "zero_optimization.stage",
            stage,
            "0, 1 or 2 with ds_npu.parallel.pipeline: each micro-batch would gather every weight of a stage",
        )
