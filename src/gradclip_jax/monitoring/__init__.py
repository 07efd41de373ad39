"""Metrics, incidents, logs and plots of a training run."""
