"""Rewards from reasoning-gym's scorers, in a process that may be killed.

Some scorers run symbolic algebra on what a model wrote, and `9**9**9` never
ends; others raise on nonsense. Neither may stop a run.
"""

import collections
import contextlib
import inspect
import os
import pickle
import string
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np

from logra_jax.data import tasks
from logra_jax.rl import scoring_worker

# (task, entry, completion) -> score in [0, 1]
ScoreFn = Callable[[str, Mapping[str, Any], str], float]

# No underscore, bracket or quote: what Python's insides are reached by.
ALLOWED = frozenset(string.ascii_letters + string.digits + " +-*/%=<>().,:;!?")
# Starting means importing reasoning-gym, about a second on a free core.
_START_SECONDS = 60.0
_TIMEOUT = b"t"
_COUNTED = {scoring_worker.ERROR: "error", _TIMEOUT: "timeout"}


class Scorer:
  """Pays 1 for a right answer and 0 for all else, within a time limit.

  Partial credit is not paid: it can be gamed (a long answer with the right one
  somewhere in it). Use as a context manager; the scoring process starts once
  and again only after it had to be killed.

  Args:
    timeout_seconds: for one answer; the scoring process is killed, it counts 0.
    max_chars: longer completions are rejected unscored.
    allowed: characters; a completion with any other is rejected unscored.
    score_fn: a module-level function. The scoring process runs its file, so
      that file must not import what the process must not.

  Raises:
    ValueError: for a time limit that is not positive or a nested score_fn.

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
      allowed: Collection[str] = ALLOWED,
      score_fn: ScoreFn = tasks.score,
  ):
    if not timeout_seconds > 0:
      raise ValueError(
          f"timeout_seconds {timeout_seconds} is not positive: choose e.g. 5.0")
    if not score_fn.__qualname__.isidentifier():
      raise ValueError(
          f"score_fn {score_fn.__qualname__!r} is not a module-level function:"
          " the scoring process could not find it; move it to a file's top")
    self._timeout = timeout_seconds
    self._max_chars = max_chars
    self._allowed = frozenset(allowed)
    # -P: this folder's types.py must not shadow Python's own.
    self._command = [
        sys.executable, "-P", scoring_worker.__file__,
        inspect.getfile(score_fn), score_fn.__qualname__, str(timeout_seconds)]
    self._process: Any = None

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

    Raises:
      ValueError: if the lengths differ, or outside the `with` block.
    """
    if len(examples) != len(completions):
      raise ValueError(
          f"{len(examples)} examples and {len(completions)} completions: pass"
          " one completion an example")
    if self._process is None:
      raise ValueError("Scorer is not running: use `with Scorer() as scorer:`")
    rewards = np.zeros(len(examples), np.float32)
    counts = collections.Counter(rejected=0, error=0, timeout=0)
    rows, items = [], []
    for i, (example, text) in enumerate(
        zip(examples, completions, strict=True)):
      if len(text) > self._max_chars or not self._allowed.issuperset(text):
        counts["rejected"] += 1
      else:
        rows.append(i)
        items.append((example.task, example.entry, text))
    letters = b""
    while len(letters) < len(items):
      letters += self._ask(items[len(letters):])
    for letter, name in _COUNTED.items():
      counts[name] = letters.count(letter)
    rewards[rows] = np.frombuffer(letters, "S1") == scoring_worker.RIGHT
    return rewards, dict(counts)

  def _ask(self, items):
    """A letter an item, up to the first that hangs or kills the process."""
    if self._process.poll() is not None:  # killed from outside, between batches
      self._stop()
      self._start()
    letters, last = b"", scoring_worker.ERROR
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(pickle.dumps(items))
      self._process.stdin.flush()
      while len(letters) < len(items):
        new = self._read(self._timeout)
        if new is None:
          last = _TIMEOUT
        if not new:
          break
        letters += new
      else:
        return letters
    self._stop()
    self._start()
    return letters + last

  def _read(self, seconds):
    """Letters as they come; none at the process's end, None if none came."""
    if not connection.wait([self._process.stdout], seconds):
      return None
    return os.read(self._process.stdout.fileno(), 1 << 16)

  def _start(self):
    self._process = subprocess.Popen(
        self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if self._read(_START_SECONDS) != scoring_worker.READY:
      self._stop()
      raise RuntimeError(
          f"the scoring process did not start: run {self._command} by hand to"
          " see why, or install logra-jax[train]")

  def _stop(self):
    if self._process is None:
      return
    process, self._process = self._process, None
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # of what it had not read
      process.stdin.close()
