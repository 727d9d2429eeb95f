"""Policy synchronisation: a worker follows the trainer by factors.

The factor U is rounded to its wire dtype once, and trainer and worker merge the
same rounded factor with the same rule, so that their weights stay equal bit for
bit; `fingerprint.fingerprint` proves it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from logra_jax import low_rank
from logra_jax.rl import types


def round_factors(
    updates: Any, wire_dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> Any:
  """Updates as they will be after the wire: U in the wire dtype.

  Args:
    updates: a tree with `LowRank` leaves.
    wire_dtype: of U.

  Returns:
    The same tree; dense updates as they were.
  """
  def one(u):
    if isinstance(u, low_rank.LowRank):
      return u.replace(factor=u.factor.astype(wire_dtype))
    return u
  return jax.tree.map(one, updates, is_leaf=low_rank.is_node)


def encode(
    updates: Any, params: Any, version: jax.Array, parent: jax.Array
) -> types.PolicyDelta:
  """The message of one update: factors, and dense leaves whole.

  Args:
    updates: rounded updates; `None` for leaves that are not trained.
    params: weights after the update.
    version: of params.
    parent: of the weights before.

  Returns:
    The delta.
  """
  def one(param, update):
    return update if update is None or low_rank.is_node(update) else param
  return types.PolicyDelta(
      version, parent, jax.tree.map(one, params, updates))


def apply(worker: types.Worker, delta: types.PolicyDelta) -> types.Worker:
  """Merges a delta into a worker's weights, in place under donation.

  Args:
    worker: at version `delta.parent`; the caller has checked.
    delta: of one update.

  Returns:
    The worker at `delta.version`.
  """
  factors = jax.tree.map(
      lambda _, leaf: leaf if low_rank.is_node(leaf) else None,
      worker.params, delta.leaves)
  merged = low_rank.apply_updates(worker.params, factors)
  params = jax.tree.map(
      lambda param, leaf: param if leaf is None or low_rank.is_node(leaf)
      else leaf, merged, delta.leaves)
  return types.Worker(delta.version, params)


def message_bytes(tree: Any) -> int:
  """Bytes of a message or of weights, or of their shapes, keys included."""
  return sum(
      leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
