"""Laws of token log-probabilities and of the clipped surrogate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.rl import losses

RNG = np.random.default_rng()
BAD = [np.nan, np.inf, -np.inf]
OPTIONS = ("clip_low", "clip_high", "importance_cap")

# Compiled once for each shape, as an experiment does.
token_logprobs = jax.jit(losses.token_logprobs)
clipped_surrogate = jax.jit(losses.clipped_surrogate, static_argnames=OPTIONS)
both = jax.jit(
    jax.value_and_grad(losses.clipped_surrogate, has_aux=True),
    static_argnames=OPTIONS)


def normal(*shape, scale=1.0):
  return (scale * RNG.standard_normal(shape)).astype(np.float32)


def batch(lengths, width):
  """(logprobs, old, behavior, advantages, mask); ratios on both clip sides."""
  logprobs = -np.abs(normal(len(lengths), width))
  old, behavior = (logprobs + normal(*logprobs.shape, scale=0.4)
                   for _ in range(2))
  mask = np.arange(width) < np.array(lengths)[:, None]
  return logprobs, old, behavior, normal(len(lengths)), mask


def gradient(*args, **options):
  """Loss and its gradient in the logprobs."""
  (loss, _), grad = both(*args, **options)
  return loss, grad


def reference(logprobs, old, behavior, advantages, mask, count, *, low=0.2,
              high=0.2, cap=2.0):
  """Loss and gradient token by token in float64."""
  loss, grad = 0.0, np.zeros(logprobs.shape)
  for i, t in zip(*np.nonzero(mask), strict=True):
    a, o = float(advantages[i]), float(old[i, t])
    ratio = np.exp(float(logprobs[i, t]) - o)
    weight = 1.0
    if cap is not None:
      weight = min(np.exp(o - float(behavior[i, t])), cap)
    held = ratio > 1 + high if a > 0 else ratio < 1 - low
    bound = 1 + high if a > 0 else 1 - low
    loss -= weight * a * (bound if held else ratio) / count
    grad[i, t] = 0.0 if held else -weight * a * ratio / count
  return loss, grad


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_token_logprobs_are_the_log_of_the_softmax(temperature):
  logits, tokens = normal(2, 5, 11, scale=4.0), RNG.integers(0, 11, (2, 5))
  z = logits.astype(np.float64) / temperature
  p = np.exp(z - z.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  expected = np.log(np.take_along_axis(p, tokens[..., None], -1)[..., 0])
  found = token_logprobs(logits, tokens, temperature)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gradient_of_token_logprobs_is_one_hot_less_softmax():
  logits, tokens = normal(2, 3, 5), RNG.integers(0, 5, (2, 3))
  found = jax.grad(
      lambda z: token_logprobs(z, tokens, 0.7).sum())(logits)
  z = np.exp(logits.astype(np.float64) / 0.7)
  expected = (np.eye(5)[tokens] - z / z.sum(-1, keepdims=True)) / 0.7
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_common_offset_of_the_logits_leaves_logprobs_alone():
  # Multiples of 2^-10, so that the offset itself rounds nothing.
  logits = np.round(normal(3, 7, 9) * 1024) / 1024
  tokens = RNG.integers(0, 9, (3, 7))
  np.testing.assert_array_equal(
      token_logprobs(logits + np.float32(1024), tokens),
      token_logprobs(logits, tokens))


def test_token_logprobs_of_bfloat16_logits_are_computed_in_float32():
  logits = jnp.asarray(normal(2, 3, 50), jnp.bfloat16)
  tokens = RNG.integers(0, 50, (2, 3))
  found = token_logprobs(logits, tokens, 0.7)
  assert found.dtype == jnp.float32
  np.testing.assert_array_equal(
      found, token_logprobs(logits.astype(jnp.float32), tokens, 0.7))


@pytest.mark.parametrize("low, high, cap", [
    (0.2, 0.2, 2.0), (0.1, 0.3, 1.1), (0.2, 0.2, None)])
def test_loss_and_gradient_equal_a_float64_reference(low, high, cap):
  rows = batch([5, 1, 4], 5)
  loss, grad = gradient(
      *rows, 10, clip_low=low, clip_high=high, importance_cap=cap)
  expected = reference(*rows, 10, low=low, high=high, cap=cap)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(grad, expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_microbatches_of_any_size_give_the_gradient_of_the_batch(size):
  rows = batch([1, 63, 63, 1], 63)
  count = rows[-1].sum()
  loss, grad = gradient(*rows, count)
  parts = [[x[i:i + size] for x in rows] for i in range(0, 4, size)]
  found = [gradient(*part, count) for part in parts]
  # Each token's gradient is its own product: not one bit may differ.
  np.testing.assert_array_equal(np.concatenate([g for _, g in found]), grad)
  np.testing.assert_allclose(
      sum(float(x) for x, _ in found), loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_shared_parameters_get_the_same_gradient_from_any_split(size):
  features, weight = normal(6, 63, 3), normal(3, scale=0.1)
  _, old, behavior, advantages, mask = batch([1, 63, 7, 1, 63, 30], 63)
  count = mask.sum()
  rows = features, old, behavior, advantages, mask

  @jax.jit
  @jax.grad
  def compiled(w, features, *rest):
    return clipped_surrogate(features @ w - 1.0, *rest, count)[0]

  def grad(part):
    return np.asarray(compiled(weight, *(x[part] for x in rows)), np.float64)

  found = sum(grad(slice(i, i + size)) for i in range(0, 6, size))
  np.testing.assert_allclose(found, grad(slice(None)), rtol=1e-5, atol=1e-6)


def test_metrics_add_over_microbatches():
  rows = batch([1, 63, 20], 63)
  _, whole = clipped_surrogate(*rows, 84)
  parts = [clipped_surrogate(*(x[i:i + 1] for x in rows), 84)[1]
           for i in range(3)]
  found = jax.tree.map(lambda *x: sum(x), *parts)
  assert whole
  for name, value in whole.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_masking_a_row_equals_the_loss_without_it():
  rows = batch([4, 2, 5], 5)
  kept = [np.delete(x, 1, axis=0) for x in rows]
  rows[-1][1] = False
  loss, grad = gradient(*rows, 9)
  expected, rest = gradient(*kept, 9)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_array_equal(np.delete(grad, 1, axis=0), rest)
  assert not np.asarray(grad[1]).any()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("field", [0, 1, 2])
def test_masked_tokens_count_nothing_whatever_they_hold(bad, field):
  rows = batch([4, 2, 5], 5)
  loss, grad = gradient(*rows, 11)
  _, metrics = clipped_surrogate(*rows, 11)
  rows[field][~rows[-1]] = bad
  found, changed = gradient(*rows, 11)
  np.testing.assert_array_equal(found, loss)
  np.testing.assert_array_equal(changed, grad)
  _, found = clipped_surrogate(*rows, 11)
  jax.tree.map(np.testing.assert_array_equal, found, metrics)


@pytest.mark.parametrize("bad", BAD)
def test_a_masked_row_may_have_any_advantage(bad):
  rows = batch([4, 0, 5], 5)
  loss, grad = gradient(*rows, 9)
  rows[3][1] = bad
  found, changed = gradient(*rows, 9)
  np.testing.assert_array_equal(found, loss)
  np.testing.assert_array_equal(changed, grad)


@pytest.mark.parametrize("bad", [0.0, *BAD])
def test_no_tokens_at_all_give_exactly_zero(bad):
  rows = batch([0, 0, 0], 5)
  for x in rows[:3]:
    x[...] += bad
  for count in (0, jnp.zeros([], jnp.int32), jnp.zeros([])):
    loss, grad = gradient(*rows, count)
    _, metrics = clipped_surrogate(*rows, count)
    for value in (loss, grad, *metrics.values()):
      assert not np.asarray(value).any()  # NaN is truthy


def test_a_nan_that_counts_is_not_hidden():
  rows = batch([4, 2, 5], 5)
  rows[0][1, 1] = np.nan
  assert np.isnan(gradient(*rows, 11)[0])


def test_on_policy_the_loss_is_minus_the_mean_advantage():
  logprobs, _, _, advantages, mask = batch([1, 63, 7], 63)
  # Small integers, so that the sums are exact: the ratio is 1, not nearly 1.
  advantages = np.array([3.0, -2.0, 5.0], np.float32)
  loss, grad = gradient(logprobs, logprobs, logprobs, advantages, mask, 64)
  each = np.where(mask, advantages[:, None], 0.0)
  assert float(loss) == -each.sum() / 64
  np.testing.assert_array_equal(grad, -each / 64)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_policy_the_ratio_is_exactly_one_in_every_microbatch(size):
  logits, tokens = normal(4, 9, 6, scale=3.0), RNG.integers(0, 6, (4, 9))
  advantages = np.array([1.0, -2.0, 4.0, -8.0], np.float32)
  mask = np.ones((size, 9), bool)

  @jax.jit
  def loss(logits, tokens, advantages):
    x = token_logprobs(logits, tokens, 0.7)
    old = jax.lax.stop_gradient(x)
    # Without any room to clip, one ratio off by an ulp would be counted.
    return clipped_surrogate(
        x, old, old, advantages, mask, 1, clip_low=0.0, clip_high=0.0)

  for i in range(0, 4, size):
    part = slice(i, i + size)
    found, metrics = loss(logits[part], tokens[part], advantages[part])
    assert float(found) == -9.0 * advantages[part].sum()
    assert float(metrics["clipped_share"]) == 0.0


@pytest.mark.parametrize("advantage, ratio, expected, moves", [
    (1.0, 1.5, 1.3, False), (1.0, 0.5, 0.5, True),
    (-1.0, 1.5, -1.5, True), (-1.0, 0.5, -0.9, False)])
def test_the_clip_only_ever_lowers_the_gain(
    advantage, ratio, expected, moves):
  old = np.zeros((1, 1), np.float32)
  loss, grad = gradient(
      np.full_like(old, np.log(ratio)), old, old, np.array([advantage]),
      np.ones((1, 1), bool), 1, clip_low=0.1, clip_high=0.3)
  np.testing.assert_allclose(loss, -expected, rtol=1e-6)
  np.testing.assert_allclose(grad, [[-expected * moves]], rtol=1e-6)


@pytest.mark.parametrize("cap, expected", [
    (2.0, [0.5, 1.5, 2.0]), (1.0, [0.5, 1.0, 1.0]), (None, [1.0, 1.0, 1.0])])
def test_the_importance_weight_is_truncated_at_its_cap(cap, expected):
  old = np.zeros((1, 3), np.float32)
  behavior = -np.log(np.array([[0.5, 1.5, 40.0]], np.float32))
  mask, advantages = np.ones((1, 3), bool), np.ones(1, np.float32)
  _, grad = gradient(
      old, old, behavior, advantages, mask, 1, importance_cap=cap)
  np.testing.assert_allclose(-grad, [expected], rtol=1e-6)


def test_only_the_ratio_carries_a_gradient_to_the_old_logprobs():
  logprobs, old, behavior, advantages, mask = batch([4, 2, 5], 5)
  found = jax.grad(lambda o, b: clipped_surrogate(
      logprobs, o, b, advantages, mask, 11)[0], argnums=(0, 1))(old, behavior)
  # d ratio / d old = -d ratio / d logprobs; the weight adds nothing.
  _, grad = gradient(logprobs, old, behavior, advantages, mask, 11)
  np.testing.assert_allclose(found[0], -grad, rtol=1e-6)
  assert not np.asarray(found[1]).any()


def test_metrics_count_clipped_tokens_and_weights():
  old = np.zeros((2, 3), np.float32)
  logprobs = np.log(np.array([[1.0, 1.5, 0.5], [1.1, 9.0, 9.0]], np.float32))
  behavior = -np.log(np.array([[1.0, 0.5, 7.0], [1.5, 9.0, 9.0]], np.float32))
  mask = np.array([[1, 1, 1], [1, 0, 0]], bool)
  _, metrics = clipped_surrogate(
      logprobs, old, behavior, np.ones(2, np.float32), mask, 4)
  np.testing.assert_allclose(metrics["clipped_share"], 2 / 4)
  np.testing.assert_allclose(
      metrics["importance_mean"], (1.0 + 0.5 + 2.0 + 1.5) / 4, rtol=1e-6)


def test_bfloat16_logprobs_are_summed_in_float32():
  zeros, mask = jnp.zeros((1, 257), jnp.bfloat16), np.ones((1, 257), bool)
  one = jnp.ones(1, jnp.bfloat16)
  loss, _ = clipped_surrogate(zeros, zeros, zeros, one, mask, 1)
  assert loss.dtype == jnp.float32
  assert float(loss) == -257.0  # which bfloat16 cannot hold


@pytest.mark.parametrize("change", [
    lambda a, m: (a, m[:, :-1], 6),
    lambda a, m: (a[:-1], m, 6),
    lambda a, m: (a[:, None] * m, m, 6),
    lambda a, m: (a, m, np.full(2, 6)),
], ids=["mask", "rows", "advantages by token", "count by row"])
def test_shapes_that_would_broadcast_are_refused(change):
  logprobs, old, behavior, advantages, mask = batch([4, 2], 4)
  with pytest.raises(AssertionError):
    clipped_surrogate(
        logprobs, old, behavior, *change(advantages, mask))


def test_one_row_without_its_axis_is_refused():
  row, mask = np.zeros(3, np.float32), np.ones(3, bool)
  with pytest.raises(AssertionError, match="rank"):
    clipped_surrogate(row, row, row, row, mask, 3)
  with pytest.raises(AssertionError, match="rank"):
    token_logprobs(normal(3, 5), np.zeros(3, np.int32))
