"""What can go wrong with an emulated network. A class exists because a caller acts differently on it."""


class WanError(Exception):
    """The network could not be built or changed; the message says what was tried."""


class WanUnavailable(WanError):
    """This machine cannot emulate a network: a test or a bench skips, with the message as its reason."""
