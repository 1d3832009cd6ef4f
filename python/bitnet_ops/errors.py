"""The exception above every exception of this package."""


class BitNetError(Exception):
    """What bitnet_ops raises on purpose: one line, `<who>: expected ..., got ...; remedy`.

    Each is also a ValueError or RuntimeError, whichever it resembles most.
    """
