"""One table of bad inputs, one test: each is one clear error that names the argument, never NaN or a LAPACK error.

The rows live in `tests/bad_inputs/<topic>.py`, as ROWS = [(id, call, regex of the message), ...].
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

import tests.bad_inputs as folder
from ot_transformers.errors import OTTransformersError

TABLE: list[Any] = []
for module in sorted(m.name for m in pkgutil.iter_modules(folder.__path__)):
    rows = importlib.import_module(f"tests.bad_inputs.{module}").ROWS
    TABLE += [pytest.param(call, message, id=f"{module}-{name}") for name, call, message in rows]


@pytest.mark.parametrize(("call", "message"), TABLE)
def test_bad_input_is_one_clear_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OTTransformersError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_table_has_at_least_sixty_rows() -> None:
    assert len(TABLE) >= 60
