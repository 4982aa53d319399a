"""The version, in the one place both the package and the build read."""

__version__ = "0.1.0"
