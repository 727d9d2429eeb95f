"""Laws of the rewards: full scores are paid, faults cost one answer only."""

import os
import pathlib
import random
import runpy
import signal
import subprocess
import sys

import numpy as np
import pytest
import reasoning_gym

from logra_jax.data import tasks
from logra_jax.rl import rewards

FAULTY = pathlib.Path(__file__).with_name("faulty_scorer.py")
NONE = dict(rejected=0, error=0, timeout=0)




def _example(task="chain_sum", **entry):
  return tasks.Example(task, "", "", entry)


def _faulty_scorer(**kwargs):
  return rewards.Scorer(score_fn=runpy.run_path(str(FAULTY))["score"], **kwargs)


def test_only_a_full_score_is_paid_and_order_is_kept():
  names = dict(chain_sum=dict(min_digits=2), spell_backward={}, gcd={})
  examples = [
      e for name, params in names.items() for e in
      tasks.generate(name, params, 20, random.randrange(1000))]
  random.shuffle(examples)
  right = [random.random() < 0.5 for _ in examples]
  completions = [  # a wrong one holds the right one: partial credit
      e.answer if r else e.answer + "1" for e, r in
      zip(examples, right, strict=True)]
  assert any(0 < tasks.score(e.task, e.entry, e.answer + "1") < 1
             for e in examples)
  broken, = reasoning_gym.create_dataset("prime_factorization", size=1, seed=1)
  examples.insert(7, tasks.Example("prime_factorization", "", "", broken))
  completions.insert(7, "zzz")
  right.insert(7, False)
  with rewards.Scorer() as scorer:
    reward, counts = scorer.score(examples, completions)
    again, _ = scorer.score(examples[::-1], completions[::-1])
    empty, _ = scorer.score([], [])
  assert reward.dtype == np.float32 and reward.shape == (61,)
  np.testing.assert_array_equal(reward, right)
  np.testing.assert_array_equal(again, right[::-1])
  assert counts == NONE | {"error": 1}
  assert empty.shape == (0,)


def test_a_fault_costs_its_own_answer_only():
  completions = ["ok", "busy", "ok", "raise", "ok", "die", "asleep", "print",
                 "ok", "modules"]
  with _faulty_scorer(timeout_seconds=0.5) as scorer:
    reward, counts = scorer.score([_example()] * 10, completions)
    after, _ = scorer.score([_example(score=s) for s in (1.0, 0.99, 0.0)],
                            ["ok"] * 3)
  assert reward.tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 1, 1]
  assert counts == dict(rejected=0, error=2, timeout=2)
  assert after.tolist() == [1, 0, 0]


def test_odd_characters_and_long_answers_never_reach_the_scorer():
  completions = ["aa", "a" * 9, "_a", "é", "\N{REPLACEMENT CHARACTER}", "a", ""]
  with _faulty_scorer(max_chars=8) as scorer:
    reward, counts = scorer.score([_example()] * 7, completions)
  assert reward.tolist() == [1, 0, 0, 0, 0, 1, 1]
  assert counts == NONE | {"rejected": 4}
  with _faulty_scorer(allowed="_") as scorer:
    assert scorer.score([_example()] * 2, ["_", "a"])[0].tolist() == [1, 0]


def test_a_process_that_died_between_batches_costs_nothing():
  with _faulty_scorer() as scorer:
    scorer.score([_example()], ["ok"])
    os.kill(scorer._process.pid, signal.SIGKILL)
    scorer._process.wait()
    reward, counts = scorer.score([_example()], ["ok"])
  assert reward.tolist() == [1] and counts == NONE


def test_an_interrupt_of_the_group_is_the_parent_s_to_handle():
  with _faulty_scorer() as scorer:
    process = scorer._process
    process.send_signal(signal.SIGINT)
    reward, _ = scorer.score([_example()], ["ok"])
    assert scorer._process is process
  assert reward.tolist() == [1]


def test_a_batch_larger_than_the_pipes_is_scored_whole():
  scores = np.random.randint(0, 2, 70_000)
  with _faulty_scorer() as scorer:
    reward, counts = scorer.score(
        [_example(score=int(s)) for s in scores], ["ok"] * len(scores))
  np.testing.assert_array_equal(reward, scores)
  assert counts == NONE


def test_the_scorers_file_does_not_import_jax():
  subprocess.run(
      [sys.executable, "-P", "-c",
       "import runpy, sys; runpy.run_path(sys.argv[1]);"
       "assert 'jax' not in sys.modules and 'logra_jax' not in sys.modules",
       tasks.__file__], check=True)


PARENT = """
import runpy, sys, threading
from logra_jax.data import tasks
from logra_jax.rl import rewards
score = runpy.run_path(sys.argv[1])["score"]
idle, busy = (rewards.Scorer(0.5, score_fn=score).__enter__() for _ in "12")
hang = lambda: busy.score([tasks.Example("", "", "", {})], ["busy"])
threading.Thread(target=hang, daemon=True).start()
print("scoring", flush=True)
threading.Event().wait()
"""


def test_idle_or_hung_the_process_ends_with_its_parent():
  # No guard, and a main module that cannot be imported a second time.
  parent = subprocess.Popen(
      [sys.executable, "-c", PARENT, str(FAULTY)], stdout=subprocess.PIPE,
      stderr=subprocess.PIPE)
  assert parent.stdout.readline() == b"scoring\n"
  parent.kill()
  # All three hold the pipe of errors: it ends when the last of them has.
  _, errors = parent.communicate(timeout=20)
  assert b"Traceback" not in errors


def test_wrong_use_names_the_remedy():
  nested = lambda task, entry, completion: 1.0
  with pytest.raises(ValueError, match="lambda>' is not a module"):
    rewards.Scorer(score_fn=nested)
  with pytest.raises(ValueError, match="timeout_seconds 0 is not positive"):
    rewards.Scorer(timeout_seconds=0)
  with pytest.raises(ValueError, match="not running: use `with"):
    rewards.Scorer().score([_example()], ["a"])
  with _faulty_scorer() as scorer, pytest.raises(
      ValueError, match="2 examples and 1 completions"):
    scorer.score([_example()] * 2, ["a"])
