"""The iteration of Muon, which brings all singular values of a matrix near 1: Newton and Schulz's, in matrix products.

A step with the coefficients (a, b, c) maps each singular value s to a s + b s^3 + c s^5. Sources: Jordan et al. 2024
(kellerjordan.github.io/posts/muon) for the iteration; Dao 2026 (tridao.me/blog/2026/gram-newton-schulz) for its form on
the Gram matrix, which takes fewer products where a matrix is not square. Both are DeepSpeed 0.19.8's, with its dtypes
(runtime/zero/muon/original_muon.py), for its keys ``ns_method`` "standard" and "gram".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

Method = Literal["gram", "standard"]
Scale = Literal["aspect", "rms"]
Coefficients = Sequence[tuple[float, float, float]]

COEFFICIENTS: dict[str, Coefficients] = {
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""Coefficients of each step: Jordan's (DeepSpeed's), You's (leloykun.github.io/ponder/muon-opt-coeffs), and those of
Polar Express (Amsel et al. 2025, arXiv 2505.16932, divided by powers of its 1.01)."""
EPSILON = 1e-7
RESTART = 2
"""Steps after which the Gram matrix is computed anew: in 16 bits, all steps on one Gram matrix are not stable."""
RMS = 0.2
"""The root mean square of AdamW's updates, which Moonlight gives Muon's (arXiv 2502.16982)."""


def update_scale(scale: Scale, rows: int, columns: int) -> float:
    """The factor of an orthogonalised update of ``rows`` x ``columns``.

    "aspect": the root of rows / columns where there are more rows (DeepSpeed's); "rms": such that its root mean square
    is RMS, as of AdamW's, so that one learning rate suits both (Moonlight).
    """
    if scale == "rms":
        return RMS * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns) if rows > columns else 1.0


def orthogonalised(
    x_BRC: torch.Tensor, method: Method, dtype: torch.dtype, coefficients: Coefficients = COEFFICIENTS["jordan"]
) -> torch.Tensor:
    """The matrices of ``x_BRC``, each with its singular values brought near 1; x_BRC: [matrices, rows, columns].

    It computes and returns ``dtype``. With "gram" a matrix is divided by its norm before it is rounded, with
    "standard" after that. A matrix of zeros gives zeros; one that is not finite gives values that are not.
    """
    x = x_BRC if method == "gram" else x_BRC.to(dtype)
    if x.dtype == torch.float16:
        x = x.float()
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + EPSILON)).to(dtype)
    if method == "gram" and x.shape[-2] != x.shape[-1]:
        for part in filter(None, (coefficients[:RESTART], coefficients[RESTART:])):
            x = _on_gram_matrix(x, part)
    else:
        for a, b, c in coefficients:
            gram = _gram_matrix(x)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, *_by_side(polynomial, x), beta=a)
    return x


def _is_tall(x_BRC: torch.Tensor) -> bool:
    return x_BRC.shape[-2] > x_BRC.shape[-1]


def _gram_matrix(x_BRC: torch.Tensor) -> torch.Tensor:
    """The smaller of x x^T and x^T x."""
    return x_BRC.mT @ x_BRC if _is_tall(x_BRC) else x_BRC @ x_BRC.mT


def _by_side(small: torch.Tensor, x_BRC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors, in order, of the product of ``x_BRC`` and ``small``, a (symmetric) polynomial of its Gram matrix.

    A tall matrix is multiplied from the right, so that nothing is transposed in memory.
    """
    return (x_BRC, small) if _is_tall(x_BRC) else (small, x_BRC)


def _on_gram_matrix(x: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """``x`` after the steps of ``coefficients``.

    The product of all steps is made of the Gram matrix alone, and multiplies ``x`` once.
    """
    gram, product = _gram_matrix(x), None
    for index, (a, b, c) in enumerate(coefficients):
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if product is None:
            product = step.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            product = torch.baddbmm(product, step, product, beta=a)
        if index < len(coefficients) - 1:
            half = torch.baddbmm(gram, step, gram, beta=a)
            gram = torch.baddbmm(half, step, half, beta=a)
    assert product is not None, "there are coefficients"
    return torch.bmm(*_by_side(product, x))


def steps_on_gram_matrices(steps: int) -> tuple[int, ...]:
    """How many of ``steps`` run on each Gram matrix."""
    return tuple(filter(None, (min(steps, RESTART), max(steps - RESTART, 0))))
