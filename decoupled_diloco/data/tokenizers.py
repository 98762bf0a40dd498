"""Text to token ids and back: plain bytes, or a Hugging Face tokenizer file."""

import hashlib
from typing import Any, Protocol

import numpy as np
from etils import epath
from jaxtyping import Integer

# A tokenizer file sees a document in pieces of about this size, cut after line
# ends: its memory stays bounded, and it spreads the pieces over its threads.
_PIECE_BYTES = 1 << 20


class Tokenizer(Protocol):
  """What the data pipeline needs of a tokenizer."""

  @property
  def vocab_size(self) -> int:
    """One more than the largest id, so the height of an embedding table."""
    ...

  @property
  def digest(self) -> str:
    """Equal for two tokenizers that give the same ids to every text."""
    ...

  def encode(self, text: bytes | str) -> Integer[np.ndarray, ' token']:
    """Ids of `text`; bytes that are not UTF-8 never raise."""
    ...

  def decode(self, ids: Integer[np.ndarray, ' token']) -> str:
    """The text of `ids`; what is not UTF-8 becomes U+FFFD."""
    ...


class ByteTokenizer:
  """One token per byte: 256 ids, every input is valid, nothing to download."""

  vocab_size = 256
  digest = 'bytes'

  def encode(self, text: bytes | str) -> Integer[np.ndarray, ' token']:
    """Returns uint8 ids: the bytes of `text` (a str as UTF-8)."""
    # A str may hold lone surrogates, which UTF-8 cannot express.
    raw = text.encode(errors='replace') if isinstance(text, str) else text
    return np.frombuffer(raw, np.uint8)

  def decode(self, ids: Integer[np.ndarray, ' token']) -> str:
    """Returns the text; sequences that are not UTF-8 become U+FFFD.

    Raises:
      ValueError: if an id lies outside 0..255.
    """
    values = np.asarray(ids)
    if values.size and not 0 <= values.min() <= values.max() < 256:
      raise ValueError(
        'byte ids must lie in 0..255, got ids from '
        f'{values.min()} to {values.max()}; decode them with the tokenizer '
        'that made them.'
      )
    return values.astype(np.uint8).tobytes().decode(errors='replace')


class FileTokenizer:
  """A tokenizer file of the Hugging Face `tokenizers` library (JSON).

  Truncation and padding that the file may ask for are switched off: a corpus
  is one long text. Special tokens are added only where the text spells them.
  """

  def __init__(self, path: str):
    """Reads the file.

    Args:
      path: of the JSON file, local or `gs://...`.

    Raises:
      ValueError: if the file is missing or is not a tokenizer, or if the
        `tokenizers` library is not installed.
    """
    try:
      import tokenizers
    except ImportError as error:
      raise ValueError(
        f'tokenizer={path!r} needs the library `tokenizers`, which is not '
        "installed; run: pip install 'decoupled_diloco[tokenizer]', or set "
        "tokenizer='bytes'."
      ) from error
    try:
      raw = epath.Path(path).read_bytes()
    except (OSError, ImportError) as error:
      raise ValueError(
        f"tokenizer={path!r} must be 'bytes' or a readable tokenizer file "
        f'({error}); correct the path.'
      ) from error
    try:
      self._tokenizer: Any = tokenizers.Tokenizer.from_str(raw.decode())
    except Exception as error:  # the library raises bare Exception
      raise ValueError(
        f'tokenizer={path!r} must be a JSON file as written by '
        f'tokenizers.Tokenizer.save, and is not ({error}); save it anew.'
      ) from error
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._digest = hashlib.sha256(raw).hexdigest()
    # Not get_vocab_size(): ids may have gaps, and the largest one counts.
    ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
    self._vocab_size = max(ids, default=-1) + 1

  @property
  def vocab_size(self) -> int:
    """One more than the largest id, added tokens included."""
    return self._vocab_size

  @property
  def digest(self) -> str:
    """SHA-256 of the file, in hexadecimal."""
    return self._digest

  def encode(self, text: bytes | str) -> Integer[np.ndarray, ' token']:
    """Returns uint32 ids; bytes that are not UTF-8 are read as U+FFFD."""
    raw = text.encode(errors='replace') if isinstance(text, str) else text
    pieces = [piece.decode(errors='replace') for piece in _pieces(raw)]
    encodings = self._tokenizer.encode_batch_fast(
      pieces, add_special_tokens=False
    )
    ids = [np.asarray(encoding.ids, np.uint32) for encoding in encodings]
    return np.concatenate([np.empty(0, np.uint32), *ids])

  def decode(self, ids: Integer[np.ndarray, ' token']) -> str:
    """Returns the text, special tokens included."""
    return self._tokenizer.decode(
      np.asarray(ids).tolist(), skip_special_tokens=False
    )


def open_tokenizer(name: str) -> Tokenizer:
  """Returns the tokenizer that `TextOptions.tokenizer` names.

  Args:
    name: 'bytes', or the path of a tokenizer file (see `FileTokenizer`).

  Raises:
    ValueError: if the file cannot be used.
  """
  return ByteTokenizer() if name == 'bytes' else FileTokenizer(name)


def _pieces(raw: bytes) -> list[bytes]:
  """Cuts after the first line end past each `_PIECE_BYTES`; joins to `raw`."""
  pieces = []
  start = 0
  while start < len(raw):
    line_end = raw.find(b'\n', start + _PIECE_BYTES - 1)
    stop = len(raw) if line_end < 0 else line_end + 1
    pieces.append(raw[start:stop])
    start = stop
  return pieces
