"""Read rows on the host, and report what happened; only `_verify_step` computes on the device.

Read the modules in this order:

| module | contents |
| --- | --- |
| `_rows` | from packed rows to NumPy arrays |
| `_outliers`, `_losses` | rules that compare a value with earlier values |
| `_detect` | from rows to incidents |
| `_evidence`, `_policy` | from rows and incidents to actions |
| `_log`, `_lines` | from files to lines, and from lines to rows |
| `_monitor` | `Monitor`, which combines all of them |
| `_summary`, `_plot` | what a monitor has read, as text and as a figure |
| `_verify_step` | a comparison of repeated runs of one step, to find faults of the hardware |
"""
