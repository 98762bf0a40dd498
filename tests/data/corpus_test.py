import dataclasses
import pathlib

import numpy as np
import pytest
import tokenizers as hf

from decoupled_diloco.data import corpus as corpus_lib
from decoupled_diloco.data.corpus import TextOptions, open_corpus


def _write(folder, *documents):
  for number, document in enumerate(documents):
    (folder / f'{number:03}.txt').write_bytes(document)
  return str(folder / '*.txt')


def _word_tokenizer(path, num_words):
  """One token per word: 'w0' is 0, 'w1' is 1, ..."""
  vocabulary = {f'w{i}': i for i in range(num_words)}
  tokenizer = hf.Tokenizer(hf.models.WordLevel(vocabulary, unk_token='w0'))
  tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
  tokenizer.save(str(path))
  return str(path)


def test_the_tail_of_every_document_is_held_out(tmp_path):
  # 10 % of 40 tokens is 4, of 60 tokens 6, and both are cut from the end.
  source = _write(tmp_path, b'a' * 36 + b'A' * 4, b'b' * 54 + b'B' * 6)
  corpus = open_corpus(
    TextOptions(source=source, held_out_fraction=0.1, separator='|')
  )
  assert corpus.train.tobytes() == b'a' * 36 + b'|' + b'b' * 54 + b'|'
  assert corpus.held_out.tobytes() == b'AAAA|BBBBBB|'
  assert corpus.num_documents == 2


def test_short_documents_hold_out_their_share_together(tmp_path):
  # 30 documents of 3 tokens: 10 % of each would round to none. Over all of
  # them floor(90 * 0.1) = 9 are held out, one from every third or fourth.
  source = _write(tmp_path, *[b'xyZ'] * 30)
  corpus = open_corpus(
    TextOptions(source=source, held_out_fraction=0.1, separator='')
  )
  assert corpus.held_out.tobytes() == b'Z' * 9
  assert corpus.train.size == 81


def test_nothing_held_out(tmp_path):
  source = _write(tmp_path, b'abc')
  corpus = open_corpus(
    TextOptions(source=source, held_out_fraction=0, separator='')
  )
  assert corpus.train.tobytes() == b'abc'
  assert corpus.held_out.size == 0


def test_empty_and_undecodable_documents(tmp_path):
  source = _write(tmp_path, b'', b'\xff\xfe\x00', b'', 'é'.encode())
  corpus = open_corpus(
    TextOptions(source=source, held_out_fraction=0, separator='|')
  )
  assert corpus.train.tobytes() == b'\xff\xfe\x00|\xc3\xa9|'
  assert corpus.num_documents == 2
  nothing = open_corpus(TextOptions(source=str(tmp_path / '000.txt')))
  assert nothing.train.size == nothing.held_out.size == 0


def test_tokens_cannot_be_changed(tmp_path):
  corpus = open_corpus(TextOptions(source=_write(tmp_path, b'abc' * 9)))
  with pytest.raises(ValueError, match='read-only'):
    corpus.train[0] = 1


def test_plays():
  corpus = open_corpus(TextOptions())
  assert corpus.num_documents == 38
  assert corpus.train.dtype == np.uint8
  # 5 % of the plays, and two line ends per play in either part.
  total = corpus.train.size + corpus.held_out.size
  assert corpus.held_out.size / total == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize(
  ('vocab_size', 'dtype'),
  # The largest id is one less than the size.
  [(2, 'u1'), (256, 'u1'), (257, '<u2'), (65536, '<u2'), (65537, '<u4')],
)
def test_tokens_take_the_smallest_type(vocab_size, dtype):
  assert corpus_lib._smallest_dtype(vocab_size) == np.dtype(dtype)


def test_digest_names_the_tokens_not_the_files(tmp_path):
  first, second, third = (tmp_path / name for name in '123')
  for folder in (first, second, third):
    folder.mkdir()

  def digest(source, **kwargs):
    return open_corpus(TextOptions(source=source, **kwargs)).digest

  original = digest(_write(first, b'abcdefgh', b'ijkl'))
  assert digest(_write(second, b'abcdefgh', b'ijkl')) == original
  assert digest(_write(third, b'abcdefgh', b'ijkL')) != original
  source = str(first / '*.txt')
  # The order of the windows is no property of the text; the split is.
  assert digest(source, seed=5, batch_size=2) == original
  assert digest(source, held_out_fraction=0.5) != original
  assert digest(source, separator=' ') != original


def test_cache_gives_the_same_corpus_and_notices_changes(tmp_path):
  tokenizer = _word_tokenizer(tmp_path / 'words.json', 300)
  words = ' '.join(f'w{i}' for i in range(300)).encode()
  source = _write(tmp_path, words, b'w7')
  options = TextOptions(source, tokenizer, held_out_fraction=0.1, separator='')
  in_memory = open_corpus(options)
  cached = dataclasses.replace(options, cache_dir=str(tmp_path / 'cache'))
  built, reopened = open_corpus(cached), open_corpus(cached)
  for corpus in (built, reopened):
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.dtype == in_memory.train.dtype == np.uint16
    np.testing.assert_array_equal(corpus.train, in_memory.train)
    np.testing.assert_array_equal(corpus.held_out, in_memory.held_out)
    assert corpus.digest == in_memory.digest
    assert corpus.num_documents == 2
  assert in_memory.train[:3].tolist() == [0, 1, 2]

  def entries():
    return len(list((tmp_path / 'cache').iterdir()))

  assert entries() == 1
  (tmp_path / '001.txt').write_bytes(b'w8 w9')
  assert open_corpus(cached).digest != built.digest
  assert entries() == 2
  open_corpus(dataclasses.replace(cached, held_out_fraction=0.2))
  assert entries() == 3
  # Nor do options that leave the tokens alone make a new entry.
  open_corpus(dataclasses.replace(cached, seed=1, sequence_length=2))
  assert entries() == 3


def test_cached_tokens_are_used_without_reading_the_files(
  tmp_path, monkeypatch
):
  options = TextOptions(
    _write(tmp_path, b'abc' * 9), cache_dir=str(tmp_path / 'cache')
  )
  built = open_corpus(options)
  monkeypatch.delattr(pathlib.Path, 'read_bytes')
  assert open_corpus(options).digest == built.digest


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'source': ''}, "source must name .* got ''"),
    ({'source': []}, r'source must name .* got \(\)'),
    ({'source': ['a', '']}, 'source must name'),
    ({'tokenizer': ''}, "tokenizer must be 'bytes' or"),
    ({'sequence_length': 0}, 'sequence_length must be a positive integer'),
    ({'batch_size': 2.0}, r'batch_size must be a positive integer, got 2\.0'),
    ({'num_shards': -1}, 'num_shards must be a positive integer, got -1'),
    ({'held_out_fraction': 1}, r'held_out_fraction must lie in \[0, 1\)'),
    ({'held_out_fraction': float('nan')}, 'held_out_fraction must lie'),
    ({'seed': -1}, r'seed must be an integer in \[0, 2\*\*32\), got -1'),
  ],
)
def test_options_are_validated(fields, message):
  with pytest.raises(ValueError, match=message):
    TextOptions(**fields)


def test_a_list_of_sources_becomes_hashable():
  assert TextOptions(source=['a', 'b']).source == ('a', 'b')  # pyright: ignore
  hash(TextOptions(source=['a', 'b']))  # pyright: ignore
