"""``ds_npu.pipeline``: cuts the model of a build into the stages of ``ds_npu.parallel.pipeline`` ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from ds_npu.config.pipeline import ONE_STAGE, PipelineSection
from ds_npu.config.sections import switched_on
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change, Phase
from ds_npu.features.loss.model_loss import HasLossFunction, LossLevel, wrap_loss
from ds_npu.features.pipeline.batch_loss import loss_by_items
from ds_npu.features.pipeline.layout import PipelineLayout, blocks_of_stages, layout_of
from ds_npu.features.pipeline.stages import StageModules, cut_into_stages, stages_of
from ds_npu.models.attributes import set_attribute
from ds_npu.models.hugging_face_model import HuggingFaceModel, hugging_face_model
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.pipeline.schedule import Schedule

OF_MODULES = ("schedule", "recompute")
"""Keys that a PipelineModule follows, too."""


def applies(build: Build) -> bool:
    """Whether the model of ``build`` is to be in stages, and is no PipelineModule."""
    return build.topology.size("pp") > 1 and not build.is_pipeline


def _asked(section: PipelineSection, build: Build) -> str:
    keys = "".join(f", {key} {value}" for key, value in switched_on(section))
    return f"pipeline {build.topology.size('pp')}{keys}" if applies(build) else ""


def _parts(section: PipelineSection, build: Build) -> Iterable[Change]:
    if build.is_pipeline:
        _check_module(section, build)
    if (ranks := build.topology.size("pp")) > 1:
        build.schedule = partial(_schedule_of, section, ranks)
    if applies(build):
        yield build.same_random_numbers("pp", "pipeline")


def _schedule_of(section: PipelineSection, ranks: int, samples: int) -> tuple[str, Schedule]:
    layout = layout_of(section, ranks)
    return layout.name, layout.make(min(section.micro_batches or samples, samples))


def _check_module(section: PipelineSection, build: Build) -> None:
    """Raise ValueError for keys that a PipelineModule, which has its own stages, cannot follow."""
    wrong = {key: value for key, value in switched_on(section) if key not in OF_MODULES}
    ranks = build.topology.size("pp")
    if not wrong and ranks > 1 and layout_of(section, ranks).chunks > 1:
        wrong = {"schedule": section.schedule}
    if wrong:
        named = ", ".join(f"ds_npu.pipeline.{key} {value}" for key, value in wrong.items())
        raise ValueError(
            f"{named}: found for a deepspeed.PipelineModule, which has one stage on each rank, of its own layers. What "
            f"to do: leave them out (a schedule of {', '.join(ONE_STAGE)} is accepted), or give deepspeed.initialize "
            "the plain model, which is cut into stages then"
        )


def _declare(section: PipelineSection, build: Build) -> Iterable[Change]:
    if not applies(build) or stages_in(build.model):
        return
    layout = layout_of(section, build.topology.size("pp"))
    every = stages_of(build.block_plan, blocks_of_stages(section, build.model, build.block_plan, layout))
    own = [every[stage] for stage in layout.own(build.topology.rank("pp"))]
    build.waiting_forwards = layout.sample.peak_activations
    build.notes.append(f"pipeline: {layout_in_words(layout, every)}")
    yield from _changes(build, own)


def layout_in_words(layout: PipelineLayout, every: Iterable[StageModules]) -> str:
    """The layout in words: how many blocks each stage has, and which rank has which stages."""
    blocks = ", ".join(str(len(each.blocks)) for each in every)
    ranks = "; ".join(f"rank {rank} has {', '.join(map(str, layout.own(rank)))}" for rank in range(layout.ranks))
    several = f"; of the stages {ranks}" if layout.chunks > 1 else ""
    return f"{layout.name}, {layout.stages} stages of {blocks} blocks{several}"


def _changes(build: Build, own: list[StageModules]) -> Iterable[Change]:
    stages = " and ".join(str(each.stage) for each in own)
    absent = [name for name in own[0].absent if all(name in each.absent for each in own)]

    def cut() -> None:
        cut_into_stages(build.model, build.block_plan, *own)
        build.forget_plan()

    for index, name in enumerate(absent):
        yield Change("replaces", name, f"passed through by {stages}", cut if index == 0 else None)
    found = hugging_face_model(build.model)
    if found is None:
        return
    yield Change("sets", "", "generate", partial(_refuse_generation, found))
    if not build.shards_sequences and isinstance(found, HasLossFunction):
        make = partial(wrap_loss, found, loss_by_items, LossLevel.SHARE, "pipeline")
        yield Change("links", "", "divides by the labels of the whole batch", make, LossLevel.SHARE)


def _refuse_generation(model: HuggingFaceModel) -> None:

    def generate(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(model).__name__} is in pipeline stages, which do not generate: a token would pass through all "
            "ranks before the next one begins. What to do: engine.save_pretrained(folder), and generate with the plain "
            "model, or ds_npu.parallel.pipeline 1"
        )

    set_attribute(model, "generate", generate)


PIPELINE: Feature[PipelineSection] = Feature("pipeline", Phase.STAGES, declare=_declare, parts=_parts, asked=_asked)
