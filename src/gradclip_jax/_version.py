"""The package version, which the build, the website and the release workflow read."""

__version__ = "0.1.0"
