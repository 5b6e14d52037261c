"""What a script does with files: everything works as it does by itself, and nothing that was there before is changed."""

from __future__ import annotations

import textwrap

import pytest

from autofit.trials.trial import Outcome
from tests.scripts.place import BUILD, TRAIN, Place, contents


def test_nothing_after_the_training_runs_and_nothing_is_written(place: Place) -> None:
    place.script(f"""
        try:
            {TRAIN.strip()}
        except BaseException:
            pass
        finally:
            for write in (lambda: open({str(place.directory / "after.txt")!r}, "w"), lambda: os.mkdir({str(place.directory / "after")!r}),
                          lambda: torch.save(1, {str(place.directory / "after.pt")!r}), lambda: model().save_pretrained(OUT)):
                try:
                    write()
                except BaseException:
                    pass
        said(reached=True)
    """)
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert sorted(p.name for p in place.directory.iterdir()) == ["out", "train.py"]
    assert not place.said.exists()


def test_what_is_saved_before_the_training_goes_elsewhere(place: Place) -> None:
    place.script(
        "os.makedirs(OUT + '/logs', exist_ok=True)\nmodel().save_pretrained(OUT)\nmodel().config.save_pretrained(OUT)\n"
        + TRAIN
    )
    facts = place.describe()
    assert any(str(place.out) in text and "nothing of it stays" in text for text in facts["warnings"])
    assert place.run().outcome is Outcome.COMPLETED


def test_files_that_the_script_writes_to_its_output_directory_lie_elsewhere_and_can_be_read_back(place: Place) -> None:
    place.script("""
        import logging, pathlib
        assert open(OUT + "/model.bin").read() == "precious"
        with open(OUT + "/labels.json", "w") as handle:
            json.dump({"a": 1}, handle)
        with open(OUT + "/model.bin", "a") as handle:
            handle.write(", and more")
        pathlib.Path(OUT, "notes.txt").write_text("note")
        torch.save({"b": 2}, OUT + "/extra.pt")
        logging.getLogger("own").addHandler(logging.FileHandler(OUT + "/own.log"))
        said(labels=json.load(open(OUT + "/labels.json")), model=open(OUT + "/model.bin").read(), extra=torch.load(OUT + "/extra.pt"),
             notes=pathlib.Path(OUT, "notes.txt").read_text())
        Trainer(model=model(), args=args, train_dataset=rows).train()
    """)
    facts = place.describe()
    assert any(str(place.out) in text and "nothing of it stays" in text for text in facts["warnings"])
    assert place.run().outcome is Outcome.COMPLETED
    assert place.heard() == {"labels": {"a": 1}, "model": "precious, and more", "extra": {"b": 2}, "notes": "note"}


@pytest.mark.parametrize(
    ("change", "build"),
    [
        ("os.remove(OUT + '/model.bin')", BUILD),
        ("os.rename(OUT + '/model.bin', OUT + '/old.bin')", BUILD),
        ("os.remove(out + '/model.bin')", "out = sys.argv[3]\n"),
        ("os.rename(out + '/model.bin', out + '/old.bin')", "out = sys.argv[3]\n"),
    ],
)
def test_what_lies_in_the_output_directory_is_not_changed_even_before_arguments_are_made(
    place: Place, change: str, build: str
) -> None:
    later = "" if build is BUILD else BUILD
    place.script(f"{change}\n{later}{TRAIN}", "--output_dir", str(place.out), build=build)
    assert any("the script removes or renames" in text and "model.bin" in text for text in place.describe()["warnings"])
    assert place.run().outcome is Outcome.COMPLETED


#: what scripts do with files in their output directory (OUT) before they train
FILES = {
    "a dataset that is saved and loaded": """
        from datasets import Dataset, load_from_disk
        Dataset.from_list(rows).save_to_disk(OUT + "/data")
        rows = load_from_disk(OUT + "/data")""",
    "rows that are written and loaded": """
        from datasets import load_dataset
        with open(OUT + "/rows.jsonl", "w") as handle:
            handle.writelines(json.dumps(row) + "\\n" for row in rows)
        rows = load_dataset("json", data_files=OUT + "/rows.jsonl", split="train")""",
    "a file that is put in place": """
        with open(OUT + "/args.tmp", "w") as handle:
            handle.write("x")
        os.replace(OUT + "/args.tmp", OUT + "/args.json")
        assert os.path.exists(OUT + "/args.json") and os.listdir(OUT)""",
    "a file that replaces another": """
        with open(OUT + "/model.tmp", "w") as handle:
            handle.write("x")
        os.replace(OUT + "/model.tmp", OUT + "/model.bin")
        assert open(OUT + "/model.bin").read() == "x" """,
    "a note that is written and removed": """
        import pathlib
        note = pathlib.Path(OUT, "note.txt")
        note.write_text("x")
        note.unlink()
        assert not note.exists()""",
    "tensors": """
        from safetensors.torch import load_file, save_file
        save_file({"a": torch.ones(2)}, OUT + "/a.safetensors")
        assert load_file(OUT + "/a.safetensors")["a"].sum() == 2""",
    "a cache of its own": """
        from datasets import Dataset
        rows = Dataset.from_list(rows).map(lambda row: row, cache_file_name=OUT + "/cache.arrow")""",
    "a copy of the script": "import shutil\nshutil.copy(__file__, OUT + '/train_copy.py')",
    "a directory that is moved": """
        os.makedirs(OUT + "/a/b")
        open(OUT + "/a/b/c", "w").close()
        os.rename(OUT + "/a", OUT + "/d")
        open(OUT + "/d/e", "w").close()
        os.remove(OUT + "/d/e")""",
    "an untrained model": "Trainer(model=model(), args=args, train_dataset=rows).save_model(OUT)",
}


@pytest.mark.parametrize("text", FILES.values(), ids=list(FILES))
def test_what_scripts_do_with_their_output_directory_works_and_leaves_it_as_it_was(text: str, place: Place) -> None:
    place.script(textwrap.dedent(text).strip() + "\n" + TRAIN)
    place.describe()
    assert contents(place.out) == {"model.bin": b"precious"}
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure


CLEAN_UPS = {
    "a worker's": "import multiprocessing\nchild = multiprocessing.get_context('fork').Process(target=os.makedirs, args=(OUT + '/by/worker',))\nchild.start()\nchild.join()\n",
    "files": "import glob\nfor name in glob.glob(OUT + '/*'): os.remove(name)\n",
    "paths": "import pathlib\nfor path in pathlib.Path(OUT).iterdir(): path.unlink()\n",
    "the last run out of the way": "os.rename(OUT, OUT + '.bak')\nos.makedirs(OUT, exist_ok=True)\n",
    "a checkpoint": "import shutil\nshutil.rmtree(OUT, ignore_errors=True)\nos.makedirs(OUT)\n",
    "settings": "with open(OUT + '/model.bin', 'w') as handle: handle.write('{}')\n",
}


@pytest.mark.parametrize("text", CLEAN_UPS.values(), ids=list(CLEAN_UPS))
def test_a_constant_output_directory_is_as_safe_before_the_arguments_are_made(text: str, place: Place) -> None:
    # The project lies among the temporary files here, which makes nothing of it temporary.
    place.script(
        f"OUT = {str(place.out)!r}\n{text}{BUILD}{TRAIN}",
        build="",
    )
    place.describe()
    assert contents(place.out) == {"model.bin": b"precious"}
    assert place.run().outcome is Outcome.COMPLETED
    assert not place.out.with_suffix(".bak").exists()


#: what scripts do with files of the user's, in their output directory (OUT, with model.bin) and beside it (HERE, with results.csv and data/rows)
AMBUSHES = {
    "backup beside": "os.rename(HERE + '/results.csv', HERE + '/results.bak'); open(HERE + '/results.csv', 'w').write('new')",
    "backup": "os.rename(OUT + '/model.bin', OUT + '/model.bak'); open(OUT + '/model.bin', 'w').write('new'); assert open(OUT + '/model.bak').read() == 'precious'",
    "touched": "import pathlib; pathlib.Path(OUT, 'model.bin').touch(); open(OUT + '/model.bin', 'w').write('new')",
    "touched and removed": "os.utime(OUT + '/model.bin'); os.remove(OUT + '/model.bin')",
    "made writable and removed": "os.chmod(OUT + '/model.bin', 0o600); os.remove(OUT + '/model.bin')",
    "linked": "os.link(OUT + '/model.bin', OUT + '/alias.bin'); open(OUT + '/model.bin', 'w').write('new'); open(OUT + '/alias.bin', 'a').write('more')",
    "opened for more": "open(OUT + '/model.bin', 'a').write('more'); os.remove(OUT + '/model.bin')",
    "moved in": "import shutil; shutil.move(HERE + '/data', OUT + '/data'); assert open(OUT + '/data/rows').read() == 'rows'",
    "moved out": "import shutil; shutil.move(OUT + '/model.bin', HERE + '/moved.bin')",
    "a move that fails": (
        "import shutil; os.makedirs(HERE + '/build'); open(HERE + '/build/x', 'w').close()\n"
        "try: os.rename(HERE + '/build', HERE + '/data')\nexcept OSError: shutil.rmtree(HERE + '/data')"
    ),
    "empty directories upwards": "os.makedirs(OUT + '/a/b'); os.removedirs(OUT + '/a/b'); os.makedirs(HERE + '/cache')",
    "a directory that is not empty": "import pathlib\ntry: pathlib.Path(OUT).rmdir()\nexcept OSError: pass\nelse: raise AssertionError",
    "all anew": "import shutil; os.makedirs(OUT + '/logs', exist_ok=True); shutil.rmtree(OUT); os.makedirs(OUT + '/logs')",
}


@pytest.mark.parametrize("text", AMBUSHES.values(), ids=list(AMBUSHES))
def test_no_order_of_changes_costs_the_user_a_file(text: str, place: Place) -> None:
    here = place.directory
    (here / "results.csv").write_text("precious")
    (here / "data").mkdir()
    (here / "data" / "rows").write_text("rows")
    place.script(f"HERE = {str(here)!r}\n{text}\n{TRAIN}")
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert contents(place.out) == {"model.bin": b"precious"}
    assert (here / "data" / "rows").read_text() == "rows"
    backup = here / "results.bak"
    assert (backup if backup.exists() else here / "results.csv").read_text() == "precious"
    assert (here / "cache").exists() == ("cache" in text), "what is beside the output directory is the script's own business"


def test_beside_its_output_directory_a_script_may_replace_links_sockets_and_databases(place: Place) -> None:
    here = place.directory
    (here / "latest").symlink_to(here)
    (here / "state.db").write_bytes(b"")
    place.script(f"""
        import multiprocessing, sqlite3
        os.chdir({str(here)!r})
        os.unlink("latest")
        os.symlink(OUT, "latest")
        os.remove("state.db")
        sqlite3.connect("state.db").execute("create table t (x)")
        open("scrap", "w").close()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(os.remove, ["scrap"])
        said(scrap=os.path.exists("scrap"))
        {TRAIN.strip()}
    """)
    result = place.run()
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert place.heard() == {"scrap": False}


def test_what_is_saved_to_another_directory_does_not_overwrite_what_is_there(place: Place) -> None:
    other = place.directory / "untrained"
    other.mkdir()
    (other / "training_args.bin").write_bytes(b"of a real run")
    place.script(f"trainer = Trainer(model=model(), args=args, train_dataset=rows)\ntrainer.save_model({str(other)!r})\ntrainer.train()\n")
    assert place.run().outcome is Outcome.COMPLETED
    assert contents(other) == {"training_args.bin": b"of a real run"}


def test_a_killed_trial_leaves_nothing_in_the_output_directory(place: Place) -> None:
    place.script("os.makedirs(OUT + '/cache')\nopen(OUT + '/cache/rows', 'w').close()\nopen(OUT + '/own.log', 'w').close()\nos.kill(os.getpid(), 9)\n" + TRAIN)
    assert place.run().outcome is not Outcome.COMPLETED
    assert contents(place.out) == {"model.bin": b"precious"}


@pytest.mark.parametrize("build", [BUILD, "out = OUT\n"], ids=["after", "before the arguments"])
def test_a_directory_that_the_script_deletes_and_makes_anew_stays_as_it_was(place: Place, build: str) -> None:
    later = "" if build is BUILD else BUILD
    place.script(
        "import shutil\nshutil.rmtree(OUT)\nos.makedirs(OUT)\n"
        "with open(OUT + '/model.bin', 'w') as handle: handle.write('another')\n"
        f"said(model=open(OUT + '/model.bin').read())\n{later}{TRAIN}",
        "--output_dir",
        str(place.out),
        build=build,
    )
    facts = place.describe()
    assert any(f"the script removes or renames {place.out}" in text for text in facts["warnings"])
    assert place.heard() == {"model": "another"}
    assert place.run().outcome is Outcome.COMPLETED


def test_before_its_arguments_are_made_a_script_may_add_to_its_output_directory_and_nothing_of_it_stays(place: Place) -> None:
    place.script(
        f"""
        import pathlib, shutil
        from datasets import Dataset, load_from_disk
        out = sys.argv[3]
        shutil.rmtree(out + "/absent", ignore_errors=True)
        os.makedirs(out + "/cache", exist_ok=True)
        with open(out + "/args.tmp", "w") as handle:
            handle.write("x")
        os.replace(out + "/args.tmp", out + "/args.json")
        pathlib.Path(out, "rows.txt").write_text("y")
        assert os.path.exists(out + "/args.json") and os.path.exists(out + "/rows.txt")
        {BUILD.strip()}
        {TRAIN.strip()}
        """,
        "--output_dir",
        str(place.out),
        build="",
    )
    assert place.describe()["script"]["digest"] is not None
    assert place.run().outcome is Outcome.COMPLETED


def test_what_is_saved_before_the_training_can_be_loaded_again(place: Place) -> None:
    place.script("""
        from transformers import AutoConfig, AutoModelForSequenceClassification
        model().save_pretrained(OUT + "/base")
        loaded = AutoModelForSequenceClassification.from_pretrained(OUT + "/base")
        said(size=AutoConfig.from_pretrained(OUT + "/base").hidden_size, kind=type(loaded).__name__)
        Trainer(model=loaded, args=args, train_dataset=rows).train()
    """)
    assert place.run().outcome is Outcome.COMPLETED
    assert place.heard() == {"size": 16, "kind": "BertForSequenceClassification"}


def test_the_open_of_a_trial_is_as_good_as_the_built_in(place: Place) -> None:
    place.script("""
        import pickle
        class Files:
            opener = open
        with Files().opener(__file__) as handle:
            said(first=handle.readline(), same=pickle.loads(pickle.dumps(open)) is not None)
        Trainer(model=model(), args=args, train_dataset=rows).train()
    """)
    place.describe()
    assert place.heard() == {"first": "\n", "same": True}


def test_a_script_may_go_to_another_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.directory.parent)
    place.script("os.chdir(OUT)\n" + TRAIN)
    assert place.describe()["script"]["digest"] is not None
    assert place.run().outcome is Outcome.COMPLETED
