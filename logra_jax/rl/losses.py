"""Policy losses over the tokens of completions."""

import chex
import jax
import jax.numpy as jnp


def token_logprobs(
    logits: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array | float = 1.0,
) -> jax.Array:
  """log p of given tokens under softmax(z / T). [N, T, V], [N, T] -> [N, T].

  Args:
    logits: z that predict the tokens.
    tokens: int32.
    temperature: the policy samples at.

  Returns:
    Nats, float32.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax.rl import losses
    >>> z, token = jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32)
    >>> print(losses.token_logprobs(z, token).round(4))
    [[-1.3863]]
  """
  chex.assert_rank((logits, tokens), [3, 2])
  chex.assert_equal_shape_prefix((logits, tokens), 2)
  scaled = jnp.asarray(logits, jnp.float32) / temperature
  # As the sampler's log_softmax does: else log p has the rounding of z, 6e-5
  # at an offset of 1,000.
  scaled -= jax.lax.stop_gradient(scaled.max(-1, keepdims=True))
  chosen = jnp.take_along_axis(scaled, tokens[..., None], -1)[..., 0]
  return chosen - jax.nn.logsumexp(scaled, -1)


def clipped_surrogate(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    token_count: jax.Array | float,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    importance_cap: float | None = 2.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """PPO's clipped surrogate, a global token mean. [N, T], [N] -> [].

    rho = exp(logprobs - old),    w = min(exp(old - behavior), cap)
    loss = - sum_masked w min(rho A, clip(rho, 1 - low, 1 + high) A) / count

  `count` is the whole batch's, so that the losses of microbatches and shards
  add up. `w` corrects for a sampler that is not quite the trainer.

  Args:
    logprobs: [N, T] of the policy being trained.
    old_logprobs: [N, T] of the trainer's policy before the update.
    behavior_logprobs: [N, T] of the sampler's policy.
    advantages: [N].
    mask: [N, T] tokens that count; what is masked out counts nothing, NaN or
      not.
    token_count: masked tokens of the whole batch; 0 gives a loss of 0.
    clip_low: how far below 1 the ratio has a gradient.
    clip_high: how far above 1.
    importance_cap: upper bound of w, None for no correction.

  Returns:
    (loss, sums over these tokens that add up as the loss does).

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax.rl import losses
    >>> zeros, one = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    >>> loss, _ = losses.clipped_surrogate(
    ...     zeros, zeros, zeros, jnp.array([3.0]), one, 2)
    >>> float(loss)
    -3.0

  Source: PPO, arXiv 1707.06347; truncated weights as in arXiv 2610.06647.
  """
  chex.assert_rank((logprobs, token_count), [2, 0])
  chex.assert_equal_shape((logprobs, old_logprobs, behavior_logprobs, mask))
  chex.assert_shape(advantages, logprobs.shape[:1])

  def clean(x):
    # Before the exponential, or a masked NaN would come back in the gradient.
    return jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)

  logprobs, old, behavior = map(
      clean, (logprobs, old_logprobs, behavior_logprobs))
  ratio = jnp.exp(logprobs - old)
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  advantage = jnp.asarray(advantages, jnp.float32)[:, None]
  gain = jnp.minimum(ratio * advantage, clipped * advantage)
  weight = jnp.ones_like(ratio)
  if importance_cap is not None:
    weight = jax.lax.stop_gradient(
        jnp.minimum(jnp.exp(old - behavior), importance_cap))
  count = jnp.maximum(token_count, 1)
  loss = -jnp.sum(jnp.where(mask, weight * gain, 0.0)) / count
  return loss, {
      "clipped_share": jnp.sum(mask & (ratio != clipped)) / count,
      "importance_mean": jnp.sum(clean(weight)) / count,
  }
