"""Read rows on the host, and report what happened; NumPy only.

Read the modules in this order:

| module | contents |
| --- | --- |
| `_outliers`, `_losses` | rules that compare a value with earlier values |
| `_detect` | from rows to incidents |
| `_evidence`, `_policy` | from rows and incidents to actions |
| `_log`, `_lines` | from files to lines, and from lines to rows |
| `_monitor` | `Monitor`, which combines all of them |
| `_summary`, `_plot` | what a monitor has read, as text and as a figure |
"""
