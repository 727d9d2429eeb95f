"""A checkpoint is whole and the bits that were saved, or it does not count."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from logra_jax import checkpoint
from logra_jax import optimizers
from logra_jax import sharding
from tests import support


def make_state():
  """Weights, moments, bases, counters and keys of an optimiser in use."""
  params = {"q_proj": {"kernel": jnp.asarray(support.normal(2, 16, 8))},
            "norm": {"scale": jnp.asarray(support.normal(16))}}
  tx = optimizers.logra(1e-2, rank=4, kl_budget=None)
  _, state = tx.update(support.like(params), tx.init(params), params)
  return {"params": params, "opt_state": state}


def target_of(tree, mesh):
  """Shapes of a tree with its leading axis of 16 or 8 spread where it is."""
  def one(x):
    spec = P(*(("data" if size % 8 == 0 else None) for size in x.shape[:1]))
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
  return jax.tree.map(one, tree)


@pytest.fixture
def warnings():
  return []


@pytest.mark.parametrize("devices", [8, 4, 2, 1])
def test_saved_on_eight_devices_it_is_the_same_on_fewer(tmp_path, devices):
  meshes = [sharding.make_mesh({"data": n}, jax.devices()[:n])
            for n in (8, devices)]
  state = make_state()
  placed = jax.tree.map(
      lambda x, t: jax.device_put(x, t.sharding), state,
      target_of(state, meshes[0]))
  target = target_of(state, meshes[1])
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, placed, {})
    found = checkpoints.restore(target)
  support.equal(found.tree, state)
  same = jax.tree.map(
      lambda x, t: x.sharding.is_equivalent_to(t.sharding, x.ndim),
      found.tree, target)
  assert all(jax.tree.leaves(same))


def test_arrays_may_be_donated_right_after_a_save(tmp_path):
  spoil = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
  value = support.normal(1 << 18)
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    array = jnp.array(value)
    checkpoints.save(1, {"w": array}, {})
    spoil(array)
    found = checkpoints.restore({"w": jnp.zeros(1 << 18)})
  np.testing.assert_array_equal(found.tree["w"], value)


def test_a_step_after_a_restore_compiles_nothing_new(tmp_path):
  mesh = sharding.make_mesh({"data": 8})
  state = make_state()
  target = target_of(state, mesh)
  placings = jax.tree.map(lambda t: t.sharding, target)
  step = jax.jit(
      lambda s: jax.tree.map(
          lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.number) else x, s),
      donate_argnums=0, in_shardings=(placings,), out_shardings=placings)
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda name, _, **__: "compile" in name and compiled.append(name))
  state = step(jax.device_put(state, placings))
  assert compiled
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, state, {})
    found = checkpoints.restore(target)
  support.equal(found.tree, state)
  compiled.clear()
  step(found.tree)
  assert not compiled
  assert found.tree["params"]["q_proj"]["kernel"].is_deleted()


def test_the_last_few_and_the_best_are_kept(tmp_path):
  scores = {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: None, 7: 0.2}
  with checkpoint.Checkpoints(tmp_path, keep_last=2) as checkpoints:
    for step, score in scores.items():
      checkpoints.save(step, {"w": jnp.full(3, step)}, {}, score)
    checkpoints.wait()
    assert checkpoints.steps() == [4, 6, 7] and checkpoints.best() == 4
    best = checkpoints.restore({"w": jnp.zeros(3, int)}, checkpoints.best())
  assert best.tree["w"].tolist() == [4, 4, 4]


def test_a_save_that_was_cut_off_does_not_count(tmp_path, warnings):
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, {"w": jnp.ones(3)}, {})
  (tmp_path / "2.orbax-checkpoint-tmp" / "tree").mkdir(parents=True)
  with checkpoint.Checkpoints(tmp_path, warn=warnings.append) as checkpoints:
    assert checkpoints.restore({"w": jnp.zeros(3)}).step == 1
  warning, = warnings
  assert "save of 2 was cut off" in warning


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_broken_checkpoint_is_set_aside_for_the_one_before(
    tmp_path, warnings, damage):
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    for step in (1, 2):
      checkpoints.save(step, {"w": jnp.full(4096, step)}, {"at": step})
  data = [p for p in (tmp_path / "2" / "tree").rglob("*")
          if p.is_file() and p.parent.name == "d"]
  assert data
  for path in data:
    path.write_bytes(path.read_bytes()[:20]) if damage == "cut" else (
        path.unlink())
  target = {"w": jnp.zeros(4096, int)}
  with checkpoint.Checkpoints(tmp_path, warn=warnings.append) as checkpoints:
    found = checkpoints.restore(target)
    assert found.step == 1 and found.record["at"] == 1
    assert "checkpoint 2 cannot be read" in warnings[0]
    checkpoints.set_aside(found.step)
    assert checkpoints.steps() == [1] and (tmp_path / "broken-2").exists()
    checkpoints.save(2, {"w": jnp.full(4096, 5)}, {})
    assert checkpoints.restore(target).tree["w"][0] == 5


def test_bits_that_changed_on_disk_are_not_taken_for_the_saved(
    tmp_path, monkeypatch):
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, {"w": jnp.ones(3)}, {})
    monkeypatch.setattr(
        checkpoints._manager, "restore", lambda step, args: {
            "tree": {"w": jnp.array([1.0, 1.0, 1.0000001])},
            "record": checkpoints_record})
    checkpoints_record = {"fingerprint": int(
        checkpoints._fingerprint({"w": jnp.ones(3)}))}
    with pytest.raises(ValueError, match="not the bits written"):
      checkpoints.restore({"w": jnp.zeros(3)})


def test_a_full_disk_is_reported_and_costs_no_earlier_checkpoint(
    tmp_path, warnings):
  large = {"w": jax.random.normal(jax.random.key(0), (1 << 18,))}
  with checkpoint.Checkpoints(
      tmp_path, keep_last=1, warn=warnings.append) as checkpoints:
    checkpoints.save(1, large, {})
    assert checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
      checkpoints.save(2, large, {})
      assert not checkpoints.wait()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "could not be written" in warnings[0]
    assert checkpoints.restore(large).step == 1
    checkpoints.save(3, large, {})
    assert checkpoints.wait() and checkpoints.steps() == [3]


def test_keeping_none_is_refused(tmp_path):
  with pytest.raises(ValueError, match="keep_last 0"):
    checkpoint.Checkpoints(tmp_path, keep_last=0)
