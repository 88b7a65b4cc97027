import contextlib
import os

import numpy as np
import pytest

from ot_transformers import InvalidInput
from ot_transformers.files import read_npz, write_npz

ARRAYS = {"x": np.arange(300.0).reshape(100, 3), "energy/a": np.array([1, 2]), "word": np.array("softmax")}


def test_arrays_come_back_as_they_went(tmp_path):
    path = write_npz(tmp_path / "new" / "folder" / "a.npz", ARRAYS)
    back = read_npz(path)
    assert back.keys() == ARRAYS.keys()
    for key, value in ARRAYS.items():
        assert back[key].dtype == value.dtype
        np.testing.assert_array_equal(back[key], value)
    assert os.listdir(path.parent) == ["a.npz"]


def _one_line(call, *parts):
    with pytest.raises(InvalidInput) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text


@pytest.mark.parametrize("content", [b"", b"x", b"a text file\n", b"PK", b"PK\x03\x04 and no more"])
def test_what_is_no_archive_is_named(tmp_path, content):
    path = tmp_path / "f.npz"
    path.write_bytes(content)
    _one_line(lambda: read_npz(path, "file"), "file", path)


def test_other_contents_are_named(tmp_path):
    lone = tmp_path / "lone.npy"
    np.save(lone, np.zeros(3))
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, a=np.array([{}], dtype=object))
    for path in (lone, pickled, tmp_path, tmp_path / "absent.npz"):
        _one_line(lambda path=path: read_npz(path), "path", path)
    for value in (None, 3, "", "a\0b"):
        _one_line(lambda value=value: read_npz(value), "path must be")
    _one_line(lambda: read_npz("~nobody-of-this-name/a.npz"), "~nobody-of-this-name")


class _Passed(Exception):
    pass


def _read_or_pass(path):
    read_npz(path)
    raise _Passed  # bytes such as a date are not covered by any check sum


def test_damage_anywhere_is_one_line_or_harmless(tmp_path):
    whole = write_npz(tmp_path / "a.npz", ARRAYS).read_bytes()
    path = tmp_path / "b.npz"
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        _one_line(lambda: read_npz(path), path)
    refused = 0
    for i in range(len(whole)):
        bad = bytearray(whole)
        bad[i] ^= 0xFF
        path.write_bytes(bytes(bad))
        with contextlib.suppress(_Passed):
            _one_line(lambda: _read_or_pass(path), path)
            refused += 1
    assert refused > len(whole) // 2


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path, tmp_path / "file" / "a.npz", tmp_path / ("n" * 300)):
        _one_line(lambda path=path: write_npz(path, ARRAYS), "path", path)
    _one_line(lambda: write_npz(tmp_path / "o.npz", {"o": np.array([{}], dtype=object)}), "'o'")
    target = write_npz(tmp_path / "a.npz", ARRAYS)
    before = target.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    _one_line(lambda: write_npz(target, ARRAYS), target, "No space left")
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["a.npz", "file"]
