"""Laws of the character tokenizer."""

import random
import string

import pytest

from logra_jax.data import tokenizer


def test_decoding_undoes_encoding():
  rng = random.Random()
  alphabet = rng.sample(string.printable, 20)
  chars = tokenizer.CharTokenizer("".join(alphabet))
  text = "".join(rng.choices(alphabet, k=50))
  ids = chars.encode(text)
  assert chars.decode(ids) == text
  assert chars.vocab_size == 22
  assert all(2 <= i < chars.vocab_size for i in ids)
  assert (chars.pad_id, chars.eos_id) == (0, 1)


def test_nothing_after_eos_is_text():
  chars = tokenizer.CharTokenizer("ab")
  assert chars.decode([2, 3, 1, 2, 1, 0]) == "ab"
  assert chars.decode([1]) == chars.decode([]) == ""


def test_a_sampled_padding_token_spoils_the_answer():
  chars = tokenizer.CharTokenizer("ab")
  assert chars.decode([2, 0, 3]) not in ("ab", "a", "b")


def test_an_unknown_character_is_named_with_the_alphabet():
  with pytest.raises(ValueError, match=r"'c'.*'abd'"):
    tokenizer.CharTokenizer("abd").encode("abc")


def test_a_repeated_character_is_refused():
  with pytest.raises(ValueError, match="'aba' repeats"):
    tokenizer.CharTokenizer("aba")
