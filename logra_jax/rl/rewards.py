"""Rewards from reasoning-gym's scorers, in a process that may be killed.

Some scorers run symbolic algebra on what a model wrote, and `9**9**9` never
ends; others raise on nonsense. Neither may stop a run.
"""

import collections
import functools
import multiprocessing
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import reasoning_gym

from logra_jax.data import tasks

# (task, entry, completion) -> score in [0, 1]
ScoreFn = Callable[[str, Mapping[str, Any], str], float]

_ALLOWED = frozenset(string.printable)
# A first answer waits for the process to start and import.
_START_SECONDS = 60.0


def reasoning_gym_score(
    task: str, entry: Mapping[str, Any], completion: str
) -> float:
  """reasoning-gym's own score of a completion, in [0, 1].

  Args:
    task: the data set's name.
    entry: the item as the data set made it.
    completion: the model's answer.
  """
  return float(_dataset(task).score_answer(completion.strip(), entry))


@functools.cache
def _dataset(task):
  return reasoning_gym.create_dataset(task, size=1, seed=0)


class Scorer:
  """Pays 1 for a right answer and 0 for all else, within a time limit.

  Partial credit is not paid: it can be gamed (a long answer with the right one
  somewhere in it). Use as a context manager; the scoring process starts once.

  Example:
    >>> from logra_jax.data import tasks
    >>> from logra_jax.rl import rewards
    >>> examples = tasks.generate("gcd", {"max_value": 9}, size=1, seed=0)
    >>> with rewards.Scorer() as scorer:
    ...   reward, _ = scorer.score(examples * 2, [examples[0].answer, "x"])
    >>> reward.tolist()
    [1.0, 0.0]
  """

  def __init__(
      self,
      timeout_seconds: float = 5.0,
      max_chars: int = 256,
      score_fn: ScoreFn = reasoning_gym_score,
  ):
    """Args as follows.

    Args:
      timeout_seconds: for one answer; the scorer is killed and counts 0.
      max_chars: longer completions are rejected unscored.
      score_fn: a module-level function, for the other process to import.
    """
    if not timeout_seconds > 0:
      raise ValueError(f"timeout_seconds {timeout_seconds} is not positive")
    self._timeout = timeout_seconds
    self._max_chars = max_chars
    self._score_fn = score_fn
    self._process: Any = None
    self._pipe: Any = None

  def __enter__(self) -> "Scorer":
    self._start()
    return self

  def __exit__(self, *exc) -> None:
    self._stop()

  def score(
      self, examples: Sequence[tasks.Example], completions: Sequence[str]
  ) -> tuple[np.ndarray, dict[str, int]]:
    """Rewards in the order given. [N] -> [N] float32.

    Args:
      examples: the problems.
      completions: an answer to each.

    Returns:
      (rewards, how many answers were "rejected" for length or characters,
      raised an "error" or ran into the "timeout"; each counts 0).
    """
    if len(examples) != len(completions):
      raise ValueError(
          f"{len(examples)} examples and {len(completions)} completions: pass"
          " one completion an example")
    rewards = np.zeros(len(examples), np.float32)
    counts = collections.Counter(rejected=0, error=0, timeout=0)
    waiting = []
    for i, (example, text) in enumerate(
        zip(examples, completions, strict=True)):
      if len(text) > self._max_chars or not _ALLOWED.issuperset(text):
        counts["rejected"] += 1
      else:
        waiting.append((i, (example.task, example.entry, text)))
    while waiting:
      done = self._score_until_stuck(waiting, rewards, counts)
      waiting = waiting[done:]
    return rewards, dict(counts)

  def _score_until_stuck(self, waiting, rewards, counts):
    """Scores items in order; returns how many are dealt with."""
    self._pipe.send([item for _, item in waiting])
    for done, (i, _) in enumerate(waiting):
      try:
        if not self._pipe.poll(self._timeout):
          raise EOFError
        score = self._pipe.recv()
      except (EOFError, OSError):
        # Hung, or the process died of it: either way this answer is to blame.
        counts["timeout"] += 1
        self._stop()
        self._start()
        return done + 1
      if score is None:
        counts["error"] += 1
      rewards[i] = score == 1.0
    return len(waiting)

  def _start(self):
    context = multiprocessing.get_context("spawn")
    self._pipe, theirs = context.Pipe()
    self._process = context.Process(
        target=_serve, args=(theirs, self._score_fn), daemon=True)
    self._process.start()
    theirs.close()
    try:
      if not self._pipe.poll(_START_SECONDS):
        raise EOFError
      self._pipe.recv()
    except (EOFError, OSError) as error:
      raise RuntimeError(
          "the scoring process did not start: a script that uses Scorer needs"
          " the guard `if __name__ == '__main__':`") from error

  def _stop(self):
    self._process.kill()
    self._process.join()
    self._pipe.close()


def _serve(pipe, score_fn):
  """Answers batches one score at a time; None for a scorer that raised."""
  pipe.send("ready")
  while True:
    try:
      items = pipe.recv()
    except EOFError:  # the parent is gone
      return
    for item in items:
      try:
        pipe.send(score_fn(*item))
      except Exception:  # noqa: BLE001 - a scorer may raise anything
        pipe.send(None)
