"""The version of the package, which is used by the build, the site and the release workflow."""

__version__ = "0.1.0"
