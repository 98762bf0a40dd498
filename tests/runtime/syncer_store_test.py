"""A restarted syncer has the bits of one that was never stopped."""

import gc
import pathlib
import shutil

import pytest

from decoupled_diloco.runtime.durability_options import DurabilityOptions
from decoupled_diloco.runtime.syncer_store import (
  StoreError,
  SyncerStore,
)
from decoupled_diloco.storage.disk import Disk
from decoupled_diloco.storage.journal import JournalError
from decoupled_diloco.training.wire_format import WireOptions
from tests.protocol.scripts import SyncerScript
from tests.runtime.waiting_executor import WaitingExecutor
from tests.training.global_models import (
  BF16_VALUE,
  EXACT,
  P,
  assert_same_bits,
  make_model,
  payload_of,
  random_delta,
)

NO_SNAPSHOTS = DurabilityOptions(snapshot_growth=1e9)
ALWAYS = DurabilityOptions(snapshot_growth=1e-9)
INT4 = WireOptions(up='f32', down='int4', block_size=8)


# What orbax had begun to read reports that nobody waits for it any more.
UNFINISHED_READS = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture
def forgotten_reads():
  """They report it now, and not in the middle of another test."""
  yield
  gc.collect()


class Syncer:
  """Machine, arrays and store of one process; merges are made when they may."""

  def __init__(self, folder, *, wire=EXACT, options=NO_SNAPSHOTS, disk=None):
    self.model = make_model(wire)
    self.saver = WaitingExecutor()
    self.told = []
    self.store = SyncerStore(
      folder,
      self.model,
      layout='layout',
      options=options,
      executor=self.saver,
      tell=self.told.append,
      disk=disk,
    )
    self.script = SyncerScript(M=2, P=P, H=P, rounds=10**6)

  def begin(self):
    self.store.begin('run')
    return self

  def resume(self):
    restored = self.store.resume()
    self.script.tell(
      self.restart(restored.life, restored.state, restored.merged)
    )
    return restored

  def restart(self, life, state, merged):
    from decoupled_diloco.protocol import events as ev

    return ev.Restarted(self.script.now, life, state, merged)

  def train(self, rounds, learners=(0, 1)):
    """Merges these rounds, one after the other, with what belongs to them."""
    for m in learners:
      if m not in self.script.incarnations:
        self.script.join(m)
    for round_ in rounds:
      for m in learners:
        self.script.contribute(m, round_)
      self.merge(round_)
      self.script.done(round_)

  def merge(self, round_):
    """Has the model make a merge that the machine wants, and keeps it."""
    (merge,) = self.script.merges_of(round_)
    p = merge.fragment
    merged = self.model.merge(
      p,
      {share.learner: share.weight for share in merge.shares},
      {
        share.learner: payload_of(random_delta(p, 10 * round_ + share.learner))
        for share in merge.shares
      },
    )
    self.store.record(self.script.state, merge, merged)

  @property
  def books(self):
    """What must survive of the machine's memory."""
    state = self.script.state
    return (
      state.versions,
      state.version_rounds,
      state.rounds_merged,
      state.merged_tokens,
      {m: member.merged_rounds for m, member in state.members.items()},
    )


def assert_equal(syncer: Syncer, other: Syncer):
  assert syncer.books == other.books
  assert_same_bits(syncer.model.arrays(), other.model.arrays())


@pytest.mark.parametrize(
  'wire', [EXACT, INT4, BF16_VALUE], ids=['f32', 'int4', 'value']
)
def test_a_replay_gives_the_same_bits(tmp_path, wire):
  live = Syncer(tmp_path / 'a', wire=wire).begin()
  live.train(range(7))
  live.store.close()
  back = Syncer(tmp_path / 'a', wire=wire)
  restored = back.resume()
  assert (restored.run_id, restored.life) == ('run', 2)
  assert restored.num_replayed == 7
  assert restored.notes == ()
  assert_equal(back, live)
  # And they go on alike.
  undisturbed = Syncer(tmp_path / 'b', wire=wire).begin()
  undisturbed.train(range(12))
  back.train(range(7, 12))
  assert_equal(back, undisturbed)
  for syncer in (back, undisturbed):
    syncer.store.close()


def test_a_run_without_merges(tmp_path):
  live = Syncer(tmp_path).begin()
  live.store.close()
  back = Syncer(tmp_path)
  restored = back.resume()
  assert restored.state is None
  assert restored.num_replayed == 0
  assert_equal(back, live)
  back.store.close()


def test_a_snapshot_makes_the_journal_short(tmp_path):
  live = Syncer(tmp_path, options=ALWAYS).begin()
  for round_ in range(8):
    live.train([round_])
    live.saver.run_all()
  assert len(names(tmp_path / 'snapshots')) == 2
  # One from the older snapshot on, one from the newer.
  assert len(names(tmp_path / 'journal')) == 2
  live.store.close()
  back = Syncer(tmp_path)
  assert back.resume().num_replayed == 0
  assert_equal(back, live)
  back.store.close()


def test_merges_go_on_while_a_snapshot_is_written(tmp_path):
  live = Syncer(tmp_path, options=ALWAYS).begin()
  live.train(range(5))  # The first asks for one; it is not written yet.
  live.saver.run_all()
  assert names(tmp_path / 'snapshots') == [f'{0:020}', f'{2:020}']
  live.store.close()
  back = Syncer(tmp_path)
  assert back.resume().num_replayed == 4
  assert_equal(back, live)
  back.store.close()


def test_several_lives(tmp_path):
  syncer = Syncer(tmp_path, options=ALWAYS).begin()
  for life in range(1, 5):
    syncer.train(range(3 * life - 3, 3 * life))
    syncer.saver.run_all()
    syncer.store.close()
    before = syncer
    syncer = Syncer(tmp_path, options=ALWAYS)
    assert syncer.resume().life == life + 1
    assert_equal(syncer, before)
  syncer.store.close()


def test_a_merge_that_the_machine_did_not_hear_of(tmp_path):
  """It was killed after the journal had it, and before it was published."""
  live = Syncer(tmp_path).begin()
  live.train(range(2))
  for m in range(2):
    live.script.contribute(m, 2)
  live.merge(2)
  live.store.close()
  live.script.done(2)
  back = Syncer(tmp_path)
  assert back.resume().merged == (2,)
  assert_equal(back, live)
  back.store.close()


def test_a_torn_tail_is_cut_and_said(tmp_path):
  live = Syncer(tmp_path / 'run').begin()
  live.train(range(3))
  shorter = Syncer(tmp_path / 'shorter').begin()
  shorter.train(range(2))
  for syncer in (live, shorter):
    syncer.store.close()
  (journal,) = (tmp_path / 'run' / 'journal').iterdir()
  journal.write_bytes(journal.read_bytes()[:-5])
  back = Syncer(tmp_path / 'run')
  restored = back.resume()
  assert restored.num_replayed == 2
  assert any('were cut off the end' in note for note in restored.notes)
  assert_equal(back, shorter)
  back.store.close()


def test_a_flipped_bit_in_the_journal_is_not_taken_for_a_tail(tmp_path):
  live = Syncer(tmp_path).begin()
  live.train(range(3))
  live.store.close()
  (journal,) = (tmp_path / 'journal').iterdir()
  data = bytearray(journal.read_bytes())
  data[len(data) // 2] ^= 1
  journal.write_bytes(data)
  with pytest.raises(JournalError, match='is damaged, and it is not the last'):
    Syncer(tmp_path).resume()
  assert journal.read_bytes() == data


def flip_a_bit(path: pathlib.Path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob('*') if path.stat().st_size)


@UNFINISHED_READS
@pytest.mark.usefixtures('forgotten_reads')
def test_a_damaged_snapshot_is_replaced_by_the_one_before(tmp_path):
  """Whichever file of it has a flipped bit: found out, or without effect."""
  live = Syncer(tmp_path / 'run', options=ALWAYS).begin()
  for round_ in range(4):
    live.train([round_])
    live.saver.run_all()
  live.store.close()
  name = names(tmp_path / 'run' / 'snapshots')[-1]
  found_out = 0
  for i, path in enumerate(files(tmp_path / 'run' / 'snapshots' / name)):
    if path.is_dir():
      continue
    copy = tmp_path / str(i)
    shutil.copytree(tmp_path / 'run', copy)
    flip_a_bit(copy / path.relative_to(tmp_path / 'run'))
    back = Syncer(copy)
    restored = back.resume()
    assert_equal(back, live)
    back.store.close()
    if restored.notes:
      found_out += 1
      (note,) = restored.notes
      newest = copy / 'snapshots' / name
      assert f'{newest} is damaged' in note
      assert restored.num_replayed == 1
      # It is kept for people, and never chosen again.
      assert newest.with_name(name + '.aside').exists()
      again = Syncer(copy)
      assert again.resume().notes == ()
      again.store.close()
  assert found_out > 3


@UNFINISHED_READS
@pytest.mark.usefixtures('forgotten_reads')
def test_no_sound_snapshot(tmp_path):
  live = Syncer(tmp_path).begin()
  live.train(range(2))
  live.store.close()
  for path in files(tmp_path / 'snapshots' / f'{0:020}'):
    if path.is_file():
      flip_a_bit(path)
  with pytest.raises(StoreError, match='restore one from a copy'):
    Syncer(tmp_path).resume()


def test_an_unfinished_snapshot_is_never_chosen(tmp_path):
  live = Syncer(tmp_path).begin()
  live.train(range(2))
  live.store.close()
  whole = tmp_path / 'snapshots' / f'{0:020}'
  for name in (f'{9:020}.newer', f'{9:020}.newer.orbax-checkpoint-tmp-1'):
    shutil.copytree(whole, whole.with_name(name))
  back = Syncer(tmp_path)
  back.resume()
  assert_equal(back, live)
  assert names(tmp_path / 'snapshots') == [f'{0:020}']
  back.store.close()


def test_the_journal_is_gone(tmp_path):
  live = Syncer(tmp_path, options=ALWAYS).begin()
  live.train(range(2))
  live.saver.run_all()
  live.store.close()
  shutil.rmtree(tmp_path / 'journal')
  with pytest.raises(JournalError, match='is not in the journal'):
    Syncer(tmp_path).resume()


def test_two_syncers_in_one_folder(tmp_path):
  live = Syncer(tmp_path).begin()
  for refused in (Syncer(tmp_path).begin, Syncer(tmp_path).resume):
    with pytest.raises(StoreError, match='in use by another syncer'):
      refused()
  live.store.close()


def test_a_run_is_not_begun_over_another(tmp_path):
  live = Syncer(tmp_path).begin()
  live.train([0])
  live.store.close()
  with pytest.raises(StoreError, match=r'--config\.resume=True'):
    Syncer(tmp_path).begin()


def test_a_run_in_which_nothing_was_merged_gives_way(tmp_path):
  Syncer(tmp_path).begin().store.close()
  live = Syncer(tmp_path)
  live.store.begin('another')
  live.train(range(2))
  live.store.close()
  back = Syncer(tmp_path)
  assert back.resume().run_id == 'another'
  assert_equal(back, live)
  back.store.close()


def test_nothing_to_resume(tmp_path):
  with pytest.raises(StoreError, match='holds no run'):
    Syncer(tmp_path).resume()


def test_another_layout(tmp_path):
  Syncer(tmp_path).begin().store.close()
  other = Syncer(tmp_path)
  other.store._layout = 'another'
  with pytest.raises(StoreError, match='has another layout'):
    other.resume()


class FullDisk(Disk):
  """Takes so many bytes, and no more."""

  def __init__(self, room: int):
    self.room = room

  def write(self, file, offset, data):
    super().write(file, offset, memoryview(data)[: self.room])
    self.room -= len(data)
    if self.room < 0:
      self.room = 0
      raise OSError(28, 'No space left on device')


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path):
  live = Syncer(tmp_path / 'run', disk=FullDisk(20_000)).begin()
  done = 0
  with pytest.raises(
    OSError, match=r'round \d+ \(No space left.*--config\.res'
  ):
    for done in range(100):
      live.train([done])
  assert done > 2
  live.store.close()
  undisturbed = Syncer(tmp_path / 'other').begin()
  undisturbed.train(range(done))
  back = Syncer(tmp_path / 'run')
  assert back.resume().num_replayed == done
  assert_equal(back, undisturbed)
  for syncer in (back, undisturbed):
    syncer.store.close()


def test_a_snapshot_that_cannot_be_written_does_not_end_the_run(
  tmp_path, monkeypatch
):
  live = Syncer(tmp_path, options=ALWAYS).begin()
  live.train([0])
  with monkeypatch.context() as patched:
    patched.setattr(
      'decoupled_diloco.storage.snapshots.save',
      lambda *args: (_ for _ in ()).throw(OSError('no room')),
    )
    live.saver.run_all()
  assert live.told == ['No snapshot was taken: no room']
  live.train(range(1, 4))
  live.saver.run_all()
  assert len(names(tmp_path / 'snapshots')) == 2  # Another one was tried.
  live.store.close()
  back = Syncer(tmp_path)
  back.resume()
  assert_equal(back, live)
  back.store.close()


def names(folder: pathlib.Path) -> list[str]:
  return sorted(path.name for path in folder.iterdir())
