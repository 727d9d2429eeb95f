"""The scoring process: a program that imports nothing of this package.

  python -P scoring_worker.py FILE FUNCTION SECONDS

Reads pickled lists of arguments from its input and answers each item by one
letter: `RIGHT` if FUNCTION of FILE scores it 1.0, `WRONG` or, if it raised,
`ERROR`. Started by path because a child of `multiprocessing` imports the
parent's main module and this package, and with either jax.
"""

import os
import pickle
import runpy
import signal
import sys

READY, RIGHT, WRONG, ERROR = b"r", b"1", b"0", b"e"


def _main(path, name, seconds):
  # Ctrl-C reaches the whole group; the parent decides when this one ends.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # What a scorer prints must not be taken for an answer.
  answers = os.dup(sys.stdout.fileno())
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  function = runpy.run_path(path)[name]
  os.write(answers, READY)
  while True:
    try:
      items = pickle.load(sys.stdin.buffer)
    except EOFError:  # the parent closed the pipe or is gone
      return
    for item in items:
      # The parent kills a hung scorer. Should the parent have died, the kernel
      # does: a thread could not, for a long power holds the interpreter lock.
      signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
      os.write(answers, _letter(function, item))
    signal.setitimer(signal.ITIMER_REAL, 0)


def _letter(function, item):
  try:
    return RIGHT if function(*item) == 1.0 else WRONG
  except Exception:  # a scorer may raise anything
    return ERROR


if __name__ == "__main__":
  try:
    _main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
  except BrokenPipeError:  # the parent is gone
    pass
