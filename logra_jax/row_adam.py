"""RowAdam: one second moment for each output unit, none of the first kind."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from logra_jax import checks
from logra_jax import low_rank


class RowAdamState(NamedTuple):
  """The moment survives a refresh: outputs do not depend on the basis."""
  count: jax.Array  # type: ignore[assignment]  # [] int32, never reset
  nu_per_output: optax.Updates  # [*batch, 1, n_out] float32 a leaf


def scale_by_row_adam(
    b2: float = 0.95,
    eps: float = 1e-8,
    restore_norm: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Divides each output column by its running root mean square.

  For a sketch (or dense gradient) `S [*batch, rows, n_out]`:

    v_j <- b2 v_j + (1 - b2) mean_i S_ij^2,    v^ = v / (1 - b2^t)
    D_ij = S_ij / (sqrt(v^_j) + eps)

  With `restore_norm` the weighting is relative and each matrix is rescaled to
  its own Frobenius norm:

    D_ij ~ S_ij / (sqrt(v^_j) + max(eps mean_j sqrt(v^_j), tiny)),  |D| = |S|

  A matrix is the last two axes of a leaf; a vector is its own output axis.

  Args:
    b2: decay of the second moment.
    eps: added to the root; relative to its mean with `restore_norm`.
    restore_norm: use the ratio form's weighting.

  Returns:
    The gradient transformation; an all-zero matrix stays zero.

  Raises:
    ValueError: if b2 is not in [0, 1) or eps is negative.

  Example:
    >>> import jax.numpy as jnp, logra_jax
    >>> tx = logra_jax.scale_by_row_adam()
    >>> s = jnp.array([[1.0, 10.0], [1.0, 10.0]])
    >>> update, state = tx.update(s, tx.init(s))
    >>> jnp.round(update, 3).tolist()
    [[1.0, 1.0], [1.0, 1.0]]

  Source: LoGRA, arXiv 2610.06647, both published forms.
  """
  checks.require(
      b2, lambda x: 0.0 <= x < 1.0, f"b2 {b2} is no decay: choose 0 <= b2 < 1")
  checks.require(
      eps, lambda x: x >= 0.0, f"eps {eps} is negative: choose e.g. 1e-8")

  def init(params):
    return RowAdamState(
        jnp.zeros([], jnp.int32),
        jax.tree.map(lambda p: jnp.zeros_like(_mean_square(p)), params))

  def update(updates, state, params=None, **extra_args):
    del params, extra_args
    count = optax.safe_increment(state.count)
    nu = jax.tree.map(
        lambda s, v: b2 * v + (1.0 - b2) * _mean_square(s),
        updates, state.nu_per_output)
    correction = 1.0 - b2 ** count.astype(jnp.float32)
    scale = _restored if restore_norm else _scaled
    scaled = jax.tree.map(
        lambda s, v: scale(s, jnp.sqrt(v / correction), eps), updates, nu)
    return scaled, RowAdamState(count, nu)

  return optax.GradientTransformationExtraArgs(init, update)


def scale_to_weight_ratio(
    ratio: float = 6e-5,
) -> optax.GradientTransformationExtraArgs:
  """Scales an update, all leaves at once, to a share of the weights' norm.

  One factor for the whole tree sets `|V U|_F = ratio |W|_F` and makes it a
  descent step: it is negated, as `optax.scale_by_learning_rate` does. All-zero
  updates stay zero.

  Args:
    ratio: size of a step relative to the weights, before step control.

  Returns:
    The gradient transformation; `update` needs `params`.

  Raises:
    ValueError: if ratio is not positive, or `update` is called without params.

  Example:
    >>> import jax.numpy as jnp, logra_jax
    >>> tx = logra_jax.scale_to_weight_ratio(0.01)
    >>> w, g = jnp.full((2, 2), 5.0), jnp.full((2, 2), 3.0)
    >>> update, _ = tx.update(g, tx.init(w), w)
    >>> print(jnp.round(update, 4))
    [[-0.05 -0.05]
     [-0.05 -0.05]]

  Source: LoGRA's ratio form, arXiv 2610.06647.
  """
  checks.require(
      ratio, lambda x: x > 0.0,
      f"ratio {ratio} is not positive: choose e.g. 6e-5")

  def update(updates, state, params=None, **extra_args):
    del extra_args
    if params is None:
      raise ValueError(
          "scale_to_weight_ratio needs the weights: pass params to update,"
          " and chain it after sketched(...), not inside")
    norm = lambda tree: jnp.sqrt(sum(
        low_rank.squared_norm(x)
        for x in jax.tree.leaves(tree, is_leaf=low_rank.is_node)))
    update_norm, weight_norm = norm(updates), norm(params)
    factor = -ratio * weight_norm / jnp.where(update_norm > 0, update_norm, 1.0)
    return low_rank.scale(updates, factor), state

  return optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(), update)


def _mean_square(s):
  """Mean of squares over the rows of each matrix. [..., rows, n] -> [..., 1, n]

  A vector has no rows: it is its own output axis.
  """
  squares = jnp.square(s.astype(jnp.float32))
  return squares.mean(-2, keepdims=True) if s.ndim > 1 else squares


def _scaled(s, root, eps):
  return (s / (root + eps)).astype(s.dtype)


def _restored(s, root, eps):
  axes = tuple(range(-min(s.ndim, 2), 0))
  s32 = s.astype(jnp.float32)
  floor = eps * jnp.mean(root, axes[-1:], keepdims=True)
  d = s32 / (root + jnp.maximum(floor, jnp.finfo(jnp.float32).tiny))
  norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True))
  d_norm = norm(d)
  return (d * norm(s32) / jnp.where(d_norm > 0, d_norm, 1.0)).astype(s.dtype)
