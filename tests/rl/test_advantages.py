"""Laws of the advantages."""

import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.rl import advantages

RNG = np.random.default_rng()

ESTIMATORS = {
    "grpo": advantages.grpo,
    "rloo": advantages.rloo,
    "reinforce": lambda rewards: advantages.reinforce(rewards, 0.0)[0],
}


def normal(*shape):
  return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("group", [1, 2, 7])
def test_grpo_standardises_each_group_by_its_population(group):
  rewards = normal(3, group)
  r = rewards.astype(np.float64)
  expected = [(row - row.mean()) / (row.std() + 1e-6) for row in r]
  np.testing.assert_allclose(
      advantages.grpo(rewards), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [2, 7])
def test_rloo_subtracts_the_mean_of_the_others(group):
  rewards = normal(3, group)
  r = rewards.astype(np.float64)
  expected = [
      [row[i] - np.delete(row, i).mean() for i in range(group)] for row in r]
  np.testing.assert_allclose(
      advantages.rloo(rewards), expected, rtol=1e-5, atol=1e-6)


def test_reinforce_uses_the_baseline_before_its_update():
  batches, baseline, expected = normal(3, 4, 2), jnp.zeros([]), 0.0
  for rewards in batches:
    found, baseline = advantages.reinforce(rewards, baseline)
    np.testing.assert_allclose(
        found, rewards.astype(np.float64) - expected, rtol=1e-5, atol=1e-6)
    expected = 0.9 * expected + 0.1 * rewards.astype(np.float64).mean()
    np.testing.assert_allclose(baseline, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay, expected", [(0.0, 0.25), (1.0, 3.0)])
def test_decay_is_the_share_of_the_new_mean(decay, expected):
  rewards = jnp.array([[1.0, 5.0]])
  _, baseline = advantages.reinforce(rewards, 0.25, decay)
  assert float(baseline) == expected


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(name):
  # Of these values several have a float32 mean that is not the value itself.
  values = np.concatenate([[0.1, -0.01, 0.7, 1e-30, 1e30], normal(200)])
  for group in (2, 3, 6, 7, 10):
    rewards = np.repeat(values.astype(np.float32)[:, None], group, axis=1)
    found = np.asarray(ESTIMATORS[name](rewards))
    assert found.shape == rewards.shape
    assert not found.any()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_does_not_see_the_others(name):
  rewards = normal(3, 4)
  changed = rewards.copy()
  changed[0] = 0.1
  found, other = (ESTIMATORS[name](r) for r in (rewards, changed))
  np.testing.assert_array_equal(found[1:], other[1:])
  assert not np.asarray(other[0]).any()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_advantages_of_a_group_sum_to_zero(name):
  found = np.asarray(ESTIMATORS[name](normal(5, 6)), np.float64)
  np.testing.assert_allclose(found.sum(1), 0.0, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("group", [4, 64])
def test_one_success_has_an_advantage_of_at_most_ten(name, group):
  rewards = np.zeros((1, group), np.float32)
  rewards[0, 0] = 1.0
  assert np.abs(ESTIMATORS[name](rewards)).max() <= 10.0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_float32_whatever_the_rewards(name):
  rewards = np.array([[1, 0, 0], [1, 1, 0]])
  expected = ESTIMATORS[name](rewards.astype(np.float32))
  for dtype in (np.int32, bool, jnp.bfloat16):
    found = ESTIMATORS[name](jnp.asarray(rewards, dtype))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)


def test_rloo_refuses_a_group_of_one():
  with pytest.raises(ValueError, match="not 1: raise the group size"):
    advantages.rloo(np.ones((3, 1), np.float32))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rewards_without_a_group_axis_are_refused(name):
  with pytest.raises(AssertionError, match="rank"):
    ESTIMATORS[name](np.ones(4, np.float32))


def test_a_baseline_for_each_completion_is_refused():
  with pytest.raises(AssertionError, match="rank"):
    advantages.reinforce(np.ones((2, 2), np.float32), np.zeros(2))
