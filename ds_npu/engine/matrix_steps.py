"""Muon on whole matrices in DeepSpeed's engines, whatever the layout of ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ds_npu.config.problems import ConfigError
from ds_npu.config.whole_matrices import against_whole_matrices
from ds_npu.zero_ext.matrix_holdings import plan_whole_matrices
from ds_npu.zero_ext.matrix_optimizer import MatrixOptimizer, MatrixSettings

MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
"""DeepSpeed's module, which is slow to import; where nobody has imported it there is no Muon."""


class WholeMatrices:
    """An engine whose Muon, DeepSpeed's own or one that a client gives it, steps whole matrices."""

    topology: Any
    basic_optimizer: Any

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        made = super()._configure_basic_optimizer(model_parameters)  # type: ignore[misc]
        return self._on_whole_matrices(made)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        given = client_optimizer
        if isinstance(client_optimizer, torch.optim.Optimizer):
            given = self._on_whole_matrices(client_optimizer)
        elif client_optimizer is not None:
            given = lambda parameters: self._on_whole_matrices(client_optimizer(parameters))  # noqa: E731
        super()._configure_optimizer(given, model_parameters)  # type: ignore[misc]

    def _on_whole_matrices(self, optimizer: Any) -> Any:
        muon: Any = sys.modules.get(MUON)
        if muon is None or not isinstance(optimizer, muon.MuonWithAuxAdam):
            return optimizer
        engine: Any = self
        if problems := list(against_whole_matrices(engine._config._param_dict)):
            raise ConfigError(problems)
        return MatrixOptimizer(optimizer, MatrixSettings())

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """As DeepSpeed's, which gets the inner Muon: that one it knows as supported by ZeRO."""
        known = basic_optimizer.inner if isinstance(basic_optimizer, MatrixOptimizer) else basic_optimizer
        return super()._do_optimizer_sanity_check(known)  # type: ignore[misc]

    def plan_matrices(self) -> None:
        """Plan the steps of whole matrices, if there are any; every rank calls it when its engine is made."""
        if isinstance(self.basic_optimizer, MatrixOptimizer):
            plan_whole_matrices(self, self.topology.stage_group("matrices"))
