"""The one place that says the version; packaging, site and release workflow read it here."""

__version__ = "0.1.0"
