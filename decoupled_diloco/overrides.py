"""What one learner may have otherwise than the others.

`config.learners = {'2': {'mesh': {'fsdp': 8}}}` gives learner 2 a mesh of its
own. What both ends of a connection, or all learners, must agree on can only be
set for all.
"""

from collections.abc import Mapping
from typing import Any

from decoupled_diloco.config_files import unknown_field

# Fields, by section; None for all of a section.
PER_LEARNER: Mapping[str, tuple[str, ...] | None] = {
  'adopt': None,
  'data': ('batch_size', 'cache_dir', 'source'),
  'images': ('batch_size', 'shift_pixels'),
  'inner': None,
  'mesh': None,
  'security': (
    *('tls_authority', 'tls_certificate', 'tls_key', 'tls_server_name'),
  ),
  'syncer': ('connect_seconds',),
  'throttle': None,
  'transport': None,
}


def check(
  overrides: Mapping[str, Any],
  sections: Mapping[str, Mapping[str, Any]],
  M: int,
) -> None:
  """Checks what all learners override.

  Args:
    overrides: `{learner: {section: {field: value}}}`.
    sections: `{section: {field: value}}` of the config.
    M: how many learners there are.

  Raises:
    ValueError: if there is no such learner or field, or the field must be equal
      everywhere.
  """
  for learner, changes in overrides.items():
    where = f'config.learners[{learner!r}]'
    if not str(learner).isdecimal() or int(learner) >= M:
      raise ValueError(
        f'{where} must be one of the learners 0 to {M - 1}, as there are '
        f'config.membership.num_learners={M}; correct its name.'
      )
    if not isinstance(changes, Mapping):
      raise ValueError(f'{where}={changes!r} must be {_EXAMPLE}.')
    for section, fields in changes.items():
      _check_section(where, section, fields, sections)


_EXAMPLE = "sections with fields, such as {'mesh': {'fsdp': 8}}"


def _check_section(
  where: str,
  section: str,
  fields: Any,
  sections: Mapping[str, Mapping[str, Any]],
) -> None:
  if section not in sections:
    raise ValueError(unknown_field(where, section, PER_LEARNER))
  if not isinstance(fields, Mapping):
    raise ValueError(f'{where}.{section}={fields!r} must be {_EXAMPLE}.')
  may = PER_LEARNER.get(section, ())
  for field in fields:
    if field not in sections[section]:
      raise ValueError(
        unknown_field(f'{where}.{section}', field, sections[section])
      )
    if may is not None and field not in may:
      raise ValueError(
        f'{where} must not override {section}.{field}, which has to be equal '
        f'everywhere; set config.{section}.{field} for all. A learner may have '
        f'its own {_allowed()}.'
      )


def applied(
  sections: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
  """The sections as they are for one learner."""
  own = {name: {**sections[name], **fields} for name, fields in changes.items()}
  return {**sections, **own}


def _allowed() -> str:
  return ', '.join(
    section if fields is None else f'{section}.{"/".join(fields)}'
    for section, fields in PER_LEARNER.items()
  )
