"""The door: kinds, dtypes, copies, and checks that agree with their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers.arrays import (
    as_matrix,
    as_scalar,
    as_tensor,
    broadcast_batch,
    cast_like,
    check_choice,
    check_count,
    check_finite,
    check_psd,
    check_symmetric,
    common_kind,
    make_generator,
    to_kind,
)
from ot_transformers.errors import InvalidInput
from ot_transformers.measures import Gaussian


def test_kinds_and_dtypes_come_back() -> None:
    for dtype in (np.float32, np.float64):
        a = np.arange(6, dtype=dtype).reshape(2, 3)
        t, kind = as_tensor(a, "a")
        back = to_kind(t, kind)
        assert back.dtype == dtype
        np.testing.assert_array_equal(back, a)
    for value in ([1, 2], (True, False), np.array([1, 2], np.int32), 3):
        t, kind = as_tensor(value, "value")
        assert t.dtype == torch.float64
        assert kind == "numpy"
    big_endian = np.array([1.0, 2.5], dtype=">f8")
    np.testing.assert_array_equal(as_tensor(big_endian, "a")[0].numpy(), [1.0, 2.5])
    assert common_kind(np.zeros(1), None, torch.zeros(1)) == "torch"
    assert common_kind(Gaussian(0.0, 1.0), [1.0]) == "numpy"
    assert isinstance(to_kind(torch.tensor(2.0).double(), "numpy"), float)


def test_numpy_data_are_copied_and_tensors_keep_their_history() -> None:
    """Known fault: a caller's array changed in place, or seen to change later."""
    a = np.zeros(3)
    t, _ = as_tensor(a, "a")
    a[0], t[1] = 1.0, 2.0
    assert t[0] == 0.0
    assert a[1] == 0.0
    strided = as_tensor(np.arange(10.0)[::-2], "a")[0]
    np.testing.assert_array_equal(strided.numpy(), [9, 7, 5, 3, 1])
    x = torch.ones(2, requires_grad=True)
    (g,) = torch.autograd.grad(as_tensor(x, "x")[0].sum(), x)
    assert bool((g == 1).all())


def test_scalars_stand_for_one_by_one_matrices() -> None:
    assert as_matrix(2.0, "A")[0].shape == (1, 1)
    assert as_scalar(np.array([[3.0]]), "eps") == 3.0
    with pytest.raises(InvalidInput, match="eps must be a number"):
        as_scalar(True, "eps")
    with pytest.raises(InvalidInput, match="A must be square"):
        as_matrix(np.ones((2, 3)), "A", square=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_entry_is_found_and_counted(bad: float) -> None:
    t = torch.ones(4, 5)
    t[2, 3] = bad
    with pytest.raises(InvalidInput, match="x has 1 NaN or infinite entries of 20"):
        check_finite(t, "x")
    both = torch.tensor([np.inf, -np.inf, 1.0])
    with pytest.raises(InvalidInput, match="x has 2 NaN or infinite"):
        check_finite(both, "x")


def test_finite_entries_whose_sum_overflows_are_finite() -> None:
    check_finite(torch.full((3,), 3e38), "x")
    check_finite(torch.tensor([1.7e308, 1.7e308], dtype=torch.float64), "x")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(-1e-3, 1e-3))
def test_psd_check_is_the_sign_of_the_smallest_eigenvalue(seed: int, d: int, low: float) -> None:
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.normal(size=(d, d)))[0]
    w = rng.uniform(0.1, 1, size=d)
    w[0] = low
    S = torch.from_numpy((Q * w) @ Q.T)
    S = 0.5 * (S + S.mT)
    batch = torch.stack([torch.eye(d, dtype=torch.float64), S])
    rounding = 1e-14

    def accepted(**options: Any) -> bool:
        try:
            check_psd(batch, "S", **options)
        except InvalidInput as error:
            reported = float(str(error).rsplit(" ", 1)[1])
            assert reported == pytest.approx(low, rel=1e-5, abs=rounding)
            return False
        return True

    if abs(low) > 100 * rounding:
        assert accepted() == (low > 0)
        assert accepted(definite=True) == (low > 0)


def test_rounding_is_neither_asymmetry_nor_indefiniteness() -> None:
    X = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    S = X @ X.T
    check_psd(S, "S")  # rank 7 of 40, eigenvalues of either sign at rounding level
    check_psd(torch.zeros(3, 3), "S")
    nearly = S.clone()
    nearly[0, 1] *= 1 + 2e-7
    check_symmetric(nearly, "S")
    nearly[0, 1] += 0.01 * S.abs().max()
    with pytest.raises(InvalidInput, match="S must be symmetric"):
        check_symmetric(nearly, "S")


def test_checks_step_aside_under_vmap() -> None:
    def f(S: torch.Tensor) -> torch.Tensor:
        check_psd(S, "S")
        check_finite(S, "S")
        return S.sum()

    torch.testing.assert_close(torch.func.vmap(f)(torch.ones(3, 2, 2)), torch.full((3,), 4.0))


def test_small_checks() -> None:
    assert check_count(np.int64(3), "n") == 3
    assert check_choice("b", "kind", ("a", "b")) == "b"
    assert broadcast_batch([(2, 1), (3,)], ["x", "y"]) == (2, 3)
    assert cast_like(torch.zeros(1), torch.zeros(1).double(), "A").dtype == torch.float64
    with pytest.raises(InvalidInput, match=r"broadcast: x \(2,\), y \(3,\)"):
        broadcast_batch([(2,), (3,)], ["x", "y"])
    with pytest.raises(InvalidInput, match="kind must be one of a, b"):
        check_choice("c", "kind", ("a", "b"))


def test_seeds_of_every_kind_repeat() -> None:
    def draw(seed: Any) -> torch.Tensor:
        return torch.randn(3, generator=make_generator(seed))

    assert torch.equal(draw(5), draw(5))
    assert torch.equal(draw(np.random.default_rng(5)), draw(np.random.default_rng(5)))
    assert torch.equal(draw(torch.Generator().manual_seed(5)), draw(5))
    assert not torch.equal(draw(5), draw(6))
