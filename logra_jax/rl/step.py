"""One update of the policy: everything between a rollout and new weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from logra_jax import low_rank
from logra_jax import sketch
from logra_jax import step_control
from logra_jax import taps
from logra_jax.rl import losses
from logra_jax.rl import sync
from logra_jax.rl import types

# (params, tokens [N, S + T], mask, T) -> logits of the completion [N, T, V]
CompletionLogits = Callable[..., jax.Array]


def train_step(
    state: types.TrainState,
    rollout: types.Rollout,
    advantages: jax.Array,
    *,
    completion_logits: CompletionLogits,
    tx: optax.GradientTransformationExtraArgs,
    trainable: Any,
    temperature: float = 1.0,
    microbatches: int = 1,
    probe_rows: int = 16,
    **loss_options,
) -> tuple[types.TrainState, types.PolicyDelta, dict[str, jax.Array]]:
  """Loss, sketches, optimiser, predicted KL, step scale, merge; to be jitted.

  Args:
    state: before the update; donate it.
    rollout: sampled under `state.params` or a recent version.
    advantages: [N], one a row.
    completion_logits: the model.
    tx: the optimiser; its state holds the bases.
    trainable: bool by leaf; which leaves without a basis get a gradient.
    temperature: the rollout was sampled at.
    microbatches: parts the rows are split into; their sketches add up exactly.
    probe_rows: rows on which KL is predicted and measured, spread evenly over
      the global batch.
    **loss_options: of `losses.clipped_surrogate`.

  Returns:
    (state, delta for the workers, scalar metrics).
  """
  width = rollout.completion_mask.shape[-1]
  basis = sketch.find_basis(state.opt_state)
  logits_of = lambda params, rows: completion_logits(
      params, rows.tokens, rows.mask, width)
  token_count = jnp.sum(rollout.completion_mask)

  def loss(params, rows, advantages):
    logprobs = losses.token_logprobs(
        logits_of(params, rows), rows.tokens[:, -width:], temperature)
    return losses.clipped_surrogate(
        logprobs, jax.lax.stop_gradient(logprobs), rows.behavior_logprobs,
        advantages, rows.completion_mask, token_count, **loss_options)

  grad = taps.value_and_grad(loss, state.params, basis, trainable)
  (value, loss_metrics), gradients = _accumulate(
      grad, (rollout, advantages), microbatches)

  probe = _spread(rollout, probe_rows)
  def predict_kl(updates):
    logits, change = taps.jvp(
        lambda params: logits_of(params, probe), state.params, basis, updates)
    return step_control.predicted_kl(
        logits, change, probe.completion_mask, temperature)

  updates, opt_state = tx.update(
      gradients, state.opt_state, _like(gradients, state.params),
      predict_kl=predict_kl)
  updates = sync.round_factors(updates)
  params = low_rank.apply_updates(state.params, updates)
  version = state.version + (~opt_state.last_refused).astype(jnp.int32)
  realised = step_control.realised_kl(
      logits_of(state.params, probe), logits_of(params, probe),
      probe.completion_mask, temperature)
  delta = sync.encode(updates, params, version, state.version)
  metrics = {
      "loss": value,
      "kl_realised": realised,
      "refused": opt_state.last_refused,
      **_control_metrics(opt_state),
      **loss_metrics,
  }
  return types.TrainState(
      state.step + 1, version, params, opt_state), delta, metrics


def _accumulate(grad, rows, parts):
  """Sums values, metrics and gradients over interleaved parts of the rows."""
  if parts == 1:
    return grad(*rows)
  # Interleaved, so that every part is spread over all data shards.
  split = lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
  stacked = jax.tree.map(split, rows)
  shapes = jax.eval_shape(lambda: grad(*jax.tree.map(lambda x: x[0], stacked)))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  add = lambda total, part: (
      jax.tree.map(jnp.add, total, grad(*part)), None)
  return jax.lax.scan(add, zeros, stacked)[0]


def _control_metrics(opt_state):
  """Predicted KL of the step as it was scaled; empty without control."""
  get = lambda name: optax.tree.get(opt_state, name)
  step_scale = get("step_scale")
  if step_scale is None:
    return {}
  # A refused update left the numbers of the one before it.
  refused = opt_state.last_refused
  predicted = jnp.square(step_scale) * get("predicted_kl")
  return {
      "kl_predicted": jnp.where(refused, jnp.nan, predicted),
      "kl_budget": get("kl_budget"),
      "step_scale": jnp.where(refused, 0.0, step_scale),
  }


def _spread(rollout, rows):
  """Evenly spaced rows of a rollout."""
  total = rollout.tokens.shape[0]
  rows = min(rows, total)
  index = jnp.arange(rows) * total // rows
  return jax.tree.map(lambda x: x[index], rollout)


def _like(gradients, params):
  """Params with `None` where there is no gradient."""
  return jax.tree.map(
      lambda p, g: None if g is None else p, params, gradients)
