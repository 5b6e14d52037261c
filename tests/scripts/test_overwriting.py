"""What a script makes before anyone knows its output directory goes again, and what was there before is not overwritten anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.trials.trial import Outcome
from tests.scripts.place import BUILD, PREAMBLE, TRAIN, Place, contents

#: how scripts come to a run directory that their text, and their command line, do not name
NAMED_LATE = {
    "a new directory": "out = json.load(open(HERE + '/cfg.json'))['new']; os.makedirs(out)",
    "one of several levels": "out = json.load(open(HERE + '/cfg.json'))['new'] + '/a/b'; os.makedirs(out)",
    "one with a name of the moment": "import time; out = HERE + '/' + time.strftime('runs/%Y%m%d'); os.makedirs(out)",
}


@pytest.mark.parametrize("text", NAMED_LATE.values(), ids=list(NAMED_LATE))
@pytest.mark.parametrize("ending", [TRAIN, "os.kill(os.getpid(), 9)\n"], ids=["trained", "killed"])
def test_what_is_made_before_the_output_directory_is_known_goes_again(place: Place, text: str, ending: str) -> None:
    here = place.directory
    (here / "cfg.json").write_text(f'{{"new": {str(here / "runs" / "one")!r}}}'.replace("'", '"'))
    place.script(
        f"""
        HERE = {str(here)!r}
        {text}
        import shutil
        json.dump({{}}, open(out + "/config.json", "w"))
        shutil.copy(__file__, out)
        from tokenizers import Tokenizer, models
        Tokenizer(models.BPE()).save(out + "/tokenizer.json")
        {BUILD.strip().replace("OUT", "out")}
        {ending.strip()}
        """,
        build="",
    )
    before = contents(here)
    for _ in range(2):  # the second would find what the first has left
        result = place.run()
        assert (result.outcome is Outcome.COMPLETED) == (ending is TRAIN), result.failure
        assert contents(here) == before


OVERWRITING = {
    "text": "open(out + '/model.bin', 'w').write('new'); assert open(out + '/model.bin').read() == 'new'",
    "more text": "open(out + '/model.bin', 'a').write(' and new'); assert open(out + '/model.bin').read() == 'precious and new'",
    "a log": "import logging; logging.basicConfig(handlers=[logging.FileHandler(out + '/model.bin', mode='w')], force=True); logging.error('new')",
    "an archive": "import numpy; numpy.savez(open(out + '/model.bin', 'wb'), a=numpy.ones(2)); assert numpy.load(out + '/model.bin')['a'].sum() == 2",
    "a zip": "import zipfile; zipfile.ZipFile(out + '/model.bin', 'w').close(); assert zipfile.is_zipfile(out + '/model.bin')",
    "a tar": "import tarfile; tarfile.open(out + '/model.bin', 'w').close(); assert tarfile.is_tarfile(out + '/model.bin')",
    "bzip2": "import bz2; bz2.open(out + '/model.bin', 'wt').write('new')",
    "a tokenizer": "from tokenizers import Tokenizer, models; Tokenizer(models.BPE()).save(out + '/model.bin'); Tokenizer.from_str(open(out + '/model.bin').read())",
    "a file that is put in place": "open(out + '/tmp', 'w').write('new'); os.replace(out + '/tmp', out + '/model.bin'); assert open(out + '/model.bin').read() == 'new'",
    "a file that is made and removed": "open(out + '/model.bin', 'w').write('new'); os.remove(out + '/model.bin')",
    "a file that is made and moved": "open(out + '/model.bin', 'w').write('new'); os.replace(out + '/model.bin', out + '/moved'); assert open(out + '/moved').read() == 'new'",
}


@pytest.mark.parametrize("text", OVERWRITING.values(), ids=list(OVERWRITING))
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_what_python_writes_over_stays_as_it_was(place: Place, text: str, known: bool) -> None:
    before, after = (BUILD, "") if known else ("", BUILD)
    place.script(f"out = OUT\n{text}\n{after}{TRAIN}", build=before)
    facts = place.describe()
    assert contents(place.out) == {"model.bin": b"precious"}
    assert any("model.bin" in warning or str(place.out) in warning for warning in facts["warnings"])
    assert place.run().outcome is Outcome.COMPLETED


DEFAULTS = {
    "an option": "import argparse\np = argparse.ArgumentParser(); p.add_argument('-o', '--out', default=DEFAULT); out = p.parse_args([]).out",
    "a field": "from dataclasses import dataclass, field\n@dataclass\nclass Own:\n    save_path: str = field(default=DEFAULT)\nout = Own().save_path",
    "a parameter": "def where(output_dir=DEFAULT): return output_dir\nout = where()",
}


@pytest.mark.parametrize("text", DEFAULTS.values(), ids=list(DEFAULTS))
def test_a_default_in_the_text_is_an_output_directory_from_the_beginning(place: Place, text: str) -> None:
    place.script(f"{text.replace('DEFAULT', repr(str(place.out)))}\nos.remove(out + '/model.bin')\n{BUILD}{TRAIN}", build="")
    place.describe()
    assert contents(place.out) == {"model.bin": b"precious"}


def test_what_the_evaluation_of_a_trial_writes_over_stays_as_it_was(place: Place) -> None:
    predictions = place.directory / "predictions.txt"
    predictions.write_text("precious")
    place.script(f"""
        class Own(Trainer):
            def evaluate(self, *args, **kwargs):
                found = super().evaluate(*args, **kwargs)
                open({str(predictions)!r}, "w").write(str(found))
                return found
        def metrics(found):
            open({str(predictions)!r}, "a").write("rows")
            return {{"rows": len(found.label_ids)}}
        Own(model=model(), args=args, train_dataset=rows, eval_dataset=rows[:5], compute_metrics=metrics).train()
    """)
    result = place.run(evaluate=True, optimizer_steps=2)
    assert result.measurement is not None, result.failure
    assert predictions.read_text() == "precious"


def test_a_file_that_is_opened_to_be_made_is_refused_where_there_is_one(place: Place) -> None:
    (place.directory / "lock").write_text("old")
    place.script(f"""
        path = {str(place.directory / "lock")!r}
        try:
            open(path, "x")
        except FileExistsError:
            said(refused=True)
        {TRAIN.strip()}
    """)
    place.describe()
    assert place.heard() == {"refused": True}


def test_caches_and_temporary_files_may_be_written_over(place: Place, tmp_path_factory: pytest.TempPathFactory) -> None:
    temporary = Path(tmp_path_factory.mktemp("elsewhere") / "note")
    temporary.write_text("old")
    place.script(f"open({str(temporary)!r}, 'w').write('new')\n{TRAIN}")
    place.describe()
    assert temporary.read_text() == "new"


@pytest.mark.slow
def test_the_text_of_a_module_names_its_outputs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.bin").write_bytes(b"precious")
    (tmp_path / "own.py").write_text(f"{PREAMBLE}os.remove('out/model.bin')\nargs = TrainingArguments(output_dir='out', use_cpu=True)\n{TRAIN}")
    with ProcessRunner(Workload(model="own", script=("-m", "own", "unused")), "cpu") as runner:
        facts = runner.describe()["model"]
    assert (facts["source"], len(facts["script"]["digest"])) == ("script", 16)
    assert contents(tmp_path / "out") == {"model.bin": b"precious"}
