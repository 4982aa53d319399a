"""State files and checkpoints, read and changed without caster's own reader and writer."""

from __future__ import annotations

from safetensors import safe_open
from safetensors.numpy import save_file

from caster.io.signed_tensors import content_digest


def contents(path):
    """Arrays and metadata of a file."""
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
        return arrays, file.metadata()


def rewrite(path, change, *, sealed=True):
    """Change arrays and metadata in place; update the digest if sealed, but no signature."""
    arrays, metadata = contents(path)
    change(arrays, metadata)
    if sealed:
        metadata["content_sha256"] = content_digest(arrays, metadata)
    save_file(arrays, path, metadata)


# --- changes for `rewrite` -----------------------------------------------------------------------


def with_array(name, make):
    """Replace an array."""

    def change(arrays, metadata):
        arrays[name] = make(arrays[name])

    return change


def with_entry(name, at, value):
    """Put a value into an array."""

    def change(arrays, metadata):
        arrays[name][at] = value

    return change
