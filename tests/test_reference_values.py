"""The copy of the reference values that ships with the tests is the shared file, where that one is at hand."""

from __future__ import annotations

import json

from tests.conftest import OWN, SHARED


def test_own_copy_is_complete_and_equal_to_the_shared_file() -> None:
    own = json.loads(OWN.read_text())
    assert {"closure_d3", "self_ot_d3", "bures_d3", "dirac_twisted_1d"} <= own.keys()
    if SHARED.exists():
        assert own == json.loads(SHARED.read_text())
