"""Laws of keys: fixed by names and numbers, different for different events."""

import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from logra_jax import keys


def bits(key):
  return np.asarray(jax.random.key_data(key))


def digest(word):
  hashed = hashlib.blake2b(word.encode(), digest_size=4).digest()
  return int.from_bytes(hashed, "little")


def test_a_name_is_folded_by_blake2b_not_by_the_salted_hash():
  key = jax.random.key(3)
  expected = jax.random.fold_in(key, digest("layers/kernel"))
  found = keys.fold_in_name(key, "layers/kernel")
  np.testing.assert_array_equal(bits(found), bits(expected))
  # Saved runs find their bases again only while this number stands.
  assert digest("layers/kernel") == 1365885030


def test_every_event_of_a_run_has_its_own_key():
  events = itertools.product((0, 1), ("sample", "probe"), (0, 1), (0, 1))
  drawn = {bits(keys.make(*event)).tobytes() for event in events}
  assert len(drawn) == 16


def test_a_traced_step_gives_the_key_of_the_number():
  traced = jax.jit(lambda step: keys.make(5, "sample", step, worker=2))
  np.testing.assert_array_equal(
      bits(traced(7)), bits(keys.make(5, "sample", 7, worker=2)))


def test_leaf_keys_differ_by_seed_refresh_path_and_layer():
  drawn = {
      bits(keys.leaf_key(jax.random.key(seed), refresh, path)).tobytes()
      for seed in (0, 1)
      for refresh in (0, 1)
      for path in ("a/kernel", "b/kernel", "a/0/kernel", "a/1/kernel",
                   "a/1/b/0/kernel", "a/0/b/1/kernel")}
  assert len(drawn) == 24


def test_batch_keys_are_leaf_keys_of_an_unstacked_model():
  seed = jax.random.key(11)
  stacked = keys.batch_keys(keys.leaf_key(seed, 4, "a/b/kernel"), (2, 3))
  assert stacked.shape == (2, 3)
  for i, j in np.ndindex(2, 3):
    separate = keys.leaf_key(seed, 4, f"a/{i}/b/{j}/kernel")
    np.testing.assert_array_equal(bits(stacked[i, j]), bits(separate))


def test_an_empty_batch_is_the_key_itself():
  key = jax.random.key(2)
  np.testing.assert_array_equal(bits(keys.batch_keys(key, ())), bits(key))


def test_a_leaf_has_one_name_in_dicts_lists_and_nnx_variables():
  tree = {"layers": [{"kernel": 1.0}, {"kernel": 2.0}]}
  names = [keys.leaf_path(p) for p, _ in jax.tree.leaves_with_path(tree)]
  assert names == ["layers/0/kernel", "layers/1/kernel"]
  path = (jax.tree_util.DictKey("layers"), jax.tree_util.SequenceKey(1),
          jax.tree_util.DictKey("kernel"))
  variable = (*path, jax.tree_util.GetAttrKey("value"))
  assert keys.leaf_path(path) == keys.leaf_path(variable) == names[1]
  assert keys.leaf_path(()) == ""


def test_integer_keys_of_a_dict_are_layers_as_places_in_a_list_are():
  as_list, as_dict = {"w": [jnp.ones(1)]}, {"w": {0: jnp.ones(1)}}
  name = lambda tree: keys.leaf_path(jax.tree.leaves_with_path(tree)[0][0])
  assert name(as_list) == name(as_dict) == "w/0"
