"""Linear equations with a symmetric positive definite matrix: a right solution, or an error.

Torch's LU of a batch (``torch.linalg.solve``, ``inv``) has given wrong numbers without an error on
machines with several threads. Cholesky has not, is faster, and every solution is put to the test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedharmony.errors import NumericalError

#: How far A x may lie from b, in units of ‖A‖ ‖x‖ + ‖b‖. Rounding of float64 makes 1e-15 of it.
WRONG = 1e-9


def solve_spd(matrix: Tensor, right: Tensor) -> Tensor:
    """``A⁻¹ b`` in float64, for A (..., n, n), symmetric and positive definite, and b (..., n, m).

    >>> solve_spd(torch.tensor([[4.0, 0.0], [0.0, 16.0]]), torch.tensor([[4.0], [8.0]])).tolist()
    [[1.0], [0.5]]
    """
    a, b = matrix.double(), right.double()
    factor, fault = torch.linalg.cholesky_ex(a)
    if bool(fault.any()) or not bool(factor.isfinite().all()):
        raise NumericalError(
            "A matrix of sums over clients is not positive definite: some sums are false, or have "
            "too much noise, or all features are alike."
        )
    x = torch.cholesky_solve(b, factor)
    scale = a.abs().amax((-2, -1)) * x.abs().sum(-2).amax(-1) + b.abs().amax((-2, -1))
    if not bool(((a @ x - b).abs().amax((-2, -1)) <= WRONG * scale).all()):
        raise NumericalError("The solution of linear equations over clients' sums is wrong.")
    return x
