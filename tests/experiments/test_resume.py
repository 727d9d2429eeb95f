"""A run that was killed, stopped or moved is the run it would have been."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import grpo
from experiments import resume
from experiments import soak_resume
from logra_jax import checkpoint
from logra_jax import metrics
from logra_jax.rl import rewards
from tests.experiments import test_grpo

ROOT = pathlib.Path(__file__).parents[2]
TIMED = {"seconds", "tokens_per_second"}


class StopAfter:
  """Asks to stop at the n-th question."""

  def __init__(self, count):
    self.left = count

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    pass

  def reason(self):
    self.left -= 1
    return "SIGTERM" if self.left <= 0 else None


def tiny(**fields):
  return test_grpo.tiny(**({
      "updates": 6, "eval_every": 3, "checkpoint_every": 2,
      "advantage": "reinforce"} | fields))


def walk(config, workdir, cache_dir, stop=None):
  workdir.mkdir(exist_ok=True)
  resume.check(workdir, config, "auto")
  return grpo.run(grpo.prepare(config), workdir, cache_dir, stop)


def lines(workdir):
  return [{k: v for k, v in line.items() if k not in TIMED}
          for line in metrics.read(workdir / "metrics.jsonl")]


def bits(workdir):
  """Of everything in the last checkpoint, by its record."""
  with checkpoint.Checkpoints(workdir / resume.CHECKPOINTS) as found:
    return found.record(found.steps()[-1])["fingerprint"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  score = lambda self, examples, completions: (
      np.array([len(text) % 2 for text in completions], np.float32), {})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rewards.Scorer, "score", score)
    folder = tmp_path_factory.mktemp("resume")
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    walk(tiny(), folder / "whole", folder / "cache")
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)


def test_three_updates_a_resume_and_three_are_six_bitwise(whole):
  workdir = whole / "parts"
  assert walk(tiny(), workdir, whole / "cache", StopAfter(3)) is None
  assert len([x for x in lines(workdir) if "reward" in x]) == 3
  summary = walk(tiny(), workdir, whole / "cache")
  assert lines(workdir) == lines(whole / "whole")
  assert bits(workdir) == bits(whole / "whole")
  expected = json.loads((whole / "whole" / "summary.json").read_text())
  assert {k: v for k, v in summary.items() if k != "seconds"} == {
      k: v for k, v in expected.items() if k != "seconds"}


def test_what_a_killed_run_wrote_after_its_checkpoint_is_written_again(whole):
  workdir = whole / "ragged"
  assert walk(tiny(), workdir, whole / "cache", StopAfter(4)) is None
  with (workdir / "metrics.jsonl").open("a") as file:
    file.write('{"step": 5, "reward": 0.0}\n{"step": 6, "rew')
  walk(tiny(), workdir, whole / "cache")
  assert lines(workdir) == lines(whole / "whole")


def test_a_finished_run_goes_on_when_it_is_given_more_updates(whole):
  workdir = whole / "longer"
  assert walk(tiny(updates=3), workdir, whole / "cache")["updates"] == 3
  walk(tiny(), workdir, whole / "cache")
  assert lines(workdir) == lines(whole / "whole")


def test_on_another_mesh_a_run_goes_on_within_rounding(whole):
  workdir = whole / "moved"
  assert walk(tiny(), workdir, whole / "cache", StopAfter(3)) is None
  moved = tiny(**{"mesh.data": 2, "mesh.fsdp": 2})
  walk(moved, workdir, whole / "cache")
  found, expected = lines(workdir), lines(whole / "whole")
  assert found[:4] == expected[:4]
  for name in ("kl_realised", "kl_predicted", "completion_length"):
    np.testing.assert_allclose(
        found[5][name], expected[5][name], rtol=1e-3, err_msg=name)


def test_another_configuration_is_refused_by_field_and_value(whole):
  config = tiny(**{"optimizer.rank": 4})
  with pytest.raises(ValueError, match=r"optimizer\.rank was 8 and is 4"):
    resume.check(whole / "whole", config, "auto")


def test_what_only_reports_or_places_may_change(whole):
  config = tiny(**{
      "updates": 9, "eval_every": 1, "mesh.data": 8, "mesh.model": 1})
  before = (whole / "whole" / "config.json").read_text()
  resume.check(whole / "whole", config, "auto")
  (whole / "whole" / "config.json").write_text(before)


def test_never_starts_again_and_keeps_the_earlier_run(whole):
  workdir = whole / "again"
  walk(tiny(updates=2), workdir, whole / "cache")
  before = lines(workdir)
  resume.check(workdir, tiny(**{"optimizer.rank": 4}), "never")
  assert lines(workdir / "earlier-1") == before
  assert [p.name for p in workdir.iterdir()] != []
  assert not (workdir / resume.CHECKPOINTS).exists()


def test_a_signal_asks_once_and_the_next_one_is_not_held_back():
  with resume.Stop() as stop:
    assert stop.reason() is None
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.reason() == "SIGINT" and stop.exit_code == 130
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)


def test_time_over_asks_to_stop_and_is_no_failure():
  stop = resume.Stop(0.0)
  assert stop.reason() == "--max_seconds" and stop.exit_code == 0
  assert resume.Stop(1e6).reason() is None


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
  folder = tmp_path_factory.mktemp("soak")
  soak_resume.soak(folder, kills=3, seed=int(np.random.randint(1 << 30)))
  return folder


def test_a_run_killed_three_times_is_bitwise_an_uninterrupted_one(soaked):
  assert lines(soaked / "killed") == lines(soaked / "whole")


def test_sigterm_saves_and_the_same_command_goes_on(soaked, tmp_path):
  command = soak_resume.command(tmp_path / "run", soaked / "cache")
  process = subprocess.Popen(
      command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
      text=True)
  soak_resume.wait_for_updates(tmp_path / "run", 1, process)
  process.terminate()
  out, _ = process.communicate(timeout=120)
  assert process.returncode == 143, out
  assert "stopped by SIGTERM" in out and "; saved" in out
  done = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  assert "goes on after update" in done.stdout


def test_the_module_runs_as_a_command():
  done = subprocess.run(
      [sys.executable, "experiments/soak_resume.py", "--kills=-1"], cwd=ROOT,
      capture_output=True, text=True, timeout=120)
  assert done.returncode == 2 and "kills -1" in done.stderr
  assert jax.device_count() == 8
