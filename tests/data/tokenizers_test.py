import builtins
import pathlib

import numpy as np
import pytest
import tokenizers as hf

from decoupled_diloco.data import tokenizers


@pytest.fixture
def bpe_file(tmp_path):
  """A byte-level BPE of 256 bytes, at most 44 merges and one special token."""
  tokenizer = hf.Tokenizer(hf.models.BPE())
  tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=301,
    special_tokens=['<|endoftext|>'],
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(['the cat and the hat and the rat\n'], trainer)
  # Both must be ignored: a corpus is one long text.
  tokenizer.enable_truncation(4)
  tokenizer.enable_padding(length=64)
  path = tmp_path / 'bpe.json'
  tokenizer.save(str(path))
  return str(path)


TEXTS = ['', 'plain', 'naïve — 日本語 🎭', 'the cat and the hat\n' * 50]


@pytest.mark.parametrize('kind', ['bytes', 'file'])
@pytest.mark.parametrize('text', TEXTS)
def test_decode_inverts_encode(kind, text, bpe_file):
  tokenizer = tokenizers.open_tokenizer(
    'bytes' if kind == 'bytes' else bpe_file
  )
  ids = tokenizer.encode(text)
  assert ids.ndim == 1
  assert np.issubdtype(ids.dtype, np.unsignedinteger)
  assert tokenizer.decode(ids) == text
  np.testing.assert_array_equal(ids, tokenizer.encode(text.encode()))


@pytest.mark.parametrize('kind', ['bytes', 'file'])
def test_undecodable_input_does_not_raise(kind, bpe_file):
  tokenizer = tokenizers.open_tokenizer(
    'bytes' if kind == 'bytes' else bpe_file
  )
  # 0xFF occurs nowhere in UTF-8; a lone surrogate cannot be written in it.
  assert tokenizer.decode(tokenizer.encode(b'a\xffb')) == 'a\ufffdb'
  assert tokenizer.decode(tokenizer.encode('a\ud800b')) == 'a?b'


def test_bytes_are_their_own_ids():
  tokenizer = tokenizers.ByteTokenizer()
  assert tokenizer.vocab_size == 256
  assert tokenizer.encode(b'\x00A\xff').tolist() == [0, 65, 255]
  assert tokenizer.encode('é').tolist() == [0xC3, 0xA9]


def test_byte_ids_out_of_range_are_refused():
  with pytest.raises(ValueError, match=r'0\.\.255, got ids from -1 to 256'):
    tokenizers.ByteTokenizer().decode(np.array([-1, 256]))


def test_file_merges_and_keeps_special_tokens(bpe_file):
  tokenizer = tokenizers.open_tokenizer(bpe_file)
  library = hf.Tokenizer.from_file(bpe_file)
  assert tokenizer.vocab_size == library.get_vocab_size()
  assert tokenizer.vocab_size > 257  # it has learnt merges
  # 'the' is one token (it was merged first), and so is the special one.
  ids = tokenizer.encode('the<|endoftext|>')
  assert ids.tolist() == [
    library.token_to_id('the'),
    library.token_to_id('<|endoftext|>'),
  ]
  assert tokenizer.decode(ids) == 'the<|endoftext|>'


def test_long_text_is_cut_at_line_ends_without_a_trace(bpe_file, monkeypatch):
  tokenizer = tokenizers.open_tokenizer(bpe_file)
  text = 'the cat and\nthe hät and the rat\n\nnone' * 3
  whole = tokenizer.encode(text)
  # Pieces of about 5 bytes: nearly every line is one of its own.
  monkeypatch.setattr(tokenizers, '_PIECE_BYTES', 5)
  assert len(tokenizers._pieces(text.encode())) > 6
  # Byte-level BPE splits before a word anyway, and the line end before it is a
  # token of its own, so that these cuts do not show in the ids.
  np.testing.assert_array_equal(tokenizer.encode(text), whole)
  assert tokenizer.decode(whole) == text


def test_digest_follows_the_content(bpe_file, tmp_path):
  first = tokenizers.open_tokenizer(bpe_file)
  copy = tmp_path / 'copy.json'
  content = pathlib.Path(bpe_file).read_text()
  copy.write_text(content)
  assert tokenizers.open_tokenizer(str(copy)).digest == first.digest
  copy.write_text(content + '\n')
  assert tokenizers.open_tokenizer(str(copy)).digest != first.digest


def test_missing_file_and_foreign_content_are_explained(tmp_path):
  with pytest.raises(ValueError, match=r"nowhere.json' must be 'bytes' or a"):
    tokenizers.open_tokenizer(str(tmp_path / 'nowhere.json'))
  for content in (b'{"not": "a tokenizer"}', b'\xff\xfe'):
    foreign = tmp_path / 'foreign.json'
    foreign.write_bytes(content)
    with pytest.raises(ValueError, match='must be a JSON file as written by'):
      tokenizers.open_tokenizer(str(foreign))


def test_missing_library_is_explained(bpe_file, monkeypatch):
  real_import = builtins.__import__

  def without_library(name, *args, **kwargs):
    if name == 'tokenizers':
      raise ImportError(name)
    return real_import(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', without_library)
  with pytest.raises(ValueError, match=r'decoupled_diloco\[tokenizer\]'):
    tokenizers.open_tokenizer(bpe_file)
