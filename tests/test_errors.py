"""The error types: what catches them, and what they carry."""

from __future__ import annotations

import pickle
import warnings

import pytest

from ot_transformers import errors
from ot_transformers.errors import (
    InvalidInput,
    NotAGradientFlow,
    NotConverged,
    NotGaussianPreserving,
    OTTransformersError,
)


def test_every_error_is_caught_by_the_base_class_and_by_its_builtin() -> None:
    builtin = {
        InvalidInput: ValueError,
        NotGaussianPreserving: TypeError,
        NotAGradientFlow: ValueError,
        NotConverged: RuntimeWarning,
    }
    assert set(errors.__all__) == {kind.__name__ for kind in (*builtin, OTTransformersError)}
    for kind, base in builtin.items():
        for caught in (OTTransformersError, base):
            with pytest.raises(caught, match="so it is"):
                raise kind("so it is")


def test_residual_travels_with_the_error() -> None:
    error = NotAGradientFlow("no", residual=0.25)
    assert error.residual == 0.25
    assert NotAGradientFlow("no").residual != NotAGradientFlow("no").residual  # NaN: unknown
    assert pickle.loads(pickle.dumps(error)).residual == 0.25


def test_not_converged_is_a_warning_that_can_be_an_error() -> None:
    with pytest.warns(NotConverged, match="stopped"):
        warnings.warn("stopped", NotConverged, stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotConverged)
        with pytest.raises(NotConverged):
            warnings.warn("stopped", NotConverged, stacklevel=1)
