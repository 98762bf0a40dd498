"""Bytes between learners and the syncer.

`base` names what a transport does, `memory` and `grpc_link`/`grpc_endpoint` do
it. Everything between is shared by both: what a frame is (`wire`), which frames
go next (`scheduler`), and what comes of those that arrive (`reassembler`).
"""

import os

# grpc's C core reads these when it is first imported, which is after this. It
# reports through our errors; on stderr it would only repeat them, and warn at
# every fork.
os.environ.setdefault('GRPC_VERBOSITY', 'NONE')
os.environ.setdefault('GRPC_ENABLE_FORK_SUPPORT', '0')
