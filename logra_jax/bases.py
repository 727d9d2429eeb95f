"""Random bases `V [n, r]` with `E[V V^T] = I`, and the keys they are drawn by.

A *law* is a function `(key, n, r, dtype, batch) -> [*batch, n, r]`. Sketching a
gradient `G` by `V^T G` and lifting it back by `V` gives an unbiased estimate of
`G`; the laws differ in its error. With `E[(V V^T)^2] = kappa I`:

  ==================================  =====================
  law                                 kappa
  ==================================  =====================
  stiefel, coordinate, hadamard       n / r, the optimum
  rademacher                          (n + r - 1) / r
  gaussian                            (n + r + 1) / r
  ==================================  =====================

Element `b` of a batch is drawn with `fold_in(key, b)`, so a list of layers and
a stacked model draw the same bases.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from logra_jax import keys

Law = Callable[..., jax.Array]


def stiefel(
    key: jax.Array,
    n: int,
    r: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    batch: Sequence[int] = (),
) -> jax.Array:
  """Haar-distributed orthonormal columns times sqrt(n/r). [*batch, n, r].

  `V = sqrt(n/r) Z R^-1`, with `Z` Gaussian and `R` the Cholesky factor of
  `Z^T Z`. Above `r = n/2` the Gram matrix of a square Gaussian is too badly
  conditioned for float32 and `V` comes from a Householder QR.

  Args:
    key: a PRNG key.
    n: rows, the input width of the weight.
    r: columns, the rank; 1 <= r <= n.
    dtype: of the result; the draw itself is float32.
    batch: leading axes, one independent basis for each element.

  Returns:
    `V` with `V^T V = (n/r) I`.

  Raises:
    ValueError: if r is not in 1..n.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from logra_jax import bases
    >>> v = bases.stiefel(jax.random.key(0), n=64, r=4)
    >>> bool(jnp.allclose(v.T @ v, 16 * jnp.eye(4), atol=1e-4))
    True

  Source: arXiv 2603.20632; the Cholesky form of Haar measure is classical.
  """
  return _draw(_stiefel, key, n, r, dtype, batch)


def rademacher(
    key: jax.Array,
    n: int,
    r: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    batch: Sequence[int] = (),
) -> jax.Array:
  """Independent signs over sqrt(r). [*batch, n, r].

  Args:
    key: a PRNG key.
    n: rows, the input width of the weight.
    r: columns, the rank; 1 <= r <= n.
    dtype: of the result.
    batch: leading axes, one independent basis for each element.

  Returns:
    `V` with entries `+-1/sqrt(r)`.

  Raises:
    ValueError: if r is not in 1..n.

  Example:
    >>> import jax
    >>> from logra_jax import bases
    >>> v = bases.rademacher(jax.random.key(0), n=8, r=4)
    >>> sorted(set(v.ravel().tolist()))
    [-0.5, 0.5]

  Source: LoGRA's default, arXiv 2610.06647.
  """
  return _draw(_rademacher, key, n, r, dtype, batch)


def gaussian(
    key: jax.Array,
    n: int,
    r: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    batch: Sequence[int] = (),
) -> jax.Array:
  """Independent normals of variance 1/r. [*batch, n, r].

  Args:
    key: a PRNG key.
    n: rows, the input width of the weight.
    r: columns, the rank; 1 <= r <= n.
    dtype: of the result; the draw itself is float32.
    batch: leading axes, one independent basis for each element.

  Returns:
    `V` with entries `N(0, 1/r)`.

  Raises:
    ValueError: if r is not in 1..n.

  Example:
    >>> import jax
    >>> from logra_jax import bases
    >>> bases.gaussian(jax.random.key(0), n=8, r=4, batch=(3,)).shape
    (3, 8, 4)

  Source: the baseline law of arXiv 2603.20632.
  """
  return _draw(_gaussian, key, n, r, dtype, batch)


def coordinate(
    key: jax.Array,
    n: int,
    r: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    batch: Sequence[int] = (),
) -> jax.Array:
  """Coordinates without replacement times sqrt(n/r). [*batch, n, r].

  Args:
    key: a PRNG key.
    n: rows, the input width of the weight.
    r: columns, the rank; 1 <= r <= n.
    dtype: of the result.
    batch: leading axes, one independent basis for each element.

  Returns:
    `V` whose columns are `sqrt(n/r) e_i` for r distinct i.

  Raises:
    ValueError: if r is not in 1..n.

  Example:
    >>> import jax
    >>> from logra_jax import bases
    >>> v = bases.coordinate(jax.random.key(0), n=8, r=2)
    >>> (int((v != 0).sum()), float(v.max()))
    (2, 2.0)

  Source: arXiv 2603.20632; ties with Haar exactly.
  """
  return _draw(_coordinate, key, n, r, dtype, batch)


def hadamard(
    key: jax.Array,
    n: int,
    r: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    batch: Sequence[int] = (),
) -> jax.Array:
  """Randomised Hadamard columns, stratified over residues. [*batch, n, r].

  With `n = 2^a m`, m odd, `V = sqrt(m/r) E` and `E[i, j]` is `+-1` where row
  and column agree modulo m, else 0: `E` is `r` columns of the Kronecker product
  of a `2^a` Hadamard matrix and the identity, its rows permuted and
  sign-flipped at random. Each residue gets floor(r/m) or ceil(r/m) columns;
  without that a gradient on one input channel is missed altogether 9-65 % of
  the time at real widths. Where m > r, no such choice exists and the law is
  `stiefel`.

  Args:
    key: a PRNG key.
    n: rows, the input width of the weight.
    r: columns, the rank; 1 <= r <= n.
    dtype: of the result.
    batch: leading axes, one independent basis for each element.

  Returns:
    `V` with `V^T V = (n/r) I`, exact up to the constant sqrt(m/r).

  Raises:
    ValueError: if r is not in 1..n.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from logra_jax import bases
    >>> v = bases.hadamard(jax.random.key(0), n=48, r=12)
    >>> bool(jnp.allclose(v.T @ v, 4 * jnp.eye(12), atol=1e-6))
    True

  Source: this project; the optimality condition is arXiv 2603.20632's.
  """
  return _draw(_hadamard, key, n, r, dtype, batch)


# Laws with V^T V = (n/r) I almost surely: the norm of V U is sqrt(n/r) |U|.
ORTHONORMAL = frozenset({stiefel, coordinate, hadamard})


def _draw(one, key, n, r, dtype, batch):
  """Applies a law of one matrix over a batch of keys."""
  if not 1 <= r <= n:
    raise ValueError(
        f"rank {r} does not fit a basis of {n} rows: choose 1 <= rank <= {n}"
        " (a leaf no wider than the rank needs no basis)")
  fn = lambda k: one(k, n, r).astype(dtype)
  for _ in batch:
    fn = jax.vmap(fn)
  return fn(keys.batch_keys(key, batch))


def _stiefel(key, n, r):
  z = jax.random.normal(key, (n, r))
  if 2 * r > n:
    q, upper = jnp.linalg.qr(z)
    # The sign of R's diagonal is the library's choice; Haar needs it positive.
    return math.sqrt(n / r) * q * jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0)
  matmul = lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
  lower = jnp.linalg.cholesky(matmul(z.T, z))
  inverse = jax.scipy.linalg.solve_triangular(lower, jnp.eye(r), lower=True)
  return math.sqrt(n / r) * matmul(z, inverse.T)


def _rademacher(key, n, r):
  return jax.random.rademacher(key, (n, r), jnp.float32) / math.sqrt(r)


def _gaussian(key, n, r):
  return jax.random.normal(key, (n, r)) / math.sqrt(r)


def _coordinate(key, n, r):
  chosen = jax.random.permutation(key, n)[:r]
  return math.sqrt(n / r) * jax.nn.one_hot(chosen, n, axis=0)


def _hadamard(key, n, r):
  power = n & -n
  m = n // power
  if m > r:
    return _stiefel(key, n, r)
  row_key, sign_key, column_key, residue_key = jax.random.split(key, 4)
  rows = jax.random.permutation(row_key, n)
  signs = jax.random.rademacher(sign_key, (n, 1), jnp.float32)
  # Column t takes the (t // m)-th of a random order of quotients, in residue
  # t % m of a random order of residues: counts differ by at most one.
  quotients = jnp.argsort(jax.random.uniform(column_key, (power, m)), axis=0)
  residues = jax.random.permutation(residue_key, m)
  t = jnp.arange(r)
  residue = residues[t % m]
  quotient = quotients[t // m, residue]
  bits = (rows // m)[:, None] & quotient[None, :]
  parity = jax.lax.population_count(bits) & 1
  entry = signs * (1.0 - 2.0 * parity.astype(jnp.float32))
  agree = (rows % m)[:, None] == residue[None, :]
  return math.sqrt(m / r) * jnp.where(agree, entry, 0.0)
