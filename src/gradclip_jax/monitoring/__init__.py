"""Metrics, incidents, logs and plots of a training run.

On the device, `_watch` writes rows of numbers (`_layout`, `_taps`). The folder `host` reads them.
"""
