"""Tables that list what the code lists: losses, verdicts, who imports torch."""

from __future__ import annotations

import re

from services.monitor.diagnosis import Verdict
from tests.deploy.tools import ROOT
from trainer.losses.catalogue import CATALOGUE


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table whose head begins with `heading`."""
    text = (ROOT / page).read_text(encoding="utf-8").split(f"\n| {heading} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_the_table_of_losses_is_the_catalogue() -> None:
    found = {}
    for names, _, radii, aggregation, advantage in rows("docs/losses.md", "name"):
        for name in re.findall("`(.*?)`", names):
            low, _, high = radii.partition(" / ")
            found[name] = (float(low or 0.2), float(high or 0.2), aggregation, advantage)
    assert found == {
        name: (entry.clip_low, entry.clip_high, entry.aggregation, entry.advantage) for name, entry in CATALOGUE.items()
    }


def test_the_parameters_of_losses_have_the_defaults_that_the_table_says() -> None:
    for names, objective, *_ in rows("docs/losses.md", "name"):
        for name in re.findall("`(.*?)`", names):
            for parameter, default in CATALOGUE[name].parameters.items():
                if parameter not in ("dual_clip", "weight", "epsilon"):  # told below the table
                    assert f" {default:g}".replace(" 0.", " .") in objective, f"{name}: {parameter}"


def test_the_table_of_verdicts_has_each_verdict() -> None:
    assert [re.sub("`", "", row[0]) for row in rows("docs/watch-a-run.md", "verdict")] == [v.value for v in Verdict]


def test_the_table_of_folders_says_who_imports_torch() -> None:
    said = {re.sub("[`/]", "", folder): torch for folder, _, torch in rows("README.md", "folder")}
    for folder in ("configs", "broker", "rollout", "services"):
        named = set(re.findall(r"`([\w/.]+)`", said[folder]))
        files = {
            f.relative_to(ROOT / folder)
            for f in (ROOT / folder).rglob("*.py")
            if re.search(r"^\s*(?:import|from) torch\b", f.read_text(encoding="utf-8"), flags=re.MULTILINE)
        }
        assert said[folder].startswith("no")
        found = {str(f) if str(f) in named else f"{f.parts[0]}/" for f in files}
        assert found == named, folder
