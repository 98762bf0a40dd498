"""What people see of a run: tape, status, live view, summary, metrics.

Everything here is made from one stream, the syncer's event tape, and only
reads: nothing in this folder ever steers a run.
"""
