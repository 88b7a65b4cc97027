"""The mobility D of V = sign D A, by least squares over symmetric matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ot_transformers.numerics.structure import find_mobility

RNG = np.random.default_rng


def symmetric_basis(d: int) -> list[np.ndarray]:
    pairs = [(i, j) for i in range(d) for j in range(i + 1)]
    out = []
    for i, j in pairs:
        E = np.zeros((d, d))
        E[i, j] = E[j, i] = 1.0
        out.append(E)
    return out


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_residual_is_the_least_one_over_symmetric_matrices(scale: float) -> None:
    d, rng = 5, RNG(0)
    U = np.linalg.qr(rng.standard_normal((d, d))).Q
    A = (U * np.array([1.0, -0.9, 0.8, 0.7, -0.6])) @ U.T
    A = (A + A.T) / 2
    V = A + 0.02 * np.linalg.norm(A) * rng.standard_normal((d, d))  # near D A: D stays positive definite
    columns = np.stack([(E @ A).ravel() for E in symmetric_basis(d)], -1)
    best = np.linalg.lstsq(columns, V.ravel(), rcond=None)[0]
    least = np.linalg.norm(columns @ best - V.ravel()) / np.linalg.norm(V)
    found = find_mobility(torch.from_numpy(scale * A), torch.from_numpy(V))
    assert "at best" in found.reason
    assert 0.01 < least < 0.1
    np.testing.assert_allclose(found.residual, least, rtol=1e-12)


@pytest.mark.parametrize("rank", [4, 6])
def test_ill_conditioned_structure_is_recovered(rank: int) -> None:
    d, rng = 6, RNG(1)
    X = np.linalg.qr(rng.standard_normal((d, d))).Q[:, :rank]
    A = (X * (10.0 ** -np.linspace(0, 9, rank) * rng.choice([-1, 1], rank))) @ X.T
    A = (A + A.T) / 2
    Y = rng.standard_normal((d, d))
    D = Y @ Y.T + np.eye(d)
    found = find_mobility(torch.from_numpy(A), torch.from_numpy(-D @ A))
    assert found.sign == -1
    assert found.residual < 1e-14
    np.testing.assert_allclose(found.D.numpy() @ A, D @ A, rtol=0, atol=1e-13 * np.abs(D @ A).max())
    assert np.linalg.eigvalsh(found.D.numpy())[0] > 0


def test_small_eigenvalues_do_not_raise_the_residual_above_one() -> None:
    rng = RNG(2)
    for _ in range(20):
        B = rng.standard_normal((8, 8))
        A = (B + B.T) * 10.0 ** -rng.uniform(0, 4, 8)[:, None]
        A = (A + A.T) / 2
        assert (
            0.01
            < find_mobility(torch.from_numpy(A), torch.from_numpy(rng.standard_normal((8, 8)))).residual
            <= 1
        )
