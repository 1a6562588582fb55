"""Errors of the package: each is also the built-in error a caller would expect."""

from __future__ import annotations


class TurboQuantError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(TurboQuantError, ValueError):
    """A setting, preset or combination of settings is not valid."""


class ShapeError(TurboQuantError, ValueError):
    """A tensor's shape, dtype or device does not fit the others."""


class ValueRangeError(TurboQuantError, ValueError):
    """A tensor holds values that cannot be quantized, such as NaN or infinity."""


class CodebookError(TurboQuantError, ValueError):
    """A codebook is missing, corrupt, or does not match what it is used for."""


class CacheStateError(TurboQuantError, RuntimeError):
    """An operation does not fit the present state of the cache."""


class CacheFileError(TurboQuantError, ValueError):
    """A file does not hold a saved cache, not a whole one, or not one for this model."""


class BackendUnavailableError(TurboQuantError, RuntimeError):
    """A backend was asked for by name and cannot run here."""


class UnsupportedModelError(TurboQuantError, ValueError):
    """The registered attention cannot serve this model; the message says which route can."""
