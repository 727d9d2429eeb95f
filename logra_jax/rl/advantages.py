"""Advantages: how much better than expected each completion was."""

import chex
import jax
import jax.numpy as jnp


def grpo(rewards: jax.Array, eps: float = 1e-6) -> jax.Array:
  """Rewards standardised in each group. [P, G] -> [P, G] float32.

    A = (r - mean(r)) / (std(r) + eps)

  Args:
    rewards: one row a prompt.
    eps: keeps a nearly constant group finite.

  Returns:
    Advantages; a group of equal rewards gives exactly 0.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax.rl import advantages
    >>> print(advantages.grpo(jnp.array([[1.0, 0.0], [0.1, 0.1]])).round(3))
    [[ 1. -1.]
     [ 0.  0.]]

  Source: GRPO, arXiv 2402.03300.
  """
  chex.assert_rank(rewards, 2)
  rewards = jnp.asarray(rewards, jnp.float32)
  centred = _centre(rewards, rewards.mean(1, keepdims=True))
  return centred / (jnp.sqrt(jnp.mean(centred**2, 1, keepdims=True)) + eps)


def rloo(rewards: jax.Array) -> jax.Array:
  """Rewards less the mean of the group's others. [P, G] -> [P, G] float32.

    A_i = r_i - mean_{j != i} r_j

  Args:
    rewards: one row a prompt, G >= 2.

  Returns:
    Advantages; a group of equal rewards gives exactly 0.

  Raises:
    ValueError: if a group has one completion only.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax.rl import advantages
    >>> print(advantages.rloo(jnp.array([[1.0, 0.0, 0.0]])))
    [[ 1.  -0.5 -0.5]]

  Source: RLOO, arXiv 2402.14740.
  """
  chex.assert_rank(rewards, 2)
  group = rewards.shape[1]
  if group < 2:
    raise ValueError(
        f"rloo needs groups of 2 or more completions, not {group}: raise the"
        " group size, or use reinforce")
  rewards = jnp.asarray(rewards, jnp.float32)
  others = rewards.sum(1, keepdims=True) - rewards
  return _centre(rewards, others / (group - 1))


def reinforce(
    rewards: jax.Array, baseline: jax.Array | float, decay: float = 0.1
) -> tuple[jax.Array, jax.Array]:
  """Rewards less a running mean. [P, G], [] -> ([P, G] float32, []).

  The baseline starts at 0 and is used before its own update:

    A = r - b,    b <- b + decay (mean(r) - b)

  Args:
    rewards: of all completions.
    baseline: b before this batch.
    decay: share of the new mean.

  Returns:
    (advantages, the next baseline).

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax.rl import advantages
    >>> advantage, baseline = advantages.reinforce(jnp.ones((2, 1)), 0.0)
    >>> round(float(baseline), 3)
    0.1

  Source: LoGRA's recipe, arXiv 2610.06647.
  """
  chex.assert_rank((rewards, baseline), [2, 0])
  rewards = jnp.asarray(rewards, jnp.float32)
  baseline = jnp.asarray(baseline, jnp.float32)
  return rewards - baseline, baseline + decay * (rewards.mean() - baseline)


def _centre(rewards, mean):
  """r - mean, exactly 0 in a group of equal rewards.

  The mean of equal numbers is rounded: four times 0.1 would leave 1e-9, which a
  standard deviation of the same size turns into a full advantage.
  """
  equal = jnp.all(rewards == rewards[:, :1], axis=1, keepdims=True)
  return jnp.where(equal, 0.0, rewards - mean)
