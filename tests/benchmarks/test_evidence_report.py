"""The report: caveats first, figures from stored rows, nothing of a CPU shown as a GPU's, and what is published."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from autofit.errors import FileFormatError
from autofit.trials.landscape import Landscape
from benchmarks.evidence import store
from benchmarks.evidence.plots import _curve
from benchmarks.evidence.reading import DRY_WARNING, HOLLOW_WARNING, Reading, cell, percent, slug
from benchmarks.evidence.sections_memory import comparisons, memory_rows
from benchmarks.evidence.sections_speed import grids, regret_of
from benchmarks.evidence.store import Folder
from benchmarks.evidence.summarise import caveats, report, summarise
from tests.benchmarks import evidence_folder
from tests.benchmarks.evidence_folder import LARGE, SMALL

DATE = "2026-01-31"


@pytest.fixture
def reading(tmp_path: Path) -> Reading:
    return Reading(evidence_folder.make(tmp_path / "evidence").path)


def test_caveats_come_first_and_name_what_was_not_measured(reading: Reading) -> None:
    lines = report(reading, DATE, {})
    headings = [line for line in lines if line.startswith("## ")]
    assert lines[0] == f"# Evidence on CUDA: NVIDIA Imaginary 100, {DATE}"
    assert headings[:2] == ["## Caveats", "## Machine, versions, commands"]
    found = caveats(reading)
    assert "*memory*: 1 left, not at all or not wholly measured (trial bert large)." in found
    assert any(text.startswith("*tests*: 1 failed (tests/gpu/test_a.py::test_bad)") for text in found)


def test_calls_on_several_machines_are_not_called_one(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "One machine, one card, one day." in caveats(reading)
    monkeypatch.setattr(store, "boot", lambda: "another")
    folder = Folder(reading.path, dry_run=False)
    for _ in range(2):
        folder.begin("python -m benchmarks.evidence", 9.0)
    found = caveats(Reading(reading.path))
    assert any(text.startswith("2 machines, or one that was started anew") for text in found)
    assert "One machine, one card, one day." not in found


def test_failures_are_said_with_their_reasons_once_each(reading: Reading) -> None:
    for key in ("a", "b"):
        reading.sheet("search").fail(key, "optuna is not installed")
    reading.sheet("founding").put("c", "failed", failure={"message": "no answer within 18 s"})
    found = caveats(Reading(reading.path))
    assert "*search*: 2 failed (a, b): optuna is not installed." in found
    assert "*founding*: 1 failed (c): no answer within 18 s." in found


def test_the_report_holds_device_versions_and_the_command(reading: Reading) -> None:
    text = "\n".join(report(reading, DATE, {}))
    for part in (
        "torch 2.11.0",
        "driver 580.1",
        "python -m benchmarks.evidence --out evidence",
        "not installed: bitsandbytes",
        "580.1",
    ):
        assert part in text


def test_a_stage_that_was_not_run_is_said_twice_and_shows_no_table(reading: Reading) -> None:
    (reading.path / "founding.json").unlink()
    lines = report(reading, DATE, {})
    assert "- *founding* was not run." in lines
    at = lines.index("## The founding table on this card")
    assert lines[at + 2] == "Not measured."


def test_a_file_that_cannot_be_read_is_said_and_stays_where_it_is(reading: Reading) -> None:
    paths = [reading.path / name for name in ("fidelity.json", "landscapes/bert-8.json")]
    for path in paths:
        path.write_text(path.read_text()[:100])
    for _ in range(2):
        found = caveats(Reading(reading.path))
        assert any(text.startswith("*fidelity*: what was recorded before could not be read: evidence file 'fidelity.json'") for text in found)
        assert "*landscape*: the grid bert-8 cannot be read." in found
        assert all(path.exists() for path in paths)
        assert str(reading.path) not in "\n".join(report(Reading(reading.path), DATE, {}))


def test_no_folder_of_the_machine_is_in_the_report(reading: Reading) -> None:
    reading.sheet("tests").fail("tests/gpu/test_b.py::test_it", "E\n/opt/venv/lib/python3.12/site-packages/torch/x.py:3: KeyError, see https://pytorch.org/docs/a.html")
    text = "\n".join(report(Reading(reading.path), DATE, {}))
    assert "| E x.py:3: KeyError, see https://pytorch.org/docs/a.html |" in text
    assert "tests/gpu/test_b.py::test_it" in text
    assert "/opt" not in text


def test_a_thinned_curve_is_drawn_over_all_births() -> None:
    class Axes:
        def __init__(self) -> None:
            self.places: list[float] = []

        def plot(self, places: list[float], *_: object, **__: object) -> None:
            self.places = places

        def __getattr__(self, name: str) -> object:
            return lambda *_, **__: None

    axes = Axes()
    _curve(axes, [(1, 1)] * 4, births=12)
    assert axes.places == [0, 3, 6, 9]


def test_a_search_that_went_on_after_a_kill_does_not_call_its_last_part_the_whole(reading: Reading) -> None:
    sheet = reading.sheet("search")
    row = {name: value for name, value in sheet.rows["bert-8 16 GiB"].items() if name not in ("state", "recorded")}
    sheet.put("bert-8 16 GiB", **{**row, "resumed": True})
    rows = [line for line in report(Reading(reading.path), DATE, {}) if line.startswith(("| bert-8 no limit", "| bert-8 16 GiB"))]
    assert ["60 of the last call" in line for line in rows] == [False, True]


def test_what_a_search_warned_of_is_in_the_report(reading: Reading) -> None:
    assert "- bert-8 16 GiB: 3 trials failed" in report(reading, DATE, {})


def test_a_trace_that_cannot_be_read_is_named(reading: Reading) -> None:
    (reading.path / "snapshots" / "traced-0.json.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(FileFormatError, match=r"traced-0.json.gz' cannot be read"):
        comparisons(reading)


def test_a_folder_of_an_earlier_day_is_reported(reading: Reading) -> None:
    path = reading.path / "snapshots" / "traced-0.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    del data["stairs"]
    path.write_bytes(gzip.compress(json.dumps(data | {"version": 1, "ceilings": [[0, 8 << 20]]}).encode()))
    assert comparisons(reading)["bert small"]["births"]["matched"] == 1


def test_what_a_grid_lacks_stands_beside_it_and_beside_the_regret_against_it(reading: Reading) -> None:
    sheet = reading.sheet("landscape")
    failure = "[3/4] 1x8 fp32 adamw_bnb_8bit: RuntimeError: no such kernel (its other batch sizes are left out until the next call)"
    sheet.put("bert-8", "partial", **{k: v for k, v in sheet.rows["bert-8"].items() if k not in ("state", "recorded")}, left_out=[failure])
    text = "\n".join(report(Reading(reading.path), DATE, {}))
    assert "| 2 points |" in text
    assert f"- bert-8 {failure}" in text
    assert "| 0.0 %, 2 of 4 points |" in text


def test_errors_of_the_prediction_are_relative_to_what_was_measured(reading: Reading) -> None:
    (row,) = memory_rows(reading)
    assert row.error("peak_reserved_bytes") == pytest.approx(0.1, abs=1e-6)
    assert row.error("peak_allocated_bytes") == pytest.approx(4096 / 3996 - 1)
    assert comparisons(reading)["bert small"]["births"]["matched"] == 1


def test_regret_is_against_the_best_recorded_point_that_fits(reading: Reading) -> None:
    grid = grids(reading)["bert-8"]
    rows = reading.rows("search")
    fast, slow = 8 / (0.2 + 0.01), 8 / (4 * 0.1 + 0.01)
    assert regret_of(rows["bert-8 no limit"], grid) == pytest.approx(1 - slow / fast)
    assert regret_of(rows["bert-8 16 GiB"], grid) == 0.0
    beyond = {"limit_bytes": 16 << 30, "best": {"config": LARGE.to_json()}}
    assert regret_of(beyond, grid) is None, "the recorded allocator kept more than this limit"
    assert regret_of({"nothing_fits": "x"}, grid) is None
    assert regret_of({"best": {"config": SMALL.to_json()}}, None) is None


def test_summarising_writes_report_pictures_grid_and_rows(reading: Reading, tmp_path: Path) -> None:
    written = summarise(
        reading.path,
        date=DATE,
        report_dir=tmp_path / "r",
        landscape_dir=tmp_path / "l",
        fixture_dir=tmp_path / "f",
    )
    names = [path.name for path in written]
    assert names[0] == f"{DATE}-evidence-imaginary-100.md"
    assert {"imaginary-100-bert-8.json", "memory-rows-imaginary-100.json"} <= set(names)
    assert all(path.exists() for path in written)
    text = written[0].read_text()
    linked = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert sorted(linked) == sorted(name for name in names if name.endswith(".png"))
    assert len(linked) == 6
    published = Landscape.load(tmp_path / "l" / "imaginary-100-bert-8.json")
    assert published.spec["complete"] is False
    assert (published.spec["space_size"], len(published.points), published.modelled) == (4, 2, False)
    rows = json.loads((tmp_path / "f" / "memory-rows-imaginary-100.json").read_text())
    assert (rows["date"], rows["device"]["name"]) == (DATE, "NVIDIA Imaginary 100")
    assert rows["rows"][0]["measured"]["peak_reserved_bytes"] == 4 << 30


def test_a_dry_run_says_so_everywhere_and_publishes_nothing(tmp_path: Path) -> None:
    folder = evidence_folder.make(tmp_path / "evidence", dry_run=True)
    written = summarise(folder.path, date=DATE, landscape_dir=tmp_path / "l", fixture_dir=tmp_path / "f")
    assert all("dry-run-cpu" in path.name for path in written)
    assert {path.parent for path in written} == {folder.path / "report"}
    assert not (tmp_path / "l").exists()
    assert not (tmp_path / "f").exists()
    check_warned(written[0].read_text(), "# DRY RUN on a CPU", DRY_WARNING)


def test_a_device_that_computes_nothing_says_so_everywhere_and_publishes_nothing(tmp_path: Path) -> None:
    folder = evidence_folder.make(tmp_path / "evidence", device="Hollow H200")
    written = summarise(folder.path, date=DATE, landscape_dir=tmp_path / "l", fixture_dir=tmp_path / "f")
    assert {path.parent for path in written} == {folder.path / "report"}
    assert not (tmp_path / "l").exists()
    assert not (tmp_path / "f").exists()
    check_warned(written[0].read_text(), "# REHEARSAL on Hollow H200", HOLLOW_WARNING)


def check_warned(text: str, title: str, warning: str) -> None:
    """Every table stands under the warning, and no title names a card."""
    lines = text.splitlines()
    assert lines[0].startswith(title)
    tables = [row for row, line in enumerate(lines) if line.startswith("| ---")]
    assert tables
    for row in tables:
        assert lines[row - 3] == warning, lines[row - 1]


def test_a_folder_without_evidence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="does not exist"):
        summarise(tmp_path, date=DATE)


def test_cells_are_one_line_and_keep_the_table_whole() -> None:
    assert cell(None) == ""
    assert cell("a|b\nc") == "a\\|b c"
    assert cell(0.123456) == "0.123"
    assert cell(1234.5) == "1234"
    assert percent(None, 3.0) is None
    assert percent(1.1, 1.0) == "+10.0 %"
    assert slug("NVIDIA H200") == "h200"
