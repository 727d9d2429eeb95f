"""Whether a run goes on where its directory stopped, and when it stops."""

import json
import pathlib
import signal
import time
from typing import Any

from ml_collections import config_dict

CHECKPOINTS = "checkpoints"
# Fields that another start of the same run may change: how long and where it
# runs and what it reports, nothing that an update depends on.
FREE = ("updates", "eval_every", "checkpoint_every", "keep_last",
        "sync_check_every", "platform", "devices", "mesh")


def check(
    workdir: pathlib.Path, config: config_dict.ConfigDict, mode: str
) -> None:
  """Lets a run into a directory, and puts its configuration there.

  Args:
    workdir: an existing directory.
    config: of the run.
    mode: "auto" goes on if the directory holds checkpoints of the same
      configuration; "never" starts again and moves an earlier run into a
      folder beside.

  Raises:
    ValueError: if the directory holds a run of another configuration.
  """
  ours = json.loads(config.to_json_best_effort())
  path = workdir / "config.json"
  if _steps(workdir):
    if mode == "never":
      _move_aside(workdir)
    elif not path.exists():
      raise ValueError(
          f"{str(workdir)!r} has checkpoints and no config.json to compare"
          " with: choose another --workdir, or --resume=never")
    else:
      _refuse_others(json.loads(path.read_text()), ours, workdir)
  path.write_text(json.dumps(ours, indent=2))


def _steps(workdir):
  return [p for p in (workdir / CHECKPOINTS).glob("*") if p.name.isdecimal()]


def _refuse_others(theirs, ours, workdir):
  before, now = _flat(theirs), _flat(ours)
  changed = [
      f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
      for name in sorted(before.keys() | now.keys())
      if name.split(".")[0] not in FREE and before.get(name) != now.get(name)]
  if changed:
    raise ValueError(
        f"{str(workdir)!r} holds a run of another configuration:"
        f" {'; '.join(changed)}: choose another --workdir, or --resume=never to"
        " start again")


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
  """Values by dotted name; a list's elements by number."""
  if isinstance(tree, list):
    tree = dict(enumerate(tree))
  if not isinstance(tree, dict):
    return {name: tree}
  found: dict[str, Any] = {}
  for key, value in tree.items():
    found |= _flat(value, f"{name}.{key}" if name else str(key))
  return found


def _move_aside(workdir):
  earlier = [p for p in workdir.iterdir() if not p.name.startswith("earlier-")]
  number = 1
  while (folder := workdir / f"earlier-{number}").exists():
    number += 1
  folder.mkdir()
  for path in earlier:
    path.rename(folder / path.name)


class Stop:
  """Why a run should save and leave: a signal, or its time is over.

  As a context manager it takes SIGTERM and Ctrl-C; a second one of either ends
  the process at once, as without it.

  Args:
    max_seconds: from now, None for no limit.
  """

  def __init__(self, max_seconds: float | None = None):
    self._deadline = None if max_seconds is None else time.time() + max_seconds
    self._signal: int | None = None
    self._handlers: dict[int, Any] = {}

  def __enter__(self) -> "Stop":
    for number in (signal.SIGTERM, signal.SIGINT):
      self._handlers[number] = signal.signal(number, self._take)
    return self

  def __exit__(self, *exc) -> None:
    self._release()

  def reason(self) -> str | None:
    """What asks the run to stop, None if nothing does."""
    if self._signal is not None:
      return signal.Signals(self._signal).name
    if self._deadline is not None and time.time() >= self._deadline:
      return "--max_seconds"
    return None

  @property
  def exit_code(self) -> int:
    """128 + the signal, as shells report it; 0 without one."""
    return 0 if self._signal is None else 128 + self._signal

  def _take(self, number, frame):
    del frame
    self._signal = number
    self._release()

  def _release(self):
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    self._handlers = {}
