"""Markdown and plots of the regret report, from its outcomes alone."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autofit.trials.landscape import Landscape
from benchmarks.problems import Problem

CHECKPOINTS = (4, 6, 8, 10, 16, 25, 40)
BUDGET = 40
NEVER = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """One method on one problem with one seed.

    Attributes:
        method: its name.
        problem: its name.
        seed: of the replay and of the method.
        regrets: after each trial, of the configuration measured fastest so far; ends where the method ends.
        out_of_memory: cumulative count after each trial.
        seconds: cumulative device seconds after each trial.
        stopped: trials after which the method ended by itself; None when the budget ended it.
        final_regret: of what it returned (ours: after the play-off).
        playoff_runs: runs after the search proper.
    """

    method: str
    problem: str
    seed: int
    regrets: tuple[float, ...]
    out_of_memory: tuple[int, ...]
    seconds: tuple[float, ...]
    stopped: int | None
    final_regret: float
    playoff_runs: int = 0


def write_report(
    folder: Path, outcomes: Sequence[Outcomes], problems: Sequence[Problem], *, seeds: int, seconds: float
) -> str:
    """Write `regret.md` and three PNG files into `folder`; return the summary table."""
    groups = _groups(outcomes)
    origin = {p.name: _origin(p) for p in problems}
    parts = {where: _groups([o for o in outcomes if origin[o.problem] == where]) for where in _origins(problems)}
    summary = "\n\n".join(f"On {name}:\n\n{_summary(part)}" for name, part in parts.items())
    for name, label, values in (
        ("regret", "mean regret of the best so far", _regrets),
        ("out_of_memory", "mean out-of-memory events so far", lambda o: _held(o.out_of_memory)),
        ("device_seconds", "mean device seconds so far", lambda o: _held(o.seconds)),
    ):
        _plot(folder / f"{name}.png", groups, label, values, log=name != "out_of_memory")
    lines = [
        f"# Regret of configuration searches, {datetime.date.today().isoformat()}",
        "",
        *_caveats(problems, seeds, seconds),
        "",
        "## Summary",
        "",
        summary,
        "",
        "## Mean regret by budget (trials)",
        "",
        "\n\n".join(f"On {name}:\n\n{_by_budget(part)}" for name, part in parts.items()),
        "",
        "![regret](regret.png)",
        "![out of memory](out_of_memory.png)",
        "![device seconds](device_seconds.png)",
        "",
        "## By problem (our search)",
        "",
        _by_problem(groups, problems),
        "",
    ]
    (folder / "regret.md").write_text("\n".join(lines), encoding="utf-8")
    return summary


def _caveats(problems: Sequence[Problem], seeds: int, seconds: float) -> list[str]:
    modelled = sum(p.landscape.modelled for p in problems)
    return [
        f"{len(problems)} problems ({modelled} on modelled landscapes, {len(problems) - modelled} on recorded ones), {seeds} seeds each "
        f"(fewer for Optuna GP), at most {BUDGET} trials.",
        "",
        "- Modelled landscapes come from formulas, not from devices; what they say about a card is only as good as those.",
        "- `memory predicted` on a modelled landscape uses its own law with errors of the size that validation on real cards found, and a bare roofline.",
        "- Our trials include the two baselines; rivals start with their own first choice. Repeats of Optuna's samplers are not counted.",
        *_recorded(problems),
        "- Nothing is predicted for recorded landscapes: on those of a card the search knows less than it would there.",
        "- Regret of a trial count is the true loss of the configuration that measured fastest by then; `final` is what the method returns.",
        "",
        f"Made in {seconds:.0f} s on {os.cpu_count()} cores, Python {platform.python_version()}, optuna {version('optuna')}, "
        f"numpy {version('numpy')}: `python -m benchmarks.regret --seeds {seeds} --problems {len(problems)}`.",
    ]


def _groups(outcomes: Sequence[Outcomes]) -> dict[str, list[Outcomes]]:
    """Method -> its outcomes."""
    methods = dict.fromkeys(o.method for o in outcomes)
    return {m: [o for o in outcomes if o.method == m] for m in methods}


def _origin(problem: Problem) -> str:
    """Where a landscape comes from: figures of a model, of a CPU and of a card never stand in one table."""
    return "modelled landscapes" if problem.landscape.modelled else f"landscapes recorded on {problem.landscape.device.name}"


def _origins(problems: Sequence[Problem]) -> list[str]:
    """Of all problems, modelled ones first."""
    return sorted({_origin(p) for p in problems}, key=lambda where: (not where.startswith("modelled"), where))


def _recorded(problems: Sequence[Problem]) -> list[str]:
    """How often each configuration was run, per device, and which grids are not whole."""
    recorded = [p for p in problems if not p.landscape.modelled]
    lines = []
    for where in _origins(recorded):
        own = [p.landscape for p in recorded if _origin(p) == where]
        shared = ": what other work took is in them" if own[0].device.kind == "cpu" else ""
        lines.append(f"- {where[0].upper()}{where[1:]}: {_runs(own)} of each configuration, pooled{shared}.")
    parts = [p for p in recorded if p.landscape.spec.get("complete") is False]
    return lines + [
        f"- {p.name} is on {len(p.space)} of {p.landscape.spec.get('space_size')} configurations, the others were not recorded: the best of these need not be the best of all."
        for p in parts
    ]


def _runs(landscapes: Sequence[Landscape]) -> str:
    counts = sorted({point.runs for landscape in landscapes for point in landscape.points if point.measurement})
    spread = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1])))) if counts else "no"
    return f"{spread} run{'' if spread == '1' else 's'}"


def _summary(groups: dict[str, list[Outcomes]]) -> str:
    head = "| method | within 1 % after (median) | stopped after (median, worst) | final regret % (median, mean, worst) | out of memory (median, worst) |"
    rows = [head, "| --- | --- | --- | --- | --- |"]
    for method, found in groups.items():
        within = [next((i + 1 for i, r in enumerate(o.regrets) if r <= 0.01), NEVER) for o in found]
        stopped = [o.stopped if o.stopped is not None else BUDGET for o in found]
        final = 100 * np.array([o.final_regret for o in found])
        events = [o.out_of_memory[-1] for o in found]
        median = np.median(within)
        rows.append(
            f"| {method} | {'never' if median >= NEVER else f'{median:g}'} | {np.median(stopped):g}, {max(stopped)} "
            f"| {np.median(final):.2f}, {final.mean():.2f}, {final.max():.1f} | {np.median(events):g}, {max(events)} |"
        )
    return "\n".join(rows)


def _by_budget(groups: dict[str, list[Outcomes]]) -> str:
    rows = ["| method | " + " | ".join(map(str, CHECKPOINTS)) + " |", "| --- |" + " --- |" * len(CHECKPOINTS)]
    for method, found in groups.items():
        mean = _balanced(found, _regrets)
        rows.append(f"| {method} | " + " | ".join(f"{100 * mean[c - 1]:.2f} %" for c in CHECKPOINTS) + " |")
    return "\n".join(rows)


def _by_problem(groups: dict[str, list[Outcomes]], problems: Sequence[Problem]) -> str:
    rows = [
        "| problem | configurations (feasible) | method | stopped | final regret % | out of memory | play-off runs |"
    ]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for problem in problems:
        for method in [m for m in groups if m.startswith("autofit")]:
            found = [o for o in groups[method] if o.problem == problem.name]
            if found:
                stops = [o.stopped if o.stopped is not None else BUDGET for o in found]
                final = [100 * o.final_regret for o in found]
                events = [o.out_of_memory[-1] for o in found]
                rows.append(
                    f"| {problem.name} | {len(problem.space)} ({len(problem.truth)}) | {method.removeprefix('autofit, ')} "
                    f"| {np.median(stops):g} ({max(stops)}) | {np.median(final):.2f} ({max(final):.1f}) "
                    f"| {np.median(events):g} ({max(events)}) | {np.median([o.playoff_runs for o in found]):g} |"
                )
    return "\n".join(rows)


def _regrets(outcome: Outcomes) -> NDArray[np.float64]:
    """Regret per trial; after a method's end what it returned."""
    values = np.full(BUDGET, outcome.final_regret)
    values[: len(outcome.regrets)] = outcome.regrets[:BUDGET]
    return values


def _held(values: Sequence[float]) -> NDArray[np.float64]:
    """A cumulative curve, held at its last value."""
    found = np.full(BUDGET, float(values[-1]))
    found[: len(values)] = values[:BUDGET]
    return found


def _balanced(found: Sequence[Outcomes], values: object) -> NDArray[np.float64]:
    """Mean curve in which every problem weighs the same."""
    assert callable(values)
    names = dict.fromkeys(o.problem for o in found)
    means = [np.mean([values(o) for o in found if o.problem == n], axis=0) for n in names]
    return np.asarray(np.mean(means, axis=0), dtype=np.float64)


def _plot(path: Path, groups: dict[str, list[Outcomes]], label: str, values: object, *, log: bool) -> None:
    """Mean curves with bands from the 25th to the 75th percentile over problems and seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert callable(values)
    figure, axes = plt.subplots(figsize=(9, 5.5))
    trials = np.arange(1, BUDGET + 1)
    colours = plt.get_cmap("tab20").colors[::2] + plt.get_cmap("tab20").colors[1::2]
    for method, colour in zip(groups, colours):
        found = groups[method]
        curves = np.array([values(o) for o in found])
        ours = method.startswith("autofit")
        mean = _balanced(found, values)
        (line,) = axes.plot(trials, mean, label=method, color=colour, linewidth=2.5 if ours else 1.2, linestyle="--" if "predicted" in method else "-")
        if ours or method == "Optuna TPE":
            low, high = np.quantile(curves, [0.25, 0.75], axis=0)
            axes.fill_between(trials, low, high, color=line.get_color(), alpha=0.15)
    if log:
        axes.set_yscale("symlog", linthresh=1e-3 if "regret" in label else 1.0)
    axes.set_xlabel("trials")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
