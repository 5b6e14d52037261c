"""Pictures of the report, as PNG. A dry run's say so in every title."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autofit.trials.landscape import Landscape
from autofit.units import GIB
from benchmarks.evidence.reading import Reading
from benchmarks.evidence.sections_memory import MemoryRow, comparisons, memory_rows
from benchmarks.evidence.sections_speed import grids
from benchmarks.problems import true_speed

DPI = 110


class Album:
    """Draws into one folder.

    Args:
        reading: what to draw.
        directory: where to.
        stem: of the file names.
    """

    def __init__(self, reading: Reading, directory: Path, stem: str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        self._reading, self._directory, self._stem = reading, directory, stem

    def draw(
        self, name: str, title: str, paint: Callable[[Any], None], *, size: tuple[float, float] = (8.0, 5.0)
    ) -> Path:
        """One picture of one pair of axes; returns its path."""
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=size)
        axes.set_title(f"{title}\n{self._reading.where}", fontsize=10)
        paint(axes)
        figure.tight_layout()
        path = self._directory / f"{self._stem}-{name}.png"
        figure.savefig(path, dpi=DPI)
        pyplot.close(figure)
        return path


def pictures(reading: Reading, directory: Path, stem: str) -> dict[str, list[Path]]:
    """Stage -> the pictures that could be drawn of it."""
    album = Album(reading, directory, stem)
    found: dict[str, list[Path]] = {
        "memory": [],
        "landscape": [],
        "search": [],
        "fidelity": [],
        "founding": [],
    }
    rows = [row for row in memory_rows(reading) if row.error("peak_reserved_bytes") is not None]
    if rows:
        found["memory"].append(
            album.draw("memory", "Peak memory: predicted against measured", partial(_memory, rows=rows))
        )
    for number, (case, compared) in enumerate(comparisons(reading).items()):
        if compared["curve"]:
            curve, births = compared["curve"], compared["births"]["matched"]
            found["memory"].append(
                album.draw(
                    f"history-{number}",
                    f"Bytes in use, event by event: {case}",
                    partial(_curve, curve=curve, births=births),
                    size=(9.0, 4.0),
                )
            )
    for name, grid in grids(reading).items():
        found["landscape"].append(
            album.draw(
                f"landscape-{name}",
                f"Every configuration of {name}",
                partial(_landscape, grid=grid),
            )
        )
    drawn = {
        "search": _search_bars(reading),
        "fidelity": _fidelity_bars(reading),
        "founding": _founding_bars(reading),
    }
    titles = {
        "search": "Speed-up of the answer",
        "fidelity": "Trial against long run, samples/s",
        "founding": "The founding table, samples/s",
    }
    for stage, (labels, series) in drawn.items():
        if labels:
            height = 1.5 + 0.5 * len(labels)
            paint = _bars(labels, series)
            found[stage].append(album.draw(stage, titles[stage], paint, size=(9.0, height)))
    return found


def _memory(axes: Any, rows: Sequence[MemoryRow]) -> None:
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        for counter, marker in (("peak_allocated_bytes", "o"), ("peak_reserved_bytes", "x")):
            x = [(row.measured or {})[counter] / GIB for row in mine]
            y = [100 * (row.error(counter) or 0.0) for row in mine]
            axes.scatter(x, y, marker=marker, label=f"{model}, {counter.split('_')[1]}", s=28)
    axes.axhline(0.0, linewidth=0.8, color="black")
    axes.set_xscale("log")
    axes.set_xlabel("measured, GiB")
    axes.set_ylabel("predicted less measured, %")
    axes.legend(fontsize=7, ncols=2)


def _curve(axes: Any, curve: Sequence[tuple[int, int]], births: int) -> None:
    places = [position * births / len(curve) for position in range(len(curve))]  # the curve is thinned
    axes.plot(places, [real / GIB for _, real in curve], label="real", linewidth=1.4)
    axes.plot(places, [ours / GIB for ours, _ in curve], label="ours", linewidth=0.9, linestyle="--")
    axes.set_xlabel("matched births, in order")
    axes.set_ylabel("GiB in use")
    axes.legend(fontsize=8)


def _landscape(axes: Any, grid: Landscape) -> None:
    points = [point for point in grid.points if point.measurement is not None]
    kinds = dict.fromkeys((point.config.precision, point.config.gradient_checkpointing) for point in points)
    for precision, checkpointing in kinds:
        mine = [
            p
            for p in points
            if (p.config.precision, p.config.gradient_checkpointing) == (precision, checkpointing)
        ]
        x = [
            ((p.measurement.memory.peak_reserved_bytes or 0) + grid.device.context_bytes) / GIB
            for p in mine
            if p.measurement
        ]
        label = f"{precision}{', checkpointing' if checkpointing else ''}"
        axes.scatter(
            x, [true_speed(p) for p in mine], marker="x" if checkpointing else "o", s=20, label=label
        )
    axes.set_xlabel("context + peak reserved, GiB")
    axes.set_ylabel("samples/s")
    axes.legend(fontsize=7)


Bars = tuple[list[str], dict[str, list[float]]]


def _search_bars(reading: Reading) -> Bars:
    rows = {key: row["speedup"] for key, row in reading.rows("search").items() if "speedup" in row}
    return list(rows), {
        "over plain defaults": [row.get("defaults") or 0.0 for row in rows.values()],
        "over the hand recipe": [row.get("hand_recipe") or 0.0 for row in rows.values()],
    }


def _fidelity_bars(reading: Reading) -> Bars:
    rows = {key: row for key, row in reading.rows("fidelity", "long ").items() if "long_run" in row}
    return list(rows), {
        "trial before": [row["trial_before"].get("samples_per_second") or 0.0 for row in rows.values()],
        "long run": [row["long_run"]["samples_per_second"] for row in rows.values()],
        "trial after": [row["trial_after"].get("samples_per_second") or 0.0 for row in rows.values()],
    }


def _founding_bars(reading: Reading) -> Bars:
    rows = {key: row for key, row in reading.rows("founding").items() if "long_run" in row}
    return list(rows), {
        "V100, published": [row["published"]["samples_per_second"] for row in rows.values()],
        reading.where: [row["long_run"]["samples_per_second"] for row in rows.values()],
    }


def _bars(labels: Sequence[str], series: dict[str, list[float]]) -> Callable[[Any], None]:
    def paint(axes: Any) -> None:
        thickness = 0.8 / len(series)
        for number, (name, values) in enumerate(series.items()):
            places = [row + number * thickness for row in range(len(labels))]
            axes.barh(places, values, height=0.9 * thickness, label=name)
        axes.set_yticks([row + 0.4 - thickness / 2 for row in range(len(labels))], labels, fontsize=7)
        axes.invert_yaxis()
        axes.legend(fontsize=7)

    return paint
