"""A scorer that fails as it is told to, run in the scoring process."""

import os
import signal
import sys
import time


def score(task, entry, completion):
  """Scores as the completion says; 1.0 if it says nothing."""
  if completion == "busy":
    return 9 ** 9 ** 9  # holds the interpreter lock for minutes
  if completion == "asleep":
    time.sleep(600)
  if completion == "raise":
    raise KeyError(task)
  if completion == "die":
    os.kill(os.getpid(), signal.SIGKILL)
  if completion == "print":
    print("1111", flush=True)
    return 0.0
  if completion == "modules":
    return float("jax" not in sys.modules and "types" in sys.modules
                 and "logra_jax" not in sys.modules)
  return entry.get("score", 1.0)
