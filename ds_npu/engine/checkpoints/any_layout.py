"""DeepSpeed's checkpoints load at any layout: other sizes of all axes, other stages of ZeRO, another cut into stages.

DeepSpeed (0.19.8) loads a checkpoint at the layout that wrote it: each rank reads its own files. Here every rank also
writes a manifest of them (``ds_npu.checkpoint.manifest``). Where this run's layout differs, each rank reassembles the
content of its own files from those of all ranks, and gives it to DeepSpeed's loading.

Before anything is written to the model or its optimizer, all ranks agree on whether the checkpoint fits: an error on
one of them is raised on all, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_npu.capability.named_classes import named_classes
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import MODULE, manifest_path
from ds_npu.checkpoint.universal import UniversalCheckpoint
from ds_npu.checkpoint.wholeness import name_in
from ds_npu.checkpoint.written import WrittenCheckpoint, differences, over_ranks
from ds_npu.engine.checkpoints.allowed_files import AllowedFilesEngine, check_universal
from ds_npu.engine.checkpoints.checkpoint_files import CheckpointTransaction
from ds_npu.engine.checkpoints.layer_files import has_known_files
from ds_npu.engine.checkpoints.offloaded_files import put_offloaded
from ds_npu.engine.checkpoints.random_states import align_behind_load
from ds_npu.engine.checkpoints.reassembly import Overlaid, Reassembly, State
from ds_npu.engine.checkpoints.weights_only import Asked, check_partitions_load
from ds_npu.engine.checkpoints.written_files import CLASSES, layout_description, manifest_of, plain_weights
from ds_npu.engine.topology_engine import TopologyEngine
from ds_npu.features.experts.relocation import restore_maps, state_of_maps
from ds_npu.log import logger
from ds_npu.parallel.runtime.placement import has_experts
from ds_npu.zero_ext.optimizer_layout import ZERO, OptimizerLayout, layout_of_optimizer

T = TypeVar("T")


class AnyLayoutCheckpoints(TopologyEngine):
    """An engine that also loads checkpoints of other layouts, by manifests that it writes; all ranks call it."""

    allowed_files: AllowedFilesEngine | None = None
    """The checkpoint engine in use; None where the config asks for another one than DeepSpeed's default."""

    def load_checkpoint(self, load_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's, for a checkpoint of any layout.

        Raises CheckpointError, on every rank the same, for one whose files are not all there, whose weights are not
        those of the model, or whose optimizer's state has other shapes.
        """
        self.finish_saving()
        folder = _folder_of(load_dir, tag, "latest_universal" if self.load_universal_checkpoint() else "latest")
        if folder is None:
            return super().load_checkpoint(load_dir, tag, *args, **kwargs)
        asked = Asked(*args, **kwargs)
        if self.load_universal_checkpoint():
            if self.has_manifests:
                universal = UniversalCheckpoint(folder, self.allowed_classes, _names_of_shared(self.module))
                align_behind_load(self, universal.layout)
                return self._load_reassembled(universal, asked, load_dir)
            share = dist.get_rank(), dist.get_world_size()
            _on_every_rank(lambda: check_universal(folder, self.allowed_classes, *share))
            return super().load_checkpoint(load_dir, tag, *args, **kwargs)
        if not self.has_manifests:
            return self._load_own_files(folder, load_dir, tag, *args, **kwargs)
        written = WrittenCheckpoint(folder, self.allowed_classes)
        if not any(_on_every_rank(lambda: written.has_manifests)):
            _on_every_rank(lambda: self._check_own_files(folder, asked))
            return self._load_own_files(folder, load_dir, tag, *args, **kwargs)
        _on_every_rank(lambda: written.check_files(dist.get_rank(), dist.get_world_size()))
        align_behind_load(self, written.layout)
        partitions_alone = self.zero_optimization_partition_weights() and asked.leaves_states_out
        if self._is_layout_of(written) and not partitions_alone:
            if written.leaves_out_frozen:
                self._check_fit(written, asked)
            return self._load_own_files(folder, load_dir, tag, *args, **kwargs)
        if not all(_on_every_rank(lambda: written.is_known)):
            if written.plain_weights():
                self._check_fit(written, asked)
            _on_every_rank(lambda: self._check_own_files(folder, asked, written))
            return self._load_own_files(folder, load_dir, tag, *args, **kwargs)
        return self._load_reassembled(written, asked, load_dir)

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's; a reassembled PipelineModule is loaded from ``checkpoint``, not from files of layers."""
        if self.reassembled is None or not isinstance(self.module, PipelineModule):
            super().load_module_state_dict(checkpoint, *args, **kwargs)
        else:
            self.module.load_state_dict(checkpoint[MODULE], strict=kwargs.get("strict", True))

    def load_universal_checkpoint(self) -> bool:
        """Whether DeepSpeed is to read a universal checkpoint by itself."""
        return bool(super().load_universal_checkpoint()) and self.reassembled is None

    def _load_reassembled(self, written: WrittenCheckpoint, asked: Asked, load_dir: Any) -> Any:
        """Load this rank's part of a checkpoint that another layout has written."""
        partitions_alone = self.zero_optimization_partition_weights() and asked.leaves_states_out
        self._check_fit(written, asked)
        message = "%s: this rank's part is taken from the files of %s ranks"
        logger().info(message, written.folder, len(written.manifests))
        self.reassembled = state = self._reassembly_of(written, partitions_alone)
        plain = self.checkpoint_engine
        self.checkpoint_engine = Overlaid(plain, load=lambda *args, **kwargs: state)
        if partitions_alone:
            # Else DeepSpeed would read the weights by itself; WeightsOnly prevents that it loads states.
            asked = asked._replace(load_optimizer_states=True)
        try:
            return super().load_checkpoint(load_dir, str(written.folder.relative_to(load_dir)), *asked)
        finally:
            self.checkpoint_engine = plain
            self.reassembled = None

    def _load_own_files(self, folder: Path, load_dir: Any, tag: str | None, *args: Any, **kwargs: Any) -> Any:
        """Let DeepSpeed load this rank's own files; all are read, and so verified, before it changes anything."""
        engine = self.allowed_files
        if engine is None:
            return super().load_checkpoint(load_dir, tag, *args, **kwargs)
        try:
            _on_every_rank(lambda: _prepare_own_files(self, engine, folder, Asked(*args, **kwargs)))
            return super().load_checkpoint(load_dir, tag, *args, **kwargs)
        finally:
            engine.forget_prepared()

    def _own_files(self, folder: Path, asked: Asked) -> list[Path]:
        """The files in ``folder`` that DeepSpeed reads on this rank."""
        where = str(folder.parent), folder.name
        names = [self._get_ckpt_name(*where)] if self.has_manifests else []
        if self.zero_optimization() and not asked.leaves_states_out:
            names.append(self._get_zero_ckpt_name(*where))
        experts: Any = self
        if experts.has_experts and not self.zero_optimization_partition_weights():
            names.append(experts.expert_file(folder))
        return [path for path in map(Path, names) if path.is_file()]

    @property
    def allowed_classes(self) -> Sequence[Any]:
        """The classes that files of checkpoints may hold besides tensors and plain Python values."""
        return (*CLASSES, *named_classes(self._config.ds_npu.config.checkpoint.allowed_classes))

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if type(self.checkpoint_engine) is TorchCheckpointEngine:
            self.allowed_files = AllowedFilesEngine(self._config, self.allowed_classes)
            self.checkpoint_engine = self.allowed_files

    def _save_checkpoint(
        self,
        save_dir: str,
        tag: str,
        client_state: dict[str, Any] | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        super()._save_checkpoint(save_dir, tag, client_state or {}, exclude_frozen_parameters)
        folder, engine = Path(save_dir, str(tag)), self.checkpoint_engine
        path = manifest_path(folder, dist.get_rank())
        manifest = manifest_of(self, folder, exclude_frozen_parameters)
        if isinstance(engine, CheckpointTransaction):
            engine.write_text_last(
                path, lambda made: replace(manifest, files=made.fingerprints, digests=made.digests).sealed()
            )
        else:
            path.write_text(manifest.sealed())

    def _get_all_ckpt_names(self, folder: str, tag: str) -> list[str]:
        if self.reassembled is not None:
            return [str(next(Path(folder, str(tag)).glob("*model_states.pt")))] * self.mp_world_size
        names: list[str] = super()._get_all_ckpt_names(folder, tag)
        if self.load_universal_checkpoint() or not WrittenCheckpoint(Path(folder, str(tag))).has_manifests:
            return names
        # An earlier checkpoint of the same name may have had more ranks.
        own = {self._get_ckpt_name(folder, tag, f"{rank:02d}") for rank in range(self.mp_world_size)}
        return [name for name in names if name in own]

    def _get_all_zero_checkpoints(self, folder: str, tag: str) -> Any:
        if self.reassembled is None:
            return super()._get_all_zero_checkpoints(folder, tag)
        return [self.reassembled[ZERO]] * self.seq_dp_world_size

    def _is_layout_of(self, written: WrittenCheckpoint) -> bool:
        """Whether ``written`` has on all ranks the manifest that the rank itself would have written."""

        def is_mine() -> bool:
            theirs = written.manifest(dist.get_rank())
            return theirs is not None and manifest_of(self, written.folder, theirs.leaves_out_frozen).like(theirs)

        return all(_on_every_rank(is_mine))

    def _check_own_files(self, folder: Path, asked: Asked, written: WrittenCheckpoint | None = None) -> None:
        """Raise CheckpointError where DeepSpeed, by itself, would not load what is in ``folder``."""
        _check_files(self, folder, not asked.leaves_states_out, written)
        if self.zero_optimization_partition_weights() and asked.leaves_states_out:
            check_partitions_load(folder, asked, self.mp_world_size == 1 and not has_experts(self.module))

    def _reassembly_of(self, written: WrittenCheckpoint, partitions_alone: bool) -> State:
        """The content of this rank's files; raises CheckpointError on every rank if one cannot read its part."""
        has_any = has_experts(self.module)
        if has_any:
            # The experts of this run begin in the plain order, wherever the former run had them.
            expert_maps = state_of_maps(self.module, self.topology)
            restore_maps(self.module, None, self.topology)
        made: list[State] = []
        try:
            # The state goes to ``made``: what the lambda returns is sent to all ranks.
            _on_every_rank(lambda: made.append(Reassembly(self, written, partitions_alone).state()))
            logger().info("%s: %s bytes of files were read", written.folder, f"{written.bytes_read:,}")
        except CheckpointError:
            if has_any:
                restore_maps(self.module, expert_maps, self.topology)
            raise
        return made[0]

    def _check_fit(self, written: WrittenCheckpoint, asked: Asked) -> None:
        """Raise CheckpointError on every rank where the weights in ``written`` are not those of the model."""
        found = over_ranks(_on_every_rank(lambda: differences(written.plain_weights(), plain_weights(self))))
        is_strict = asked.load_module_strict and asked.custom_load_fn is None
        if found.other or (is_strict and found.any_names):
            frozen = ""
            if written.leaves_out_frozen and found.missing:
                frozen = " It was saved with exclude_frozen_parameters=True: frozen weights are not in it."
            raise CheckpointError(
                f"{written.folder} does not fit {type(self.module).__name__}: {found.told()}.{frozen} What to do: load "
                "it into the model that was saved; load_module_strict=False lets weights that are missing keep the "
                "model's values and leaves out those in the checkpoint only, but shapes have to be the same"
            )
        if found.any_names:
            message = "%s, loaded with load_module_strict=False, does not fit the model: %s"
            is_usual = written.leaves_out_frozen and not found.unexpected
            logger().log(INFO if is_usual else WARNING, message, written.folder, found.told())

    @property
    def has_manifests(self) -> bool:
        """Whether it is known where each weight is in the files that this engine saves."""
        return not isinstance(self.module, PipelineModule) or has_known_files(self.module)

    @property
    def optimizer_layout(self) -> OptimizerLayout | None:
        """Where the optimizer has its weights and their state; None without one, or where that is not known."""
        return layout_of_optimizer(self.optimizer, list(self.module.parameters()))


def _prepare_own_files(engine: AnyLayoutCheckpoints, files: AllowedFilesEngine, folder: Path, asked: Asked) -> None:
    """Read what DeepSpeed will ask for; raises CheckpointError, with nothing written to the model."""
    for path in engine._own_files(folder, asked):
        content = files.prepare(path)
        if engine.zero_optimization_partition_weights() and ZERO in content:
            put_offloaded(engine, folder, content[ZERO])


def _names_of_shared(model: nn.Module) -> dict[str, list[str]]:
    """All names of a weight that has several, by each of its names."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return {name: same for same in names.values() if len(same) > 1 for name in same}


def _folder_of(load_dir: Any, tag: str | None, file: str) -> Path | None:
    """The folder that ``tag``, or else ``file``, names; None without either. Every rank calls it."""

    tags = _on_every_rank(lambda: name_in(Path(load_dir, file)) if tag is None else tag)
    if len(set(map(str, tags))) > 1:
        first, rank = next((each, rank) for rank, each in enumerate(tags) if str(each) != str(tags[0]))
        raise CheckpointError(
            f"{load_dir}: rank 0 is to load {tags[0]}, and rank {rank} {first} (None: it sees no file named {file}). "
            "What to do: put the checkpoint on a disk that all ranks see, and give all of them the same tag"
        )
    return None if tags[0] is None else Path(load_dir, str(tags[0]))


def _on_every_rank(make: Callable[[], T]) -> list[T]:
    """Call ``make`` on each rank and return the results of all ranks.

    Where it raises CheckpointError on one rank or more, the same CheckpointError is raised on all of them.
    """
    made, problem = None, None
    try:
        made = make()
    except CheckpointError as error:
        problem = str(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (problem, made))
    problems = [each for each, _ in found if each is not None]
    if problems:
        raise CheckpointError(problems[0])
    return [each for _, each in found]


def _check_files(engine: Any, folder: Path, with_states: bool, written: WrittenCheckpoint | None = None) -> None:
    """Raise CheckpointError where DeepSpeed cannot read ``folder`` with the layout of ``engine``.

    DeepSpeed (0.19.8) fails there with a bare assertion, or after it has written to the model. ``with_states``: it
    reads the optimizer's files, too. ``written``: the checkpoint as its manifests describe it, if it has any.
    """
    models = {path.name for path in folder.glob("*mp_rank_*_model_states.pt")}
    states = {path.name for path in folder.glob("*zero_pp_rank_*_optim_states.pt")}
    if not models and written is None:
        raise CheckpointError(
            f"{folder} has no checkpoint: expected files *_model_states.pt, found none. What to do: name the folder "
            "and the tag that engine.save_checkpoint was given, on a disk that all ranks see"
        )
    problem = _unlike_own_files(engine, folder, states if with_states else None)
    if written is not None and problem is None:
        mine = manifest_of(engine, folder)
        if not any(mine.has_parts_like(each) for each in written.manifests):
            problem = "none of its ranks held the parts of the model that this rank holds"
    if problem is not None:
        wrote = written.layout if written else _layout_by_names(models, states)
        mine_is = layout_description(engine)
        raise CheckpointError(
            f"{folder} was written at another layout ({wrote}; this run: {mine_is}), and it is not known what its "
            f"files hold where: {problem}. What to do: load it with the layout that wrote it, or weights only: "
            "engine.save_pretrained in a run with that layout, from_pretrained in this one"
        )


def _unlike_own_files(engine: Any, folder: Path, states: set[str] | None) -> str | None:
    """How the files that DeepSpeed reads on this rank differ from those in ``folder``; None where they do not."""
    where = str(folder.parent), folder.name
    own = Path(engine._get_ckpt_name(*where)).name
    alike = {Path(name).name for name in engine._get_all_ckpt_names(*where)}
    if own not in alike or len(alike) != engine.mp_world_size:
        return f"this rank reads {own}, one of {engine.mp_world_size}, and {len(alike)} of that kind are there"
    has_states = states is not None and engine.optimizer is not None and engine.zero_optimization()
    if states is None or not has_states or engine.zero_elastic_checkpoint():
        return None
    mine = Path(engine._get_zero_ckpt_name(*where)).name
    before = mine.split("zero_pp_rank_")[0]
    after = mine.split("_mp_rank_")[1]
    of_group = [each for each in states if each.startswith(f"{before}zero_pp_rank_") and each.endswith(after)]
    if mine not in states or len(of_group) != engine.seq_dp_world_size:
        return f"this rank reads {mine}, one of {engine.seq_dp_world_size}, and {len(of_group)} of that kind are there"
    return None


def _layout_by_names(models: set[str], states: set[str]) -> str:
    if any(name.startswith("zero_pp_rank_") for name in models):
        return f"{len(models)} ranks, ZeRO 3"
    zero = f"ZeRO 1 or 2 over {len(states)} ranks" if states else "no ZeRO"
    return f"{len(models)} model-parallel ranks, {zero}"
