"""The `disk` tier: segments of frames in directories of local filesystems. Layout: docs/design/format.md."""
