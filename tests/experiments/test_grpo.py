"""The whole walk on a model of a few thousand weights."""

import json

import jax
import numpy as np
import pytest

from configs import quickstart
from experiments import grpo
from logra_jax.rl import rewards

SUMMARY = {
    "accuracy_before", "accuracy_after", "greedy_before", "greedy_after",
    "updates", "seconds", "devices", "kl_predicted_median",
    "kl_realised_median", "sync_bytes_per_update", "full_sync_bytes",
    "optimizer_state_bytes", "dense_adam_state_bytes"}


def tiny(**fields):
  config = quickstart.get_config("short")
  config.update_from_flattened_dict({
      "model.num_layers": 2, "model.embed_dim": 32, "model.num_heads": 2,
      "model.head_dim": 16, "model.mlp_dim": 64, "optimizer.rank": 8,
      # An untrained policy is hard to move; no cap, or it always binds.
      "optimizer.max_scale": 1e6,
      "data.examples": 200, "data.held_out": 16, "warm_start.updates": 4,
      "warm_start.batch_size": 16, "rollout.prompts": 8,
      "rollout.group_size": 4, "probe_rows": 8, "updates": 3, "eval_every": 2,
      "sync_check_every": 1} | fields)
  return config


@pytest.fixture(scope="module", autouse=True)
def odd_lengths_are_paid():
  """So small a model answers nothing right, and no reward is no update."""
  score = lambda self, examples, completions: (
      np.array([len(text) % 2 for text in completions], np.float32), {})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rewards.Scorer, "score", score)
    yield


def walk(config, tmp_path, name):
  workdir = tmp_path / name
  workdir.mkdir()
  summary = grpo.run(grpo.prepare(config), workdir, tmp_path / "cache")
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return summary, [json.loads(line) for line in lines], workdir


@pytest.fixture(scope="module")
def first(tmp_path_factory, odd_lengths_are_paid):
  tmp_path = tmp_path_factory.mktemp("runs")
  return tmp_path, *walk(tiny(), tmp_path, "first")


def test_a_run_leaves_its_scalars_summary_and_picture(first):
  _, summary, lines, workdir = first
  written = json.loads((workdir / "summary.json").read_text())
  assert SUMMARY <= written.keys() and written["seconds"] > 0
  assert written["devices"] == 8 and written["updates"] == 3
  assert [x["step"] for x in lines if "reward" in x] == [1, 2, 3]
  assert [x["step"] for x in lines if "accuracy" in x] == [0, 2, 3]
  assert (workdir / "report.png").stat().st_size > 10_000


def test_the_worker_holds_the_trainers_bits_after_every_update(first):
  _, summary, _, _ = first
  assert summary["sync_mismatches"] == 0
  assert summary["sync_bytes_per_update"] < summary["full_sync_bytes"] / 4


def test_predicted_kl_meets_the_budget_where_the_cap_does_not_bind(first):
  _, _, lines, _ = first
  free = [x for x in lines if x.get("step_scale", 1e6) < 1e6]
  assert free and all(0 < x["kl_realised"] < 0.1 for x in free)
  for x in free:
    assert x["kl_predicted"] == pytest.approx(x["kl_budget"], rel=1e-4)


def test_the_same_run_again_takes_the_warm_start_and_gives_the_same_bits(
    first, capsys):
  tmp_path, _, lines, _ = first
  again = walk(tiny(), tmp_path, "again")[1]
  assert "from the cache" in capsys.readouterr().out
  timed = {"seconds", "tokens_per_second"}
  strip = lambda line: {k: v for k, v in line.items() if k not in timed}
  assert list(map(strip, again)) == list(map(strip, lines))


@pytest.mark.parametrize("fields", [
    # A step large enough to ruin the model must not end the run.
    {"optimizer.kl_control": False, "optimizer.step_multiplier": 1e6},
    {"optimizer.learning_rate": 1e-3, "advantage": "reinforce",
     "microbatches": 2, "optimizer.basis": "stiefel"},
])
def test_other_forms_and_collapsed_runs_end_normally(first, fields):
  tmp_path = first[0]
  summary, lines, _ = walk(tiny(**fields), tmp_path, str(len(fields)))
  assert summary["updates"] == 3 and summary["sync_mismatches"] == 0
  assert jax.tree.leaves(lines)
