"""The command line of chaos experiments."""

import dataclasses
import datetime
import itertools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

from ml_collections import config_flags
from rich.console import Console

from decoupled_diloco import configuring, entry, roles, stopping
from decoupled_diloco.chaos import baseline, given, kept, report, schedule
from decoupled_diloco.chaos import options as chaos_options
from decoupled_diloco.chaos.decoupled import DisturbedRun
from decoupled_diloco.chaos.options import ChaosOptions
from decoupled_diloco.chaos.result import ChaosResult
from decoupled_diloco.run_folder import write_whole
from decoupled_diloco.watching import show_summary


def run(argv: list[str], usage: str) -> int:
  """Carries an experiment out; returns the exit code.

  Args:
    argv: the command line.
    usage: what is printed for --help.

  Raises:
    SystemExit: if it could not begin or go on, with a sentence.
  """
  config = config_flags.DEFINE_config_file('config', None, 'Path of a config.')
  with entry.setting_up():
    entry.parse_flags(argv, usage)
    if config.value is None:
      raise ValueError(
        'no config; give that of an experiment, such as '
        '--config=configs/chaos.py.'
      )
    options = chaos_options.options_of(config.value)
    entry.prepare_jax('local')
    roles.check(options.run, options.learners)
  results = {}
  for phase in options.phases:
    path = pathlib.Path(options.workdir).resolve() / f'{phase}.json'
    asked = _asked(phase, options, config.value.run)
    with entry.setting_up():
      result = kept.load(path, asked)
    if result is None and phase == chaos_options.BASELINE:
      result = _run_baseline(options, config.value.run, path)
    elif result is None:
      result = _run_phase(phase, options, config.value.run, path)
    else:
      entry.say(f'{phase}: finished before; see {path}.')
      results[phase] = result
      continue
    if result.is_complete:
      with entry.at_work():
        kept.save(path, asked, result)
    results[phase] = result
  return _show(options, results)


def _asked(phase: str, options: ChaosOptions, run_config: Any) -> Any:
  """What the result of a run depends on, of values that JSON has."""
  asked = {'run': run_config.to_dict()}
  del asked['run']['workdir']
  if phase != chaos_options.UNDISTURBED:
    asked['faults'] = dataclasses.asdict(options.faults)
  if phase == chaos_options.BASELINE:
    asked['baseline'] = dataclasses.asdict(options.baseline)
  else:
    asked['slow_bytes_per_second'] = options.slow_bytes_per_second
  return asked


def _run_phase(
  phase: str, options: ChaosOptions, run_config: Any, path: pathlib.Path
) -> ChaosResult:
  folder = path.with_suffix('')
  with entry.setting_up():
    _set_aside(folder)
    run_config = run_config.copy_and_resolve_references()
    run_config.workdir = str(folder)
    argument = given.write(run_config, path.with_name(f'{phase}-run.json'))
    faults = iter(())
    if phase != chaos_options.UNDISTURBED:
      num_learners = options.run.membership.num_learners
      faults = schedule.faults(options.faults, num_learners)
    disturbed = DisturbedRun(
      configuring.options_of(run_config),
      [argument],
      faults,
      options.slow_bytes_per_second,
    )
  entry.say(f'{phase}: the run is in {folder}.')
  local, stopped_by = disturbed.local, []

  def stop(number: int) -> None:
    stopped_by.append(number)
    local.launcher.request_stop(number)

  stopping.in_order(stop, local.end_at_once)
  disturbed.run()
  show_summary(local.watcher, local.result)
  if stopped_by:
    raise SystemExit(stopping.exit_code(stopped_by[0]))
  with entry.setting_up():
    return disturbed.result()


def _run_baseline(
  options: ChaosOptions, run_config: Any, path: pathlib.Path
) -> ChaosResult:
  """Runs the baseline as long as the decoupled run has taken."""
  folder = path.with_suffix('')
  num_learners = options.run.membership.num_learners
  with entry.setting_up():
    before = chaos_options.DECOUPLED
    decoupled = kept.load(
      path.with_name(f'{before}.json'), _asked(before, options, run_config)
    )
    if decoupled is None:
      raise ValueError(
        f'config.phases={options.phases} must have a complete decoupled run '
        'before the baseline, which is run as long as that has taken.'
      )
    _set_aside(folder)
    run_config = run_config.copy_and_resolve_references()
    run_config.workdir = str(folder)
    config = path.with_name(f'{chaos_options.BASELINE}-run.json')
    given.write(run_config, config)
  entry.say(
    f'baseline: {num_learners} workers for {decoupled.wall_seconds:.0f} s; '
    f'what they print goes to {folder / "logs"}.'
  )
  with entry.at_work():
    found = baseline.run_baseline(
      options.run,
      config,
      folder,
      faults=options.faults,
      baseline=options.baseline,
      wall_seconds=decoupled.wall_seconds,
      tell=_stamped(time.monotonic()),
      on_stop=stopping.in_order,
    )
  if found.stopped_by is not None:
    raise SystemExit(stopping.exit_code(found.stopped_by))
  with entry.at_work():
    details = path.with_name(f'{chaos_options.BASELINE}-details.json')
    write_whole(details, json.dumps(dataclasses.asdict(found), indent=2))
  return baseline.as_chaos_result(found)


def _stamped(began_at: float) -> Callable[[str], None]:
  """Says things with the time that has passed."""
  return lambda text: entry.say(
    f'[{datetime.timedelta(seconds=int(time.monotonic() - began_at))}] {text}'
  )


def _set_aside(folder: pathlib.Path) -> None:
  """Makes room where a run was broken off."""
  if not folder.exists():
    return
  aside = next(
    path
    for number in itertools.count(1)
    if not (path := folder.with_name(f'{folder.name}-{number}')).exists()
  )
  folder.rename(aside)
  entry.say(f'What is left of a run that was broken off is in {aside}.')


def _show(options: ChaosOptions, results: dict[str, ChaosResult]) -> int:
  """Shows and keeps the report; returns the exit code."""
  Console(highlight=False).print(report.as_table(results))
  path = pathlib.Path(options.workdir).resolve() / 'report.md'
  with entry.at_work():
    write_whole(path, report.as_markdown(results))
  entry.say(f'\nThe table is in {path} as well.')
  found = report.faults_found(results)
  for text in found:
    entry.say(f'NOT RIGHT: {text}')
  return 1 if found else 0
