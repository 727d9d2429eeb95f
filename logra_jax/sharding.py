"""Devices, the mesh, and the one table that says where every array lives.

A rule gives the mesh axes of a weight's last dimensions by its path. State of
an optimiser follows its weight: a dimension that it shares with the weight is
sharded as the weight's, whatever the state is (basis, sketch, moment).
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from logra_jax import keys

AXES = ("data", "fsdp", "model", "expert")

# (path pattern, axes of the last dimensions); the first match counts.
RULES = (
    (r"(q|k|v|gate|up)_proj/kernel$", ("fsdp", "model")),
    (r"(o|down)_proj/kernel$", ("model", "fsdp")),
    (r"embed/embedding$", ("model", "fsdp")),
    (r"lm_head/kernel$", ("fsdp", "model")),
    (r"norm/scale$", (None,)),
)

# Rows of a batch are spread over both data axes.
BATCH = ("data", "fsdp")
ACTIVATIONS = {"activation": P(BATCH, None, None), "batch": P(BATCH)}


def make_mesh(sizes: Mapping[str, int], devices=None) -> Mesh:
  """A mesh with axes data, fsdp, model, expert; those not named have size 1.

  Args:
    sizes: axis name -> number of devices.
    devices: default, all of the process.

  Returns:
    The mesh, its axes of the automatic kind.

  Raises:
    ValueError: for an unknown axis or a product that is not the device count.

  Example:
    >>> import jax
    >>> from logra_jax import sharding
    >>> mesh = sharding.make_mesh({"data": 1}, jax.devices()[:1])
    >>> dict(mesh.shape)
    {'data': 1, 'fsdp': 1, 'model': 1, 'expert': 1}
  """
  devices = jax.devices() if devices is None else devices
  for name, size in sizes.items():
    if name not in AXES:
      raise ValueError(f"mesh axis {name!r} is unknown: choose from {AXES}")
    if size < 1:
      raise ValueError(f"mesh.{name} {size} is below 1")
  shape = tuple(sizes.get(name, 1) for name in AXES)
  if math.prod(shape) != len(devices):
    raise ValueError(
        f"a mesh of {dict(sizes)} takes {math.prod(shape)} devices and"
        f" {len(devices)} are there: change the mesh sizes or the devices")
  # Explicit axes, the default of newer jax, refuse ordinary contractions of
  # sharded arrays.
  return Mesh(
      np.asarray(devices).reshape(shape), AXES,
      axis_types=(AxisType.Auto,) * len(AXES))


def constrain(x: jax.Array, kind: str) -> jax.Array:
  """Asks for an activation's sharding in the current mesh, if there is one."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, ACTIVATIONS[kind])


def param_specs(params: Any, mesh: Mesh) -> Any:
  """PartitionSpec of each weight by the table.

  Args:
    params: weights or their shapes.
    mesh: the mesh.

  Returns:
    A tree of PartitionSpecs.

  Raises:
    ValueError: for a weight no rule names, or a dimension its axis does not
      divide.
  """
  def one(path, leaf):
    name = keys.leaf_path(path)
    for pattern, axes in RULES:
      if re.search(pattern, name):
        spec = (None,) * (leaf.ndim - len(axes)) + axes
        _check_divides(name, leaf.shape, spec, mesh)
        return P(*spec)
    raise ValueError(f"no sharding rule names {name!r}: add one to RULES")
  return jax.tree.map_with_path(one, params)


def state_specs(state: Any, params: Any, mesh: Mesh) -> Any:
  """PartitionSpec of each array of an optimiser state, from its weight's.

  Args:
    state: optimiser state or its shapes.
    params: the weights it was initialised from, or their shapes.
    mesh: the mesh.

  Returns:
    A tree of PartitionSpecs; arrays of no weight are replicated.
  """
  specs = param_specs(params, mesh)
  weights = {
      keys.leaf_path(path): (leaf.shape, spec)
      for (path, leaf), spec in zip(
          jax.tree.leaves_with_path(params), jax.tree.leaves(specs),
          strict=True)}
  def one(path, leaf):
    parts = keys.leaf_path(path).split("/")
    for start in range(len(parts)):
      found = weights.get("/".join(parts[start:]))
      if found is not None and leaf.ndim == len(found[0]):
        return P(*(
            axis if size == whole else None
            for size, whole, axis in zip(
                leaf.shape, *found, strict=True)))
    return P()
  return jax.tree.map_with_path(one, state)


def named(specs: Any, mesh: Mesh) -> Any:
  """NamedShardings of a tree of PartitionSpecs."""
  return jax.tree.map(
      lambda spec: NamedSharding(mesh, spec), specs,
      is_leaf=lambda x: isinstance(x, P))


def _check_divides(name, shape, spec, mesh):
  for dim, (size, axis) in enumerate(zip(shape, spec, strict=True)):
    if axis is not None and size % mesh.shape[axis]:
      raise ValueError(
          f"dimension {dim} of {name!r}, {size}, is not divisible by mesh axis"
          f" {axis!r} of {mesh.shape[axis]} devices: change the model or the"
          " mesh")
