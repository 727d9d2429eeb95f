"""Laws of laying prompts out and of choosing them."""

import random

import numpy as np
import pytest

from logra_jax.data import prompts
from logra_jax.data import tokenizer

CHARS = tokenizer.CharTokenizer("abc")


def test_prompts_end_where_completions_begin():
  texts = ["".join(random.choices("abc", k=k)) for k in (1, 3, 5, 2)]
  batch = prompts.pad(texts, CHARS, width=5)
  assert batch.tokens.shape == batch.mask.shape == (4, 5)
  assert (batch.tokens.dtype, batch.mask.dtype) == (np.int32, bool)
  for text, tokens, mask in zip(texts, *batch, strict=True):
    assert mask.tolist() == [False] * (5 - len(text)) + [True] * len(text)
    assert tokens[mask].tolist() == CHARS.encode(text)
    assert not tokens[~mask].any()


@pytest.mark.parametrize("text", ["aabb", ""])
def test_a_prompt_that_does_not_fit_is_named(text):
  with pytest.raises(ValueError, match=f"prompt '{text}' has {len(text)} tok"):
    prompts.pad(["abc", text], CHARS, width=3)


@pytest.mark.parametrize("size, batch", [(12, 4), (7, 3), (3, 8)])
def test_every_epoch_uses_every_example_once(size, batch):
  seed = random.randrange(1000)
  stream = np.concatenate([
      prompts.select(size, batch, seed, step) for step in range(3 * size)])
  assert len(stream) == 3 * size * batch
  for epoch in stream.reshape(-1, size):
    assert sorted(epoch) == list(range(size))


def test_epochs_and_seeds_differ():
  first, second = (prompts.select(50, 50, 0, step) for step in (0, 1))
  other = prompts.select(50, 50, 1, 0)
  assert not np.array_equal(first, second)
  assert not np.array_equal(first, other)


def test_a_step_s_choice_depends_on_the_step_alone():
  straight = [prompts.select(10, 4, 5, step) for step in range(6)]
  resumed = [prompts.select(10, 4, 5, step) for step in (5, 3, 4)]
  np.testing.assert_array_equal(resumed, [straight[i] for i in (5, 3, 4)])
