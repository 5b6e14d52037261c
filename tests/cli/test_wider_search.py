"""`--keep-numerics` and `--tune` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autofit.testing import simulated_landscape
from tests.cli.runs import autofit

REAL = ("search", "--model", "bert-tiny", "--effective-batch", "8", "--seq-len", "16", "--device", "cpu", "--memory", "4GiB")


def test_kept_numerics_leave_out_other_optimizers_and_the_report_says_why(tmp_path: Path) -> None:
    simulated_landscape(16, optims=("adamw_torch_fused", "sgd"), update_seconds=0.2).save(tmp_path / "grid.json")
    free = autofit("search", "--replay", "grid.json", "--output", "free.json", cwd=tmp_path)
    kept = autofit("search", "--replay", "grid.json", "--output", "kept.json", "--keep-numerics", cwd=tmp_path)
    assert free.status == kept.status == 0, free.stderr + kept.stderr
    best = {name: json.loads((tmp_path / f"{name}.json").read_text())["best"]["config"]["optim"] for name in ("free", "kept")}
    assert best == {"free": "sgd", "kept": "adamw_torch_fused"}
    told = " ".join(free.stdout.split())
    assert "The winner changes the mathematics of training: sgd trains otherwise than adamw_torch_fused" in told
    assert "the fastest measured that keeps it is" in told
    assert "~ changes the mathematics of training" in told
    assert "it has neither moments nor a step size for each weight" in " ".join(kept.stdout.split())


def test_a_knob_that_nobody_knows_is_one_line(tmp_path: Path) -> None:
    done = autofit(*REAL, "--tune", "attn,warp", cwd=tmp_path)
    assert done.status == 2
    assert "--tune does not know 'warp'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_knob_that_cannot_work_here_is_one_line_with_the_reason(tmp_path: Path) -> None:
    done = autofit(*REAL, "--tune", "offload", cwd=tmp_path)
    assert done.status == 2
    assert "--tune offload cannot be used: it moves activations from a card to the host" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_part_of_the_layers_and_other_attention_are_searched_and_proved(tmp_path: Path) -> None:
    few = ("--optim", "adamw_torch_fused", "--precision", "fp32", "--batch-size", "8", "--sampler", "grid", "--tolerance", "0.5")
    done = autofit(*REAL, *few, "--tune", "attn,every_n_layers", "--timeout", "25s", cwd=tmp_path)
    assert done.status == 0, done.stderr
    trials = json.loads((tmp_path / "best.json").read_text())["trials"]
    ran = [t for t in trials if t["outcome"] == "completed"]
    extras = {name for t in ran for name in t["config"] if name in ("attn_implementation", "every_n_layers")}
    assert extras == {"attn_implementation", "every_n_layers"}
    for trial in ran:
        facts = trial["measurement"]["facts"]
        assert facts["asked"] == facts["seen"]
        for name in extras & set(trial["config"]):
            assert facts["seen"][name] == trial["config"][name]
