"""What staging does with a published folder that nobody expects."""

from __future__ import annotations

import json
from pathlib import Path

from tests.weight_sync.live import World, syncing, until


async def test_whatever_is_wrong_with_a_version_is_told_and_the_next_one_is_loaded(w: World) -> None:
    w.add_engine("e0")
    broken = w.publish()
    files = {"model\0.safetensors": "c0ffee"}  # no path can be called so: open() raises a ValueError
    (Path(broken.path) / "manifest.json").write_text(json.dumps({"files": files}))
    async with syncing(w, back_off_s=0.01) as reconciler:
        await until(lambda: reconciler.totals.staging_failures)
        assert f"version {broken.version}: ValueError" in reconciler.staging_problem
        newer = w.publish()
        await until(lambda: w.serves("e0", newer.version))
        assert reconciler.staging_problem == ""
