"""Make ot_transformers/models/data/minilm_tokens.npz: a real token cloud and two real heads.

Needs the extra `models`. Run from the root of the repository:  python scripts/make_minilm_tokens.py
The same packages give the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np

from ot_transformers.models import bundled_model_path, extract_tokens, read_heads

TEXT = (
    "Call me Ishmael. Some years ago—never mind how long precisely—having little or no money in my purse, "
    "and nothing particular to interest me on shore, I thought I would sail about a little and see the "
    "watery part of the world. It is a way I have of driving off the spleen and regulating the "
    "circulation. Whenever I find myself growing grim about the mouth; whenever it is a damp, drizzly "
    "November in my soul; whenever I find myself involuntarily pausing before coffin warehouses, and "
    "bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper "
    "hand of me, that it requires a strong moral principle to prevent me from deliberately stepping into "
    "the street, and methodically knocking people's hats off—then, I account it high time to get to sea "
    "as soon as I can. This is my substitute for pistol and ball. With a philosophical flourish Cato "
    "throws himself upon his sword; I quietly take to the ship. There is nothing surprising in this. If "
    "they but knew it, almost all men in their degree, some time or other, cherish very nearly the same "
    "feelings towards the ocean with me. There now is your insular city of the Manhattoes, belted round "
    "by wharves as Indian isles by coral reefs—commerce surrounds it with her surf. Right and left, the "
    "streets take you waterward. Its extreme downtown is the battery, where that noble mole is washed by "
    "waves, and cooled by breezes, which a few hours previous were out of sight of land. Look at the "
    "crowds of water-gazers there."
)
SOURCE = "Herman Melville, Moby-Dick; or, The Whale (1851), opening of chapter 1; public domain"
LAYER, HEADS, N_HEADS = 0, (0, 4), 12


def main() -> None:
    """Extract, check and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / "ot_transformers" / "models" / "data" / "minilm_tokens.npz"
    parser.add_argument("--out", type=Path, default=default)
    out = parser.parse_args().out
    clouds, names = extract_tokens(TEXT)
    heads = read_heads(bundled_model_path() / "model.safetensors", LAYER, N_HEADS)
    arrays = {
        "tokens": clouds[LAYER].x,
        "token_names": np.array(names),
        "text": np.array(TEXT),
        "source": np.array(SOURCE),
        "layer": np.array(LAYER),
        "heads": np.array(HEADS),
    }
    for h in HEADS:
        for key in ("Q", "K", "W_V", "W_O"):
            arrays[f"{key}_{h}"] = getattr(heads[h], key).numpy()
    out.write_bytes(packed(arrays))
    shape = arrays["tokens"].shape
    print(f"{out}: {shape[0]} tokens in dimension {shape[1]}, {out.stat().st_size / 1e6:.2f} MB")


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz with fixed time stamps, so that the same arrays give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, member.getvalue())
    return buffer.getvalue()


if __name__ == "__main__":
    main()
