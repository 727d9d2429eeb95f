"""Wrong input ends before any work, with one line and exit code 2."""

import os
import pathlib
import subprocess
import sys

import pytest

from configs import quickstart
from experiments import grpo

ROOT = pathlib.Path(__file__).parents[2]
QUICK = "--config=configs/quickstart.py:short"


@pytest.mark.parametrize("args, words", [
    ((), ("--config",)),
    (("--config=configs/nowhere.py",), ("configs/nowhere.py",)),
    (("--config=configs/quickstart.py:huge",), ("huge", ":short")),
    ((QUICK, "--config.optimizer.rnk=4"), ("rnk", "rank")),
    ((QUICK, "--config.optimizer.rank=four"), ("four", "rank")),
    ((QUICK, "--config.tasks[0].name=sudoko"), ("sudoko", "chain_sum")),
    ((QUICK, "--config.platform="), ("devices", "mesh")),
    ((QUICK, "--config.platform=tpus"), ("tpus", "cpu")),
    ((QUICK, "--workdir=/proc/1/nowhere"), ("/proc/1/nowhere", "--workdir")),
])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(args, words):
  done = subprocess.run(
      [sys.executable, "experiments/launch.py", *args], cwd=ROOT,
      env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True,
      text=True, timeout=120)
  assert done.returncode == 2, done.stderr
  lines = done.stderr.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
  for word in words:
    assert word in lines[0], lines[0]


@pytest.mark.parametrize("field, value, words", [
    ("optimizer.rank", 0, ("rank 0", "choose")),
    ("optimizer.name", "sgdd", ("sgdd", "logra")),
    ("optimizer.basis", "haar", ("haar", "stiefel")),
    ("optimizer.kl_budget", 0.0, ("kl_budget 0.0", "kl_control")),
    ("optimizer.kl_budget", -1.0, ("kl_budget -1.0",)),
    ("optimizer.kl_budget", float("nan"), ("kl_budget nan",)),
    ("optimizer.step_multiplier", 0.0, ("step_multiplier 0.0",)),
    ("tasks", (), ("tasks",)),
    ("advantage", "gae", ("gae", "grpo")),
    ("mesh.data", 3, ("6 devices", "8")),
    ("mesh.data", 0, ("mesh.data 0",)),
    ("rollout.prompts", 6, ("rollout.prompts 6", "4 data")),
    ("rollout.group_size", 0, ("group_size",)),
    ("rollout.max_new_tokens", 2, ("max_new_tokens 2",)),
    ("rollout.temperature", -1.0, ("temperature -1.0",)),
    ("data.prompt_width", 3, ("prompt_width",)),
    ("data.held_out", 100_000, ("hold out",)),
    ("probe_rows", 512, ("probe_rows 512",)),
    ("microbatches", 3, ("microbatches 3",)),
    ("model.num_heads", 5, ("num_heads 5",)),
    ("model.embed_dim", 0, ("embed_dim 0",)),
    ("warm_start.batch_size", 6, ("warm_start.batch_size 6",)),
    ("updates", 0, ("updates 0",)),
])
def test_a_wrong_value_is_named_before_anything_is_compiled(
    field, value, words):
  config = quickstart.get_config("short")
  with config.ignore_type():
    config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError) as error:
    grpo.prepare(config)
  for word in words:
    assert word in str(error.value)
