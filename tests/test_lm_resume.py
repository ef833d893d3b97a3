"""A run that is killed at any moment goes on as if nothing had happened; what cannot go on says why."""

import functools
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from lm_cases import one_device, tiny_config

from jax_linattn.lm import checkpoint
from jax_linattn.lm import folder as folders
from jax_linattn.lm.config import Config
from jax_linattn.lm.report import append_metrics, read_metrics
from jax_linattn.lm.run import prepare
from jax_linattn.lm.train import Stopped, train

# A server imports once; each process that is to be killed is forked from it before jax has started anything.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["jax_linattn.lm.train"])
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def config_of(tmp_path: Path) -> Config:
    """Dropout draws, logging and checkpoints do not keep step, and shuffling enters a second pass."""
    config = tiny_config(tmp_path)
    config.model.dropout = 0.1
    config.sample.prompt = "3 is "
    config.update({"steps": 20, "log_every": 3, "validate_every": 10, "checkpoint_every": 4, "context": 256})
    Path(config.corpus).write_text("".join(f"{number} is {number**2}, " for number in range(40)))
    return config


def train_until(config: Config, folder: Path, fatal: int) -> None:
    """Trains to the end, or to where the folder is changed for the fatal-th time: there it is killed as by the kernel."""
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    count = 0

    def watch(event, arguments):
        nonlocal count
        if event not in CHANGES or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        count += 1
        if count == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train(prepare(config, folder, mesh=one_device()), progress=False)
    (folder.parent / "counted").write_text(str(count))


def in_a_process(function, *arguments) -> int:
    """The exit code: 0, or less than 0 for the signal that ended it."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    process.join(timeout=240)
    assert process.exitcode is not None, "still running"
    return process.exitcode


def without_times(metrics):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in metrics if "summary" not in line]


def last_state(config: Config, folder: Path):
    run = prepare(config, folder, mesh=one_device())
    return jax.tree.map(np.asarray, run.state), run.batches.get_state()


def test_a_run_killed_again_and_again_is_the_run_that_was_not(tmp_path):
    config, whole, killed = config_of(tmp_path), tmp_path / "whole", tmp_path / "killed"
    assert in_a_process(train_until, config, whole, 0) == 0
    changes = int((tmp_path / "counted").read_text())
    fatal = itertools.count(2, changes // 4)
    attempts = (in_a_process(train_until, config, killed, next(fatal)) for _ in range(20))
    codes = list(itertools.takewhile(lambda code: code != 0, attempts))
    assert set(codes) == {-signal.SIGKILL}
    assert len(codes) >= 2
    assert without_times(read_metrics(killed / folders.METRICS)) == without_times(read_metrics(whole / folders.METRICS))
    jax.tree.map(np.testing.assert_array_equal, last_state(config, killed), last_state(config, whole))
    assert (killed / folders.SAMPLE).read_text() == (whole / folders.SAMPLE).read_text()
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}
    steps = sorted(path.name for path in (killed / folders.CHECKPOINTS).iterdir())
    assert steps == ["16", "20"], "the newest two, and nothing unfinished"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(config, folder) of a run that was told to stop in its sixth step, with a checkpoint of step 4 as well."""
    tmp_path = tmp_path_factory.mktemp("stopped")
    config, folder = config_of(tmp_path), tmp_path / "run"
    run = prepare(config, folder, mesh=one_device())
    batches = run.batches

    class Interrupting:
        def __next__(self):
            if batches.get_state() == {"next_index": 5}:
                signal.raise_signal(signal.SIGTERM)
            return next(batches)

        def __getattr__(self, name):
            return getattr(batches, name)

    with pytest.raises(Stopped, match="stopped after step 6 of 20; the same command goes on"):
        train(run._replace(batches=Interrupting()), progress=False)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return config, folder


def copy_of(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / folder.name


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_refused(config, folder, message):
    """With this message, and nothing is touched."""
    before = contents(folder)
    with pytest.raises(ValueError, match=message):
        prepare(config, folder, mesh=one_device())
    assert contents(folder) == before


def test_a_run_asked_to_stop_leaves_a_checkpoint_of_that_step(stopped, tmp_path):
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    run = prepare(config, folder, mesh=one_device())
    assert int(run.state.step) == 6
    assert run.batches.get_state() == {"next_index": 6}
    assert run.losses == []
    assert "going on after step 6" in run.description()
    assert [line["step"] for line in read_metrics(folder / folders.METRICS)] == [3, 6]


def test_measurements_after_the_checkpoint_are_dropped(stopped, tmp_path):
    """Also half a line, as a kill leaves it; what a finished run said at its end too."""
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    path = folder / folders.METRICS
    kept = path.read_text()
    with path.open("a") as file:
        file.write('{"step": 7, "train_bits": 1.0}\n{"step": 6, "summary": {}}\n{"step": 8, "tr')
    shutil.rmtree(folder / folders.CHECKPOINTS / "6")
    run = prepare(config, folder, mesh=one_device())
    assert int(run.state.step) == 4
    assert len(run.losses) == 1, "of step 4, which no line of metrics tells"
    assert path.read_text() == kept.splitlines(keepends=True)[0]


def attempt(function):
    """(result, None), or (None, what the ValueError says)."""
    try:
        return function(), None
    except ValueError as error:
        return None, str(error)


def read_damaged(config: Config, folder: Path) -> None:
    like = prepare(config, folder, mesh=one_device()).state
    expected = jax.tree.map(np.asarray, like)
    newest = folder / folders.CHECKPOINTS / "6"
    refused = set()
    for number, path in enumerate(sorted(path for path in newest.rglob("*") if path.is_file())):
        data = path.read_bytes()
        path.write_bytes((data[: len(data) // 2], bytes(byte ^ 0x5A for byte in data), b"")[number % 3])
        with checkpoint.open_checkpoints(folder) as manager:
            state, complaint = attempt(functools.partial(checkpoint.restore, manager, 6, like))
        if state is None:
            assert re.search(r"6 cannot be read as a checkpoint of this model.*go on from step 4, remove", complaint)
            refused.add(path.relative_to(newest).parts[0])
        else:
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state[0]), expected)
        path.write_bytes(data)
    assert refused == {"params", "rest", "meta"}


def test_a_damaged_checkpoint(stopped, tmp_path):
    """Every file of it in turn, cut short, overwritten or emptied: an error that says what to do, or no effect at all.

    In a process of its own: what orbax leaves unawaited then is a warning at a time that nobody can choose.
    """
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    assert in_a_process(read_damaged, config, folder) == 0
    newest = folder / folders.CHECKPOINTS / "6"
    (newest / "meta" / "metadata").unlink()
    assert_refused(config, folder, "6 cannot be read as a checkpoint of this model")
    shutil.rmtree(newest)
    assert int(prepare(config, folder, mesh=one_device()).state.step) == 4, "the remedy helps"


def test_one_run_at_a_time(stopped, tmp_path):
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    run = prepare(config, folder, mesh=one_device())
    assert_refused(config, folder, "is being trained in by another process")
    assert in_a_process(refused_elsewhere, config, folder) == 0
    del run
    prepare(config, folder, mesh=one_device())


def refused_elsewhere(config: Config, folder: Path) -> None:
    with pytest.raises(ValueError, match="is being trained in by another process"):
        prepare(config, folder, mesh=one_device())


def test_the_same_text_elsewhere_is_the_same_corpus(stopped, tmp_path):
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    config = config.copy_and_resolve_references()
    config.corpus = str(shutil.copy(config.corpus, tmp_path / "moved.txt"))
    assert int(prepare(config, folder, mesh=one_device()).state.step) == 6


def test_a_damaged_line_of_metrics(stopped, tmp_path):
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    path = folder / folders.METRICS
    kept = path.read_text()
    for line in ['{"step": 3, "tok', "7", "{}", ""]:
        path.write_text(f"{line}\n{kept}")
        assert_refused(config, folder, r"line 1 of .*metrics.jsonl is damaged, .*: remove that line")
    again = config.copy_and_resolve_references()
    again.overwrite = True
    assert int(prepare(again, folder, mesh=one_device()).state.step) == 0, "overwriting helps"


def test_a_finished_run_without_checkpoints(stopped, tmp_path):
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    append_metrics(folder / folders.METRICS, {"step": 20, "summary": {}})
    shutil.rmtree(folder / folders.CHECKPOINTS)
    assert_refused(config, folder, "holds a finished run without its checkpoints")
    (tmp_path / "elsewhere").mkdir()
    (folder / folders.CHECKPOINTS).symlink_to(tmp_path / "elsewhere")
    again = config.copy_and_resolve_references()
    again.overwrite = True
    prepare(again, folder, mesh=one_device())
    assert not (folder / folders.CHECKPOINTS).exists()
    assert (tmp_path / "elsewhere").exists(), "what a link leads to is not ours"


def test_a_flipped_bit_is_found():
    tree = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.int32(7), "c": np.arange(2, dtype=np.uint32)}
    known = checkpoint.checksum(tree)
    assert known == checkpoint.checksum(jax.tree.map(jax.numpy.asarray, tree))
    for name, leaf in tree.items():
        for place, bit in itertools.product(range(leaf.size), (0, 13, 31)):
            words = np.atleast_1d(leaf).copy().view(np.uint32).ravel()
            words[place] ^= np.uint32(1 << bit)
            changed = words.view(leaf.dtype).reshape(leaf.shape)
            assert checkpoint.checksum({**tree, name: changed}) != known
    swapped = {**tree, "a": tree["a"][::-1]}
    assert checkpoint.checksum(swapped) != known


def test_what_is_no_checkpoint_of_ours(stopped, tmp_path):
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    newest = folder / folders.CHECKPOINTS / "6"
    meta = newest / "meta" / "metadata"
    ours = json.loads(meta.read_text())
    meta.write_text(json.dumps(ours | {"format": "another 7"}))
    assert_refused(config, folder, r"6 is no checkpoint of 'jax_linattn.lm 1': it says 'another 7'")
    for part in ("params", "rest"):
        meta.write_text(json.dumps(ours | {"checksum": ours["checksum"] | {part: 1}}))
        assert_refused(
            config, folder, rf"6 cannot be read .* \(checksum of {part} is \d+, not 1\); to go on from step 4, remove"
        )
    other = ours["config"] | {"seed": 5}
    meta.write_text(json.dumps(ours | {"config": other}))
    assert_refused(config, folder, r"checkpoint 6 in .* is of a run with other options: seed: 5 → 0")
    meta.write_text(json.dumps(ours))
    (folder / folders.CONFIG).unlink()
    assert_refused(config, folder, r"holds files of a run, but no config.json.*--config.overwrite=True")
    (folder / folders.CONFIG).write_text('{"seed"')
    assert_refused(config, folder, r"config.json is damaged .*--config.overwrite=True")


def test_another_run_in_the_folder(stopped, tmp_path):
    """Changed options or text are named; overwriting is only done when asked for, and then continues what it began."""
    config, folder = stopped
    folder = copy_of(folder, tmp_path)
    changed = config.copy_and_resolve_references()
    changed.update({"steps": 30, "model": {"dropout": 0.2}})
    assert_refused(changed, folder, r"other options: model.dropout: 0.1 → 0.2; steps: 20 → 30. Choose another name")
    Path(tmp_path / "other.txt").write_text(Path(config.corpus).read_text() + "3")
    text = Path(config.corpus).read_text()
    try:
        Path(config.corpus).write_text(text + "3")
        assert_refused(config, folder, r"other options: corpus_sha256: '\w+' → '\w+'. Choose another name")
    finally:
        Path(config.corpus).write_text(text)
    changed.overwrite = True
    assert int(prepare(changed, folder, mesh=one_device()).state.step) == 0
    assert not (folder / folders.CHECKPOINTS).exists()
    again = config.copy_and_resolve_references()
    again.overwrite = True
    folder = copy_of(stopped[1], tmp_path / "again")
    assert int(prepare(again, folder, mesh=one_device()).state.step) == 6, "the same run, not finished, is no other"
    report_finished = {"step": 20, "summary": {}}
    append_metrics(folder / folders.METRICS, report_finished)
    assert int(prepare(again, folder, mesh=one_device()).state.step) == 0, "a finished one is replaced"
