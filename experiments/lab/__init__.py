"""What all studies share: sweeps, engines, one store, one trainer, claims, figures and pages."""


class ExperimentError(RuntimeError):
    """An experiment cannot be run as it was asked for; the message says what to do."""
