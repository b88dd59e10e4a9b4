"""The error a user of the predictor can do something about. Imports nothing, so that a command line can know it at once."""


class PredictorError(Exception):
    """A trace or a predictor is missing, damaged or of another model; one line: what, got, expected, what to do."""
