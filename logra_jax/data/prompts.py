"""Which prompts a step uses, and how they lie in an array."""

from collections.abc import Sequence

import grain
import numpy as np

from logra_jax.data import tokenizer as tokenizer_lib
from logra_jax.rl import types


def pad(
    texts: Sequence[str], tokenizer: tokenizer_lib.CharTokenizer, width: int
) -> types.PromptBatch:
  """Prompts in one array, padded on the left. -> [P, width] NumPy arrays.

  Args:
    texts: the prompts.
    tokenizer: to encode them.
    width: S, tokens of the longest prompt allowed.

  Returns:
    The batch.

  Raises:
    ValueError: for a prompt that is empty or longer than width.

  Example:
    >>> from logra_jax.data import prompts, tokenizer
    >>> chars = tokenizer.CharTokenizer("ab")
    >>> prompts.pad(["a", "ab"], chars, width=3).tokens.tolist()
    [[0, 0, 2], [0, 2, 3]]
  """
  tokens = np.full((len(texts), width), tokenizer.pad_id, np.int32)
  mask = np.zeros((len(texts), width), bool)
  for row, text in enumerate(texts):
    ids = tokenizer.encode(text)
    if not 0 < len(ids) <= width:
      raise ValueError(
          f"prompt {text!r} has {len(ids)} tokens and 1 to {width} fit: change"
          " data.prompt_width or the task")
    tokens[row, width - len(ids):] = ids
    mask[row, width - len(ids):] = True
  # _make, as the record's fields are typed jax.Array and these are NumPy's.
  return types.PromptBatch._make((tokens, mask))


def select(
    num_examples: int, batch_size: int, seed: int, step: int
) -> np.ndarray:
  """The examples that a step uses. -> [batch_size] indices.

  Steps walk through one shuffled epoch after the other without replacement, and
  a step's examples depend on nothing but the arguments.

  Args:
    num_examples: how many there are.
    batch_size: how many to use.
    seed: of the shuffle.
    step: number of the batch.

  Returns:
    Indices.

  Example:
    >>> from logra_jax.data import prompts
    >>> epoch = [prompts.select(6, 2, seed=0, step=s) for s in range(3)]
    >>> sorted(int(i) for chosen in epoch for i in chosen)
    [0, 1, 2, 3, 4, 5]
  """
  stream = grain.MapDataset.range(num_examples).seed(seed).shuffle().repeat()
  first = step * batch_size
  return np.array([stream[first + i] for i in range(batch_size)])
