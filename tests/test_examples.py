"""Every example runs, as a user would run it; one that nobody runs fails here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autofit.devices.device import Device
from autofit.problem.config import TrialConfig
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Measurement, Memory

EXAMPLES = Path(__file__).parent.parent / "examples"
RUNS = {
    "tune_by_name.py": (["--trials", "3"], "loss after 3 steps"),
    "tune_your_model.py": ([], "arguments to write down"),
    "tune_a_csv_classifier.py": (["--timeout", "20s"], "memory was decided by length"),
    "tune_a_trainer_subclass.py": ([], "samples/s"),
    "lora_on_a_decoder.py": (["--trials", "2"], "loss after 3 steps"),
    "replay_a_landscape.py": (["grid.json"], "regret against the best"),
    "train_with_the_answer.py": (["best.json", "--rows", "64"], "trained 4 optimizer steps of 16 samples"),
}


#: how a user starts it, where that is not with python alone
LAUNCHERS = {
    "train_with_the_answer.py": "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
}
#: what has to be there before it starts: options of `autofit search`, which writes best.json
SEARCHES = {
    "train_with_the_answer.py": "--model bert-tiny --effective-batch 16 --seq-len 32 --batch-size 16 --precision fp32 --optim adamw_torch_fused"
    " --checkpointing off --eval-batch-size 32 --device cpu"
}


def grid(path: Path) -> None:
    points = tuple(
        Point(
            config=TrialConfig(per_device_train_batch_size=size, gradient_accumulation_steps=16 // size, precision=precision),
            measurement=Measurement(
                micro_step_seconds=(0.01 + 0.002 * size,) * 5,
                update_seconds=(0.01,),
                memory=Memory(peak_allocated_bytes=size << 20, peak_reserved_bytes=size << 20),
            ),
        )
        for size in (1, 2, 4, 8, 16)
        for precision in ("fp32", "bf16")
    )
    Landscape(points=points, device=Device(kind="cuda", name="a card", total_memory_bytes=1 << 30)).save(path)


def test_no_example_is_forgotten() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(RUNS)
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_example(name: str, tmp_path: Path) -> None:
    arguments, expected = RUNS[name]
    grid(tmp_path / "grid.json")
    if name in SEARCHES:
        search = [sys.executable, "-c", "from autofit.cli import main; main()", "search", *SEARCHES[name].split()]
        subprocess.run(search, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    start = [sys.executable, *LAUNCHERS.get(name, "").split(), str(EXAMPLES / name), *arguments]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
