"""How small the difference of two published versions is, in float32 and rounded to bfloat16.

    python -m benchmarks.delta_size runs/<id>/weights

Prints one JSON line for each pair of neighbouring versions and number format: the share of 16-bit words that changed
(in bfloat16: of the elements), bytes of delta.bin, and the share of the full files that these are. Run with
weights.keep above the number of steps to have many pairs.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from broker import delta


def copy_as(source: Path, target: Path, bits: int) -> Path:
    """A version's weights alone with a manifest. bits: 32, or 16 (rounded to nearest even, as torch does)."""
    target.mkdir()
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        with (target / file.name).open("wb") as out:
            for name in sorted(tensors):
                words = np.ascontiguousarray(tensors[name]).view(np.uint32)
                if bits == 16:
                    words = ((words + (0x7FFF + ((words >> 16) & 1))) >> 16).astype(np.uint16)
                out.write(words.tobytes())
    files = {
        f.name: {"bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in target.iterdir()
    }
    (target / delta.MANIFEST).write_text(json.dumps({"format": 1, "files": files}))
    return target


def main(weights: Path) -> None:
    """Measure and print."""
    versions = sorted(path for path in weights.glob("v*") if (path / delta.MANIFEST).exists())
    for before, after in pairwise(versions):
        for bits in (32, 16):
            with tempfile.TemporaryDirectory() as scratch:
                old, new = (copy_as(v, Path(scratch) / v.name, bits) for v in (before, after))
                made = delta.write(old, new)
            line = {
                "versions": f"{before.name} {after.name}",
                "bits": bits,
                "changed": round(made.changed / made.words, 4),
                "bytes": made.bytes,
                "of full": round(made.bytes / made.full_bytes, 4),
            }
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
