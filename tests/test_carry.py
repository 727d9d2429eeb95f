"""Laws of what a refresh does to moments, and of what it refuses to touch."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import bases
from tests.support import equal
from tests.support import like
from tests.support import normal
from tests.support import quick

MODES = ["keep", "reset", "rotate"]


def f64(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found, expected, rtol=2e-5):
  np.testing.assert_allclose(
      found, expected, rtol=0, atol=rtol * float(np.abs(expected).max()))


def sketched(inner, basis=bases.rademacher, **kwargs):
  """`logra_jax.sketched`, compiled, with a law that compiles quickly."""
  tx = logra_jax.sketched(inner, rank=3, basis=basis, **kwargs)
  return optax.GradientTransformationExtraArgs(
      quick(tx.init), quick(tx.update))


@pytest.mark.parametrize("carry", MODES)
def test_a_refresh_keeps_resets_or_rotates_first_moments(carry):
  params = {"w": normal(2, 7, 5), "b": normal(5)}
  tx = sketched(optax.trace(0.9), carry=carry)
  state, g = tx.init(params), like(params)
  _, new = tx.update(g, state, params)
  old, v = f64((state.basis["w"], new.basis["w"]))
  moment = np.swapaxes(old, -1, -2) @ f64(g["w"])
  turned = np.swapaxes(v, -1, -2) @ (old @ moment)
  if carry == "reset":
    equal(new.inner.sketched.trace["w"], np.zeros((2, 3, 5), np.float32))
  else:
    expected = moment if carry == "keep" else 3 / 7 * turned
    close(new.inner.sketched.trace["w"], expected)
  equal(new.inner.dense.trace["b"], g["b"])
  assert new.inner.sketched.trace["b"] is None


def test_between_refreshes_no_mode_touches_a_moment():
  w, gradients = normal(7, 5), [normal(7, 5) for _ in range(2)]
  found = []
  for carry in MODES:
    tx = sketched(optax.trace(0.9), carry=carry, refresh_every=3)
    state = tx.init(w)
    for g in gradients:
      _, state = tx.update(g, state, w)
    found.append(state)
  equal(found[1].inner, found[0].inner)
  equal(found[2].inner, found[0].inner)


@pytest.mark.parametrize("inner", [
    optax.adam(0.1), optax.nadam(0.1), optax.sgd(0.1, momentum=0.9)],
    ids=["adam", "nadam", "momentum"])
def test_the_step_after_a_reset_is_the_first_step_of_a_fresh_one(inner):
  w = normal(7, 5)
  tx = sketched(inner, refresh_every=2)
  state = tx.init(w)
  for _ in range(2):
    _, state = tx.update(like(w), state, w)
  g, v = like(w), np.asarray(state.basis)
  updates, _ = tx.update(g, state, w)
  first = quick(lambda s: inner.update(s, inner.init(s), s)[0])
  close(updates, f64(v) @ f64(first(v.T @ g)), rtol=5e-5)


def test_a_reset_leaves_the_learning_rate_schedule_running():
  rates = [0.5, 0.25, 0.125]
  w = normal(7, 5)
  tx = sketched(
      optax.sgd(lambda count: jnp.asarray(rates)[count], momentum=0.9))
  state = tx.init(w)
  for rate in rates:
    g, v = like(w), f64(state.basis)
    updates, state = tx.update(g, state, w)
    close(updates, -rate * v @ (v.T @ f64(g)))


def test_a_rotated_norm_does_not_grow_over_refreshes():
  w = normal(12, 5)
  tx = sketched(optax.trace(1.0), carry="rotate", basis=bases.stiefel)
  _, state = tx.update(like(w), tx.init(w), w)
  norms = []
  for _ in range(8):
    norms.append(np.linalg.norm(state.inner.sketched.trace))
    _, state = tx.update(np.zeros_like(w), state, w)
  assert norms[0] > 0
  # Without the factor r/n it doubles at each of them.
  assert (np.diff(norms) < 1e-6 * norms[0]).all()


@pytest.mark.parametrize("carry", ["reset", "rotate"])
def test_moments_per_output_and_their_count_outlive_a_refresh(carry):
  w = normal(7, 5)
  row_adam = logra_jax.scale_by_row_adam()
  tx, kept = sketched(row_adam, carry=carry), sketched(row_adam, carry="keep")
  state, kept_state = tx.init(w), kept.init(w)
  for i in range(3):
    g = like(w)
    _, state = tx.update(g, state, w)
    _, kept_state = kept.update(g, kept_state, w)
    assert int(state.inner.sketched.count) == i + 1
  equal(state, kept_state)


UNKNOWN = {
    "ema": optax.ema(0.9),
    "amsgrad": optax.amsgrad(0.1),
    "adafactor": optax.adafactor(0.1),
    "adagrad": optax.adagrad(0.1),
    "optimistic": optax.optimistic_gradient_descent(0.1),
    "chained": optax.chain(optax.clip(1.0), optax.ema(0.9)),
    "masked": optax.masked(optax.ema(0.9), {"w": True, "o": False, "b": False}),
    "partition": optax.partition(
        {"e": optax.ema(0.9), "s": optax.sgd(0.1)},
        {"w": "e", "o": "s", "b": "s"}),
}


@pytest.mark.parametrize("carry", ["reset", "rotate"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_moments_are_refused_unless_kept(name, carry):
  params = {"w": normal(7, 5), "o": normal(7, 5), "b": normal(5)}
  make = functools.partial(
      logra_jax.sketched, UNKNOWN[name], rank=3, refresh_every=2)
  jax.eval_shape(make(carry="keep").init, params)
  with pytest.raises(ValueError, match="does not know state field.*'keep'"):
    jax.eval_shape(make(carry=carry).init, params)


@pytest.mark.parametrize("inner", [
    optax.adam(0.1), optax.rmsprop(0.1),
    optax.masked(optax.adam(0.1), {"w": True, "o": False})])
def test_second_moments_cannot_be_rotated(inner):
  tx = logra_jax.sketched(inner, rank=3, refresh_every=2, carry="rotate")
  with pytest.raises(ValueError, match="rotate.*'nu'.*reset"):
    jax.eval_shape(tx.init, {"w": normal(7, 5), "o": normal(7, 5)})


def test_adam_reset_at_every_update_is_warned_of_and_nothing_else_is():
  params = {"w": normal(7, 5), "b": normal(5)}
  init = lambda inner, **kwargs: jax.eval_shape(
      logra_jax.sketched(inner, rank=3, **kwargs).init, params)
  with pytest.warns(UserWarning, match="refresh_every=1.*first step"):
    init(optax.adam(0.1))
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    init(optax.adam(0.1), refresh_every=2)
    init(optax.adam(0.1), carry="keep")
    init(optax.lion(0.1))
    init(logra_jax.scale_by_row_adam())
    # Nothing is sketched, so nothing is ever reset.
    init(optax.adam(0.1), where=lambda path, leaf: False)


@pytest.mark.parametrize("carry", ["reset", "rotate"])
def test_muon_on_matrices_has_no_second_moments_to_refuse_or_warn_of(carry):
  params = {"w": normal(7, 5), "b": normal(5)}
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    tx = logra_jax.sketched(optax.contrib.muon(0.1), rank=3, carry=carry)
    jax.eval_shape(tx.init, params)
