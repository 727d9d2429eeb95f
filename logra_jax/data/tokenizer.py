"""One token a character."""

from collections.abc import Iterable


class CharTokenizer:
  """Characters of a fixed alphabet, with padding and end of sequence.

  Example:
    >>> from logra_jax.data import tokenizer
    >>> chars = tokenizer.CharTokenizer("0123456789+=")
    >>> chars.encode("1+2=")
    [3, 12, 4, 13]
    >>> chars.decode([5, chars.eos_id, 7])
    '3'
  """

  pad_id = 0
  eos_id = 1

  def __init__(self, alphabet: str):
    if len(set(alphabet)) != len(alphabet):
      raise ValueError(f"alphabet {alphabet!r} repeats a character")
    self._alphabet = alphabet
    self._ids = {char: i for i, char in enumerate(alphabet, start=2)}

  @property
  def vocab_size(self) -> int:
    """Characters, padding and EOS."""
    return len(self._alphabet) + 2

  def encode(self, text: str) -> list[int]:
    """Token ids of a text, without EOS."""
    for char in text:
      if char not in self._ids:
        raise ValueError(
            f"character {char!r} of {text!r} is not in the alphabet"
            f" {self._alphabet!r}: add it there")
    return [self._ids[char] for char in text]

  def decode(self, ids: Iterable[int]) -> str:
    """The text up to EOS.

    Padding that a policy sampled is a character like any other, and a wrong
    one: if it vanished, wrong answers would become right.
    """
    text = []
    for token in ids:
      if token == self.eos_id:
        break
      text.append("\N{REPLACEMENT CHARACTER}" if token == self.pad_id
                  else self._alphabet[token - 2])
    return "".join(text)
