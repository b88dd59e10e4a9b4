"""The errors a user can cause or meet; the command lines turn them into one line on stderr and exit code 1."""


class StrawError(Exception):
    """Something outside the program is not as it must be: what, got, expected, what to do, in one line."""


class CheckpointError(StrawError):
    """A released checkpoint is missing, damaged or of another model."""


class ArtifactError(StrawError):
    """A model directory is missing, incomplete, damaged or of another version."""


class ContextFullError(StrawError):
    """The sequence has reached the context that its state was allocated for."""


class StoreError(StrawError):
    """An expert could not be brought to where it is needed."""
