"""How far an update will move the policy, and the step size that follows."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from logra_jax import checks
from logra_jax import low_rank

Schedule = Callable[[jax.Array], jax.Array | float]


def predicted_kl(
    logits: jax.Array,
    tangents: jax.Array,
    mask: jax.Array,
    temperature: jax.Array | float = 1.0,
) -> jax.Array:
  """Second-order KL(old||new) of a change of logits. [..., V] -> [], nats.

  With `p = softmax(z / T)` and the tangent `dz` of the logits along the update,
  the mean over masked positions of `1/2 Var_{y~p}(dz_y / T)`. The variance is
  centred: the uncentred form cancels to noise in float32.

  Args:
    logits: z [..., V] before the update.
    tangents: dz [..., V], a forward-mode derivative along the whole update.
    mask: [...] positions that count.
    temperature: T of the sampled policy.

  Returns:
    Nats per token; NaN where no position counts, which refuses the step.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import step_control
    >>> z, dz = jnp.zeros((1, 2)), jnp.array([[0.1, -0.1]])
    >>> round(float(step_control.predicted_kl(z, dz, jnp.ones(1))), 6)
    0.005

  Source: LoGRA, arXiv 2610.06647, section on predicted-KL step control.
  """
  p = jax.nn.softmax(logits.astype(jnp.float32) / temperature)
  change = tangents.astype(jnp.float32) / temperature
  centred = change - jnp.sum(p * change, -1, keepdims=True)
  return _masked_mean(0.5 * jnp.sum(p * jnp.square(centred), -1), mask)


def realised_kl(
    old_logits: jax.Array,
    new_logits: jax.Array,
    mask: jax.Array,
    temperature: jax.Array | float = 1.0,
) -> jax.Array:
  """Exact KL(old||new) over full distributions. [..., V] -> [], nats.

  Args:
    old_logits: [..., V] before the update.
    new_logits: [..., V] after it.
    mask: [...] positions that count.
    temperature: of the sampled policy.

  Returns:
    The mean over masked positions in nats per token; NaN if there are none.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import step_control
    >>> z = jnp.array([[1.0, 2.0]])
    >>> float(step_control.realised_kl(z, z, jnp.ones(1)))
    0.0
  """
  old = jax.nn.log_softmax(old_logits.astype(jnp.float32) / temperature)
  new = jax.nn.log_softmax(new_logits.astype(jnp.float32) / temperature)
  # expm1(d) - d is the same sum, for the p sum to one, and each term is >= 0:
  # the first-order parts cancel before they are rounded.
  d = new - old
  terms = jnp.exp(old) * (jnp.expm1(d) - d)
  return _masked_mean(jnp.sum(terms, -1), mask)


class PredictedKLState(NamedTuple):
  """What the last update was expected to do, before its step scale."""
  count: jax.Array  # type: ignore[assignment]  # [] int32, updates scaled
  predicted_kl: jax.Array  # [] float32, nats per token at step scale 1
  step_scale: jax.Array  # [] float32, alpha; 0 refuses the step
  kl_budget: jax.Array  # [] float32, nats per token


def scale_by_predicted_kl(
    kl_budget: float | Schedule,
    max_scale: float = 3.0,
) -> optax.GradientTransformationExtraArgs:
  """Scales an update to the KL budget by a prediction of its own KL.

    alpha = min(max_scale, sqrt(kl_budget / predicted))

  alpha may exceed 1. A prediction of 0 gives min(1, max_scale). A prediction
  that is NaN, infinite or negative gives alpha = 0 and an update of zeros;
  `logra` then leaves the whole optimiser state as it was.

  Args:
    kl_budget: nats per token, or a schedule of the number of updates made.
    max_scale: upper bound of alpha.

  Returns:
    A transform whose `update` requires `predict_kl`, a function from the
    updates (low-rank leaves included) to nats per token.

  Raises:
    ValueError: if kl_budget or max_scale is not positive.

  Example:
    >>> import jax.numpy as jnp, logra_jax
    >>> tx = logra_jax.scale_by_predicted_kl(1e-4)
    >>> u = jnp.ones(2)
    >>> u, state = tx.update(u, tx.init(u), predict_kl=lambda u: 4e-4)
    >>> u.tolist(), float(state.step_scale)
    ([0.5, 0.5], 0.5)

  Source: LoGRA, arXiv 2610.06647.
  """
  if not callable(kl_budget):
    checks.require(
        kl_budget, lambda x: x > 0.0,
        f"kl_budget {kl_budget} is not positive: choose e.g. 2e-4 nats per"
        " token, or None in logra(...) for no control")
  checks.require(
      max_scale, lambda x: x > 0.0,
      f"max_scale {max_scale} is not positive: choose e.g. 3.0")

  def init(params):
    del params
    # Three arrays: a donated state may not hold one buffer twice.
    zeros = [jnp.zeros([], jnp.float32) for _ in range(3)]
    return PredictedKLState(jnp.zeros([], jnp.int32), *zeros)

  def update(updates, state, params=None, *, predict_kl, **extra_args):
    del params, extra_args
    budget = kl_budget(state.count) if callable(kl_budget) else kl_budget
    budget = jnp.asarray(budget, jnp.float32)
    predicted = jnp.asarray(predict_kl(updates), jnp.float32)
    step_scale = _step_scale(predicted, budget, max_scale)
    # Not a product: 0 * NaN would keep the NaN.
    scaled = jax.tree.map(
        lambda u: u if _is_key(u) else jnp.where(step_scale > 0, u, 0),
        low_rank.scale(updates, step_scale))
    count = optax.safe_increment(state.count)
    return scaled, PredictedKLState(count, predicted, step_scale, budget)

  return optax.GradientTransformationExtraArgs(init, update)


def _step_scale(predicted, budget, max_scale):
  valid = jnp.isfinite(predicted) & (predicted >= 0.0)
  positive = predicted > 0.0
  root = jnp.sqrt(budget / jnp.where(positive & valid, predicted, 1.0))
  step_scale = jnp.minimum(max_scale, jnp.where(positive, root, 1.0))
  return jnp.where(valid, step_scale, 0.0)


def _is_key(x):
  return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _masked_mean(values, mask):
  mask = mask.astype(bool)
  return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.sum(mask)
