"""The version of the package, which packaging, site and release workflow read from here."""

__version__ = "0.1.0"
