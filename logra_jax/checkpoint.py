"""Checkpoints that survive a kill, a full disk and another mesh; orbax.

A checkpoint is whole or not there: orbax writes beside and renames. What a
rename cannot promise, that the bits read are the bits written, a fingerprint in
its record does; one that cannot be read is set aside for the one before it.
"""

import logging
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from logra_jax import fingerprint

_UNFINISHED = ".orbax-checkpoint-tmp"
# Set aside, never deleted: the cause may be a disk that is back tomorrow.
_BROKEN = "broken-"


class Restored(NamedTuple):
  """A checkpoint as it was saved."""
  step: int
  tree: Any
  record: dict[str, Any]


class Checkpoints:
  """The checkpoints of a run: the last few, and the best evaluated.

  Saving is asynchronous: `save` copies the arrays and returns. A save that
  fails is reported through `warn` and the run goes on. Use as a context
  manager; leaving it waits for the last save.

  Args:
    directory: holds one directory a step; made when needed.
    keep_last: how many to keep, beside the best.
    warn: what to do with a message of one line.

  Raises:
    ValueError: if keep_last is below 1.

  Example:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from logra_jax import checkpoint
    >>> with checkpoint.Checkpoints(tempfile.mkdtemp()) as checkpoints:
    ...   checkpoints.save(3, {"w": jnp.ones(2)}, {"seed": 0}, score=0.5)
    ...   found = checkpoints.restore({"w": jnp.zeros(2)})
    >>> found.step, found.tree["w"].tolist(), found.record["seed"]
    (3, [1.0, 1.0], 0)
  """

  def __init__(
      self,
      directory: str | pathlib.Path,
      keep_last: int = 2,
      warn: Callable[[str], None] = logging.warning,
  ):
    if keep_last < 1:
      raise ValueError(f"keep_last {keep_last} is below 1: choose e.g. 2")
    self._directory = pathlib.Path(directory).resolve()
    self._warn = warn
    for path in sorted(self._directory.glob(f"*{_UNFINISHED}*")):
      warn(f"the save of {path.name.partition('.')[0]} was cut off: an earlier"
           " checkpoint counts")
      shutil.rmtree(path, ignore_errors=True)
    policy = checkpoint_managers.AnyPreservationPolicy([
        checkpoint_managers.LatestN(keep_last),
        checkpoint_managers.BestN(
            get_metric_fn=lambda metrics: metrics["score"], n=1,
            keep_checkpoints_without_metrics=False)])
    self._manager = ocp.CheckpointManager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=lambda metrics: metrics["score"]))
    self._fingerprint = jax.jit(fingerprint.fingerprint)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *exc) -> None:
    self.wait()
    self._manager.close()

  def steps(self) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return sorted(self._manager.all_steps())

  def best(self) -> int | None:
    """The step with the highest score; of equal ones the latest."""
    return self._manager.best_step()

  def record(self, step: int) -> dict[str, Any]:
    """The record saved with a step; no array is read."""
    return self._manager.restore(
        step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]

  def save(
      self,
      step: int,
      tree: Any,
      record: Mapping[str, Any],
      score: float | None = None,
  ) -> None:
    """Saves a tree; the caller may donate its arrays right after.

    Args:
      step: names the checkpoint; one that is there already stays.
      tree: arrays and typed keys.
      record: JSON values.
      score: of an evaluation of this very tree, if there was one.
    """
    self.wait()
    if step in self._manager.all_steps():
      return
    marked = dict(record) | {"fingerprint": int(self._fingerprint(tree))}
    self._attempt(lambda: self._manager.save(
        step,
        args=ocp.args.Composite(
            tree=ocp.args.StandardSave(_plain(tree)),
            record=ocp.args.JsonSave(marked)),
        metrics=None if score is None else {"score": score}))

  def wait(self) -> bool:
    """Waits until the last save is on disk. Returns whether it is."""
    return self._attempt(self._manager.wait_until_finished)

  def restore(
      self, target: Any, step: int | None = None
  ) -> Restored | None:
    """The newest checkpoint that can be read, on the target's shardings.

    Args:
      target: a tree of arrays, or of ShapeDtypeStructs with shardings.
      step: of one checkpoint; default, the newest that is whole.

    Returns:
      The checkpoint, or None if there is none.

    Raises:
      ValueError: if there are checkpoints and none can be read.
    """
    steps = self.steps()[::-1] if step is None else [step]
    causes = []
    for candidate in steps:
      try:
        found = self._read(candidate, target)
      except Exception as error:  # any kind, by where the bytes are broken
        causes.append(_line(error))
        self._warn(f"checkpoint {candidate} cannot be read ({causes[-1]}): it"
                   " is set aside and an earlier one is tried")
        continue
      tree = jax.tree.map(_like, target, found["tree"])
      return Restored(candidate, tree, found["record"])
    if not causes:
      return None
    raise ValueError(
        f"none of the checkpoints {steps} in {str(self._directory)!r} can be"
        f" read ({causes[0]}): repair the disk, or start again elsewhere")

  def set_aside(self, after: int) -> None:
    """Renames the checkpoints later than a step, which could not be read."""
    for step in self.steps():
      if step > after:
        (self._directory / str(step)).rename(
            self._directory / f"{_BROKEN}{step}")
    self._manager.reload()

  def _read(self, step, target):
    found = self._manager.restore(step, args=ocp.args.Composite(
        tree=ocp.args.StandardRestore(_plain(target)),
        record=ocp.args.JsonRestore()))
    read = int(self._fingerprint(found["tree"]))
    if read != found["record"]["fingerprint"]:
      raise ValueError("the bits read are not the bits written")
    return found

  def _attempt(self, action):
    try:
      action()
      return True
    except Exception as error:  # a full disk comes as many types
      self._warn(f"a checkpoint could not be written ({_line(error)}): the run"
                 " goes on; free disk space before the next save")
      for path in self._directory.glob(f"*{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
      self._manager.reload()
      return False


def _plain(tree):
  """The tree with keys as the numbers they hold."""
  def one(x):
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      return x
    if not isinstance(x, jax.ShapeDtypeStruct):
      return jax.random.key_data(x)
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
  return jax.tree.map(one, tree)


def _like(target, x):
  """A key again where the target has one."""
  if not jax.dtypes.issubdtype(target.dtype, jax.dtypes.prng_key):
    return x
  impls = []  # asked of a tracer, for a shape has none to give
  jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), target)
  return jax.random.wrap_key_data(x, impl=impls[0])


def _line(error):
  text = " ".join(str(error).split())
  return text[:200] or type(error).__name__
