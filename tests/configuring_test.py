"""From a config to options."""

import dataclasses
from typing import Any

import ml_collections
import pytest

from decoupled_diloco import configuring, overrides
from decoupled_diloco.run_options import RunOptions


@pytest.fixture
def config():
  """The defaults, with 3 learners, and an end."""
  made = configuring.default_config()
  made.budget.rounds = 1000
  made.membership.num_learners = 3
  return made


def test_the_defaults_are_those_of_the_options():
  config = configuring.default_config()
  for field in dataclasses.fields(RunOptions):
    section: Any = field.type
    if dataclasses.is_dataclass(section) and field.name != 'budget':
      defaults = dataclasses.asdict(section())  # pyright: ignore
      for name, value in config[field.name].to_dict().items():
        assert value == defaults[name], (field.name, name)
  # Only when to stop has no default.
  with pytest.raises(ValueError, match=r'config.budget: .*set one'):
    configuring.options_of(config)


def test_what_follows_from_other_fields(config):
  config.seed = 5
  config.data.sequence_length = 64
  config.schedule.sync_every, config.schedule.num_fragments = 24, 6
  config.budget.rounds = 100
  options = configuring.options_of(config)
  assert options.data.num_shards == 3 and options.data.seed == 5
  assert options.model.sequence_length == 64
  # 100 rounds of K = 24 / 6 inner steps.
  assert options.inner.decay_steps == 400


def test_a_budget_of_tokens_is_what_the_learning_rate_follows(config):
  config.data.sequence_length, config.data.batch_size = 128, 8
  config.learners = {'2': {'data': {'batch_size': 16}}}
  config.budget.merged_tokens = 10_000_000
  by_rounds = configuring.options_of(config)
  assert by_rounds.schedule.tokens_per_step == 0
  config.budget.rounds = 0
  for learner in (None, 0, 2):
    options = configuring.options_of(config, learner)
    assert options.schedule.tokens_per_step == (8 + 8 + 16) * 128
    assert options.inner.decay_steps == 10_000_000 // 4096
  assert 'tokens_per_step' not in config.schedule
  config.task = 'image'
  options = configuring.options_of(config)
  assert options.schedule.tokens_per_step == 3 * config.images.batch_size


@pytest.mark.parametrize(
  ('changes', 'says'),
  [
    ({'role': 'boss'}, "config.role='boss' must be one of local, syncer"),
    ({'role': 'learner', 'learner': 3}, 'config.learner=3 must be one of 0 to'),
    ({'workdir': ''}, "config.workdir='' must name a folder"),
    ({'workdir': ' '}, "config.workdir=' ' must name a folder"),
    ({'workdir': 'gs://b/x'}, 'must be a local folder'),
    ({'seed': -1}, 'config.data: seed must'),
    ({'membership.num_learners': 0}, 'config.membership: num_learners=0'),
    ({'quorum.min_learners': 4}, 'min_learners=4 must not exceed .*=3'),
    ({'lead.max_rounds_in_flight': 2}, 'must exceed config.grace.overlap_sca'),
    ({'launch.kill': ((3, 0.5),)}, r'kill=\(\(3, 0.5\),\) names learner 3'),
    ({'fragments.pattern': 'balancd'}, 'config.fragments: pattern=.*balanced'),
    ({'syncer.address': 'host'}, "config.syncer: address='host' must be"),
    ({'syncer.address': '10.0.0.1:1'}, 'config.security: .* not loopback'),
    ({'syncer.connect_seconds': 0.0}, 'connect_seconds=0.0 must be positive'),
    ({'evaluation.batches': -1}, 'config.evaluation: batches=-1'),
    ({'evaluation.prompt': ''}, "prompt='' must hold"),
    ({'evaluation.temperature': 0.0}, 'temperature=0.0 must be positive'),
    (
      {'budget.rounds': 0, 'budget.merged_tokens': 9},
      r'merged_tokens=9 makes 0 inner steps, which must exceed',
    ),
    ({'budget.rounds': 1}, r'must exceed config.inner.warmup_steps=50'),
    (
      {'adopt.rule': 'rebase', 'wire.up_error_feedback': True},
      'make up for quantisation twice',
    ),
  ],
)
def test_what_cannot_be(config, changes, says):
  config.update_from_flattened_dict(changes)
  with pytest.raises(ValueError, match=says):
    configuring.options_of(config)


def test_a_config_that_lacks_sections():
  with pytest.raises(ValueError, match=r'workdir.* are missing; begin get_con'):
    configuring.options_of(ml_collections.ConfigDict({'role': 'local'}))


def test_a_field_that_was_added(config):
  with config.inner.unlocked():
    config.inner.lr = 1.0
  with pytest.raises(
    ValueError, match=r"config.inner has no field 'lr'.*learn"
  ):
    configuring.options_of(config)


def test_a_learner_of_its_own_kind(config):
  config.learners = {
    '2': {'mesh': {'fsdp': 2}, 'data': {'batch_size': 16}},
    '0': {'throttle': {'step_seconds': 1}},
  }
  usual = configuring.options_of(config)
  assert usual.mesh.fsdp == 1 and usual.throttle.step_seconds == 0.0
  assert configuring.options_of(config, 2).mesh.fsdp == 2
  assert configuring.options_of(config, 2).data.batch_size == 16
  assert configuring.options_of(config, 1) == usual
  config.role, config.learner = 'learner', 0
  assert configuring.options_of(config).throttle.step_seconds == 1


@pytest.mark.parametrize(
  ('changes', 'says'),
  [
    ({'3': {}}, "'3'.* must be one of the learners 0 to 2"),
    ({'first': {}}, "'first'.* must be one of the learners 0 to 2"),
    ({'0': {'iner': {}}}, r"\['0'\] has no field 'iner'; .*inner"),
    ({'0': {'inner': {'lr': 1}}}, "inner has no field 'lr'; .*learning_rate"),
    ({'0': {'inner': 3}}, 'inner=3 must be sections with fields'),
    ({'0': 3}, "config.learners.'0'.=3 must be sections with fields"),
    ({'0': {'mesh': {'fsdp': 'all'}}}, "fsdp='all' must be a whole number"),
    ({'0': {'inner': {'b1': True}}}, 'b1=True must be a number'),
  ],
)
def test_overrides_that_cannot_be(config, changes, says):
  config.learners = changes
  with pytest.raises(ValueError, match=says):
    for learner in range(3):
      configuring.options_of(config, learner)


def test_fields_that_may_be_none_have_a_type_otherwise(config):
  assert config.outer.gain is None
  config.outer.gain = 2
  assert configuring.options_of(config).outer.gain == 2.0
  with pytest.raises(TypeError):
    config.outer.gain = 'much'
  with config.outer.ignore_type():
    config.outer.gain = 'much'
  with pytest.raises(ValueError, match=r"outer.gain='much' must be a number"):
    configuring.options_of(config)


# What both ends of a connection, or all learners, must agree on; or what no
# learner ever looks at.
EVERYWHERE_EQUAL = (
  ('schedule', 'sync_every'),
  ('fragments', 'pattern'),
  ('membership', 'num_learners'),
  ('quorum', 'min_learners'),
  ('grace', 'overlap_scans'),
  ('staleness', 'max_staleness'),
  ('lead', 'max_rounds_in_flight'),
  ('budget', 'rounds'),
  ('outer', 'gain'),
  ('wire', 'up'),
  ('model', 'width'),
  ('data', 'tokenizer'),
  ('data', 'sequence_length'),
  ('data', 'held_out_fraction'),
  ('security', 'run_token'),
  ('syncer', 'address'),
  ('launch', 'max_restarts'),
  ('evaluation', 'batches'),
)


@pytest.mark.parametrize(('section', 'field'), EVERYWHERE_EQUAL)
def test_what_must_be_equal_everywhere(config, section, field):
  config.learners = {'1': {section: {field: config[section][field]}}}
  says = rf'override {section}.{field}, which has to be equal.* own adopt, data'
  with pytest.raises(ValueError, match=says):
    configuring.options_of(config)


def test_every_section_is_decided_upon(config):
  """A new section is equal everywhere until it is listed as another kind."""
  sections = {
    field.name
    for field in dataclasses.fields(RunOptions)
    if dataclasses.is_dataclass(field.type)
  }
  assert set(overrides.PER_LEARNER) <= sections
  for section, fields in overrides.PER_LEARNER.items():
    assert fields is None or set(fields) <= set(config[section])
